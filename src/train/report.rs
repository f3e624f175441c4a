//! What one step did: loss, norms, tokens, time by phase, memory by category.

use serde::{Deserialize, Serialize};

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
    /// Spans of this step, where it was an instrumented one.
    pub spans: Vec<Span>,
}

impl StepReport {
    /// Tokens of documents a second.
    pub fn tokens_per_sec(&self) -> f64 {
        if self.step_ms > 0.0 { self.document_tokens as f64 / (self.step_ms / 1e3) } else { 0.0 }
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
