//! The trainer: micro-batches to one optimizer update, and evaluation. Stop 7 of the walk.

mod copies;
mod experts;
mod joining;
mod rehearsal;
mod reporting;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, ensure};

use self::experts::ExpertsReader;
use self::reporting::{Found, Submitted};
use super::batch::{bucket_on, upload};
use super::config::{
    Activations, ActivationsChoice, Dequantized, MethodConfig, MethodKind, OptimizerConfig, Placement,
};
use super::optimizer::{self, Optimizer};
use super::plan::{Machine, MemoryPlan, Planner, Workload};
use super::report::{Choice, EvalReport, StepReport};
use super::schedule::learning_rate;
use super::snapshot::Snapshot;
use super::state_place::StatePlace;
use super::switches::{self, Reasons, Switches};
use crate::base::error::{OutOfMemory, Result};
use crate::data::example::IGNORE_INDEX;
use crate::data::pack::PackedBatch;
use crate::layers::DropoutState;
use crate::layers::parameter::Grads;
use crate::model::lora::LoraSpec;
use crate::model::offload::OffloadState;
use crate::model::recording::Recordings;
use crate::model::transformer::{Form, PassOptions, Transformer};
use crate::ops::cross_entropy::LossSum;
use crate::tensor::Device;
use crate::tensor::phase::{Pass, Phase};

/// How a trainer is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerSetup {
    /// Which parameters train.
    pub method: MethodConfig,
    /// Optimizer, schedule, clipping.
    pub optimizer: OptimizerConfig,
    /// What of the engine is switched how.
    pub switches: Switches,
    /// Seed of adapter initialization and dropout.
    pub seed: u64,
    /// Optimizer steps of the run, for the schedule.
    pub total_steps: u64,
}

impl TrainerSetup {
    /// The form in which a model must be made to be trained so, with room for the adapters `lora` of its method.
    pub fn form<'a>(&self, lora: Option<&'a LoraSpec>) -> Form<'a> {
        let memory = self.switches.memory;
        let weights = self.method.weight_format(memory.dequantized);
        // What trains is worked on all the time.
        let embedding = if self.method.kind.has_adapters() { memory.embedding } else { Placement::Device };
        let experts = if self.method.kind.has_adapters() { memory.dequantized } else { Dequantized::Resident };
        Form { lora, weights, embedding, experts }
    }
}

/// The adapters that a method asks for, if any: what a model should have room for when it is loaded to be trained by it.
pub fn lora_spec(method: &MethodConfig) -> Option<LoraSpec> {
    match method.kind {
        MethodKind::Full => None,
        MethodKind::Lora | MethodKind::Qlora => Some(LoraSpec {
            r: method.r,
            scale: LoraSpec::scale(method.r, method.lora_alpha, method.use_rslora),
            dropout: method.lora_dropout,
            target_modules: method.target_modules.clone(),
            target_parameters: method.target_parameters.clone(),
            layers_to_transform: method.layers_to_transform.clone(),
        }),
    }
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    /// Passes recorded so far. They read the model and write the gradients, so they go before those.
    recordings: Recordings,
    /// Why blocks keep what they keep, where Tandem chose it, and why there is one buffer.
    activations_why: Option<String>,
    one_buffer_why: Option<String>,
    /// The choices that were taken last.
    told_choices: Vec<Choice>,
    model: Transformer,
    setup: TrainerSetup,
    grads: Grads,
    optimizer: Optimizer,
    experts: ExpertsReader,
    /// Whether a step's report comes from the call after it: on a GPU.
    reports_late: bool,
    /// The step whose report is to come.
    submitted: Option<Submitted>,
    /// Whether a step was not finite whose successor was queued already: the device makes no more updates then.
    failed: bool,
}

/// What [`Trainer::step`] did.
#[derive(Debug, Clone, PartialEq)]
pub enum Stepped {
    /// `stop` was raised before the update: nothing has changed.
    Stopped,
    /// The update is done (CPU) or queued (GPU); with the report that is known now: its own on the CPU, on a GPU that of the step before,
    /// none at the first step and after [`Trainer::flush`].
    Submitted(Option<Box<StepReport>>),
}

impl Trainer {
    /// Adds adapters (or makes every parameter trainable) and allocates gradients and optimizer state.
    ///
    /// # Errors
    /// When the method does not fit the model.
    pub fn new(mut model: Transformer, setup: TrainerSetup) -> Result<Self> {
        let (device, mut place) = (model.device().clone(), StatePlace::new(setup.switches.memory.optimizer_state));
        let misfit = "[method] does not fit this model";
        match lora_spec(&setup.method) {
            None => {
                let mut room = |category, shape: &[usize]| place.host_f32(&device, category, shape);
                model.train_everything_in(&mut room).context(misfit)?;
            }
            Some(spec) => {
                model.add_lora(&spec, setup.seed).context(misfit)?;
                model.params().ids().for_each(|id| optimizer::move_exact(model.params_mut(), &device, id, &mut place));
            }
        }
        let grads = Grads::new(model.params());
        let optimizer = Optimizer::new(&model, setup.optimizer.bits, place);
        let reports_late = matches!(model.device(), Device::Cuda(_));
        let recordings = Recordings::new(setup.switches.cuda_graphs);
        let mut trainer = Self {
            recordings,
            activations_why: None,
            one_buffer_why: None,
            told_choices: Vec::new(),
            model,
            setup,
            grads,
            optimizer,
            experts: ExpertsReader::default(),
            reports_late,
            submitted: None,
            failed: false,
        };
        trainer.apply_switches();
        Ok(trainer)
    }

    /// The state between two steps, copied to the host; [`Self::flush`] first.
    pub fn snapshot(&self) -> Snapshot {
        self.optimizer.snapshot(&self.model)
    }

    /// Goes back to a state of this trainer; [`Self::flush`] first. The next steps are those that followed it then, to the bit. What was recorded stays.
    pub fn restore(&mut self, snapshot: &Snapshot) {
        self.optimizer.restore(&mut self.model, snapshot);
    }

    /// Gives up what was recorded, with the memory that it holds.
    pub fn forget_recordings(&mut self) {
        self.recordings.clear();
    }

    /// What is switched how.
    pub fn switches(&self) -> Switches {
        self.setup.switches
    }

    /// Switches, from the next step on. No result changes; what was recorded stays where it still fits.
    pub fn set_switches(&mut self, switches: Switches) {
        if switches.activations != self.setup.switches.activations {
            self.activations_why = None;
        }
        if switches.offload != self.setup.switches.offload {
            self.one_buffer_why = None;
        }
        self.setup.switches = switches;
        self.apply_switches();
    }

    fn apply_switches(&mut self) {
        let Switches { attention, metadata, routing, offload, cuda_graphs, memory, activations: _ } =
            self.setup.switches;
        self.model.set_routing(routing);
        self.model.set_mlp_rows(memory.mlp_rows);
        self.model.set_keeps_beside(memory.kept_parts());
        self.model.set_attention_path(attention);
        self.model.set_metadata_policy(metadata);
        self.model.set_offload_policy(offload);
        self.recordings.enable(cuda_graphs);
        if self.model.place_embedding(memory.embedding) {
            // They read the table where it was.
            self.recordings.forget();
        }
        let Self { optimizer, model, grads, .. } = self;
        optimizer.place(model, grads, memory.optimizer_state);
        // What had no room on the device is where it was, and the choices say so.
        let memory = &mut self.setup.switches.memory;
        memory.optimizer_state = self.optimizer.state_place().asked;
        if self.model.embedding_host_bytes().is_some() {
            memory.embedding = Placement::Host;
        }
    }

    /// Chooses what blocks keep, for packs of at most `tokens` tokens: what was asked for, or the fastest that fits.
    pub fn choose_activations(&mut self, asked: ActivationsChoice, tokens: usize) {
        let tokens = tokens.max(self.pass_tokens());
        let (activations, why) = match (asked.fixed(), self.model.device()) {
            (Some(activations), _) => (activations, "set in the configuration".to_owned()),
            (None, Device::Cpu(_)) => switches::choose_on_cpu(&self.model, tokens),
            (None, Device::Cuda(gpu)) => {
                let planner = Planner {
                    config: self.model.config().clone(),
                    setup: self.setup.clone(),
                    activations: asked,
                    // The model has its form.
                    memory: None,
                    work: Workload { tokens, longest: tokens, batches: 1 },
                    machine: Machine::of(gpu),
                };
                return self.follow(&planner.plan());
            }
        };
        self.setup.switches.activations = activations;
        self.activations_why = Some(why);
        self.prepare_offload(tokens);
    }

    /// Trains in the way that a plan chose.
    pub fn follow(&mut self, plan: &MemoryPlan) {
        self.set_switches(plan.choice().switches);
        self.activations_why = Some(plan.why.clone());
        self.one_buffer_why = Some(plan.why.clone());
        self.prepare_offload(self.passes_of(plan.work).tokens);
    }

    fn prepare_offload(&self, tokens: usize) {
        if self.setup.switches.activations == Activations::Offload {
            // Page-locking takes time, and what is refused is to be known before the first step.
            self.model.prepare_offload(bucket_on(self.model.device(), tokens));
        }
    }

    /// Where the optimizer's moments lie.
    pub fn state_place(&self) -> &StatePlace {
        self.optimizer.state_place()
    }

    /// Which optimizations are on, and why.
    pub fn choices(&self) -> Vec<Choice> {
        let reasons = Reasons {
            state: Some(self.optimizer.state_place()),
            unrecorded: self.recordings.unused(),
            activations: self.activations_why.as_deref(),
            one_buffer: self.one_buffer_why.as_deref(),
        };
        switches::choices(&self.setup.switches, &self.model, reasons)
    }

    /// As [`Self::choices`], when they are others than at the last call: for a log.
    pub fn take_choices(&mut self) -> Option<Vec<Choice>> {
        let choices = self.choices();
        (choices != self.told_choices).then(|| {
            self.told_choices.clone_from(&choices);
            choices
        })
    }

    /// The model.
    pub fn model(&self) -> &Transformer {
        &self.model
    }

    /// The model, to set adapters before the first step. What was recorded of it is recorded anew.
    pub fn model_mut(&mut self) -> &mut Transformer {
        self.recordings.forget();
        &mut self.model
    }

    /// Gradients of the last step.
    pub fn grads(&self) -> &Grads {
        &self.grads
    }

    /// Why passes are not recorded as CUDA graphs although that was asked for; known after the first steps.
    pub fn unrecorded(&self) -> Option<&str> {
        self.recordings.unused()
    }

    /// Optimizer updates done, on a GPU with the one that is queued.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.updates()
    }

    /// Parameters that train, in values.
    pub fn num_trainable(&self) -> u64 {
        self.model.params().num_trainable()
    }

    /// One optimizer update from the micro-batches of one step; `data_wait_ms` is the time spent waiting for them.
    ///
    /// On a GPU the update is queued and nobody waits for it. Its report comes from the next call, when the device has long done it, or from
    /// [`Self::flush`]. So the host is one step ahead at most. On the CPU a report comes at once.
    ///
    /// Where memory runs out with two device buffers for offloaded activations, the step is taken again with one.
    ///
    /// The loss is the sum over all micro-batches divided by the supervised tokens of all of them, never a mean of means.
    ///
    /// # Errors
    /// [`NonFinite`] when the loss or a gradient is NaN or infinite: no update is made, neither in that step nor in one that was queued behind
    /// it, and on a GPU no more steps are taken. An error when a batch does not fit the model; the report of the step before is not lost then.
    pub fn step(&mut self, micro_batches: &[PackedBatch], data_wait_ms: f64, stop: &AtomicBool) -> Result<Stepped> {
        self.again_with_one_buffer(|trainer| trainer.try_step(micro_batches, data_wait_ms, stop))
    }

    /// Does `work`, and where memory runs out with two device buffers, again with one.
    fn again_with_one_buffer<R>(&mut self, mut work: impl FnMut(&mut Self) -> Result<R>) -> Result<R> {
        match work(self) {
            Err(error)
                if error.is::<OutOfMemory>()
                    && self.setup.switches.activations == Activations::Offload
                    && self.model.drop_second_buffer(format!("{error:#}")) =>
            {
                work(self)
            }
            done => done,
        }
    }

    /// [`Self::step`], once.
    fn try_step(&mut self, micro_batches: &[PackedBatch], data_wait_ms: f64, stop: &AtomicBool) -> Result<Stepped> {
        let num_label_tokens: usize = micro_batches.iter().map(|batch| batch.num_label_tokens).sum();
        ensure!(num_label_tokens > 0, "a step without a supervised token: nothing to learn from");
        ensure!(
            !self.failed,
            "a step of this trainer gave numbers that are not finite: start again from what was saved"
        );
        let number = self.steps_done() + 1;
        let device = self.model.device().clone();
        let clock = device.clock();
        let counters = device.counters();
        let cache = self.model.metadata_counts();
        self.model.begin_offload_step();
        clock.begin_step(true, data_wait_ms);
        {
            let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
            self.optimizer.clear_gradients(&self.model, &mut self.grads);
            self.experts.clear(&self.model);
        }
        let mut loss = LossSum::new(&device);
        let passes = self.passes(micro_batches);
        // A pass without a supervised token is none.
        let share = 1.0 / passes.iter().filter(|batch| batch.num_label_tokens > 0).count() as f32;
        for (i, batch) in passes.iter().enumerate() {
            let uploaded = {
                // Once a batch, whatever layers do about metadata.
                let _phase = clock.enter(Phase::Metadata, Pass::Step, None);
                upload(&self.model, batch)?
            };
            let options = PassOptions {
                weight: 1.0 / num_label_tokens as f32,
                share,
                activations: self.setup.switches.activations,
                dropout: Some(DropoutState { seed: self.setup.seed, step: number, micro_batch: i as u32 }),
                stop,
            };
            let Self { model, recordings, grads, .. } = self;
            let done = model.forward_backward_recorded(recordings, grads, &mut loss, &uploaded, options);
            // Both errors are taken off, whichever is told.
            let carried = self.model.check_offload();
            device.check()?;
            carried?;
            if done.is_none() || stop.load(Ordering::Relaxed) {
                return Ok(Stepped::Stopped);
            }
        }
        let lr = learning_rate(&self.setup.optimizer, number - 1, self.setup.total_steps);
        let known = {
            let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
            let Self { model, setup, grads, optimizer, .. } = self;
            device.run(|| optimizer.step(model, grads, &loss, &setup.optimizer, lr))
        };
        let fail = |optimizer: &mut Optimizer, error| {
            // What follows a failure on the device is skipped there, the update too.
            optimizer.take_back(number - 1);
            Err(error)
        };
        // A step that failed leaves alone what the report of the one before is read from: the marks of the clock, and the slots of results.
        if let Err(error) = device.check() {
            return fail(&mut self.optimizer, error);
        }
        let experts = self.experts.queue(&self.model);
        // The copy comes last: when it has been passed, so have the marks of the clock.
        let times = clock.end_step();
        let found = match known {
            Some(values) => Some(Found::Now(values)),
            None => self.optimizer.queue_read().map(Found::Later),
        };
        if let Err(error) = device.check() {
            return fail(&mut self.optimizer, error);
        }
        let submitted = Submitted {
            number,
            found: found.context("an update left no result")?,
            times,
            lr,
            total_tokens: micro_batches.iter().map(|batch| batch.input_ids.len() as u64).sum(),
            document_tokens: micro_batches
                .iter()
                .map(|batch| (batch.input_ids.len() - batch.num_padding_tokens) as u64)
                .sum(),
            num_label_tokens: num_label_tokens as u64,
            memory: device.memory(),
            counters: device.counters().zip(counters).map(|(after, before)| after - before),
            cache: self.model.metadata_counts() - cache,
            offload: self.offloaded(),
            metadata: self.setup.switches.metadata.metadata,
            cache_entries: self.model.metadata_entries(),
            routing: self.setup.switches.routing,
            experts,
        };
        let ready = if self.reports_late { self.submitted.replace(submitted) } else { Some(submitted) };
        let report = ready.map(|submitted| self.report(submitted)).transpose()?;
        Ok(Stepped::Submitted(report.map(Box::new)))
    }

    /// What became of offloading, where activations are offloaded.
    fn offloaded(&self) -> Option<OffloadState> {
        let asked = self.setup.switches.activations == Activations::Offload;
        asked.then(|| self.model.offload_state()).filter(|state| state.refused.is_none())
    }

    /// Waits for the step that was queued last, and gives its report if no call has given it yet. Needed before everything that must not be one
    /// step ahead: evaluation, saving, the end.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn flush(&mut self) -> Result<Option<StepReport>> {
        // What follows is no part of a step.
        self.model.device().clock().pause();
        self.submitted.take().map(|submitted| self.report(submitted)).transpose()
    }

    /// As [`Self::step`], but waits for this step and gives its own report; `None` when `stop` was raised before the update. For a loop that
    /// looks at each step before the next: the report of an earlier one that is not given yet is lost.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_and_wait(
        &mut self,
        micro_batches: &[PackedBatch],
        data_wait_ms: f64,
        stop: &AtomicBool,
    ) -> Result<Option<StepReport>> {
        match self.step(micro_batches, data_wait_ms, stop)? {
            Stepped::Stopped => Ok(None),
            Stepped::Submitted(report) => Ok(self.flush()?.or(report.map(|report| *report))),
        }
    }

    /// Lets a trainer on the CPU give its reports one step late, as on a GPU.
    #[cfg(test)]
    pub(crate) fn report_late(&mut self) {
        self.reports_late = true;
    }

    /// Mean loss over held-out batches; `None` when `stop` was raised on the way. A step that is queued counts as done: [`Self::flush`] first.
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

#[cfg(test)]
#[path = "optimization_tests.rs"]
mod optimization_tests;
