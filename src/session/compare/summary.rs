//! From measured blocks to a report: means, paired differences, parity.

use super::report::{Better, CompareReport, Difference, PairDifferences, Parity};
use super::{Block, Measured, arms, models, stats, text, verdict};
use crate::base::units;
use crate::tensor::phase::{Phase, PhaseTime};
use crate::train::report::{CopyReport, StepReport};

/// A row of the table: what it is called, and its value in the counted steps of a block.
struct Row {
    name: &'static str,
    unit: &'static str,
    decimals: usize,
    better: Better,
    /// Whether a clock gives it, so that it scatters.
    timed: bool,
    value: fn(&[StepReport]) -> Option<f64>,
}

const fn timed(
    name: &'static str,
    unit: &'static str,
    decimals: usize,
    better: Better,
    value: fn(&[StepReport]) -> Option<f64>,
) -> Row {
    Row { name, unit, decimals, better, timed: true, value }
}

const fn counted(name: &'static str, decimals: usize, better: Better, value: fn(&[StepReport]) -> Option<f64>) -> Row {
    Row { name, unit: "", decimals, better, timed: false, value }
}

/// Rows in the order in which they are shown; those that neither arm has are left out.
const ROWS: [Row; 14] = [
    timed("Step", "ms", 2, Better::Lower, |steps| mean(steps, |step| Some(step.step_ms))),
    timed("Tokens/s", "", 0, Better::Higher, tokens_per_sec),
    timed("Forward", "ms", 2, Better::Lower, |steps| mean(steps, |step| sum(&step.phases, |time| time.forward_ms))),
    timed("Backward", "ms", 2, Better::Lower, |steps| mean(steps, |step| sum(&step.phases, |time| time.backward_ms))),
    timed("Metadata", "ms", 3, Better::Lower, |steps| mean(steps, |step| phase_ms(step, Phase::Metadata))),
    counted("Metadata builds", 0, Better::Lower, |steps| {
        mean(steps, |step| Some(step.cache.as_ref()?.counts.builds as f64))
    }),
    timed("Routing", "ms", 2, Better::Lower, |steps| mean(steps, |step| phase_ms(step, Phase::Routing))),
    timed("Recompute", "ms", 2, Better::Lower, |steps| mean(steps, |step| phase_ms(step, Phase::Recompute))),
    timed("Exposed copy", "ms", 2, Better::Lower, |steps| mean(steps, |step| Some(step.copies?.exposed_ms()))),
    timed("Copy hidden", "%", 1, Better::Higher, |steps| mean(steps, |step| Some(100.0 * step.copies?.overlap()))),
    counted("Kernel launches", 0, Better::Lower, |steps| mean(steps, |step| Some(step.counters?.launches as f64))),
    counted("Host syncs", 0, Better::Lower, |steps| mean(steps, |step| Some(step.counters?.host_syncs as f64))),
    counted("Loss", 5, Better::Neither, |steps| mean(steps, |step| Some(step.loss))),
    counted("Gradient norm", 5, Better::Neither, |steps| mean(steps, |step| Some(step.grad_norm))),
];

/// Mean of what the steps have; `None` when one lacks it.
pub(super) fn mean(steps: &[StepReport], of: impl Fn(&StepReport) -> Option<f64>) -> Option<f64> {
    stats::mean(&steps.iter().map(of).collect::<Option<Vec<f64>>>()?)
}

/// Sum of what was measured; `None` when nothing was.
fn sum(phases: &[PhaseTime], of: impl Fn(&PhaseTime) -> Option<f64>) -> Option<f64> {
    phases.iter().filter_map(of).reduce(|a, b| a + b)
}

/// All of a phase in a step.
pub(super) fn phase_ms(step: &StepReport, phase: Phase) -> Option<f64> {
    step.phases.iter().find(|time| time.phase == phase)?.total_ms()
}

fn tokens_per_sec(steps: &[StepReport]) -> Option<f64> {
    let tokens: u64 = steps.iter().map(|step| step.document_tokens).sum();
    let ms: f64 = steps.iter().map(|step| step.step_ms).sum();
    (ms > 0.0).then(|| tokens as f64 / ms * 1e3)
}

impl Measured<'_> {
    /// What is known from the pairs that are complete; there is at least one.
    pub(super) fn report(&self) -> CompareReport {
        let blocks = self.paired();
        let step_ms = |block: &Block| mean(block.counted(), |step| Some(step.step_ms)).unwrap_or_default();
        let pairs: Vec<f64> = blocks[0].iter().zip(blocks[1]).map(|(a, b)| step_ms(a) - step_ms(b)).collect();
        let both = |of: fn(&[StepReport]) -> Option<f64>| blocks.map(|blocks| arm_mean(blocks, of).unwrap_or_default());
        let first = |of: fn(&StepReport) -> f64| blocks.map(|blocks| blocks[0].0.iter().map(of).collect());
        let [a, b] = &self.arms;
        let quantities = models::quantities(self);
        let mut report = CompareReport {
            title: format!("{}, on against off", self.variation.name()),
            variation: self.variation,
            model: self.subject.model.to_owned(),
            device: self.device.clone(),
            workload: self.workload(),
            arms: self.arms.clone(),
            pairs: pairs.len(),
            pairs_planned: self.pairs_planned,
            steps_per_block: self.subject.batches.len() - 1,
            rows: self.rows(),
            losses: first(|step| step.loss),
            grad_norms: first(|step| step.grad_norm),
            phases: blocks.map(mean_phases),
            step_ms: both(|steps| mean(steps, |step| Some(step.step_ms))),
            not_attributed_ms: both(|steps| mean(steps, |step| Some(step.not_attributed_ms))),
            pair_differences: PairDifferences {
                mean_ms: stats::mean(&pairs).unwrap_or_default(),
                interval_ms: stats::interval(&pairs),
                ms: pairs,
            },
            predictions: Vec::new(),
            quantities,
            settings: arms::settings([&a.switches, &b.switches]),
            parity: parity(blocks, self.ground.adds_alike([&a.switches, &b.switches])),
            memory: self.memory,
            verdict: verdict::pending(),
            notes: self.notes.clone(),
        };
        report.predictions = models::predictions(self, &report);
        report.verdict = verdict::verdict(&report);
        report
    }

    /// The blocks whose pair is complete.
    pub(super) fn paired(&self) -> [&[Block]; 2] {
        let pairs = self.blocks[0].len().min(self.blocks[1].len());
        [&self.blocks[0][..pairs], &self.blocks[1][..pairs]]
    }

    fn workload(&self) -> String {
        let steps = self.subject.batches;
        let batches: usize = steps.iter().map(Vec::len).sum();
        let tokens: usize = steps.iter().flatten().map(|batch| batch.input_ids.len()).sum();
        format!(
            "{} tokens a step in {} · same weights, same batches, same seed",
            units::count((tokens as f64 / steps.len() as f64).round() as u64),
            text::micro_batches(batches as f64 / steps.len() as f64)
        )
    }

    fn rows(&self) -> Vec<Difference> {
        let blocks = self.paired();
        let rows = ROWS.iter().map(|row| {
            let values = blocks.map(|blocks| blocks.iter().map(|block| (row.value)(block.counted())).collect());
            difference(row, values)
        });
        let mut rows: Vec<Difference> = rows.filter(|row| row.a.is_some() || row.b.is_some()).collect();
        // Memory stands before what is learned.
        let at = rows.iter().position(|row| row.name == "Kernel launches" || row.name == "Loss").unwrap_or(rows.len());
        let pinned = self.memory.map(|memory| memory.pinned_bytes);
        if pinned.iter().any(Option::is_some) {
            // Where nothing is offloaded there is none.
            rows.insert(at, bytes("Host memory of inputs", pinned.map(Option::unwrap_or_default)));
        }
        rows.insert(at, bytes("Peak memory", self.memory.map(|memory| memory.peak_bytes)));
        rows
    }
}

/// A row from the values of each pair's blocks.
fn difference(row: &Row, values: [Vec<Option<f64>>; 2]) -> Difference {
    let known = values.map(|values| values.into_iter().collect::<Option<Vec<f64>>>());
    let [a, b] = [&known[0], &known[1]].map(|values| stats::mean(values.as_deref()?));
    let pairs = known[0].as_deref().zip(known[1].as_deref());
    let pairs = pairs.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<f64>>());
    let constant = |values: &Option<Vec<f64>>| values.as_ref().is_none_or(|v| v.iter().all(|value| *value == v[0]));
    let exact = !row.timed && known.iter().all(constant);
    Difference {
        name: row.name.into(),
        unit: row.unit.into(),
        decimals: row.decimals,
        a,
        b,
        difference: pairs.as_deref().and_then(stats::mean),
        interval: pairs.as_deref().and_then(stats::interval).filter(|_| !exact),
        exact,
        percent: a.zip(b).filter(|_| row.unit != "%").and_then(|(a, b)| percent(row.better, a, b)),
        better: row.better,
    }
}

fn percent(better: Better, a: f64, b: f64) -> Option<f64> {
    (better != Better::Neither && b != 0.0).then(|| 100.0 * (a - b) / b)
}

/// A row of bytes, in the unit that suits the larger value.
fn bytes(name: &str, bytes: [u64; 2]) -> Difference {
    let (unit, size) =
        if bytes[0].max(bytes[1]) >= 1 << 30 { ("GiB", f64::from(1 << 30)) } else { ("MiB", f64::from(1 << 20)) };
    let [a, b] = bytes.map(|bytes| bytes as f64 / size);
    Difference {
        name: name.into(),
        unit: unit.into(),
        decimals: 2,
        a: Some(a),
        b: Some(b),
        difference: Some(a - b),
        interval: None,
        exact: true,
        percent: percent(Better::Lower, a, b),
        better: Better::Lower,
    }
}

/// Mean over the blocks of an arm; `None` when one lacks it.
pub(super) fn arm_mean(blocks: &[Block], of: impl Fn(&[StepReport]) -> Option<f64>) -> Option<f64> {
    stats::mean(&blocks.iter().map(|block| of(block.counted())).collect::<Option<Vec<f64>>>()?)
}

/// As [`arm_mean`], of what copies of a step have.
pub(super) fn copies_mean(blocks: &[Block], of: fn(&CopyReport) -> Option<f64>) -> Option<f64> {
    arm_mean(blocks, |steps| mean(steps, |step| of(step.copies.as_ref()?)))
}

/// The phases of the mean step, those that were measured.
fn mean_phases(blocks: &[Block]) -> Vec<PhaseTime> {
    let times = |phase: Phase| {
        let part = |of: fn(&PhaseTime) -> Option<f64>| {
            arm_mean(blocks, |steps| mean(steps, |step| of(step.phases.iter().find(|time| time.phase == phase)?)))
        };
        PhaseTime {
            phase,
            forward_ms: part(|time| time.forward_ms),
            backward_ms: part(|time| time.backward_ms),
            step_ms: part(|time| time.step_ms),
        }
    };
    Phase::ALL.into_iter().map(times).filter(|time| time.total_ms().is_some()).collect()
}

/// Each block against the first of its arm, and the arms' first blocks against each other.
fn parity(blocks: [&[Block]; 2], must_be_bit_equal: bool) -> Parity {
    let results = |block: &Block| -> Vec<[f64; 2]> { block.0.iter().map(|step| [step.loss, step.grad_norm]).collect() };
    let [a, b] = blocks.map(|blocks| results(&blocks[0]));
    let bits = |results: &[[f64; 2]]| results.iter().flatten().map(|value| value.to_bits()).collect::<Vec<u64>>();
    let repeats =
        blocks.iter().all(|blocks| blocks.iter().all(|block| bits(&results(block)) == bits(&results(&blocks[0]))));
    let largest = |of: fn(&[f64; 2], &[f64; 2]) -> f64| a.iter().zip(&b).map(|(a, b)| of(a, b)).fold(0.0, f64::max);
    Parity {
        bit_equal: bits(&a) == bits(&b),
        repeats,
        must_be_bit_equal,
        max_loss_difference: largest(|a, b| (a[0] - b[0]).abs()),
        max_grad_norm_difference: largest(|a, b| (a[1] - b[1]).abs() / b[1].abs().max(f64::MIN_POSITIVE)),
        max_loss: largest(|a, b| a[0].abs().max(b[0].abs())),
    }
}
