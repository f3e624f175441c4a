//! What of the engine can be switched without changing a result, as it stands in a trainer.

use serde::{Deserialize, Serialize};

use super::config::{
    Activations, AttentionPath, Baselines, MemoryConfig, MemoryPolicy, Metadata, MetadataPolicy, OffloadPolicy,
    OptimizationsConfig, Placement, Routing, TrainConfig,
};
use super::report::{Choice, Optimization};
use super::state_place::StatePlace;
use crate::base::units;
use crate::model::offload::OffloadState;
use crate::model::transformer::Transformer;
use crate::tensor::Device;

/// The switches of a trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switches {
    /// What blocks keep.
    pub activations: Activations,
    /// How attention knows the documents of a pack, in training and evaluation.
    pub attention: AttentionPath,
    /// Where layers get what they need to know of documents.
    pub metadata: MetadataPolicy,
    /// How rows get to routed experts, in a model that has them.
    #[serde(default)]
    pub routing: Routing,
    /// How activations travel, where they are offloaded.
    pub offload: OffloadPolicy,
    /// Whether passes are recorded as CUDA graphs, on a GPU.
    pub cuda_graphs: bool,
    /// What lies where. In files it has a name of its own beside reports of memory.
    #[serde(default, rename = "memory_policy")]
    pub memory: MemoryPolicy,
}

impl Default for Switches {
    fn default() -> Self {
        Self::of(&TrainConfig::default(), &OptimizationsConfig::default(), &MemoryConfig::default())
    }
}

impl Switches {
    /// As a configuration sets them; what it leaves to Tandem in `activations` is `recompute` until it is chosen for a model and its batches.
    pub fn of(train: &TrainConfig, optimizations: &OptimizationsConfig, memory: &MemoryConfig) -> Self {
        Self {
            activations: train.activations.fixed().unwrap_or_default(),
            attention: train.attention,
            metadata: optimizations.metadata(),
            routing: optimizations.routing(),
            offload: optimizations.offload(),
            cuda_graphs: train.cuda_graphs,
            memory: memory.policy(),
        }
    }
}

/// What blocks should keep on the CPU for batches of at most `tokens` tokens, and why. On a GPU the [plan](super::plan) says it.
///
/// The estimate counts what blocks keep (their input, q, k, v, attention's output, the stream between attention and MLP, gate and up) and
/// two blocks more for what a backward pass works with.
pub fn choose_on_cpu(model: &Transformer, tokens: usize) -> (Activations, String) {
    let config = model.config();
    let (device, layers, hidden) = (model.device(), config.num_hidden_layers as u64, config.hidden_size);
    let value = device.dtype().num_bytes() as u64;
    // Gate and up: of an MLP, or of every expert that a token goes to.
    let inner = config.moe.as_ref().map_or(0, |moe| moe.num_experts_per_tok * moe.moe_intermediate_size);
    let gate_up = 2 * inner.max(config.intermediate_size);
    let block = tokens as u64 * (2 * hidden + 2 * config.q_size() + 2 * config.kv_size() + gate_up) as u64 * value;
    let Some(free) = device.available_bytes() else {
        return (Activations::Recompute, "the system does not say how much memory is free".into());
    };
    // The host's memory is everybody's: half of what is free is enough to take.
    let (free, keep) = (free / 2, (layers + 2) * block);
    let (of, is) = (units::bytes(free), units::bytes(keep));
    if keep <= free {
        (Activations::Keep, format!("{is} for all blocks fit into {of}"))
    } else {
        (Activations::Recompute, format!("keeping all would need {is}, and {of} are free"))
    }
}

/// Reasons that a trainer knows beside those of its model.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reasons<'a> {
    /// Why passes are not recorded although that is asked for.
    pub unrecorded: Option<&'a str>,
    /// Why blocks keep what they keep.
    pub activations: Option<&'a str>,
    /// Why there is one buffer for what comes back.
    pub one_buffer: Option<&'a str>,
    /// Where the optimizer's moments lie.
    pub state: Option<&'a StatePlace>,
}

/// Which optimizations are on, and why.
pub fn choices(switches: &Switches, model: &Transformer, reasons: Reasons<'_>) -> Vec<Choice> {
    let Reasons { unrecorded, activations: activations_why, one_buffer, state } = reasons;
    let on_gpu = matches!(model.device(), Device::Cuda(_));
    let offload = model.offload_state();
    let of = |optimization| {
        let (on, available, why) = match optimization {
            Optimization::MetadataCache => match switches.metadata.metadata {
                Metadata::Cached => (true, true, "one build for each pack and window".to_owned()),
                Metadata::Fused => (false, true, "each layer builds anew, in few operations".to_owned()),
                Metadata::Published => (false, true, "each layer builds anew, as published".to_owned()),
            },
            Optimization::GroupedRouting => match model.routing() {
                None => (false, false, "the model has no experts".to_owned()),
                Some(Routing::Grouped) => {
                    (true, true, "the host reads nothing, one product for all experts".to_owned())
                }
                Some(Routing::Sorted) => (false, true, "one read of the counts, a product an expert".to_owned()),
                Some(Routing::PerExpert) => (false, true, "a search and a read an expert, as published".to_owned()),
            },
            Optimization::KeepActivations => {
                let on = switches.activations == Activations::Keep;
                (on, true, activations_why.unwrap_or("as set").to_owned())
            }
            Optimization::ActivationOffload if switches.activations == Activations::Offload => match &offload {
                OffloadState { refused: Some(why), .. } => (false, true, why.clone()),
                OffloadState { fallback: Some(why), .. } => (true, true, why.clone()),
                _ => (true, true, activations_why.unwrap_or("as set").to_owned()),
            },
            Optimization::ActivationOffload if !on_gpu => (
                false,
                true,
                "a CPU keeps activations in host memory anyway: here it only shows the order of copies".into(),
            ),
            Optimization::ActivationOffload => (false, true, "activations stay on the device".to_owned()),
            Optimization::DoubleBuffer if switches.activations != Activations::Offload || offload.refused.is_some() => {
                (false, false, "no activations are offloaded".to_owned())
            }
            Optimization::DoubleBuffer => match &offload.buffers {
                Some((1, _)) if switches.offload.buffers == 1 && one_buffer.is_some() => {
                    (false, true, one_buffer.unwrap_or_default().to_owned())
                }
                Some((buffers, why)) => (*buffers == 2, true, why.clone()),
                None => (switches.offload.buffers != 1, true, "chosen in the first backward pass".into()),
            },
            Optimization::VarlenAttention => match switches.attention {
                AttentionPath::Varlen => (true, true, "no T×T mask".to_owned()),
                AttentionPath::Masked => (false, true, "a T×T mask for each window".to_owned()),
            },
            Optimization::CudaGraphs if !on_gpu => (false, false, "there is no GPU in this run".to_owned()),
            Optimization::CudaGraphs => match (switches.cuda_graphs, unrecorded) {
                (true, Some(why)) => (false, true, why.to_owned()),
                (true, None) => (true, true, "two launches a pass".to_owned()),
                (false, _) => (false, true, "every kernel is queued by the host".to_owned()),
            },
            Optimization::HostEmbedding => match (model.embedding_host_bytes(), model.embedding_refused()) {
                (Some(_), Some(why)) => (true, true, format!("it stays there: {why}")),
                (Some(bytes), None) => (true, true, format!("rows of {} are read over the bus", units::bytes(bytes))),
                (None, why) => (false, true, why.unwrap_or("as set").to_owned()),
            },
            Optimization::HostOptimizerState => match state {
                Some(StatePlace { stays: Some(why), .. }) => (true, true, format!("it stays there: {why}")),
                Some(StatePlace { host_bytes: 0, refused, .. }) => {
                    (false, true, refused.as_deref().unwrap_or("as set").to_owned())
                }
                Some(StatePlace { host_bytes, refused, .. }) => {
                    let rest = refused.as_ref().map(|why| format!("; the rest is on the device: {why}"));
                    let bytes = units::bytes(*host_bytes);
                    (
                        true,
                        true,
                        format!("{bytes} of moments and exact weights go over the bus{}", rest.unwrap_or_default()),
                    )
                }
                None => (false, true, "there is no optimizer".to_owned()),
            },
            Optimization::JoinedPacks => match joining(switches, model) {
                Ok(tokens) => (
                    true,
                    false,
                    format!("set before the run: at most {} tokens in a pass", units::count(tokens as u64)),
                ),
                Err(why) => (false, false, why.to_owned()),
            },
            Optimization::MlpTiles => {
                let tokens = units::count(switches.memory.mlp_rows as u64);
                match switches.activations {
                    Activations::Keep => (false, false, "blocks keep all that the MLP works with".to_owned()),
                    _ => (true, false, format!("set before the run: at most {tokens} tokens at one time")),
                }
            }
        };
        Choice { optimization, on, available, why }
    };
    // Where there are no experts, nobody needs to read that there is nothing to route.
    let experts = model.routing().map(|_| Optimization::GroupedRouting);
    let MemoryPolicy { embedding, optimizer_state, mlp_rows, pass_tokens, .. } = switches.memory;
    let asked = [
        (embedding == Placement::Host, Optimization::HostEmbedding),
        (optimizer_state == Placement::Host, Optimization::HostOptimizerState),
        (mlp_rows > 0, Optimization::MlpTiles),
        (pass_tokens > 0, Optimization::JoinedPacks),
    ];
    let asked = asked.into_iter().filter_map(|(asked, optimization)| asked.then_some(optimization));
    Optimization::ALL.into_iter().chain(experts).chain(asked).map(of).collect()
}

/// Most tokens of a pass into which the packs of a step are joined; 0 where nobody asked for it.
///
/// # Errors
/// What speaks against it, as a clause.
pub fn joining(switches: &Switches, model: &Transformer) -> Result<usize, &'static str> {
    match switches.memory.pass_tokens {
        0 => Ok(0),
        _ if switches.attention == AttentionPath::Masked => Err("a mask grows with the square of a pass's tokens"),
        _ if model.has_auxiliary_loss() => Err("the auxiliary loss of the router is one of each pack"),
        _ if model.drops() => Err("with lora_dropout above 0 what is dropped goes by the place in a pack"),
        tokens => Ok(tokens),
    }
}

impl Switches {
    /// The switches with one optimization on or off; off is the baseline that `off` names.
    pub fn with(mut self, optimization: Optimization, on: bool, off: Baselines) -> Self {
        match optimization {
            Optimization::GroupedRouting => self.routing = if on { Routing::Grouped } else { off.routing },
            Optimization::MetadataCache => self.metadata.metadata = if on { Metadata::Cached } else { off.metadata },
            Optimization::KeepActivations => self.switch_activations(Activations::Keep, on),
            Optimization::ActivationOffload => self.switch_activations(Activations::Offload, on),
            Optimization::DoubleBuffer => self.offload.buffers = if on { 2 } else { 1 },
            Optimization::VarlenAttention => {
                self.attention = if on { AttentionPath::Varlen } else { AttentionPath::Masked };
            }
            Optimization::CudaGraphs => self.cuda_graphs = on,
            Optimization::HostEmbedding => self.memory.embedding = Placement::host_if(on),
            Optimization::HostOptimizerState => self.memory.optimizer_state = Placement::host_if(on),
            // Set before a run: a choice that says so cannot be switched.
            Optimization::MlpTiles | Optimization::JoinedPacks => {}
        }
        self
    }

    /// Turns to what blocks keep, or away from it where that is what they keep.
    fn switch_activations(&mut self, to: Activations, on: bool) {
        if on {
            self.activations = to;
        } else if self.activations == to {
            self.activations = Activations::Recompute;
        }
    }
}
