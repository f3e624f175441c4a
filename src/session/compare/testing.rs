//! Comparisons with made-up figures, for tests.

use super::report::{CompareReport, PairDifferences, Variation};
use super::{ArmMemory, Block, Ground, Measured, Subject, arms, stats};
use crate::data::example::Example;
use crate::data::pack::PackedBatch;
use crate::model::metadata::CacheCounts;
use crate::tensor::phase::{Phase, PhaseTime};
use crate::train::config::Metadata;
use crate::train::report::{CacheReport, CopyReport, StepReport};
use crate::train::switches::Switches;

/// A pack of documents of these lengths.
pub(crate) fn batch(lengths: &[usize]) -> PackedBatch {
    let document = |&len: &usize| Example { input_ids: vec![1; len], labels: vec![1; len] };
    PackedBatch::from_examples(&lengths.iter().map(document).collect::<Vec<Example>>())
}

fn step(number: u64, (step_ms, builds, metadata_ms): (f64, u64, f64), copies: Option<CopyReport>) -> StepReport {
    let times = |phase, forward, backward, step| PhaseTime {
        phase,
        forward_ms: Some(forward),
        backward_ms: Some(backward),
        step_ms: step,
    };
    let rest = step_ms - metadata_ms - 1.0;
    StepReport {
        loss: 2.0 / number as f64,
        grad_norm: 0.5,
        lr: 1e-3,
        total_tokens: 2048,
        document_tokens: 2000,
        num_label_tokens: 1900,
        step_ms,
        phases: vec![
            times(Phase::Attention, 0.1 * rest, 0.2 * rest, None),
            times(Phase::Mlp, 0.2 * rest, 0.5 * rest, None),
            PhaseTime { phase: Phase::Metadata, forward_ms: Some(metadata_ms), backward_ms: None, step_ms: None },
        ],
        not_attributed_ms: 1.0,
        cache: Some(CacheReport {
            metadata: Metadata::Cached,
            counts: CacheCounts { builds, ..CacheCounts::default() },
            metadata_ms: Some(metadata_ms),
            entries: Vec::new(),
        }),
        copies,
        ..StepReport::plain(number)
    }
}

/// Three pairs of two counted steps of two micro-batches. Of each arm: milliseconds of a step, which scatter a little, builds of metadata and their time.
pub(crate) fn measured(
    variation: Variation,
    figures: [(f64, u64, f64); 2],
    copies: Option<[Option<CopyReport>; 2]>,
) -> Measured<'static> {
    let batches: &'static [Vec<PackedBatch>] = Vec::leak(vec![vec![batch(&[4, 6]), batch(&[8])]; 3]);
    let ground = Ground { on_gpu: false, has_experts: variation.needs_experts() };
    let (arms, notes) = arms::arms(variation, Switches::default(), ground).unwrap();
    let block = |pair: usize, arm: usize| {
        let (ms, builds, metadata_ms) = figures[arm];
        let figures = (ms + 0.05 * (pair * (arm + 1)) as f64, builds, metadata_ms);
        let copies = copies.and_then(|copies| copies[arm]);
        Block((1..=3).map(|number| step(number, figures, copies)).collect())
    };
    Measured {
        variation,
        subject: Subject { model: "tiny <model>", batches },
        device: "a machine".into(),
        num_blocks: 4,
        pair_share: 0.5,
        needed: arms::needed(variation, Switches::default(), ground),
        ground,
        arms,
        pairs_planned: 4,
        notes,
        memory: [3, 5].map(|gib| ArmMemory { peak_bytes: gib << 30, pinned_bytes: None }),
        blocks: [0, 1].map(|arm| (0..3).map(|pair| block(pair, arm)).collect()),
    }
}

/// The cache on against off: 703 ms a step against 1,063.4 ms.
pub(crate) fn report() -> CompareReport {
    measured(Variation::Cache, [(703.0, 1, 2.0), (1063.4, 8, 16.0)], None).report()
}

impl CompareReport {
    /// Gives the pairs these differences.
    pub(crate) fn set_pairs(&mut self, ms: &[f64]) {
        self.step_ms = [703.0, 1063.4];
        if ms.iter().sum::<f64>() > 0.0 {
            self.step_ms = [1071.0, 1050.0];
        }
        self.pair_differences =
            PairDifferences { mean_ms: stats::mean(ms).unwrap(), interval_ms: stats::interval(ms), ms: ms.to_vec() };
    }
}
