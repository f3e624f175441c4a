//! The state of a training as it stood between two steps, on the host: what a comparison starts every block of steps from.

/// Values of all parameters that train, the optimizer's state of them, and the count of updates. It belongs to the trainer that it was taken of.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub(super) updates: u64,
    pub(super) slots: Vec<SlotValues>,
}

/// What belongs to one parameter.
#[derive(Debug, Clone)]
pub(super) struct SlotValues {
    pub(super) value: Vec<f32>,
    pub(super) moments: MomentValues,
}

/// First and second moment, as the optimizer keeps them.
#[derive(Debug, Clone)]
pub(super) enum MomentValues {
    F32([Vec<f32>; 2]),
    /// Codes, and the largest magnitude of each block.
    Blockwise8([(Vec<u8>, Vec<f32>); 2]),
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use serde_json::json;

    use super::{MomentValues, SlotValues};
    use crate::data::example::Example;
    use crate::data::pack::PackedBatch;
    use crate::model::testing::tiny;
    use crate::ops::testing::cpu;
    use crate::train::config::{MethodConfig, MethodKind, OptimizerConfig};
    use crate::train::switches::Switches;
    use crate::train::trainer::{Trainer, TrainerSetup};

    fn steps(trainer: &mut Trainer, batches: &[PackedBatch]) -> Vec<(u64, u64, u64)> {
        let never = AtomicBool::new(false);
        let mut step = |batch| trainer.step_and_wait(std::slice::from_ref(batch), 0.0, &never).unwrap().unwrap();
        let reports = batches.iter().map(&mut step);
        reports.map(|report| (report.step, report.loss.to_bits(), report.grad_norm.to_bits())).collect()
    }

    #[test]
    fn a_restored_trainer_takes_the_same_steps_to_the_bit() {
        let document = |seed: i32| {
            let input_ids: Vec<i32> = (0..9).map(|i| (7 * i + 13 * seed) % 61).collect();
            Example { labels: input_ids[1..].iter().copied().chain([-100]).collect(), input_ids }
        };
        let batches: Vec<PackedBatch> =
            (0..4).map(|seed| PackedBatch::from_examples(&[document(seed), document(seed + 9)])).collect();
        let lora = |lora_dropout| MethodConfig { r: 3, lora_dropout, ..MethodConfig::default() };
        let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
        // With this width some matrices are large enough for state in 8 bits, adapters of rank 17 among them.
        let model = json!({ "intermediate_size": 243 });
        let large = MethodConfig { r: 17, ..MethodConfig::default() };
        let runs = [
            (lora(0.1), false, 32),
            (lora(0.0), true, 32),
            (full.clone(), false, 32),
            (large, false, 8),
            (full.clone(), true, 8),
        ];
        for (method, late, bits) in runs {
            let optimizer = OptimizerConfig { lr: 1e-2, bits, ..OptimizerConfig::default() };
            let setup = TrainerSetup { method, optimizer, switches: Switches::default(), seed: 5, total_steps: 10 };
            let mut trainer = Trainer::new(tiny(&cpu(1), &model), setup).unwrap();
            if late {
                trainer.report_late();
            }
            steps(&mut trainer, &batches[..1]);
            let snapshot = trainer.snapshot();
            let in_8_bits = |slot: &&SlotValues| matches!(slot.moments, MomentValues::Blockwise8(_));
            assert_eq!(snapshot.slots.iter().any(|slot| in_8_bits(&slot)), bits == 8);
            let first = steps(&mut trainer, &batches[1..]);
            let next = steps(&mut trainer, &batches[1..]);
            assert_ne!(next[0].1, first[0].1, "without going back it goes on");
            trainer.restore(&snapshot);
            assert_eq!(steps(&mut trainer, &batches[1..]), first);
        }
    }
}
