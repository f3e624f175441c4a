//! Where a step's time goes: phases, split into forward and backward.

use serde::{Deserialize, Serialize};

/// A part of a step that is timed on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Attention with its projections, norms and rotary embedding.
    Attention,
    /// The dense MLP with its norm.
    Mlp,
    /// Products of routed experts, with their norm.
    Moe,
    /// Choosing experts, and moving rows to them and back.
    Routing,
    /// Final norm, output projection, loss, and the token embedding.
    HeadLoss,
    /// Forward work repeated in the backward pass.
    Recompute,
    /// Copies that compute had to wait for.
    ExposedCopy,
    /// Boundaries, positions, tile lists and masks.
    Metadata,
    /// Gradient norm, clipping and the parameter update.
    Optimizer,
    /// The device waiting for the host.
    HostWait,
    /// Waiting for the loader.
    DataWait,
}

impl Phase {
    /// All phases in the order in which they are stacked and listed.
    pub const ALL: [Self; 11] = [
        Self::Attention,
        Self::Mlp,
        Self::Moe,
        Self::Routing,
        Self::HeadLoss,
        Self::Recompute,
        Self::ExposedCopy,
        Self::Metadata,
        Self::Optimizer,
        Self::HostWait,
        Self::DataWait,
    ];

    /// The name shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Moe => "moe",
            Self::Routing => "routing",
            Self::HeadLoss => "head loss",
            Self::Recompute => "recompute",
            Self::ExposedCopy => "exposed copy",
            Self::Metadata => "metadata",
            Self::Optimizer => "optimizer",
            Self::HostWait => "host wait",
            Self::DataWait => "data wait",
        }
    }
}

/// Which pass a span of time belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
    /// Once a step: optimizer, waits.
    Step,
}

/// Time of one phase in one step. `None` means not measured or not possible here, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhaseTime {
    /// The phase.
    pub phase: Phase,
    /// Milliseconds in the forward pass.
    pub forward_ms: Option<f64>,
    /// Milliseconds in the backward pass.
    pub backward_ms: Option<f64>,
    /// Milliseconds outside both passes.
    pub step_ms: Option<f64>,
}

impl PhaseTime {
    /// Measured milliseconds of both passes, without what is done once a step; `None` when nothing of it was measured.
    pub fn passes_ms(&self) -> Option<f64> {
        [self.forward_ms, self.backward_ms].into_iter().flatten().reduce(|a, b| a + b)
    }

    /// All measured milliseconds of the phase; `None` when nothing of it was measured.
    pub fn total_ms(&self) -> Option<f64> {
        [self.forward_ms, self.backward_ms, self.step_ms].into_iter().flatten().reduce(|a, b| a + b)
    }
}

/// A hardware queue that work runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneKind {
    /// Kernels, or CPU work.
    Compute,
    /// Device to host copies.
    D2h,
    /// Host to device copies.
    H2d,
    /// The host, queueing work.
    Host,
}

/// One stretch of work on one lane, relative to the start of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Lane it ran on.
    pub lane: LaneKind,
    /// Phase it belongs to.
    pub phase: Phase,
    /// Pass it belongs to.
    pub pass: Pass,
    /// Block (layer) number, where it belongs to one.
    pub layer: Option<u32>,
    /// Start in milliseconds after the start of the step.
    pub start_ms: f64,
    /// End in milliseconds after the start of the step.
    pub end_ms: f64,
}
