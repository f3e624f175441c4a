//! The trainer: micro-batches to one optimizer update, and evaluation. Stop 7 of the walk.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};

use super::batch::upload;
use super::config::{Activations, MethodConfig, MethodKind, OptimizerConfig};
use super::optimizer::{BadGradient, Optimizer};
use super::report::{EvalReport, StepReport};
use super::schedule::learning_rate;
use crate::base::error::{NonFinite, Result};
use crate::data::example::IGNORE_INDEX;
use crate::data::pack::PackedBatch;
use crate::layers::DropoutState;
use crate::layers::parameter::Grads;
use crate::model::lora::LoraSpec;
use crate::model::transformer::{PassOptions, Transformer};
use crate::ops::cross_entropy::LossSum;
use crate::ops::norm::first_non_finite;
use crate::tensor::phase::{Pass, Phase};

/// How a trainer is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerSetup {
    /// Which parameters train.
    pub method: MethodConfig,
    /// Optimizer, schedule, clipping.
    pub optimizer: OptimizerConfig,
    /// What blocks keep.
    pub activations: Activations,
    /// Seed of adapter initialization and dropout.
    pub seed: u64,
    /// Optimizer steps of the run, for the schedule.
    pub total_steps: u64,
}

/// The adapters that a method asks for.
fn lora_spec(method: &MethodConfig) -> LoraSpec {
    LoraSpec {
        r: method.r,
        scale: LoraSpec::scale(method.r, method.lora_alpha, method.use_rslora),
        dropout: method.lora_dropout,
        target_modules: method.target_modules.clone(),
        layers_to_transform: method.layers_to_transform.clone(),
    }
}

/// What a model should have room for when it is loaded to be trained by `method`: its adapters, if any.
pub fn room_for(method: &MethodConfig) -> Option<LoraSpec> {
    (method.kind == MethodKind::Lora).then(|| lora_spec(method))
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    model: Transformer,
    setup: TrainerSetup,
    grads: Grads,
    optimizer: Optimizer,
}

impl Trainer {
    /// Adds adapters (or makes every parameter trainable) and allocates gradients and optimizer state.
    ///
    /// # Errors
    /// When the method does not fit the model.
    pub fn new(mut model: Transformer, setup: TrainerSetup) -> Result<Self> {
        let method = &setup.method;
        match method.kind {
            MethodKind::Full => model.train_everything(),
            MethodKind::Lora => {
                let spec = lora_spec(method);
                model.add_lora(&spec, setup.seed).context("[method] does not fit this model")?;
            }
        }
        let grads = Grads::new(model.params());
        let optimizer = Optimizer::new(&model);
        Ok(Self { model, setup, grads, optimizer })
    }

    /// The model.
    pub fn model(&self) -> &Transformer {
        &self.model
    }

    /// The model, to set adapters before the first step.
    pub fn model_mut(&mut self) -> &mut Transformer {
        &mut self.model
    }

    /// Gradients of the last step.
    pub fn grads(&self) -> &Grads {
        &self.grads
    }

    /// Optimizer updates done.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.updates()
    }

    /// Parameters that train, in values.
    pub fn num_trainable(&self) -> u64 {
        self.model.params().num_trainable()
    }

    /// One optimizer update from the micro-batches of one step; `data_wait_ms` is the time spent waiting for them.
    /// `None` when `stop` was raised before the update: nothing has changed then.
    ///
    /// The loss is the sum over all micro-batches divided by the supervised tokens of all of them, never a mean of means.
    ///
    /// # Errors
    /// [`NonFinite`] when the loss or a gradient is NaN or infinite (no update is made); an error when a batch does not fit the model.
    pub fn step(
        &mut self,
        micro_batches: &[PackedBatch],
        data_wait_ms: f64,
        stop: &AtomicBool,
    ) -> Result<Option<StepReport>> {
        let num_label_tokens: usize = micro_batches.iter().map(|batch| batch.num_label_tokens).sum();
        ensure!(num_label_tokens > 0, "a step without a supervised token: nothing to learn from");
        let number = self.steps_done() + 1;
        let device = self.model.device().clone();
        let clock = device.clock();
        let counters = device.counters();
        clock.begin_step(true);
        clock.book(Phase::DataWait, Pass::Step, data_wait_ms);
        {
            let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
            self.optimizer.clear_gradients(&self.model, &mut self.grads);
        }
        let mut loss = LossSum::new(&device);
        for (i, batch) in micro_batches.iter().enumerate() {
            let uploaded = {
                let _phase = clock.enter(Phase::Metadata, Pass::Forward, None);
                upload(&self.model, batch)?
            };
            let options = PassOptions {
                weight: 1.0 / num_label_tokens as f32,
                activations: self.setup.activations,
                dropout: Some(DropoutState { seed: self.setup.seed, step: number, micro_batch: i as u32 }),
                stop,
            };
            let done = self.model.forward_backward(&mut self.grads, &mut loss, &uploaded, options);
            if done.is_none() || stop.load(Ordering::Relaxed) {
                device.check()?;
                return Ok(None);
            }
        }
        let lr = learning_rate(&self.setup.optimizer, number - 1, self.setup.total_steps);
        let update = {
            let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
            let Self { model, setup, grads, optimizer } = self;
            device.run(|| optimizer.step(model, grads, &loss, &setup.optimizer, lr))
        };
        device.check()?;
        let update = update.map_err(|BadGradient { name, value }| NonFinite {
            step: number,
            tensor: format!("the gradient of {name}"),
            value,
        })?;
        let loss = update.loss_sum / num_label_tokens as f64;
        if !update.finite {
            return Err(self.why_not_finite(number, loss).into());
        }
        let times = clock.end_step();
        let step_ms = times.step_ms + data_wait_ms;
        let attributed: f64 = times.phases.iter().filter_map(|phase| phase.total_ms()).sum();
        Ok(Some(StepReport {
            step: number,
            loss,
            grad_norm: update.norm,
            clipped: update.scale < 1.0,
            lr,
            total_tokens: micro_batches.iter().map(|batch| batch.input_ids.len() as u64).sum(),
            document_tokens: micro_batches
                .iter()
                .map(|batch| (batch.input_ids.len() - batch.num_padding_tokens) as u64)
                .sum(),
            num_label_tokens: num_label_tokens as u64,
            step_ms,
            not_attributed_ms: (step_ms - attributed).max(0.0),
            phases: times.phases,
            memory: device.memory(),
            counters: device.counters().zip(counters).map(|(after, before)| after - before),
            spans: times.spans,
        }))
    }

    /// Names what made the loss of step `step` NaN or infinite: a parameter that is not finite itself, else the loss.
    fn why_not_finite(&self, step: u64, loss: f64) -> NonFinite {
        let params = self.model.params();
        let bad = params
            .iter()
            .find_map(|(id, parameter)| Some((parameter.name.clone(), first_non_finite(&params.to_vec(id))?)));
        let (tensor, value) = bad.unwrap_or_else(|| ("the loss".into(), loss as f32));
        NonFinite { step, tensor, value }
    }

    /// Mean loss over held-out batches; `None` when `stop` was raised on the way.
    ///
    /// # Errors
    /// When the batches hold no supervised token or do not fit the model.
    pub fn evaluate(&self, batches: &[PackedBatch], stop: &AtomicBool) -> Result<Option<EvalReport>> {
        let start = Instant::now();
        let device = self.model.device();
        let mut sum = LossSum::new(device);
        for batch in batches {
            let uploaded = upload(&self.model, batch)?;
            let losses = self.model.losses(&uploaded, stop);
            device.check()?;
            let Some(losses) = losses else { return Ok(None) };
            sum.add(device, &losses);
        }
        let loss_sum = sum.read();
        device.check()?;
        let num_label_tokens: usize = batches.iter().map(|batch| batch.num_label_tokens).sum();
        ensure!(num_label_tokens > 0, "the held-out records hold no supervised token");
        Ok(Some(EvalReport {
            step: self.steps_done(),
            loss: loss_sum / num_label_tokens as f64,
            num_label_tokens: num_label_tokens as u64,
            num_documents: batches.iter().map(num_supervised_documents).sum(),
            eval_ms: start.elapsed().as_secs_f64() * 1e3,
        }))
    }
}

/// Documents of a batch with something to learn (padding has none).
fn num_supervised_documents(batch: &PackedBatch) -> u64 {
    let supervised =
        |bounds: &&[i32]| batch.labels[bounds[0] as usize..bounds[1] as usize].iter().any(|&l| l != IGNORE_INDEX);
    batch.cu_seqlens.windows(2).filter(supervised).count() as u64
}

#[cfg(test)]
#[path = "trainer_tests.rs"]
mod tests;
