//! Paired comparison: an optimization on against off, in blocks A B B A … from the same state, on the same batches, with the same seed.

mod arms;
mod handle;
mod html;
mod models;
mod plots;
mod report;
mod stats;
mod summary;
#[cfg(test)]
mod testing;
mod text;
mod verdict;

use std::sync::atomic::AtomicBool;

use anyhow::{bail, ensure};

use self::arms::Ground;
pub use self::handle::{CompareHandle, start};
pub use self::html::html;
pub use self::report::{
    Arm, ArmMemory, Better, CompareEvent, CompareOptions, CompareReport, Difference, Effect, PairDifferences, Parity,
    Prediction, Quantities, Setting, Variation, Verdict, VerdictKind,
};
pub use self::text::text;
use crate::base::error::Result;
use crate::data::pack::PackedBatch;
use crate::tensor::Device;
use crate::train::config::Activations;
use crate::train::report::{Choice, Optimization, StepReport};
use crate::train::snapshot::Snapshot;
use crate::train::trainer::{Stepped, Trainer};

/// What both arms run.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Name of the model.
    pub model: &'a str,
    /// Micro-batches of each step of a block. The first step is not counted: there the device still does what a switch of arms brings with it.
    pub batches: &'a [Vec<PackedBatch>],
}

/// The steps of one block, the first included.
#[derive(Debug)]
struct Block(Vec<StepReport>);

impl Block {
    /// The steps that count.
    fn counted(&self) -> &[StepReport] {
        self.0.get(1..).unwrap_or_default()
    }
}

/// What was measured so far.
#[derive(Debug)]
struct Measured<'a> {
    variation: Variation,
    subject: Subject<'a>,
    device: String,
    num_blocks: usize,
    /// Share of the pairs of tokens of a pack that are of one document: what attention has to visit.
    pair_share: f64,
    arms: [Arm; 2],
    ground: Ground,
    /// What must be on in arm A.
    needed: Vec<Optimization>,
    pairs_planned: usize,
    notes: Vec<String>,
    memory: [ArmMemory; 2],
    /// Blocks of each arm; those of one place are a pair.
    blocks: [Vec<Block>; 2],
}

/// Makes the comparisons that `options` names, one after another; each is told when it is done. What cannot be compared on this device is an error
/// before time is spent. When `stop` is raised, the pairs that were done make the last report.
///
/// # Errors
/// As [`compare`].
pub fn compare_all(
    trainer: &mut Trainer,
    subject: Subject<'_>,
    options: &CompareOptions,
    on_event: &(dyn Fn(CompareEvent) + Sync),
    stop: &AtomicBool,
) -> Result<()> {
    for &variation in &options.vary {
        arms::arms(variation, trainer.switches(), Ground::of(trainer.model()))?;
    }
    for &variation in &options.vary {
        let Some(report) = compare(trainer, subject, variation, options, on_event, stop)? else { break };
        on_event(CompareEvent::Finished { report: Box::new(report) });
    }
    Ok(())
}

/// Compares one optimization on against off. Nothing of the trainer has changed when it is done.
///
/// Every block starts from the state that the trainer is in, so both arms take the very same steps. Each arm runs one block before, or two where passes
/// are recorded, so that all that is done once is done. `on_event` hears of every pair. When `stop` is raised, the pairs that were done are the result;
/// `None` when there is none.
///
/// # Errors
/// When the optimization cannot be switched on here, with the reason, and when a step fails.
pub fn compare(
    trainer: &mut Trainer,
    subject: Subject<'_>,
    variation: Variation,
    options: &CompareOptions,
    on_event: &(dyn Fn(CompareEvent) + Sync),
    stop: &AtomicBool,
) -> Result<Option<CompareReport>> {
    options.check()?;
    ensure!(subject.batches.len() == options.num_steps(), "a block takes {} steps", options.num_steps());
    trainer.flush()?;
    let (base, snapshot) = (trainer.switches(), trainer.snapshot());
    let ground = Ground::of(trainer.model());
    let (arms, notes) = arms::arms(variation, base, ground)?;
    let measured = Measured {
        variation,
        subject,
        device: trainer.model().device().describe(),
        num_blocks: trainer.model().config().num_hidden_layers,
        pair_share: models::pair_share(subject.batches),
        arms,
        needed: arms::needed(variation, base, ground),
        ground,
        pairs_planned: options.pairs,
        notes,
        memory: [ArmMemory::default(); 2],
        blocks: [Vec::new(), Vec::new()],
    };
    let mut comparison = Comparison { trainer, snapshot, measured, on_event, stop };
    let report = comparison.run();
    let Comparison { trainer, snapshot, .. } = comparison;
    // A report of the last step that is not read yet belongs to a block that was given up.
    let flushed = trainer.flush();
    trainer.set_switches(base);
    trainer.restore(&snapshot);
    let report = report?;
    flushed?;
    Ok(report)
}

/// A comparison that runs.
struct Comparison<'a> {
    trainer: &'a mut Trainer,
    snapshot: Snapshot,
    measured: Measured<'a>,
    on_event: &'a (dyn Fn(CompareEvent) + Sync),
    stop: &'a AtomicBool,
}

impl Comparison<'_> {
    fn run(&mut self) -> Result<Option<CompareReport>> {
        if !self.warm_up()? {
            return Ok(None);
        }
        let (variation, pairs) = (self.measured.variation, self.measured.pairs_planned);
        let mut report = None;
        for pair in 0..pairs {
            (self.on_event)(CompareEvent::Progress { variation, done: pair, pairs, report: report.clone() });
            // A B, B A, A B, …: what drifts slowly meets both arms alike.
            for arm in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
                let Some(block) = self.block(arm)? else { return Ok(report.map(|report| *report)) };
                self.measured.blocks[arm].push(block);
            }
            report = Some(Box::new(self.measured.report()));
        }
        Ok(report.map(|report| *report))
    }

    /// Lets both arms do what is done once, measures their memory, and sees whether they are what they should be; false when it was stopped.
    fn warm_up(&mut self) -> Result<bool> {
        let records = self.measured.arms.iter().any(|arm| arm.switches.cuda_graphs);
        let rounds = if records && matches!(self.trainer.model().device(), Device::Cuda(_)) { 2 } else { 1 };
        for (round, arm) in (0..rounds).flat_map(|round| [(round, 0), (round, 1)]) {
            let (stage, done) = ("warming up".to_owned(), (2 * round + arm) as u64);
            (self.on_event)(CompareEvent::Preparing { stage, done, total: 2 * rounds as u64 });
            if round == 0 {
                // What the other arm has recorded holds memory that is none of this one's.
                self.trainer.forget_recordings();
            }
            let Some(block) = self.block(arm)? else { return Ok(false) };
            if round == 0 {
                self.measured.memory[arm] = memory(&block);
            }
            if arm == 0 {
                self.check_on()?;
            }
            if let Some(fallback) = self.offload_fallback(arm) {
                self.note(fallback);
            }
            if self.leave_graphs() {
                return self.warm_up();
            }
        }
        Ok(true)
    }

    /// Takes the graphs from both arms where one of them cannot be recorded: what they are compared for would not be all in which they differ.
    fn leave_graphs(&mut self) -> bool {
        let Some(why) = self.trainer.unrecorded().map(str::to_owned) else { return false };
        if self.measured.variation == Variation::Graphs {
            return false;
        }
        self.note(format!("neither arm is recorded as CUDA graphs: {why}"));
        self.measured.arms.iter_mut().for_each(|arm| arm.switches.cuda_graphs = false);
        true
    }

    /// Sees that what arm A should have on is on.
    fn check_on(&mut self) -> Result<()> {
        let choices = self.trainer.choices();
        let choice = |needed: &Optimization| choices.iter().find(|choice| choice.optimization == *needed);
        let off: Vec<&Choice> = self.measured.needed.iter().filter_map(choice).filter(|choice| !choice.on).collect();
        for Choice { optimization, why, .. } in off {
            let name = optimization.name();
            if self.measured.variation != Variation::All {
                bail!("{name} cannot be compared here, because it cannot be switched on: {why}");
            }
            self.note(format!("{name} could not be switched on: {why}"));
        }
        Ok(())
    }

    /// What is not as good as it could be where an arm offloads.
    fn offload_fallback(&self, arm: usize) -> Option<String> {
        let offloads = self.measured.arms[arm].switches.activations == Activations::Offload;
        self.trainer.model().offload_state().fallback.filter(|_| offloads)
    }

    /// Notes what is not noted yet.
    fn note(&mut self, note: String) {
        if !self.measured.notes.contains(&note) {
            self.measured.notes.push(note);
        }
    }

    /// Runs a block of an arm from the common state; `None` when it was stopped.
    fn block(&mut self, arm: usize) -> Result<Option<Block>> {
        let Self { trainer, measured, snapshot, stop, .. } = self;
        trainer.flush()?;
        trainer.set_switches(measured.arms[arm].switches);
        trainer.restore(snapshot);
        trainer.model().device().reset_memory_peaks();
        let mut steps = Vec::with_capacity(measured.subject.batches.len());
        for micro_batches in measured.subject.batches {
            match trainer.step(micro_batches, 0.0, stop)? {
                Stepped::Stopped => return Ok(None),
                Stepped::Submitted(report) => steps.extend(report.map(|report| *report)),
            }
        }
        steps.extend(trainer.flush()?);
        steps.iter_mut().for_each(|step| step.spans.clear());
        Ok(Some(Block(steps)))
    }
}

/// Most memory at one time in a block.
fn memory(block: &Block) -> ArmMemory {
    let last = block.0.last();
    ArmMemory {
        peak_bytes: last.map_or(0, |step| step.memory.peak_bytes),
        pinned_bytes: last.and_then(|step| step.copies).map(|copies| copies.host_bytes),
    }
}
