//! The CUDA engine on a GPU: every operation against its CPU form, the golden families, whole steps.
//!
//! Without a GPU each test says "skipped: no device"; with `REQUIRE_GPU=1` it fails instead.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;
#[path = "gpu_ops/mod.rs"]
mod gpu_ops;

use std::collections::HashMap;

use golden_family::{Family, NEVER, adapter_values, assert_within_bf16, bf16_deviations, bf16_errors};
use tandem::tensor::{Device, Precision};
use tandem::train::config::Activations;

/// The GPU, or a reason to skip.
fn gpu() -> Option<Device> {
    // What the engine keeps between runs goes to the temporary folder. The first test sets it, the others wait.
    static HOME: std::sync::Once = std::sync::Once::new();
    HOME.call_once(|| {
        let home = std::env::temp_dir().join("tandem-gpu-tests");
        // SAFETY: every test comes here before it reads the environment or starts a thread that does.
        unsafe { std::env::set_var("TANDEM_HOME", home) };
    });
    match Device::cuda() {
        Ok(device) => Some(device),
        Err(reason) => {
            assert!(std::env::var_os("REQUIRE_GPU").is_none_or(|v| v != "1"), "REQUIRE_GPU=1, but {reason}");
            println!("skipped: no device ({reason})");
            None
        }
    }
}

#[test]
fn golden_families_on_the_gpu_are_as_near_to_f32_as_bf16_elsewhere() {
    let Some(gpu) = gpu() else { return };
    println!("{}", gpu.describe());
    for family in Family::all() {
        let ours = bf16_deviations(&family, &gpu);
        let mut theirs = bf16_deviations(&family, &Device::cpu(0, Precision::Bf16).unwrap());
        // The reference is bf16 elsewhere: Transformers' or the CPU form, whichever is further off.
        let others: HashMap<String, f64> = bf16_errors(&family).unwrap_or_default();
        for (name, error) in others {
            let known = theirs.get_mut(&name).unwrap();
            *known = known.max(error);
        }
        assert_within_bf16(&family, &ours, &theirs);
    }
}

#[test]
fn golden_two_gpu_runs_and_recompute_and_keep_are_bit_equal() {
    let Some(gpu) = gpu() else { return };
    for family in Family::all() {
        let run = |activations| {
            let mut trainer = family.lora_trainer(&gpu, activations);
            let batch = family.batch();
            let losses: Vec<u64> = (0..4)
                .map(|_| trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss.to_bits())
                .collect();
            let adapters: Vec<Vec<f32>> = adapter_values(&trainer);
            (losses, adapters)
        };
        let reference = run(Activations::Keep);
        assert!(run(Activations::Keep) == reference, "{}: two runs differ", family.name);
        assert!(run(Activations::Recompute) == reference, "{}: recompute differs from keep", family.name);
    }
}

#[test]
fn a_step_that_has_run_once_allocates_nothing() {
    let Some(Device::Cuda(gpu)) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    for family in Family::all() {
        let mut trainer = family.lora_trainer(&device, Activations::Recompute);
        let batch = family.batch();
        let mut step = || trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
        step();
        let before = gpu.counters();
        step();
        let after = gpu.counters();
        assert_eq!(after.allocations, before.allocations, "{}", family.name);
        println!(
            "{}: {} launches and {} host syncs a step",
            family.name,
            after.launches - before.launches,
            after.host_syncs - before.host_syncs
        );
    }
}
