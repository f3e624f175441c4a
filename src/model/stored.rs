//! What the files of a model hold, and how its weights are put together from that: most are one stored tensor, the experts of a block are one stack
//! however the file has them.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use anyhow::bail;

use super::config::{Architecture, ModelConfig};
use super::shards::Shards;
use crate::base::error::Result;
use crate::formats::blocks::BlockKind;
use crate::formats::mxfp4;
use crate::formats::nf4;
use crate::formats::safetensors::{Dtype, TensorInfo};

/// A stored tensor.
#[derive(Debug, Clone)]
pub(super) struct Raw {
    /// Its name in its file; of one in MXFP4 in a folder, what comes before `_blocks` and `_scales`.
    pub name: String,
    /// Its element format.
    pub format: Format,
    /// Its bytes on disk.
    pub num_bytes: u64,
    /// Its shape, slowest dimension first.
    pub shape: Vec<usize>,
}

/// How the values of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Format {
    /// Floats, or blocks of a GGUF file.
    Plain(BlockKind),
    /// Several tensors that bitsandbytes wrote.
    Nf4,
    /// Two tensors: the codes of gpt-oss's experts and their scales.
    Mxfp4,
}

impl Format {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain(kind) => kind.name(),
            Self::Nf4 => "NF4",
            Self::Mxfp4 => BlockKind::Mxfp4.name(),
        }
    }

    /// Whether it is MXFP4, in either order of its bytes.
    pub(super) fn is_mxfp4(self) -> bool {
        matches!(self, Self::Mxfp4 | Self::Plain(BlockKind::Mxfp4))
    }
}

/// Ends of the names of the two parts of a weight in MXFP4.
pub(super) const BLOCKS: &str = "_blocks";
pub(super) const SCALES: &str = "_scales";

impl Raw {
    /// The tensor of a folder whose name the file has; the error says what it is instead of a weight that can be read.
    pub(super) fn of(name: &str, info: &TensorInfo, shards: &Shards) -> Result<Self> {
        if let Some(weight) = name.strip_suffix(BLOCKS) {
            return Self::mxfp4(weight, info, shards);
        }
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

    /// A weight in MXFP4, from the part that holds its codes.
    fn mxfp4(weight: &str, blocks: &TensorInfo, shards: &Shards) -> Result<Self> {
        let name = format!("{weight}{SCALES}");
        let Some((_, scales)) = shards.find(&name) else {
            bail!("is stored in MXFP4, but its scales ({name}) are missing; fetch the model again");
        };
        let shape = match blocks.shape.as_slice() {
            [rest @ .., mxfp4::BLOCK_BYTES]
                if rest == scales.shape && rest.len() > 1 && (blocks.dtype, scales.dtype) == (Dtype::U8, Dtype::U8) =>
            {
                let mut shape = rest.to_vec();
                shape.last_mut().into_iter().for_each(|last| *last *= mxfp4::BLOCK);
                shape
            }
            _ => bail!(
                "is not MXFP4 as gpt-oss has it: blocks {} {:?}, scales {} {:?}",
                blocks.dtype,
                blocks.shape,
                scales.dtype,
                scales.shape
            ),
        };
        let num_bytes = (blocks.num_bytes() + scales.num_bytes()) as u64;
        Ok(Self { name: weight.to_owned(), format: Format::Mxfp4, num_bytes, shape })
    }
}

/// How a weight is made.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    /// Shape of the weight.
    pub shape: Vec<usize>,
    pub source: Source,
}

#[derive(Debug, Clone)]
pub(super) enum Source {
    /// It is a stored tensor.
    Tensor(Raw),
    /// It has a part for each expert.
    Stack(Stack),
}

/// The experts of a block: every expert's part is made of one piece, or of its gate and its up rows.
#[derive(Debug, Clone)]
pub(super) struct Stack {
    pub pieces: Vec<Piece>,
    pub order: Order,
}

/// One piece of every expert.
#[derive(Debug, Clone)]
pub(super) enum Piece {
    /// In one tensor, expert after expert.
    Stacked(Raw),
    /// In a tensor of its own for each expert.
    Each(Vec<Raw>),
}

/// Where the rows of an expert are in its pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// As the weight has them, piece after piece.
    Rows,
    /// In turns: one of the first piece (or of the first half of the only one), one of the second.
    Interleaved,
    /// The one piece has rows as columns: `in` before `out`.
    Transposed,
}

impl Piece {
    /// The stored tensor that holds an expert, the number of the expert in it, and how many it holds.
    pub(super) fn of(&self, expert: usize, num_experts: usize) -> (&Raw, usize, usize) {
        match self {
            Self::Stacked(raw) => (raw, expert, num_experts),
            Self::Each(raws) => (&raws[expert], 0, 1),
        }
    }

    fn raws(&self) -> &[Raw] {
        match self {
            Self::Stacked(raw) => std::slice::from_ref(raw),
            Self::Each(raws) => raws,
        }
    }
}

impl Stored {
    /// The stored tensors it is made of.
    pub(super) fn raws(&self) -> impl Iterator<Item = &Raw> {
        let (first, second): (&[Raw], &[Raw]) = match &self.source {
            Source::Tensor(raw) => (std::slice::from_ref(raw), &[]),
            Source::Stack(Stack { pieces, .. }) => {
                let mut pieces = pieces.iter().map(Piece::raws);
                (pieces.next().unwrap_or_default(), pieces.next().unwrap_or_default())
            }
        };
        first.iter().chain(second)
    }

    /// Bytes on disk.
    pub(super) fn num_bytes(&self) -> u64 {
        self.raws().map(|raw| raw.num_bytes).sum()
    }

    /// Whether all of it is stored in a format.
    pub(super) fn is_all(&self, is: impl Fn(Format) -> bool) -> bool {
        self.raws().all(|raw| is(raw.format))
    }
}

/// Puts the rows of `cols` items of an expert's pieces into the order of its weight.
pub(super) fn arranged<'a, T: Copy>(mut pieces: Vec<Cow<'a, [T]>>, order: Order, cols: usize) -> Cow<'a, [T]> {
    if order == Order::Rows && pieces.len() == 1 {
        return pieces.swap_remove(0);
    }
    let mut out = Vec::with_capacity(pieces.iter().map(|piece| piece.len()).sum());
    match (order, pieces.as_slice()) {
        (Order::Transposed, [one]) => {
            let rows = one.len() / cols.max(1);
            (0..rows).for_each(|row| out.extend((0..cols).map(|col| one[col * rows + row])));
        }
        (Order::Interleaved, pieces) => {
            let (gate, up) = match pieces {
                [gate, up] => (gate.as_ref(), up.as_ref()),
                _ => pieces.first().map_or((&[][..], &[][..]), |both| both.split_at(both.len() / 2)),
            };
            for (gate, up) in gate.chunks_exact(cols).zip(up.chunks_exact(cols)) {
                out.extend_from_slice(gate);
                out.extend_from_slice(up);
            }
        }
        _ => pieces.iter().for_each(|piece| out.extend_from_slice(piece)),
    }
    out.into()
}

/// Why a weight cannot be made.
pub(super) enum Problem {
    /// A stored tensor of that name is missing.
    Missing(String),
    /// Something is wrong: a clause that begins with the tensor.
    Wrong(String),
}

/// The stored tensors of a model by name (in Hugging Face's spelling), and why others cannot be read.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub readable: HashMap<String, Raw>,
    pub unreadable: HashMap<String, String>,
    pub is_gguf: bool,
}

impl Table {
    fn has(&self, name: &str) -> bool {
        self.readable.contains_key(name) || self.unreadable.contains_key(name)
    }

    /// The stored tensor of that name, which must have that shape.
    fn take(&self, name: &str, shape: &[usize]) -> Result<Raw, Problem> {
        if let Some(why) = self.unreadable.get(name) {
            return Err(Problem::Wrong(format!("tensor {name} {why}")));
        }
        match self.readable.get(name) {
            None => Err(Problem::Missing(name.to_owned())),
            Some(raw) if raw.shape != shape => Err(Problem::Wrong(format!(
                "tensor {name} has shape {:?}; the configuration asks for {shape:?}",
                raw.shape
            ))),
            Some(raw) => Ok(raw.clone()),
        }
    }

    /// How the weight `name` of `shape` is made from what is stored.
    pub(super) fn resolve(&self, config: &ModelConfig, name: &str, shape: &[usize]) -> Result<Stored, Problem> {
        let source = match name.split_once(".mlp.experts.") {
            Some((block, part)) => Source::Stack(self.experts(config, (name, block, part), shape)?),
            None => Source::Tensor(self.take(self.stored_name(config, name).as_ref(), shape)?),
        };
        Ok(Stored { shape: shape.to_vec(), source })
    }

    /// What a weight that is one tensor is called where it is stored: Mixtral's router has two names.
    fn stored_name<'n>(&self, config: &ModelConfig, name: &'n str) -> Cow<'n, str> {
        if config.architecture == Architecture::Mixtral && !self.has(name) && name.ends_with(".mlp.gate.weight") {
            return name.replace(".mlp.gate.", ".block_sparse_moe.gate.").into();
        }
        name.into()
    }

    /// The experts' weight or bias `part` of `block`, [E, rows, cols] or [E, rows].
    fn experts(
        &self,
        config: &ModelConfig,
        (name, block, part): (&str, &str, &str),
        shape: &[usize],
    ) -> Result<Stack, Problem> {
        let (num_experts, one) = (shape[0], &shape[1..]);
        let is_interleaved = config.moe.as_ref().is_some_and(|moe| moe.interleaved);
        if self.has(name) {
            // gpt-oss has floats `in` before `out`, which shapes may not tell. What its files have in MXFP4 and GGUF files are not so.
            let is_transposed = config.architecture == Architecture::GptOss
                && !self.is_gguf
                && one.len() == 2
                && self.readable.get(name).is_none_or(|raw| matches!(raw.format, Format::Plain(_) | Format::Nf4));
            if is_transposed {
                let raw = self.take(name, &[num_experts, one[1], one[0]])?;
                return Ok(Stack { pieces: vec![Piece::Stacked(raw)], order: Order::Transposed });
            }
            // llama.cpp takes gate and up rows apart before it puts all of them into one tensor.
            let is_apart = self.is_gguf && is_interleaved && part.starts_with("gate_up_proj");
            let order = if is_apart { Order::Interleaved } else { Order::Rows };
            return Ok(Stack { pieces: vec![Piece::Stacked(self.take(name, shape)?)], order });
        }
        let (modules, kind): (&[&str], &str) = match part {
            "gate_up_proj" => (&["gate_proj", "up_proj"], ""),
            "gate_up_proj_bias" => (&["gate_proj", "up_proj"], "_bias"),
            "down_proj" => (&["down_proj"], ""),
            _ => return Err(Problem::Missing(name.to_owned())),
        };
        let order = if is_interleaved && modules.len() == 2 { Order::Interleaved } else { Order::Rows };
        let mut one = one.to_vec();
        one[0] /= modules.len();
        let stacked = |module: &&str| format!("{block}.mlp.experts.{module}{kind}");
        if modules.iter().any(|module| self.has(&stacked(module))) {
            let shape = [&[num_experts], one.as_slice()].concat();
            let piece = |module: &&str| Ok(Piece::Stacked(self.take(&stacked(module), &shape)?));
            return Ok(Stack { pieces: modules.iter().map(piece).collect::<Result<_, Problem>>()?, order });
        }
        if config.architecture == Architecture::GptOss {
            return Err(Problem::Missing(name.to_owned()));
        }
        let piece = |module: &&str| {
            let of = |expert| self.take(&expert_name(config.architecture, self.is_gguf, block, expert, module), &one);
            Ok(Piece::Each((0..num_experts).map(of).collect::<Result<_, Problem>>()?))
        };
        Ok(Stack { pieces: modules.iter().map(piece).collect::<Result<_, Problem>>()?, order })
    }

    /// Names of the stored tensors that no weight is made of, sorted.
    pub(super) fn unused<'s>(&self, weights: impl Iterator<Item = &'s Stored>) -> Vec<String> {
        let used: HashSet<&str> = weights.flat_map(Stored::raws).map(|raw| raw.name.as_str()).collect();
        let readable = self.readable.iter().filter(|(_, raw)| !used.contains(raw.name.as_str())).map(|(name, _)| name);
        let mut unused: Vec<String> = readable.chain(self.unreadable.keys()).cloned().collect();
        unused.sort();
        unused
    }
}

/// What a family's files call the projection `module` (`gate_proj`, `up_proj`, `down_proj`) of one expert.
pub(super) fn expert_name(family: Architecture, is_gguf: bool, block: &str, expert: usize, module: &str) -> String {
    if family != Architecture::Mixtral || is_gguf {
        return format!("{block}.mlp.experts.{expert}.{module}.weight");
    }
    let module = match module {
        "gate_proj" => "w1",
        "up_proj" => "w3",
        _ => "w2",
    };
    format!("{block}.block_sparse_moe.experts.{expert}.{module}.weight")
}

#[cfg(test)]
#[path = "stored_tests.rs"]
mod tests;
