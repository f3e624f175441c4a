//! A model on disk, behind one door: Hugging Face folders and GGUF files give the same names, shapes and values.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};

use super::config::{Architecture, ModelConfig};
use super::config_gguf::{ROPE_FREQS, hf_name};
pub use super::shards::{INDEX_FILE, SINGLE_FILE};
use super::shards::{Shards, files_where};
use super::stored::{BLOCKS, Format, Order, Piece, Problem, Raw, SCALES, Source, Stack, Stored, Table, arranged};
use crate::base::error::Result;
use crate::base::units;
use crate::formats::blocks::{self, BlockKind};
use crate::formats::gguf::{GgufFile, unsupported_kind};
use crate::formats::mxfp4::{BLOCK_BYTES, Mxfp4};
use crate::formats::nf4::{self, Absmax, Nf4};

/// The weights of a model that are stored in 4 bits, in one format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    /// How many weights they are.
    pub num_weights: usize,
    /// Values in them.
    pub num_elements: u64,
    /// Bytes that they take on disk.
    pub num_bytes: u64,
    /// Whether the scales of all of them are in 8 bits (double quantization of NF4; MXFP4's always are).
    pub double_quant: bool,
}

#[derive(Debug)]
enum Files {
    Safetensors(Shards),
    Gguf(Box<GgufFile>),
}

/// A model on disk whose configuration and tensor table have been read and checked: every weight the configuration asks
/// for is there, with the right shape, in a format that can be read. The values stay on disk.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    files: Files,
    names: Vec<String>,
    stored: HashMap<String, Stored>,
    ignored: Vec<String>,
}

impl Checkpoint {
    /// Open a Hugging Face folder (`config.json` and safetensors, one file or sharded) or a GGUF file.
    ///
    /// # Errors
    /// When the path is neither, the model is not supported, a shard or a weight is missing, a file is truncated, or a
    /// weight has another shape than the configuration says. Nothing large is allocated before that is known.
    pub fn open(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).with_context(|| format!("cannot open the model {}", path.display()))?;
        if meta.is_dir() { Self::open_folder(path) } else { Self::open_gguf(path) }
    }

    fn open_folder(path: &Path) -> Result<Self> {
        if !path.join("config.json").is_file() {
            return Err(not_a_model_folder(path));
        }
        let config = ModelConfig::from_hf_path(path)?;
        let shards = Shards::open(path)?;
        let mut table = Table::default();
        for name in shards.names() {
            // A weight's parts are one entry.
            let is_part = nf4::owner(name).is_some_and(|weight| shards.find(weight).is_some());
            let is_part =
                is_part || name.strip_suffix(SCALES).is_some_and(|w| shards.find(&format!("{w}{BLOCKS}")).is_some());
            let Some((file, info)) = shards.find(name).filter(|_| !is_part) else { continue };
            let weight = name.strip_suffix(BLOCKS).unwrap_or(name).to_owned();
            match Raw::of(name, info, &shards) {
                Ok(raw) => drop(table.readable.insert(weight, raw)),
                Err(why) => {
                    let file = file.path().file_name().unwrap_or_default().display();
                    table.unreadable.insert(weight, format!("of {file} {why:#}"));
                }
            }
        }
        Self::checked(path, config, Files::Safetensors(shards), &table)
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|e| e == "safetensors" || e == "bin" || e == "json") {
            bail!(
                "{} is one file of a model; choose the folder that holds it and config.json, or a GGUF file",
                path.display()
            );
        }
        let file = GgufFile::open(path)?;
        let config = ModelConfig::from_gguf(&file)?;
        let mut table = Table { is_gguf: true, ..Table::default() };
        for tensor in file.tensors().iter().filter(|t| t.name != ROPE_FREQS) {
            let name = hf_name(config.architecture, &tensor.name).unwrap_or_else(|| tensor.name.clone());
            match tensor.kind.block_kind() {
                Some(kind) => {
                    let (num_bytes, shape) = (tensor.num_bytes() as u64, tensor.shape.clone());
                    let format = Format::Plain(kind);
                    table.readable.insert(name, Raw { name: tensor.name.clone(), format, num_bytes, shape });
                }
                None => {
                    table.unreadable.insert(name, unsupported_kind(tensor));
                }
            }
        }
        Self::checked(path, config, Files::Gguf(Box::new(file)), &table)
    }

    /// Compare what is stored with what the configuration asks for.
    fn checked(path: &Path, mut config: ModelConfig, files: Files, table: &Table) -> Result<Self> {
        let mut names = Vec::new();
        let mut stored = HashMap::new();
        let mut missing = Vec::new();
        for (name, shape) in config.expected_tensors() {
            match table.resolve(&config, &name, &shape) {
                Ok(found) => {
                    stored.insert(name.clone(), found);
                    names.push(name);
                }
                Err(Problem::Missing(name)) => missing.push(name),
                Err(Problem::Wrong(why)) => bail!("{}: {why}", path.display()),
            }
        }
        if let Some(first) = missing.first() {
            let others = missing.len() - 1;
            let more = if others == 0 { String::new() } else { format!(" and {others} others") };
            bail!(
                "{}: tensor {first}{more} missing: the model does not match its configuration, or is incomplete; fetch it again",
                path.display()
            );
        }
        let ignored = table.unused(stored.values());
        if let Some(moe) = &mut config.moe {
            // What the file has counts, not what config.json says of it.
            moe.mxfp4 = stored.values().filter(|s| s.shape.len() == 3).all(|s| s.is_all(Format::is_mxfp4));
        }
        Ok(Self { path: path.to_owned(), config, files, names, stored, ignored })
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Whether it is a GGUF file (else a Hugging Face folder).
    pub fn is_gguf(&self) -> bool {
        matches!(self.files, Files::Gguf(_))
    }

    /// Names of all weights in the order of computation, as [`ModelConfig::expected_tensors`] has them: Hugging Face's spelling, experts in stacks. A
    /// tied head is not among them.
    pub fn tensor_names(&self) -> &[String] {
        &self.names
    }

    /// Stored tensors that the engine does not use, sorted; for example the copy of a tied head.
    pub fn ignored_tensors(&self) -> &[String] {
        &self.ignored
    }

    /// Shape of a weight, `[out, in]` for a matrix, `[experts, out, in]` for the experts of a block.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.stored.get(name).map(|s| s.shape.as_slice())
    }

    /// Bytes that a weight takes on disk; 0 for one that is not there.
    pub fn tensor_bytes(&self, name: &str) -> u64 {
        self.stored.get(name).map_or(0, Stored::num_bytes)
    }

    /// Bytes that all weights take on disk: the sum of [`Checkpoint::tensor_bytes`].
    pub fn bytes_on_disk(&self) -> u64 {
        self.stored.values().map(Stored::num_bytes).sum()
    }

    /// Number of parameters; a tied head counts once.
    pub fn num_parameters(&self) -> u64 {
        self.config.num_parameters()
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.stored.get(name).with_context(|| format!("{}: the model has no tensor named {name}", self.path.display()))
    }

    /// The weights that are stored in NF4; `None` where there are none.
    pub fn quantized(&self) -> Option<Quantized> {
        let is_double = |raw: &Raw| match &self.files {
            Files::Safetensors(shards) => {
                shards.nf4(&raw.name).is_ok_and(|weight| matches!(weight.absmax(), Absmax::Nested { .. }))
            }
            Files::Gguf(_) => false,
        };
        self.in_format(|format| format == Format::Nf4, is_double)
    }

    /// The weights that are stored in MXFP4, which are experts'; `None` where there are none. Whatever trains, they may stay so
    /// ([`Self::tensor_mxfp4`]).
    pub fn mxfp4(&self) -> Option<Quantized> {
        self.in_format(Format::is_mxfp4, |_| true)
    }

    fn in_format(&self, is: impl Fn(Format) -> bool, is_double: impl Fn(&Raw) -> bool) -> Option<Quantized> {
        let weights: Vec<&Stored> = self.stored.values().filter(|s| s.is_all(&is)).collect();
        let num_elements = weights.iter().map(|s| s.shape.iter().product::<usize>() as u64).sum();
        let num_bytes = weights.iter().map(|s| s.num_bytes()).sum();
        let double_quant = weights.iter().flat_map(|s| s.raws()).all(is_double);
        (!weights.is_empty()).then_some(Quantized { num_weights: weights.len(), num_elements, num_bytes, double_quant })
    }

    /// An error about a weight.
    fn about(&self, name: &str, why: &anyhow::Error) -> anyhow::Error {
        anyhow!("{}: tensor {name} {why:#}", self.path.display())
    }

    /// The values of a weight, row-major. The rows of q and k that llama.cpp reorders are put back; weights in 4 bits are dequantized. Experts lie one
    /// after another, whatever the file has; [`Self::expert_f32`] reads one of them.
    ///
    /// # Errors
    /// When there is no such weight, or its scales are damaged.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>> {
        let stored = self.stored(name)?;
        match &stored.source {
            Source::Tensor(raw) => {
                let values = self.values(raw, 0, 1)?;
                Ok(match self.reordered_heads(name) {
                    Some(heads) => halves_from_pairs(&values, heads, self.config.head_dim),
                    None => values,
                })
            }
            Source::Stack(stack) => {
                let mut values = Vec::with_capacity(stored.shape.iter().product());
                for expert in 0..stored.shape[0] {
                    values.extend_from_slice(
                        &self.expert(stored, stack, expert, &|raw, at, of| self.values(raw, at, of).map(Cow::Owned))?,
                    );
                }
                Ok(values)
            }
        }
    }

    /// The values of one expert's part of a weight of experts: [out, in] of `gate_up_proj` and `down_proj`, [out] of their biases.
    ///
    /// # Errors
    /// When there is no such weight or expert, or its scales are damaged.
    pub fn expert_f32(&self, name: &str, expert: usize) -> Result<Vec<f32>> {
        let (stored, stack) = self.stack(name, expert)?;
        let values = self.expert(stored, stack, expert, &|raw, at, of| self.values(raw, at, of).map(Cow::Owned))?;
        Ok(values.into_owned())
    }

    /// As [`Self::expert_f32`], of a weight that the file stores as bf16: two little-endian bytes a value; `None` for one that is stored otherwise.
    ///
    /// # Errors
    /// When there is no such weight or expert.
    pub fn expert_bf16(&self, name: &str, expert: usize) -> Result<Option<Cow<'_, [u8]>>> {
        let (stored, stack) = self.stack(name, expert)?;
        if !stored.is_all(|format| format == Format::Plain(BlockKind::Bf16)) {
            return Ok(None);
        }
        let pairs = self.expert(stored, stack, expert, &|raw, at, of| {
            Ok(Cow::Borrowed(part(self.bytes(raw)?, at, of).as_chunks::<2>().0))
        })?;
        Ok(Some(match pairs {
            Cow::Borrowed(pairs) => pairs.as_flattened().into(),
            Cow::Owned(pairs) => pairs.into_flattened().into(),
        }))
    }

    /// A weight of experts that is stored in MXFP4, [experts, out, in], in gpt-oss's order of rows and bytes; `None` for one that is stored otherwise.
    ///
    /// # Errors
    /// When there is no such weight, or its bytes are not those of its shape.
    pub fn tensor_mxfp4(&self, name: &str) -> Result<Option<Mxfp4<'_>>> {
        let stored = self.stored(name)?;
        let Source::Stack(stack) = &stored.source else { return Ok(None) };
        if let (Files::Safetensors(shards), [Piece::Stacked(raw)]) = (&self.files, stack.pieces.as_slice())
            && raw.format == Format::Mxfp4
        {
            let [blocks, scales] = mxfp4_parts(shards, raw)?;
            return Mxfp4::new(&stored.shape, blocks, scales).map(Some).map_err(|why| self.about(name, &why));
        }
        let (mut blocks, mut scales) = (Vec::new(), Vec::new());
        for expert in 0..stored.shape[0] {
            let Some(one) = self.expert_mxfp4(name, expert)? else { return Ok(None) };
            blocks.extend_from_slice(one.blocks());
            scales.extend_from_slice(one.scales());
        }
        Mxfp4::new(&stored.shape, blocks, scales).map(Some).map_err(|why| self.about(name, &why))
    }

    /// As [`Self::tensor_mxfp4`], one expert of it: [out, in].
    ///
    /// # Errors
    /// As [`Self::tensor_mxfp4`], and when there is no such expert.
    pub fn expert_mxfp4(&self, name: &str, expert: usize) -> Result<Option<Mxfp4<'_>>> {
        let (stored, stack) = self.stack(name, expert)?;
        let &[num_experts, rows, cols] = stored.shape.as_slice() else { return Ok(None) };
        if !stored.is_all(Format::is_mxfp4) || stack.order == Order::Transposed {
            return Ok(None);
        }
        let one = [rows / stack.pieces.len(), cols];
        let (mut blocks, mut scales) = (Vec::new(), Vec::new());
        for piece in &stack.pieces {
            let (raw, at, of) = piece.of(expert, num_experts);
            match &self.files {
                Files::Safetensors(shards) => {
                    let [codes, powers] = mxfp4_parts(shards, raw)?;
                    blocks.push(Cow::Borrowed(part(codes, at, of)));
                    scales.push(Cow::Borrowed(part(powers, at, of)));
                }
                Files::Gguf(_) => {
                    let weight = Mxfp4::from_gguf(&one, part(self.bytes(raw)?, at, of));
                    let weight = weight.map_err(|why| self.about(&raw.name, &why))?;
                    blocks.push(Cow::Owned(weight.blocks().to_vec()));
                    scales.push(Cow::Owned(weight.scales().to_vec()));
                }
            }
        }
        let row_blocks = stored.shape[2] / crate::formats::mxfp4::BLOCK;
        let blocks = arranged(blocks, stack.order, row_blocks * BLOCK_BYTES);
        let scales = arranged(scales, stack.order, row_blocks);
        Mxfp4::new(&[rows, cols], blocks, scales).map(Some).map_err(|why| self.about(name, &why))
    }

    /// A weight that has a part for each expert, and that it has one for `expert`.
    fn stack(&self, name: &str, expert: usize) -> Result<(&Stored, &Stack)> {
        let stored = self.stored(name)?;
        match &stored.source {
            Source::Stack(stack) if expert < stored.shape[0] => Ok((stored, stack)),
            Source::Stack(_) => {
                bail!(
                    "{}: tensor {name} has {} experts; there is no number {expert}",
                    self.path.display(),
                    stored.shape[0]
                )
            }
            Source::Tensor(_) => bail!("{}: tensor {name} is not one of experts", self.path.display()),
        }
    }

    /// One expert of a stack, of items that `read` gets: from a stored tensor, the part with that number of so many.
    fn expert<'a, T: Copy>(
        &self,
        stored: &Stored,
        stack: &'a Stack,
        expert: usize,
        read: &dyn Fn(&'a Raw, usize, usize) -> Result<Cow<'a, [T]>>,
    ) -> Result<Cow<'a, [T]>> {
        let pieces = stack.pieces.iter().map(|piece| {
            let (raw, at, of) = piece.of(expert, stored.shape[0]);
            read(raw, at, of)
        });
        let cols = stored.shape.get(2).copied().unwrap_or(1);
        Ok(arranged(pieces.collect::<Result<_>>()?, stack.order, cols))
    }

    /// The bytes of a stored tensor.
    fn bytes(&self, raw: &Raw) -> Result<&[u8]> {
        match &self.files {
            Files::Safetensors(shards) => shards.file(&raw.name)?.bytes(&raw.name),
            Files::Gguf(file) => {
                let tensor = file.tensor(&raw.name);
                let tensor = tensor.with_context(|| format!("{} holds no {}", self.path.display(), raw.name))?;
                Ok(file.bytes(tensor))
            }
        }
    }

    /// The values of a stored tensor: of the `at`-th of `of` equal parts.
    fn values(&self, raw: &Raw, at: usize, of: usize) -> Result<Vec<f32>> {
        let num_elements = raw.shape.iter().product::<usize>() / of;
        match (raw.format, &self.files) {
            (Format::Plain(kind), _) => blocks::to_f32(kind, part(self.bytes(raw)?, at, of), num_elements)
                .with_context(|| format!("{}: tensor {}", self.path.display(), raw.name)),
            (Format::Nf4, Files::Safetensors(shards)) => {
                let values = shards.nf4(&raw.name).and_then(|weight| weight.dequantize());
                let values = values.map_err(|why| self.about(&raw.name, &why))?;
                Ok(if of == 1 { values } else { part(&values, at, of).to_vec() })
            }
            (Format::Mxfp4, Files::Safetensors(shards)) => {
                let [blocks, scales] = mxfp4_parts(shards, raw)?;
                let cols = raw.shape.last().copied().unwrap_or(1).max(1);
                let weight = Mxfp4::new(&[num_elements / cols, cols], part(blocks, at, of), part(scales, at, of));
                Ok(weight.map_err(|why| self.about(&raw.name, &why))?.dequantize())
            }
            (Format::Nf4 | Format::Mxfp4, Files::Gguf(_)) => bail!("{} has no such format", self.path.display()),
        }
    }

    /// A weight that is stored in NF4, as it lies in the file; `None` for one that is stored otherwise.
    ///
    /// # Errors
    /// When there is no such weight, or its scales are damaged.
    pub fn tensor_nf4(&self, name: &str) -> Result<Option<Nf4<'_>>> {
        match (&self.files, &self.stored(name)?.source) {
            (Files::Safetensors(shards), Source::Tensor(raw)) if raw.format == Format::Nf4 => {
                let weight = shards.nf4(&raw.name).and_then(|weight| weight.check().map(|()| weight));
                weight.map(Some).map_err(|why| self.about(name, &why))
            }
            _ => Ok(None),
        }
    }

    /// The bytes of a weight that the file stores as bf16, row-major and little-endian, where they lie in the mapped file; `None` for one that is
    /// stored otherwise, reordered or in several tensors ([`Self::tensor_f32`] reads those, [`Self::expert_bf16`] experts).
    ///
    /// # Errors
    /// When there is no such weight.
    pub fn tensor_bf16(&self, name: &str) -> Result<Option<&[u8]>> {
        let raw = match (&self.files, &self.stored(name)?.source) {
            (Files::Gguf(_), _) => return Ok(None),
            (_, Source::Tensor(raw)) => raw,
            (_, Source::Stack(Stack { pieces, order: Order::Rows })) => match pieces.as_slice() {
                [Piece::Stacked(raw)] => raw,
                _ => return Ok(None),
            },
            _ => return Ok(None),
        };
        if raw.format == Format::Plain(BlockKind::Bf16) { self.bytes(raw).map(Some) } else { Ok(None) }
    }

    /// Number of heads of a weight whose rows llama.cpp reorders: q and k of the architecture it calls `llama`.
    fn reordered_heads(&self, name: &str) -> Option<usize> {
        if !self.is_gguf() || !matches!(self.config.architecture, Architecture::Llama | Architecture::Mixtral) {
            return None;
        }
        let module = name.rsplit_once('.')?.0;
        if module.ends_with("q_proj") {
            Some(self.config.num_attention_heads)
        } else if module.ends_with("k_proj") {
            Some(self.config.num_key_value_heads)
        } else {
            None
        }
    }

    /// The element format that most values are stored in: `bf16`, `nf4`, `Q4_1` …
    pub fn dtype_summary(&self) -> String {
        let mut values: BTreeMap<&str, usize> = BTreeMap::new();
        for raw in self.stored.values().flat_map(Stored::raws) {
            *values.entry(raw.format.name()).or_default() += raw.shape.iter().product::<usize>();
        }
        let most = values.into_iter().max_by_key(|(_, n)| *n).map_or("", |(name, _)| name);
        if self.is_gguf() { most.to_owned() } else { most.to_lowercase() }
    }

    /// One line for people: `llama, 30 blocks, hidden size 576, 134,515,008 parameters, Q4_1 (93.80 MiB)`.
    pub fn describe(&self) -> String {
        format!(
            "{}, {} blocks, hidden size {}, {} parameters, {} ({})",
            self.config.architecture.name(),
            self.config.num_hidden_layers,
            self.config.hidden_size,
            units::count(self.num_parameters()),
            self.dtype_summary(),
            units::bytes(self.bytes_on_disk())
        )
    }
}

/// Why a folder without config.json is no model, and what to choose instead.
fn not_a_model_folder(folder: &Path) -> anyhow::Error {
    let name = folder.display();
    if folder.join("adapter_config.json").is_file() {
        return anyhow!("{name} holds an adapter, not a model; choose the model it was trained on");
    }
    match files_where(folder, |n| n.ends_with(".gguf")).first() {
        Some(gguf) => {
            anyhow!("{name} has no config.json; choose its GGUF file itself: {}", folder.join(gguf).display())
        }
        None => anyhow!(
            "{name} has no config.json: choose a Hugging Face model folder (config.json and {SINGLE_FILE}) or a GGUF file"
        ),
    }
}

/// The `at`-th of `of` equal parts.
fn part<T>(whole: &[T], at: usize, of: usize) -> &[T] {
    let len = whole.len() / of;
    &whole[at * len..(at + 1) * len]
}

/// Codes and scales of a weight in MXFP4.
fn mxfp4_parts<'a>(shards: &'a Shards, raw: &Raw) -> Result<[&'a [u8]; 2]> {
    let bytes = |kind: &str| {
        let name = format!("{}{kind}", raw.name);
        shards.file(&name)?.bytes(&name)
    };
    Ok([bytes(BLOCKS)?, bytes(SCALES)?])
}

/// Undo llama.cpp's order of rotary rows. Its files pair neighbouring rows (2j, 2j+1) of a head; Hugging Face pairs row j
/// with row j + head_dim/2. `values` is [heads · head_dim, …] row-major.
fn halves_from_pairs(values: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let row = values.len() / (heads * head_dim);
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(row * head_dim) {
        for half in 0..2 {
            for j in 0..head_dim / 2 {
                let from = (2 * j + half) * row;
                out.extend_from_slice(&head[from..from + row]);
            }
        }
    }
    out
}

#[cfg(test)]
#[path = "loading_tests.rs"]
mod tests;
