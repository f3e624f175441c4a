//! The CUDA engine on a GPU: every operation against its CPU form, the golden families, whole steps.
//!
//! Without a GPU each test says "skipped: no device"; with `REQUIRE_GPU=1` it fails instead.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;
#[path = "gpu_ops/mod.rs"]
mod gpu_ops;
#[path = "gpu_optimizations/mod.rs"]
mod gpu_optimizations;

use std::collections::HashMap;

use golden_family::{
    Family, NEVER, adapter_values, assert_within_bf16, bf16_bound, bf16_deviations, bf16_errors, error, packed,
};
use tandem::base::error::NonFinite;
use tandem::data::pack::PackedBatch;
use tandem::tensor::phase::Phase;
use tandem::tensor::{Device, Precision};
use tandem::train::batch::bucket;
use tandem::train::config::{Activations, AttentionPath, MethodConfig, OptimizerConfig};
use tandem::train::report::StepReport;
use tandem::train::switches::Switches;
use tandem::train::trainer::{Stepped, Trainer, TrainerSetup};

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
        let mut theirs = bf16_deviations(&family, &cpu, AttentionPath::Varlen, 0);
        // The reference is bf16 elsewhere: Transformers' or the CPU form, whichever is further off.
        let others: HashMap<String, f64> = bf16_errors(&family).unwrap_or_default();
        for (name, error) in others {
            if let Some(known) = theirs.get_mut(&name) {
                *known = known.max(error);
            }
        }
        let (varlen, masked) = (AttentionPath::Varlen, AttentionPath::Masked);
        for (path, mlp_rows) in [(varlen, 0), (masked, 0), (varlen, 7), (varlen, 24)] {
            println!("{path:?}, tiles of {mlp_rows}");
            assert_within_bf16(&family, &bf16_deviations(&family, &gpu, path, mlp_rows), &theirs);
        }
    }
}

#[test]
fn golden_full_fine_tuning_on_the_gpu_follows_the_losses_of_transformers() {
    let Some(gpu) = gpu() else { return };
    let mut compared = 0;
    for family in Family::all() {
        let Some(want) = family.full_finetune() else { continue };
        let bound = bf16_bound("loss", want.bf16_error);
        for bits in [32, 8] {
            let losses = family.full_losses(&gpu, &want, |setup| setup.optimizer.bits = bits);
            let off = error(&losses, &want.losses);
            println!("{}, state in {bits} bits: {off:.2e}, bound {bound:.2e}", family.name);
            assert!(off <= bound, "{}, state in {bits} bits: {losses:?} against {:?}", family.name, want.losses);
        }
        compared += 1;
    }
    assert!(compared > 0, "no family has losses of full fine-tuning");
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

/// Those documents of a family, in that order, as one pack.
fn pack_of(family: &Family, documents: impl Iterator<Item = usize>) -> PackedBatch {
    let all = family.documents();
    let (mut ids, mut labels, mut cu_seqlens) = (Vec::new(), Vec::new(), vec![0]);
    for document in documents {
        ids.extend(&all[document].input_ids);
        labels.extend(&all[document].labels);
        cu_seqlens.push(ids.len() as i32);
    }
    packed(&ids, &labels, &cu_seqlens)
}

/// Steps of two micro-batches each, their reports, and the adapters after them. Every size of pack is in the first two steps twice, so that from the
/// third on nothing is new.
fn steps_of_two_sizes(
    family: &Family,
    device: &Device,
    trainer: &mut Trainer,
    after_each: &mut dyn FnMut(u64, &Device),
) -> (Vec<StepReport>, Vec<Vec<f32>>) {
    let num_documents = family.documents().len();
    let large = pack_of(family, 0..num_documents);
    let turned = pack_of(family, (0..num_documents).rev());
    let small = pack_of(family, 0..num_documents - 1);
    let total = |pack: &PackedBatch| pack.input_ids.len();
    assert_eq!(bucket(total(&large)), bucket(total(&turned)));
    assert_ne!(bucket(total(&large)), bucket(total(&small)));
    assert!(
        large.cu_seqlens != turned.cu_seqlens && bucket(total(&small)) > total(&small),
        "other documents, and padding"
    );
    let steps =
        [[&large, &turned], [&small, &small], [&turned, &large], [&small, &large], [&turned, &small], [&large, &large]];
    let mut reports = Vec::new();
    for (number, step) in (1..).zip(steps) {
        let stepped = trainer.step(&step.map(PackedBatch::clone), 0.0, &NEVER).unwrap();
        let Stepped::Submitted(report) = stepped else { panic!("nobody stopped it") };
        reports.extend(report.map(|report| *report));
        after_each(number, device);
    }
    reports.extend(trainer.flush().unwrap());
    (reports, adapter_values(trainer))
}

#[test]
fn recorded_passes_give_the_same_bits_and_counts_as_queued_ones() {
    let Some(device) = gpu() else { return };
    for family in Family::all() {
        for (activations, path) in [Activations::Keep, Activations::Recompute]
            .into_iter()
            .flat_map(|activations| [AttentionPath::Varlen, AttentionPath::Masked].map(|path| (activations, path)))
        {
            let what = format!("{}, {activations:?}, {path:?}", family.name);
            let run = |graphs, after_each: &mut dyn FnMut(u64, &Device)| {
                let mut trainer = family.lora_trainer_with(&device, activations, graphs);
                trainer.model_mut().set_attention_path(path);
                let done = steps_of_two_sizes(&family, &device, &mut trainer, after_each);
                assert_eq!(trainer.unrecorded(), None, "{what}");
                done
            };
            let bits = |reports: &[StepReport]| reports.iter().map(|r| r.loss.to_bits()).collect::<Vec<u64>>();
            let (queued, queued_adapters) = run(false, &mut |_, _| ());
            let (recorded, recorded_adapters) = run(true, &mut |_, _| ());
            assert_eq!(bits(&recorded), bits(&queued), "{what}");
            assert!(recorded_adapters == queued_adapters, "{what}: adapters differ");
            // Memory that goes back to the driver takes the recordings with it.
            let (again, again_adapters) = run(true, &mut |step, device| {
                if step == 4 {
                    device.trim();
                }
            });
            assert_eq!(bits(&again), bits(&queued), "{what}, with less memory in between");
            assert!(again_adapters == queued_adapters, "{what}: adapters differ, with less memory in between");

            for (with, without) in recorded.iter().zip(&queued).skip(2) {
                let (with_counts, without_counts) = (with.counters.unwrap(), without.counters.unwrap());
                assert_eq!(with_counts.launches, without_counts.launches, "{what}: step {}", with.step);
                if with.step >= 4 {
                    assert_eq!((with_counts.host_syncs, with_counts.allocations), (0, 0), "{what}: step {}", with.step);
                }
                assert_eq!(with.total_tokens, without.total_tokens, "{what}: padding is not counted");
                let measured = |report: &StepReport| -> Vec<Phase> {
                    report.phases.iter().filter(|p| p.total_ms().is_some()).map(|p| p.phase).collect()
                };
                assert_eq!(measured(with), measured(without), "{what}: step {}", with.step);
                let ms = |phase| with.phases.iter().find(|p| p.phase == phase).and_then(|p| p.total_ms()).unwrap();
                let half = if with.moe.is_some() { [Phase::Moe, Phase::Routing] } else { [Phase::Mlp; 2] };
                for phase in [Phase::Attention, Phase::HeadLoss, Phase::Optimizer].into_iter().chain(half) {
                    assert!(ms(phase) > 0.0, "{what}: step {}: nothing of {phase:?} was measured", with.step);
                }
                let attributed: f64 = with.phases.iter().filter_map(|p| p.total_ms()).sum();
                let sum = attributed + with.not_attributed_ms;
                assert!((sum / with.step_ms - 1.0).abs() < 2e-2, "{what}: phases of {sum} ms in {} ms", with.step_ms);
            }
            let [with, without] = [&recorded, &queued].map(|reports| reports.last().unwrap());
            println!(
                "{what}: {} launches a step; {:.3} ms recorded, {:.3} ms queued",
                with.counters.unwrap().launches,
                with.step_ms,
                without.step_ms
            );
        }
    }
}

#[test]
fn what_cannot_be_recorded_is_queued_and_the_reason_is_said() {
    let Some(device) = gpu() else { return };
    let family = Family::all().into_iter().next().unwrap();
    let batch = family.batch();
    let trainer = family.lora_trainer(&device, Activations::Recompute);
    assert_eq!(trainer.unrecorded(), None);
    drop(trainer);
    let method = MethodConfig { lora_dropout: 0.1, ..family.method() };
    let setup = TrainerSetup {
        method,
        optimizer: OptimizerConfig::default(),
        switches: Switches::default(),
        seed: 0,
        total_steps: 4,
    };
    let mut trainer = Trainer::new(family.model(&device), setup).unwrap();
    for step in 0..3 {
        trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
        let told = trainer.take_choices();
        assert_eq!(told.is_some(), step == 0, "{told:?}");
        assert!(trainer.unrecorded().is_some_and(|why| why.contains("lora_dropout")));
    }
    let Device::Cuda(gpu) = &device else { panic!("a GPU") };
    // A recording that waits is given up, and leaves a device that works.
    let error = gpu.record(|| gpu.synchronize()).unwrap_err();
    assert!(error.to_string().contains("recorded graph"), "{error:#}");
    device.check().unwrap();
    trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
}
