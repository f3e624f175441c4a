//! From a step that was queued to its report, when the device has done it.

use anyhow::Context as _;

use super::Trainer;
use super::copies::copy_report;
use super::experts::Counts;
use crate::base::error::{NonFinite, Result};
use crate::model::metadata::{CacheCounts, CacheEntry};
use crate::model::offload::OffloadState;
use crate::ops::norm::{ClipValues, first_non_finite};
use crate::tensor::clock::ClosedStep;
use crate::tensor::cuda::{CounterValues, ReadSlot};
use crate::tensor::memory::MemoryReport;
use crate::tensor::phase::Phase;
use crate::train::config::{Metadata, Routing};
use crate::train::optimizer::BadGradient;
use crate::train::report::{CacheReport, StepReport};

/// A step whose result is not read yet.
#[derive(Debug)]
pub(super) struct Submitted {
    pub number: u64,
    pub found: Found,
    pub times: ClosedStep,
    pub lr: f64,
    pub total_tokens: u64,
    pub document_tokens: u64,
    pub num_label_tokens: u64,
    pub memory: MemoryReport,
    pub counters: Option<CounterValues>,
    /// Where activations were offloaded.
    pub offload: Option<OffloadState>,
    pub metadata: Metadata,
    pub cache: CacheCounts,
    pub cache_entries: Vec<CacheEntry>,
    pub routing: Routing,
    pub experts: Option<Counts>,
}

/// What clipping found in a step.
#[derive(Debug)]
pub(super) enum Found {
    Now(ClipValues),
    Later(ReadSlot),
}

impl Trainer {
    /// The report of a step, when the device has done it.
    pub(super) fn report(&mut self, submitted: Submitted) -> Result<StepReport> {
        let Submitted { number, found, times, lr, num_label_tokens, .. } = submitted;
        let device = self.model.device().clone();
        let found = match found {
            Found::Now(values) => Some(values),
            Found::Later(slot) => self.optimizer.read(slot),
        };
        if let Err(error) = device.check() {
            // Nobody knows what became of this step, or of the one behind it.
            self.submitted = None;
            self.optimizer.take_back(number - 1);
            return Err(error);
        }
        let found = found.context("an update left no result")?;
        let loss = found.loss_sum / num_label_tokens as f64;
        if !found.finite {
            self.failed = self.reports_late;
            // The step behind this one, if there is one, was left out on the device.
            self.submitted = None;
            self.optimizer.take_back(number - 1);
            return Err(self.why_not_finite(number, &found, loss).into());
        }
        let times = device.clock().read(times);
        let metadata = times.phases.iter().find(|time| time.phase == Phase::Metadata);
        // Without what is done once a batch, cache or no cache.
        let metadata_ms = metadata.and_then(|time| time.passes_ms());
        let attributed: f64 = times.phases.iter().filter_map(|phase| phase.total_ms()).sum();
        Ok(StepReport {
            step: number,
            loss,
            grad_norm: found.norm,
            clipped: found.scale < 1.0,
            lr,
            total_tokens: submitted.total_tokens,
            document_tokens: submitted.document_tokens,
            num_label_tokens,
            step_ms: times.step_ms,
            not_attributed_ms: (times.step_ms - attributed).max(0.0),
            moe: self.experts.report(&self.model, submitted.experts, submitted.routing, &times.phases),
            phases: times.phases,
            memory: submitted.memory,
            counters: submitted.counters,
            cache: Some(CacheReport {
                metadata: submitted.metadata,
                counts: submitted.cache,
                metadata_ms,
                entries: submitted.cache_entries,
            }),
            copies: submitted.offload.map(|offload| copy_report(&offload, &times.spans, times.copied)),
            spans: times.spans,
        })
    }

    /// Names what made step `step` NaN or infinite: the first gradient that is, under a finite loss; else a parameter that is not finite itself;
    /// else the norm or the loss. On a GPU the gradients may be those of the step behind it, made with the same parameters.
    fn why_not_finite(&self, step: u64, found: &ClipValues, loss: f64) -> NonFinite {
        if found.loss_sum.is_finite()
            && let Some(BadGradient { name, value }) = self.optimizer.first_bad_gradient(&self.model, &self.grads)
        {
            return NonFinite { step, tensor: format!("the gradient of {name}"), value };
        }
        let params = self.model.params();
        let bad = params
            .iter()
            .find_map(|(id, parameter)| Some((parameter.name.clone(), first_non_finite(&params.to_vec(id))?)));
        let (tensor, value) = bad.unwrap_or_else(|| match found.loss_sum.is_finite() {
            true => ("the norm of the gradients".into(), found.norm as f32),
            false => ("the loss".into(), loss as f32),
        });
        NonFinite { step, tensor, value }
    }
}
