//! The memory plan of a measurement, and how far it was off.

use serde::Serialize;

use super::bench::BenchOptions;
use crate::model::config::ModelConfig;
use crate::tensor::cuda::Pool;
use crate::tensor::{Device, Gpu};
use crate::train::config::{ActivationsChoice, MemoryConfig};
use crate::train::plan::{Machine, MemoryPlan, Need, Planner, Workload};
use crate::train::trainer::{Trainer, TrainerSetup};

/// Device memory of a row as planned and as measured, in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct PlanCheck {
    /// Most in use at one time by our accounting, planned.
    pub planned_peak_bytes: u64,
    /// The same, measured.
    pub peak_bytes: u64,
    /// In slabs of the engine, planned.
    pub planned_slab_bytes: u64,
    /// The same, measured.
    pub slab_bytes: u64,
    /// In use on the card before the first tensor, by everybody.
    pub before_bytes: u64,
    /// In use on the card by everybody, planned.
    pub planned_vram_bytes: u64,
    /// The same as the driver says it after the last step.
    pub vram_bytes: Option<u64>,
    /// What was measured over what was planned, minus one: positive where more was taken.
    pub deviation: Option<f64>,
}

/// Plans a row on a GPU.
pub(super) fn plan(options: &BenchOptions, config: &ModelConfig, setup: &TrainerSetup, gpu: &Gpu) -> MemoryPlan {
    let longest = options.lengths().into_iter().max().unwrap_or(options.pack);
    Planner {
        config: config.clone(),
        setup: TrainerSetup { switches: options.switches, ..setup.clone() },
        activations: options.activations,
        memory: match options.activations {
            ActivationsChoice::Auto => Some(MemoryConfig::default()),
            _ => None,
        },
        work: Workload { tokens: options.pack, longest, batches: options.tokens / options.pack },
        machine: Machine::of(gpu),
    }
    .plan()
}

/// Lets an arena of which nothing is in use begin with the slab that a plan has for it.
pub(super) fn reserve(gpu: &Gpu, pool: Pool, plan: &MemoryPlan) {
    gpu.trim();
    if let Some(need) = plan.need() {
        let bytes = match pool {
            Pool::Lasting => need.lasting_bytes,
            Pool::Pass => need.pass_bytes,
        };
        gpu.set_first_slab(pool, bytes);
    }
}

/// Switches a trainer as a row asks, `plan` being that of the row on a GPU.
pub(super) fn switch(trainer: &mut Trainer, options: &BenchOptions, plan: Option<&MemoryPlan>) {
    // A way is gone straight to: what moves on a detour leaves gaps.
    match (options.activations, plan) {
        (ActivationsChoice::Auto, Some(plan)) => trainer.follow(plan),
        (ActivationsChoice::Auto, None) => {
            trainer.set_switches(options.switches);
            trainer.choose_activations(ActivationsChoice::Auto, options.pack);
        }
        _ => trainer.set_switches(options.switches),
    }
}

/// Holds what a row took to its plan.
pub(super) fn check(device: &Device, need: &Need, peak_bytes: u64) -> Option<PlanCheck> {
    let Device::Cuda(gpu) = device else { return None };
    let (planned, measured) = (need.vram_bytes(), gpu.driver_used_bytes());
    Some(PlanCheck {
        planned_peak_bytes: need.peak_bytes,
        peak_bytes,
        planned_slab_bytes: need.slab_bytes(),
        slab_bytes: [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool).slabs).iter().sum(),
        before_bytes: need.before_bytes,
        planned_vram_bytes: planned,
        vram_bytes: measured,
        deviation: measured.map(|measured| measured as f64 / planned as f64 - 1.0),
    })
}
