//! What one step did: loss, norms, tokens, time by phase, memory by category.

use serde::{Deserialize, Serialize};

use crate::model::metadata::{CacheCounts, CacheEntry};
use crate::model::policy::{Metadata, Routing};
use crate::tensor::cuda::CounterValues;
use crate::tensor::memory::MemoryReport;
use crate::tensor::phase::{PhaseTime, Span};

/// One optimizer step, as measured. Stop 7 of the walk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// 1-based number of the step.
    pub step: u64,
    /// Mean loss over the supervised tokens of the whole step, in nats.
    pub loss: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Whether the gradient was scaled down to `max_grad_norm`.
    pub clipped: bool,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens computed, padding included.
    pub total_tokens: u64,
    /// Tokens of documents (without padding).
    pub document_tokens: u64,
    /// Supervised tokens: the loss's denominator.
    pub num_label_tokens: u64,
    /// Wall time of the step, waiting for data included, in milliseconds. On a GPU, where steps follow each other: from the end of the one before
    /// to its own.
    pub step_ms: f64,
    /// Time by phase, in the order of `Phase::ALL`.
    pub phases: Vec<PhaseTime>,
    /// Part of `step_ms` that no phase claims, in milliseconds.
    pub not_attributed_ms: f64,
    /// Memory at the end of the step.
    pub memory: MemoryReport,
    /// Launches, host syncs and allocations while the step was queued, on a GPU.
    #[serde(default)]
    pub counters: Option<CounterValues>,
    /// What the metadata cache did.
    #[serde(default)]
    pub cache: Option<CacheReport>,
    /// What was copied to host memory and back, where activations are offloaded.
    #[serde(default)]
    pub copies: Option<CopyReport>,
    /// What routed experts did, in a model that has them.
    #[serde(default)]
    pub moe: Option<MoeReport>,
    /// Spans of this step, where it was an instrumented one.
    pub spans: Vec<Span>,
}

impl StepReport {
    /// A step with nothing measured, for tests.
    #[cfg(test)]
    pub(crate) fn plain(step: u64) -> Self {
        Self {
            step,
            loss: 1.0,
            grad_norm: 1.0,
            clipped: false,
            lr: 1e-4,
            total_tokens: 8,
            document_tokens: 8,
            num_label_tokens: 8,
            step_ms: 10.0,
            phases: Vec::new(),
            not_attributed_ms: 0.0,
            memory: MemoryReport::default(),
            counters: None,
            cache: None,
            copies: None,
            moe: None,
            spans: Vec::new(),
        }
    }

    /// Tokens of documents a second.
    pub fn tokens_per_sec(&self) -> f64 {
        if self.step_ms > 0.0 { self.document_tokens as f64 / (self.step_ms / 1e3) } else { 0.0 }
    }
}

/// What the metadata cache did in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheReport {
    /// How layers had their metadata.
    pub metadata: Metadata,
    /// Counts of the step.
    pub counts: CacheCounts,
    /// Time of the metadata phase in both passes, in milliseconds: building, without the upload of batches; `None` when it was not measured.
    pub metadata_ms: Option<f64>,
    /// What is kept, at the end of the step.
    pub entries: Vec<CacheEntry>,
}

impl CacheReport {
    /// Mean time of one build, in milliseconds.
    pub fn build_ms(&self) -> Option<f64> {
        self.metadata_ms.filter(|_| self.counts.builds > 0).map(|ms| ms / self.counts.builds as f64)
    }

    /// Time that hits saved, at the mean time of a build, in milliseconds.
    pub fn avoided_ms(&self) -> Option<f64> {
        self.build_ms().map(|ms| ms * self.counts.hits as f64)
    }
}

/// What routed experts did in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MoeReport {
    /// How rows got to experts.
    pub routing: Routing,
    /// Experts of a token.
    pub experts_per_token: usize,
    /// Blocks that have experts, in order.
    pub layers: Vec<usize>,
    /// How many tokens went to each expert, for each of `layers`; padding of passes included. Empty where that was not kept.
    pub tokens_per_expert: Vec<Vec<u64>>,
    /// Time of the routing phase in both passes, recomputation apart, in milliseconds; `None` when it was not measured.
    pub routing_ms: Option<f64>,
}

impl MoeReport {
    /// Load of the fullest expert of a layer over the mean load: 1 when all have as much.
    pub fn imbalance(&self, layer: usize) -> Option<f64> {
        let tokens = self.tokens_per_expert.get(layer)?;
        let all: u64 = tokens.iter().sum();
        (all > 0).then(|| *tokens.iter().max().unwrap_or(&0) as f64 * tokens.len() as f64 / all as f64)
    }

    /// The layer whose load is least even, with its [imbalance](Self::imbalance); layers are counted among those with experts. `None` when no token
    /// went to an expert.
    pub fn worst_layer(&self) -> Option<(usize, f64)> {
        let layers = (0..self.tokens_per_expert.len()).filter_map(|layer| Some((layer, self.imbalance(layer)?)));
        // Of layers alike the first.
        layers.rev().max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Mean imbalance of the layers; `None` when no token went to an expert.
    pub fn mean_imbalance(&self) -> Option<f64> {
        let (sum, layers) = (0..self.tokens_per_expert.len())
            .filter_map(|layer| self.imbalance(layer))
            .fold((0.0, 0), |(sum, layers), imbalance| (sum + imbalance, layers + 1));
        (layers > 0).then(|| sum / f64::from(layers))
    }

    /// Experts of all layers.
    pub fn num_experts(&self) -> usize {
        self.tokens_per_expert.iter().map(Vec::len).sum()
    }

    /// How even the load was, in a line; `None` when no token went to an expert.
    pub fn describe(&self) -> Option<String> {
        let (worst, most) = self.worst_layer()?;
        let block = self.layers.get(worst).copied().unwrap_or(worst);
        Some(format!(
            "fullest expert {most:.2} times the mean in block {block}, {:.2} times over all layers; {} of {} experts idle",
            self.mean_imbalance()?,
            self.idle_experts(),
            self.num_experts()
        ))
    }

    /// Experts of all layers that got no token.
    pub fn idle_experts(&self) -> usize {
        self.tokens_per_expert.iter().flatten().filter(|tokens| **tokens == 0).count()
    }
}

/// What was copied to host memory and back in one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CopyReport {
    /// Device buffers for what comes back.
    pub buffers: usize,
    /// Bytes of one of them: what travels of a block, its input (tokens × hidden × bytes a value) and what is kept beside it.
    pub buffer_bytes: u64,
    /// Blocks whose inputs travel, and what is kept beside them.
    pub blocks: usize,
    /// Page-locked (CPU: plain) host memory that they wait in, in bytes.
    pub host_bytes: u64,
    /// Bytes to host memory.
    pub d2h_bytes: u64,
    /// Bytes back.
    pub h2d_bytes: u64,
    /// Time of copies to host memory, in milliseconds.
    pub d2h_ms: f64,
    /// Time of copies back, in milliseconds.
    pub h2d_ms: f64,
    /// Time in which a copy ran, in either direction, in milliseconds.
    pub copy_ms: f64,
    /// Part of it in which compute ran beside, in milliseconds.
    pub hidden_ms: f64,
    /// Times that a block came back in the step: passes × blocks.
    pub reloads: usize,
    /// Mean time of the backward pass of a block that waits for a copy, recomputation included, in milliseconds; `None` when not measured.
    pub block_backward_ms: Option<f64>,
}

impl CopyReport {
    /// Share of the copy time that was hidden behind compute, 0 to 1.
    pub fn overlap(&self) -> f64 {
        if self.copy_ms > 0.0 { self.hidden_ms / self.copy_ms } else { 0.0 }
    }

    /// Copy time that was not hidden, in milliseconds.
    pub fn exposed_ms(&self) -> f64 {
        self.copy_ms - self.hidden_ms
    }

    /// Mean time in which a block comes back, in milliseconds: `c` of the formulas.
    pub fn reload_ms(&self) -> Option<f64> {
        (self.reloads > 0).then(|| self.h2d_ms / self.reloads as f64)
    }
}

/// Something the engine can do in more than one way without changing a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Optimization {
    /// Metadata of packs built once and kept.
    MetadataCache,
    /// Everything kept for the backward pass, nothing computed again.
    KeepActivations,
    /// Inputs of blocks in host memory.
    ActivationOffload,
    /// Two device buffers for what comes back.
    DoubleBuffer,
    /// Attention that visits only the pairs of tokens that see each other.
    VarlenAttention,
    /// Tokens routed to experts on the device alone.
    GroupedRouting,
    /// Passes recorded as CUDA graphs.
    CudaGraphs,
    /// The table of token embeddings in host memory.
    HostEmbedding,
    /// Moments and exact weights in host memory.
    HostOptimizerState,
    /// The MLP over tiles of rows, so that what it works with is held for one of them.
    MlpTiles,
    /// Packs of a step joined into passes.
    JoinedPacks,
}

impl Optimization {
    /// Those that every run tells about, in the order in which they are shown. The others are told where they were asked for.
    pub const ALL: [Self; 6] = [
        Self::MetadataCache,
        Self::DoubleBuffer,
        Self::ActivationOffload,
        Self::KeepActivations,
        Self::VarlenAttention,
        Self::CudaGraphs,
    ];

    /// The name shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::MetadataCache => "Packing metadata cache",
            Self::KeepActivations => "Keep instead of recompute",
            Self::ActivationOffload => "Activation offload",
            Self::DoubleBuffer => "Overlapped copies",
            Self::VarlenAttention => "Variable-length attention",
            Self::GroupedRouting => "Grouped MoE routing",
            Self::CudaGraphs => "CUDA graphs",
            Self::HostEmbedding => "Embedding table in host memory",
            Self::HostOptimizerState => "Optimizer state in host memory",
            Self::MlpTiles => "MLP in tiles",
            Self::JoinedPacks => "Joined packs",
        }
    }
}

/// Whether an optimization is on in a run, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Which one.
    pub optimization: Optimization,
    /// Whether it is on.
    pub on: bool,
    /// Whether it can be switched in this run: where not, `why` says why.
    pub available: bool,
    /// The reason, as a short clause.
    pub why: String,
}

impl Choice {
    /// The choice in a line: `Packing metadata cache: on (one build for each pack and window)`.
    pub fn describe(&self) -> String {
        format!("{}: {} ({})", self.optimization.name(), if self.on { "on" } else { "off" }, self.why)
    }
}

/// Loss on held-out records.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvalReport {
    /// Step (optimizer updates done) at which it was measured.
    pub step: u64,
    /// Mean loss over the supervised tokens, in nats.
    pub loss: f64,
    /// Supervised tokens.
    pub num_label_tokens: u64,
    /// Held-out documents.
    pub num_documents: u64,
    /// Wall time in milliseconds.
    pub eval_ms: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_experts_is_told_by_its_worst_layer_and_on_average() {
        let mut report = MoeReport {
            routing: Routing::Grouped,
            experts_per_token: 2,
            layers: vec![0, 2, 3],
            tokens_per_expert: vec![vec![4, 4, 4, 4], vec![0, 12, 4, 0], vec![0; 4]],
            routing_ms: None,
        };
        assert_eq!((report.imbalance(0), report.imbalance(1), report.imbalance(2)), (Some(1.0), Some(3.0), None));
        assert_eq!((report.worst_layer(), report.mean_imbalance()), (Some((1, 3.0)), Some(2.0)));
        assert_eq!((report.idle_experts(), report.num_experts()), (6, 12));
        assert_eq!(
            report.describe().unwrap(),
            "fullest expert 3.00 times the mean in block 2, 2.00 times over all layers; 6 of 12 experts idle"
        );
        report.tokens_per_expert.clear();
        assert_eq!((report.worst_layer(), report.mean_imbalance(), report.describe()), (None, None, None));
    }
}
