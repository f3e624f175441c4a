//! What routed experts did in a step: cleared when it begins, copied when it ends, read when its report is made.

use std::sync::PoisonError;

use crate::model::transformer::Transformer;
use crate::tensor::cuda::{ReadSlot, Readback};
use crate::tensor::phase::{Phase, PhaseTime};
use crate::tensor::{Device, Tensor};
use crate::train::config::Routing;
use crate::train::report::MoeReport;

/// Counts of one step on their way to the host.
#[derive(Debug)]
pub(super) enum Counts {
    Now(Vec<f32>),
    Later(ReadSlot),
}

/// Reads how often experts were chosen.
#[derive(Debug, Default)]
pub(super) struct ExpertsReader {
    /// On a GPU, from the first step on.
    readback: Option<Readback>,
}

fn with_counts<R>(model: &Transformer, work: impl FnOnce(&mut Tensor) -> R) -> Option<R> {
    model.expert_counts().map(|counts| work(&mut counts.lock().unwrap_or_else(PoisonError::into_inner)))
}

impl ExpertsReader {
    /// Begins a step.
    pub(super) fn clear(&mut self, model: &Transformer) {
        with_counts(model, |counts| {
            if let (Device::Cuda(gpu), None) = (model.device(), &self.readback) {
                self.readback = Some(Readback::new(gpu, vec![0.0; counts.len()]));
            }
            counts.fill_zero();
        });
    }

    /// Ends a step: queues the copy, on a GPU.
    pub(super) fn queue(&self, model: &Transformer) -> Option<Counts> {
        with_counts(model, |counts| match &self.readback {
            Some(readback) => Counts::Later(readback.queue(counts.pointer())),
            None => Counts::Now(counts.to_vec()),
        })
    }

    /// The report of a step whose copy the device has passed.
    pub(super) fn report(
        &self,
        model: &Transformer,
        counts: Option<Counts>,
        routing: Routing,
        phases: &[PhaseTime],
    ) -> Option<MoeReport> {
        let counts = match counts? {
            Counts::Now(counts) => counts,
            Counts::Later(slot) => self.readback.as_ref()?.read(slot),
        };
        let moe = model.config().moe.as_ref()?;
        let time = phases.iter().find(|time| time.phase == Phase::Routing);
        let layers = counts.chunks_exact(moe.num_experts);
        Some(MoeReport {
            routing,
            experts_per_token: moe.num_experts_per_tok,
            layers: moe.layers.iter().enumerate().filter(|(_, has)| **has).map(|(layer, _)| layer).collect(),
            tokens_per_expert: layers.map(|layer| layer.iter().map(|&count| count as u64).collect()).collect(),
            routing_ms: time.and_then(|time| time.passes_ms()),
        })
    }
}
