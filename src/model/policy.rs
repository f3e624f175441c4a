//! Policies of a pass: what a block keeps between its forward and its backward pass and where, and how attention knows the documents of a pack.

use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
pub use crate::layers::moe::Routing;

/// What a block keeps between its forward and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// Everything the backward pass needs: most memory, no extra work.
    Keep,
    /// The block's input only; the rest is computed again.
    #[default]
    Recompute,
    /// As `Recompute`, and the input waits in host memory: copied there behind the forward pass, and back beside the backward pass.
    Offload,
}

/// How inputs of blocks travel to host memory and back, under [`Activations::Offload`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadPolicy {
    /// Device buffers for what comes back: 1 (copy, then compute, in turns) or 2 (the next copy runs beside compute); 0: two where memory allows.
    pub buffers: usize,
    /// Skips the guardrails: what is asked for is done wherever it can be done at all.
    pub force: bool,
    /// Device memory that a second buffer must leave free, in bytes.
    pub headroom_bytes: u64,
    /// Most page-locked host memory, in bytes; `None`: half of what the system says is available.
    pub pinned_bytes: Option<u64>,
}

impl Default for OffloadPolicy {
    fn default() -> Self {
        Self { buffers: 0, force: false, headroom_bytes: 512 << 20, pinned_bytes: None }
    }
}

/// Where something lies that is not worked on all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// In the device's memory.
    #[default]
    Device,
    /// In the host's memory, page-locked: a GPU reads and writes it over the bus.
    Host,
}

impl Placement {
    /// Host memory if `host`.
    pub fn host_if(host: bool) -> Self {
        if host { Self::Host } else { Self::Device }
    }
}

/// Where a model and its training put what takes memory, and how much they work on at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryPolicy {
    /// The table of token embeddings, where it does not train and is not the head's as well.
    pub embedding: Placement,
    /// What only the optimizer touches: moments, and the f32 values of weights whose products read bf16.
    pub optimizer_state: Placement,
    /// What weights in 4 bits are multiplied as.
    pub dequantized: Dequantized,
    /// Whether blocks that are computed again keep the residual stream between attention and MLP beside their input.
    pub middle: bool,
    /// Whether they keep queries, keys and values as well.
    pub qkv: bool,
    /// Most rows (tokens) that the MLP of a block takes at one time where its activations are not kept; 0: all of a pass.
    pub mlp_rows: usize,
    /// Most tokens of a pass into which packs of a step are joined; 0: each pack has a pass of its own.
    pub pass_tokens: usize,
}

impl MemoryPolicy {
    /// What blocks that are computed again keep beside their input.
    pub fn kept_parts(&self) -> KeptParts {
        KeptParts { middle: self.middle, qkv: self.qkv }
    }
}

/// Which activations of a block are kept beside its input where the rest is computed again: for each a product less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptParts {
    /// The residual stream between attention and MLP: attention's output projection is not computed again.
    pub middle: bool,
    /// Queries, keys and values: their projection is not computed again.
    pub qkv: bool,
}

impl KeptParts {
    /// Columns of what is kept of a block: its input, middle, and q, k and v; 0 for what is not.
    pub fn columns(self, config: &ModelConfig) -> [usize; 3] {
        let qkv = config.q_size() + 2 * config.kv_size();
        [config.hidden_size, if self.middle { config.hidden_size } else { 0 }, if self.qkv { qkv } else { 0 }]
    }
}

/// How attention knows which tokens of a pack see each other. Both give the same, up to the order of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionPath {
    /// By where documents start: work for the pairs that are seen.
    #[default]
    Varlen,
    /// By a dense T×T mask for each window, which is read for every pair of the pack.
    Masked,
}

/// Where a layer gets what it needs to know about the documents of a pack: boundaries, positions, tile lists or masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metadata {
    /// Built once for a pack and window, and kept while the pack is in work.
    #[default]
    Cached,
    /// Built anew by every layer in every forward pass, recomputation included, in as few operations as it takes.
    Fused,
    /// Built anew likewise, operation by operation, as published: lengths → cu_seqlens → the longest, read back to the host → positions → tile lists, or
    /// a mask document by document.
    Published,
}

/// How a model holds the weights of its linear layers; embedding, head, norms and biases are never quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// In the device's format.
    #[default]
    Plain,
    /// Quantized to NF4 (QLoRA, arXiv 2305.14314). What the file has in NF4 is taken as it is.
    Nf4 {
        /// Whether the scales of blocks are quantized, too, to 8 bits.
        double_quant: bool,
        /// Where the values are that products read.
        dequantized: Dequantized,
    },
}

/// Where weights in 4 bits are dequantized to. Products read the same values in every way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dequantized {
    /// Into scratch memory, for a product or for the pass of a block: the weights take 4 bits.
    #[default]
    Scratch,
    /// Once, when the model is loaded: no work later, and as much memory as without quantization.
    Resident,
}

impl WeightFormat {
    /// Where weights are quantized, whether their scales are, too.
    pub fn double_quant(self) -> Option<bool> {
        match self {
            Self::Plain => None,
            Self::Nf4 { double_quant, .. } => Some(double_quant),
        }
    }
}
