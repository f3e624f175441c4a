//! A model on disk, behind one door: Hugging Face folders and GGUF files give the same names, shapes and values.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};

use super::config::{Architecture, ModelConfig};
use super::config_gguf::{ROPE_FREQS, hf_name};
pub use super::shards::{INDEX_FILE, SINGLE_FILE};
use super::shards::{Shards, files_where};
use crate::base::error::Result;
use crate::base::units;
use crate::formats::blocks::BlockKind;
use crate::formats::gguf::{GgufFile, unsupported_kind};
use crate::formats::nf4::{self, Absmax, Nf4};
use crate::formats::safetensors::{Dtype, TensorInfo};

/// Where a weight is stored.
#[derive(Debug, Clone)]
struct Stored {
    /// Its name in that file.
    name: String,
    /// Its element format.
    format: Format,
    /// Its bytes on disk.
    num_bytes: u64,
    /// Its shape, slowest dimension first.
    shape: Vec<usize>,
}

impl Stored {
    /// A tensor of a folder; the error says what it is instead of a weight that can be read.
    fn of(name: &str, info: &TensorInfo, shards: &Shards) -> Result<Self> {
        let (format, num_bytes, shape) = if shards.is_in_4_bits(name) {
            let weight = shards.nf4(name)?;
            (Format::Nf4, weight.num_bytes(), weight.shape().to_vec())
        } else if let Some(kind) = info.block_kind() {
            (Format::Plain(kind), info.num_bytes(), info.shape.clone())
        } else if info.dtype == Dtype::I8 && shards.find(&name.replace(".weight", ".SCB")).is_some() {
            bail!("is stored in 8 bits by bitsandbytes (load_in_8bit), which Tandem does not read; {}", nf4::REMEDY);
        } else {
            bail!("is stored as {}; Tandem reads F32, F16 and BF16 weights", info.dtype);
        };
        Ok(Self { name: name.to_owned(), format, num_bytes: num_bytes as u64, shape })
    }
}

/// How the values of a weight are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Format {
    /// Floats, or blocks of a GGUF file.
    Plain(BlockKind),
    /// Several tensors that bitsandbytes wrote.
    Nf4,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Self::Plain(kind) => kind.name(),
            Self::Nf4 => "NF4",
        }
    }
}

/// The weights of a model that are stored in 4 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantized {
    /// How many weights they are.
    pub num_weights: usize,
    /// Values in them.
    pub num_elements: u64,
    /// Bytes that they take on disk.
    pub num_bytes: u64,
    /// Whether the scales of all of them are in 8 bits (double quantization).
    pub double_quant: bool,
}

#[derive(Debug)]
enum Source {
    Safetensors(Shards),
    Gguf(Box<GgufFile>),
}

/// A model on disk whose configuration and tensor table have been read and checked: every weight the configuration asks
/// for is there, with the right shape, in a format that can be read. The values stay on disk.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    source: Source,
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
        let mut stored = HashMap::new();
        let mut unreadable = HashMap::new();
        for name in shards.names() {
            let is_part = nf4::owner(name).is_some_and(|weight| shards.find(weight).is_some());
            let Some((file, info)) = shards.find(name).filter(|_| !is_part) else { continue };
            match Stored::of(name, info, &shards) {
                Ok(entry) => drop(stored.insert(name.to_owned(), entry)),
                Err(why) => {
                    let file = file.path().file_name().unwrap_or_default().display();
                    unreadable.insert(name.to_owned(), format!("of {file} {why:#}"));
                }
            }
        }
        Self::checked(path, config, Source::Safetensors(shards), stored, unreadable)
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
        let mut stored = HashMap::new();
        let mut unreadable = HashMap::new();
        for tensor in file.tensors().iter().filter(|t| t.name != ROPE_FREQS) {
            let name = hf_name(&tensor.name).unwrap_or_else(|| tensor.name.clone());
            match tensor.kind.block_kind() {
                Some(kind) => {
                    let (num_bytes, shape) = (tensor.num_bytes() as u64, tensor.shape.clone());
                    let format = Format::Plain(kind);
                    let entry = Stored { name: tensor.name.clone(), format, num_bytes, shape };
                    stored.insert(name, entry);
                }
                None => {
                    unreadable.insert(name, unsupported_kind(tensor));
                }
            }
        }
        Self::checked(path, config, Source::Gguf(Box::new(file)), stored, unreadable)
    }

    /// Compare what is stored with what the configuration asks for.
    fn checked(
        path: &Path,
        config: ModelConfig,
        source: Source,
        mut stored: HashMap<String, Stored>,
        unreadable: HashMap<String, String>,
    ) -> Result<Self> {
        let mut names = Vec::new();
        let mut missing = Vec::new();
        for (name, shape) in config.expected_tensors() {
            if let Some(why) = unreadable.get(&name) {
                bail!("{}: tensor {name} {why}", path.display());
            }
            match stored.get(&name) {
                None => missing.push(name),
                Some(found) if found.shape != shape => bail!(
                    "{}: tensor {name} has shape {:?}; the configuration asks for {shape:?}",
                    path.display(),
                    found.shape
                ),
                Some(_) => names.push(name),
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
        let wanted: HashSet<&String> = names.iter().collect();
        let mut ignored: Vec<String> =
            stored.keys().chain(unreadable.keys()).filter(|n| !wanted.contains(n)).cloned().collect();
        ignored.sort();
        stored.retain(|n, _| wanted.contains(n));
        Ok(Self { path: path.to_owned(), config, source, names, stored, ignored })
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
        matches!(self.source, Source::Gguf(_))
    }

    /// Names of all weights in the order of computation, in Hugging Face's spelling. A tied head is not among them.
    pub fn tensor_names(&self) -> &[String] {
        &self.names
    }

    /// Stored tensors that the engine does not use, sorted; for example the copy of a tied head.
    pub fn ignored_tensors(&self) -> &[String] {
        &self.ignored
    }

    /// Shape of a weight, `[out, in]` for a matrix.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.stored.get(name).map(|s| s.shape.as_slice())
    }

    /// Bytes that a weight takes on disk; 0 for one that is not there.
    pub fn tensor_bytes(&self, name: &str) -> u64 {
        self.stored.get(name).map_or(0, |s| s.num_bytes)
    }

    /// Bytes that all weights take on disk: the sum of [`Checkpoint::tensor_bytes`].
    pub fn bytes_on_disk(&self) -> u64 {
        self.stored.values().map(|s| s.num_bytes).sum()
    }

    /// Number of parameters; a tied head counts once.
    pub fn num_parameters(&self) -> u64 {
        self.config.num_parameters()
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.stored.get(name).with_context(|| format!("{}: the model has no tensor named {name}", self.path.display()))
    }

    /// The weights that are stored in 4 bits; `None` where there are none.
    pub fn quantized(&self) -> Option<Quantized> {
        let weights: Vec<&Stored> = self.stored.values().filter(|s| s.format == Format::Nf4).collect();
        let num_elements = weights.iter().map(|s| s.shape.iter().product::<usize>() as u64).sum();
        let num_bytes = weights.iter().map(|s| s.num_bytes).sum();
        let is_double = |stored: &&Stored| match &self.source {
            Source::Safetensors(shards) => {
                shards.nf4(&stored.name).is_ok_and(|weight| matches!(weight.absmax(), Absmax::Nested { .. }))
            }
            Source::Gguf(_) => false,
        };
        let double_quant = weights.iter().all(is_double);
        (!weights.is_empty()).then_some(Quantized { num_weights: weights.len(), num_elements, num_bytes, double_quant })
    }

    /// The values of a weight, row-major. The rows of q and k that llama.cpp reorders are put back; weights in NF4 are dequantized.
    ///
    /// # Errors
    /// When there is no such weight, or its scales are damaged.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>> {
        let stored = self.stored(name)?;
        match &self.source {
            Source::Safetensors(shards) if stored.format == Format::Nf4 => {
                let values = shards.nf4(name).and_then(|weight| weight.dequantize());
                values.map_err(|why| anyhow!("{}: tensor {name} {why:#}", self.path.display()))
            }
            Source::Safetensors(shards) => shards.file(name)?.to_f32(name),
            Source::Gguf(file) => {
                let values = file.to_f32(&stored.name)?;
                Ok(match self.reordered_heads(name) {
                    Some(heads) => halves_from_pairs(&values, heads, self.config.head_dim),
                    None => values,
                })
            }
        }
    }

    /// A weight that is stored in NF4, as it lies in the file; `None` for one that is stored otherwise.
    ///
    /// # Errors
    /// When there is no such weight, or its scales are damaged.
    pub fn tensor_nf4(&self, name: &str) -> Result<Option<Nf4<'_>>> {
        match &self.source {
            Source::Safetensors(shards) if self.stored(name)?.format == Format::Nf4 => {
                let weight = shards.nf4(name).and_then(|weight| weight.check().map(|()| weight));
                weight.map(Some).map_err(|why| anyhow!("{}: tensor {name} {why:#}", self.path.display()))
            }
            _ => Ok(None),
        }
    }

    /// The bytes of a weight that the file stores as bf16, row-major and little-endian, where they lie in the mapped file; `None` for one that is
    /// stored otherwise or reordered ([`Self::tensor_f32`] reads those).
    ///
    /// # Errors
    /// When there is no such weight.
    pub fn tensor_bf16(&self, name: &str) -> Result<Option<&[u8]>> {
        let stored = self.stored(name)?;
        match &self.source {
            Source::Safetensors(shards) if stored.format == Format::Plain(BlockKind::Bf16) => {
                shards.file(name)?.bytes(name).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Number of heads of a weight whose rows llama.cpp reorders: q and k of the architecture it calls `llama`.
    fn reordered_heads(&self, name: &str) -> Option<usize> {
        if self.config.architecture != Architecture::Llama {
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
        for s in self.stored.values() {
            *values.entry(s.format.name()).or_default() += s.shape.iter().product::<usize>();
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
