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
use tandem::base::error::NonFinite;
use tandem::tensor::{Device, Precision};
use tandem::train::config::{Activations, AttentionPath};
use tandem::train::trainer::{Stepped, Trainer};

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
        let cpu = Device::cpu(0, Precision::Bf16).unwrap();
        let mut theirs = bf16_deviations(&family, &cpu, AttentionPath::Varlen);
        // The reference is bf16 elsewhere: Transformers' or the CPU form, whichever is further off.
        let others: HashMap<String, f64> = bf16_errors(&family).unwrap_or_default();
        for (name, error) in others {
            let known = theirs.get_mut(&name).unwrap();
            *known = known.max(error);
        }
        for path in [AttentionPath::Varlen, AttentionPath::Masked] {
            println!("{path:?}");
            assert_within_bf16(&family, &bf16_deviations(&family, &gpu, path), &theirs);
        }
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
                .map(|_| {
                    trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss.to_bits()
                })
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
fn a_step_that_has_run_once_allocates_nothing_and_nobody_waits_for_it() {
    let Some(Device::Cuda(gpu)) = gpu() else { return };
    let device = Device::Cuda(gpu.clone());
    for family in Family::all() {
        let batch = family.batch();
        let prompt: Vec<u64> = {
            let mut trainer = family.lora_trainer(&device, Activations::Recompute);
            let mut step = || trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
            (0..5).map(|_| step().loss.to_bits()).collect()
        };
        let mut trainer = family.lora_trainer(&device, Activations::Recompute);
        let (mut reports, mut counters) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            counters.push(gpu.counters());
            let stepped = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap();
            let Stepped::Submitted(report) = stepped else { panic!("nobody stopped it") };
            reports.extend(report.map(|report| *report));
        }
        counters.push(gpu.counters());
        reports.extend(trainer.flush().unwrap());
        assert_eq!(reports.iter().map(|report| report.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        let late: Vec<u64> = reports.iter().map(|report| report.loss.to_bits()).collect();
        assert_eq!(late, prompt, "{}: reports that come late say the same", family.name);
        // From the third step on, with everything allocated and a step ahead.
        for step in 2..5 {
            let during = counters[step + 1] - counters[step];
            assert_eq!((during.host_syncs, during.allocations), (0, 0), "{}: step {}", family.name, step + 1);
            assert_eq!(reports[step].counters, Some(during), "{}: a report has the counters of its step", family.name);
        }
        let last = &reports[4];
        println!(
            "{}: {} launches a step; {:.3} ms, {:.3} ms of it in no phase; the host was held back {} times so far",
            family.name,
            (counters[5] - counters[4]).launches,
            last.step_ms,
            last.not_attributed_ms,
            gpu.times_held_back()
        );
    }
}

#[test]
fn a_step_behind_one_that_is_not_finite_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let family = Family::all().into_iter().next().unwrap();
    let batch = family.batch();
    let mut trainer = family.lora_trainer(&gpu, Activations::Keep);
    trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
    let norm = |trainer: &mut Trainer, change: &dyn Fn(&mut f32)| {
        let params = trainer.model_mut().params_mut();
        let id = params.find("model.norm.weight").unwrap();
        let mut values = params.to_vec(id);
        change(&mut values[0]);
        params.set(id, &values);
    };
    let (before, finite) = (adapter_values(&trainer), std::cell::Cell::new(0.0));
    norm(&mut trainer, &|x| {
        finite.set(*x);
        *x = f32::NAN;
    });
    assert_eq!(trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap(), Stepped::Submitted(None));
    norm(&mut trainer, &|x| *x = finite.get());
    let error = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap_err();
    assert_eq!(error.downcast::<NonFinite>().unwrap().step, 2);
    assert_eq!((trainer.steps_done(), trainer.flush().unwrap()), (1, None));
    assert!(adapter_values(&trainer) == before, "the step behind it was finite, and was left out all the same");
}
