//! What a training run is asked to do, apart from its model and data.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::model::metadata::MetadataPolicy;
pub use crate::model::policy::{
    Activations, AttentionPath, Dequantized, MemoryPolicy, Metadata, OffloadPolicy, Placement, Routing, WeightFormat,
};
pub use crate::tensor::dtype::Precision;

/// Which parameters train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MethodKind {
    /// Low-rank adapters on frozen weights.
    #[default]
    Lora,
    /// Low-rank adapters on frozen weights that are quantized to NF4 (arXiv 2305.14314).
    Qlora,
    /// Every parameter of the model.
    Full,
}

impl MethodKind {
    /// Whether adapters train, and nothing else.
    pub fn has_adapters(self) -> bool {
        matches!(self, Self::Lora | Self::Qlora)
    }
}

/// `[method]`: which parameters train, and the adapter's shape (names as in PEFT).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MethodConfig {
    /// `lora`, `qlora` or `full`.
    pub kind: MethodKind,
    /// With `qlora`, quantize the scales of blocks as well: 0.4 bits less a weight.
    pub double_quant: bool,
    /// Rank of the adapters.
    pub r: usize,
    /// Scale numerator: the adapter is scaled by `lora_alpha / r`, or `lora_alpha / √r` with `use_rslora`.
    pub lora_alpha: f64,
    /// Probability with which an input of the adapter is dropped, 0 ≤ p < 1.
    pub lora_dropout: f64,
    /// Scale by `lora_alpha / √r`.
    pub use_rslora: bool,
    /// Projections that get an adapter: `q_proj` … `down_proj`, or the single word `all-linear`; experts are no such layers.
    pub target_modules: Vec<String>,
    /// Weights of routed experts that get adapters: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`; in every block, as in PEFT.
    pub target_parameters: Vec<String>,
    /// Blocks that get adapters; empty means all.
    pub layers_to_transform: Vec<usize>,
    /// A PEFT adapter folder to start from instead of fresh matrices.
    pub init_adapter: Option<PathBuf>,
}

impl MethodConfig {
    /// How the weights of linear layers are held, those in 4 bits dequantized to where `dequantized` says.
    pub fn weight_format(&self, dequantized: Dequantized) -> WeightFormat {
        match self.kind {
            MethodKind::Lora | MethodKind::Full => WeightFormat::Plain,
            MethodKind::Qlora => WeightFormat::Nf4 { double_quant: self.double_quant, dequantized },
        }
    }
}

impl Default for MethodConfig {
    fn default() -> Self {
        Self {
            kind: MethodKind::Lora,
            double_quant: true,
            r: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.0,
            use_rslora: false,
            target_modules: vec!["all-linear".into()],
            target_parameters: Vec::new(),
            layers_to_transform: Vec::new(),
            init_adapter: None,
        }
    }
}

/// Shape of the learning rate over a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Half a cosine from `lr` to 0.
    #[default]
    Cosine,
    /// A straight line from `lr` to 0.
    Linear,
    /// `lr` throughout.
    Constant,
}

/// `[optimizer]`: AdamW, its state, its schedule and clipping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Bits of a value of the moments: 32, or 8 in blocks as in bitsandbytes.
    pub bits: u32,
    /// Largest global gradient norm; 0 turns clipping off.
    pub max_grad_norm: f64,
    /// Shape of the learning rate after warm-up.
    pub schedule: ScheduleKind,
    /// Steps over which the learning rate rises linearly to `lr`.
    pub warmup_steps: u64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            lr: 2e-4,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            bits: 32,
            max_grad_norm: 1.0,
            schedule: ScheduleKind::Cosine,
            warmup_steps: 0,
        }
    }
}

/// Where to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// The best device found; the run says which and why.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU; an error where there is none.
    Cuda,
}

/// What blocks keep for the backward pass, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationsChoice {
    /// The fastest that fits; the run says which and why.
    #[default]
    Auto,
    /// Everything.
    Keep,
    /// Inputs of blocks, on the device.
    Recompute,
    /// Inputs of blocks, in host memory.
    Offload,
}

impl ActivationsChoice {
    /// What is asked for, unless that is left to Tandem.
    pub fn fixed(self) -> Option<Activations> {
        match self {
            Self::Auto => None,
            Self::Keep => Some(Activations::Keep),
            Self::Recompute => Some(Activations::Recompute),
            Self::Offload => Some(Activations::Offload),
        }
    }
}

/// A switch that may be left to Tandem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Switch {
    /// On where it helps.
    #[default]
    Auto,
    /// On.
    On,
    /// Off.
    Off,
}

/// How metadata are rebuilt where they are not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MetadataBaseline {
    /// Operation by operation, as published.
    #[default]
    Published,
    /// In as few operations as it takes.
    Fused,
}

impl MetadataBaseline {
    /// The engine's word for it.
    pub fn metadata(self) -> Metadata {
        match self {
            Self::Published => Metadata::Published,
            Self::Fused => Metadata::Fused,
        }
    }
}

/// How rows get to routed experts where `grouped_routing` is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingBaseline {
    /// A stable sort and one read of the counts, as in the published improvement.
    #[default]
    Sorted,
    /// A search, a read and a gather for each expert, as in the published baseline.
    PerExpert,
}

impl RoutingBaseline {
    /// The engine's word for it.
    pub fn routing(self) -> Routing {
        match self {
            Self::Sorted => Routing::Sorted,
            Self::PerExpert => Routing::PerExpert,
        }
    }
}

/// `[optimizations]`: each can be left to Tandem or set, and none changes a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptimizationsConfig {
    /// Keep what layers need to know of a pack's documents, instead of building it anew for each layer.
    pub metadata_cache: Switch,
    /// How it is built anew where `metadata_cache` is off.
    pub metadata_baseline: MetadataBaseline,
    /// Most entries the cache keeps; 0 means one for each window of the model.
    pub metadata_entries: usize,
    /// Route tokens to experts on the device alone, with one grouped product for all of them.
    pub grouped_routing: Switch,
    /// How tokens get to experts where `grouped_routing` is off.
    pub routing_baseline: RoutingBaseline,
    /// Device buffers for offloaded activations that come back: 1 or 2; 0 means two where memory allows.
    pub offload_buffers: usize,
    /// Offload also where the guardrails would not: small blocks, memory that host and device share, no headroom.
    pub offload_force: bool,
    /// MiB of device memory that a second buffer must leave free.
    pub offload_headroom_mib: u64,
    /// GiB of page-locked host memory for activations at most; 0 means half of what is available.
    pub offload_pinned_gib: f64,
}

impl Default for OptimizationsConfig {
    fn default() -> Self {
        Self {
            metadata_cache: Switch::Auto,
            metadata_baseline: MetadataBaseline::Published,
            metadata_entries: 0,
            grouped_routing: Switch::Auto,
            routing_baseline: RoutingBaseline::default(),
            offload_buffers: 0,
            offload_force: false,
            offload_headroom_mib: 512,
            offload_pinned_gib: 0.0,
        }
    }
}

/// What optimizations are compared with, and switched off to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Baselines {
    /// Of the metadata cache.
    pub metadata: Metadata,
    /// Of grouped routing.
    pub routing: Routing,
}

impl OptimizationsConfig {
    /// What an optimization is switched off to.
    pub fn baselines(&self) -> Baselines {
        Baselines { metadata: self.metadata_baseline.metadata(), routing: self.routing_baseline.routing() }
    }

    /// Where layers get what they need to know of documents. Nothing speaks against the cache anywhere, so `auto` is on.
    pub fn metadata(&self) -> MetadataPolicy {
        let metadata = match self.metadata_cache {
            Switch::Auto | Switch::On => Metadata::Cached,
            Switch::Off => self.metadata_baseline.metadata(),
        };
        MetadataPolicy { metadata, capacity: self.metadata_entries }
    }

    /// How tokens get to experts. Nothing speaks against grouped routing anywhere, so `auto` is on.
    pub fn routing(&self) -> Routing {
        match self.grouped_routing {
            Switch::Auto | Switch::On => Routing::Grouped,
            Switch::Off => self.routing_baseline.routing(),
        }
    }

    /// How activations travel.
    pub fn offload(&self) -> OffloadPolicy {
        OffloadPolicy {
            buffers: self.offload_buffers,
            force: self.offload_force,
            headroom_bytes: self.offload_headroom_mib << 20,
            pinned_bytes: (self.offload_pinned_gib > 0.0)
                .then_some((self.offload_pinned_gib * f64::from(1 << 30)) as u64),
        }
    }
}

/// Where something lies, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementChoice {
    /// In the device's memory, until Tandem plans it.
    #[default]
    Auto,
    /// In the device's memory.
    Device,
    /// In the host's memory.
    Host,
}

impl PlacementChoice {
    /// Where that is.
    pub fn placement(self) -> Placement {
        match self {
            Self::Auto | Self::Device => Placement::Device,
            Self::Host => Placement::Host,
        }
    }
}

/// Where weights in 4 bits are dequantized to, as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DequantizedChoice {
    /// To where it is fastest and fits; the run says which and why.
    #[default]
    Auto,
    /// Into scratch memory, whenever a block needs them.
    Scratch,
    /// Once, when the model is loaded.
    Resident,
}

/// `[memory]`: where things lie. None of it changes a result.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryConfig {
    /// The table of token embeddings.
    pub embedding: PlacementChoice,
    /// What only the optimizer touches: moments, and the f32 values of weights whose products read bf16.
    pub optimizer_state: PlacementChoice,
    /// What weights in 4 bits are multiplied as.
    pub dequantized: DequantizedChoice,
    /// Whether blocks that are computed again keep the residual stream between attention and MLP beside their input: a product less for an activation.
    pub middle: Switch,
    /// Whether they keep queries, keys and values as well: a product less for an activation that is half as large again, or more.
    pub qkv: Switch,
    /// Most tokens that the MLP of a block takes at one time; 0 leaves it to Tandem.
    pub mlp_rows: usize,
    /// Most tokens of a pass into which packs of a step are joined; 0 leaves it to Tandem.
    pub pass_tokens: usize,
}

impl MemoryConfig {
    /// The engine's word for it.
    pub fn policy(&self) -> MemoryPolicy {
        MemoryPolicy {
            embedding: self.embedding.placement(),
            optimizer_state: self.optimizer_state.placement(),
            dequantized: match self.dequantized {
                DequantizedChoice::Auto | DequantizedChoice::Scratch => Dequantized::Scratch,
                DequantizedChoice::Resident => Dequantized::Resident,
            },
            middle: self.middle == Switch::On,
            qkv: self.qkv == Switch::On,
            mlp_rows: self.mlp_rows,
            pass_tokens: self.pass_tokens,
        }
    }
}

/// `[train]`: how long, how often, on what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainConfig {
    /// Passes over the training data, used when `max_steps` is 0.
    pub epochs: f64,
    /// Optimizer steps; 0 means as many as `epochs` takes.
    pub max_steps: u64,
    /// Packs (micro-batches) in one optimizer step.
    pub grad_accum_steps: usize,
    /// Evaluate on the held-out records every so many steps; 0 means only at the end.
    pub eval_every: u64,
    /// Save the adapter every so many steps; 0 means only at the end.
    pub save_every: u64,
    /// What blocks keep for the backward pass.
    pub activations: ActivationsChoice,
    /// How attention knows the documents of a pack.
    pub attention: AttentionPath,
    /// On a GPU, whether passes over batches of as many tokens are recorded as CUDA graphs and launched as a whole.
    pub cuda_graphs: bool,
    /// Arithmetic of the CPU engine.
    pub precision: Precision,
    /// Where to train.
    pub device: DeviceChoice,
    /// CPU threads; 0 means one a core.
    pub threads: usize,
    /// GiB of the GPU's memory to use at most, the driver's own part included: trains as on a smaller card. 0 means all that is free.
    pub vram_limit_gib: f64,
}

impl TrainConfig {
    /// [`Self::vram_limit_gib`] in bytes; `None` where all that is free may be used.
    pub fn vram_limit_bytes(&self) -> Option<u64> {
        (self.vram_limit_gib > 0.0).then_some((self.vram_limit_gib * f64::from(1 << 30)) as u64)
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            epochs: 1.0,
            max_steps: 0,
            grad_accum_steps: 1,
            eval_every: 20,
            save_every: 0,
            activations: ActivationsChoice::Auto,
            attention: AttentionPath::Varlen,
            cuda_graphs: true,
            precision: Precision::F32,
            device: DeviceChoice::Auto,
            threads: 0,
            vram_limit_gib: 0.0,
        }
    }
}
