//! Learning rate by step, as the schedules of Transformers compute it.

use super::config::{OptimizerConfig, ScheduleKind};

/// Learning rate of step `step` (0-based) of `total_steps`.
///
/// Warm-up: `lr·step/warmup_steps`, so the first step of a warm-up has rate 0 (as `get_*_schedule_with_warmup` in Transformers).
/// After it, with `p = (step − warmup) / (total − warmup)`: cosine `lr·(1 + cos πp)/2`, linear `lr·(1 − p)`, constant `lr`.
pub fn learning_rate(config: &OptimizerConfig, step: u64, total_steps: u64) -> f64 {
    let OptimizerConfig { lr, schedule, warmup_steps, .. } = *config;
    if step < warmup_steps {
        return lr * step as f64 / warmup_steps as f64;
    }
    let rest = total_steps.saturating_sub(warmup_steps).max(1);
    let p = ((step - warmup_steps) as f64 / rest as f64).min(1.0);
    match schedule {
        ScheduleKind::Cosine => lr * 0.5 * (1.0 + (std::f64::consts::PI * p).cos()),
        ScheduleKind::Linear => lr * (1.0 - p),
        ScheduleKind::Constant => lr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: ScheduleKind, warmup_steps: u64) -> Vec<f64> {
        let config = OptimizerConfig { lr: 1.0, schedule, warmup_steps, ..OptimizerConfig::default() };
        (0..6).map(|step| learning_rate(&config, step, 6)).collect()
    }

    #[test]
    fn shapes_are_those_of_transformers() {
        // get_linear_schedule_with_warmup(num_warmup_steps=2, num_training_steps=6)
        assert_eq!(rates(ScheduleKind::Linear, 2), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(rates(ScheduleKind::Constant, 2), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
        let cosine = rates(ScheduleKind::Cosine, 0);
        assert_eq!(cosine[0], 1.0);
        assert!((cosine[3] - 0.5).abs() < 1e-12, "halfway is half");
        assert!(cosine.windows(2).all(|w| w[1] < w[0]));
    }

    #[test]
    fn a_warmup_longer_than_the_run_only_rises() {
        let config = OptimizerConfig { lr: 1.0, warmup_steps: 10, ..OptimizerConfig::default() };
        assert_eq!(learning_rate(&config, 3, 5), 0.3);
        assert_eq!(learning_rate(&config, 10, 5), 1.0, "no division by zero beyond the end");
    }
}
