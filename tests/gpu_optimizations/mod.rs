//! The switches on a GPU: none changes a bit, and what is refused or fails is said.

mod experts;
mod host_memory;
mod plan;
mod qlora;
mod tiles;

use serde_json::json;
use tandem::base::error::{OutOfMemory, Result};
use tandem::base::rng::{Philox, unit_f32};
use tandem::model::config::ModelConfig;
use tandem::model::metadata::MetadataPolicy;
use tandem::model::policy::Metadata;
use tandem::model::transformer::{Form, Transformer};
use tandem::tensor::offload::{Carrier, Faults};
use tandem::tensor::{Device, MemoryCategory, Tensor};
use tandem::train::config::{
    Activations, AttentionPath, MemoryPolicy, MethodConfig, OffloadPolicy, OptimizerConfig, Routing,
};
use tandem::train::report::{Optimization, StepReport};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup, lora_spec};

use super::golden_family::{Family, NEVER, packed};
use super::{gpu, pack_of};

/// Offload without the guardrails that a tiny model would not pass.
fn offload(buffers: usize) -> OffloadPolicy {
    OffloadPolicy { buffers, force: true, ..OffloadPolicy::default() }
}

/// Steps over two packs of different sizes.
fn steps(family: &Family, trainer: &mut Trainer, count: usize) -> Vec<StepReport> {
    let num_documents = family.documents().len();
    let packs = [pack_of(family, 0..num_documents), pack_of(family, 0..num_documents - 1)];
    let mut step = || trainer.step_and_wait(&packs, 0.0, &NEVER).unwrap().unwrap();
    (0..count).map(|_| step()).collect()
}

fn bits(reports: &[StepReport]) -> Vec<[u64; 2]> {
    reports.iter().map(|report| [report.loss.to_bits(), report.grad_norm.to_bits()]).collect()
}

fn run(
    family: &Family,
    device: &Device,
    switches: Switches,
    faults: Faults,
    count: usize,
) -> (Trainer, Vec<StepReport>) {
    let mut trainer = family.lora_trainer(device, switches.activations);
    trainer.model().set_offload_faults(faults);
    trainer.set_switches(switches);
    let reports = steps(family, &mut trainer, count);
    (trainer, reports)
}

fn why(trainer: &Trainer, optimization: Optimization) -> String {
    trainer.choices().into_iter().find(|choice| choice.optimization == optimization).unwrap().describe()
}

#[test]
fn no_switch_changes_a_bit_of_twenty_steps() {
    let Some(device) = gpu() else { return };
    for family in Family::all() {
        for attention in [AttentionPath::Varlen, AttentionPath::Masked] {
            let mut reference = None;
            for metadata in [Metadata::Cached, Metadata::Fused, Metadata::Published] {
                for (activations, buffers, [middle, qkv]) in [
                    (Activations::Keep, 0, [false, false]),
                    (Activations::Recompute, 0, [false, false]),
                    (Activations::Recompute, 0, [true, false]),
                    (Activations::Recompute, 0, [true, true]),
                    (Activations::Offload, 1, [false, false]),
                    (Activations::Offload, 1, [true, true]),
                    (Activations::Offload, 2, [false, false]),
                    (Activations::Offload, 2, [true, false]),
                    (Activations::Offload, 2, [false, true]),
                    (Activations::Offload, 2, [true, true]),
                ] {
                    if (middle || qkv) && metadata != Metadata::Cached {
                        continue;
                    }
                    for cuda_graphs in [false, true] {
                        let switches = Switches {
                            activations,
                            attention,
                            metadata: MetadataPolicy { metadata, capacity: 0 },
                            routing: Routing::default(),
                            offload: offload(buffers),
                            cuda_graphs,
                            memory: MemoryPolicy { middle, qkv, ..MemoryPolicy::default() },
                        };
                        let (trainer, reports) = run(&family, &device, switches, Faults::default(), 20);
                        let got = bits(&reports);
                        let what = format!("{}: {switches:?}", family.name);
                        assert_eq!(&got, reference.get_or_insert_with(|| got.clone()), "{what}");
                        let recorded = cuda_graphs && metadata == Metadata::Cached;
                        assert_eq!(trainer.unrecorded().is_none(), recorded || !cuda_graphs, "{what}");
                        let last = reports.last().unwrap();
                        let copies =
                            last.copies.map(|copies| (copies.buffers, copies.reloads > 0, copies.d2h_bytes > 0));
                        let want = (activations == Activations::Offload).then_some((buffers, true, true));
                        assert_eq!(copies, want, "{what}");
                        if metadata == Metadata::Cached {
                            let counters = last.counters.unwrap();
                            assert_eq!((counters.host_syncs, counters.allocations), (0, 0), "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn switching_back_and_forth_uses_what_was_recorded_and_changes_no_bit() {
    let Some(device) = gpu() else { return };
    let family = Family::all().into_iter().next().unwrap();
    let of = |activations, buffers| Switches { activations, offload: offload(buffers), ..Switches::default() };
    let (_, reference) = run(&family, &device, of(Activations::Recompute, 0), Faults::default(), 12);
    let (mut trainer, mut reports) = run(&family, &device, of(Activations::Offload, 2), Faults::default(), 3);
    for (activations, buffers) in [(Activations::Offload, 1), (Activations::Offload, 2), (Activations::Recompute, 0)] {
        trainer.set_switches(of(activations, buffers));
        let done = steps(&family, &mut trainer, 3);
        if let Some(copies) = done.last().unwrap().copies {
            assert_eq!(copies.buffers, buffers);
        }
        reports.extend(done);
    }
    assert_eq!(trainer.unrecorded(), None);
    assert_eq!(bits(&reports), bits(&reference));
}

#[test]
fn what_is_refused_or_fails_is_said_and_changes_no_result() {
    let Some(device) = gpu() else { return };
    let family = Family::all().into_iter().next().unwrap();
    let (_, reference) = run(&family, &device, Switches::default(), Faults::default(), 5);
    let with = |policy, faults| {
        let switches = Switches { activations: Activations::Offload, offload: policy, ..Switches::default() };
        let (trainer, reports) = run(&family, &device, switches, faults, 5);
        assert_eq!(bits(&reports), bits(&reference), "{policy:?}, {faults:?}");
        trainer
    };
    let (offloading, buffering, graphs) =
        (Optimization::ActivationOffload, Optimization::DoubleBuffer, Optimization::CudaGraphs);

    let none = Faults::default();
    let small = with(OffloadPolicy::default(), none);
    assert!(why(&small, offloading).contains("below 512"), "{}", why(&small, offloading));

    let no_second = with(offload(2), Faults { second_buffer: true, ..none });
    assert!(
        why(&no_second, buffering).contains("off (there is no memory for a second buffer"),
        "{}",
        why(&no_second, buffering)
    );
    assert!(why(&no_second, offloading).contains(": on ("));

    // One input page-locked, the others through the ring; then all of them.
    for pinned_from in [1, 0] {
        let ring = with(offload(2), Faults { pinned_from: Some(pinned_from), ..none });
        assert!(why(&ring, offloading).contains("wait in pageable memory"), "{}", why(&ring, offloading));
        assert!(why(&ring, graphs).contains("a thread carries activations"), "{}", why(&ring, graphs));
    }
    let budget = with(OffloadPolicy { pinned_bytes: Some(1), ..offload(2) }, none);
    assert!(why(&budget, offloading).contains("wait in pageable memory"));

    let no_ring = with(offload(2), Faults { pinned_from: Some(0), ring: true, ..none });
    assert!(
        why(&no_ring, offloading).contains("off (the driver refuses page-locked memory"),
        "{}",
        why(&no_ring, offloading)
    );
}

#[test]
fn a_failing_copy_ends_the_step_with_its_reason_and_leaves_the_device_usable() {
    let Some(device) = gpu() else { return };
    let family = Family::all().into_iter().next().unwrap();
    let (_, reference) = run(&family, &device, Switches::default(), Faults::default(), 4);
    let switches = Switches { activations: Activations::Offload, offload: offload(2), ..Switches::default() };
    let (mut trainer, mut reports) = run(&family, &device, switches, Faults::default(), 2);
    trainer.model().set_offload_faults(Faults { store_to: Some(0), ..Faults::default() });
    let pack = pack_of(&family, 0..family.documents().len());
    let error = trainer.step_and_wait(&[pack], 0.0, &NEVER).unwrap_err();
    assert!(error.to_string().contains("to host memory failed"), "{error:#}");
    trainer.model().set_offload_faults(Faults::default());
    reports.extend(steps(&family, &mut trainer, 2));
    assert_eq!(bits(&reports), bits(&reference));
}

/// Three steps of a model whose inputs of blocks are as large as the guardrails ask for, with packs of `tokens` tokens.
///
/// # Errors
/// When the device has no room.
fn large_enough(
    device: &Device,
    activations: Activations,
    offload: OffloadPolicy,
    tokens: i32,
) -> Result<(Trainer, Vec<StepReport>)> {
    let config = json!({
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    });
    let config = ModelConfig::from_hf_json(&config.to_string()).unwrap();
    let method = MethodConfig::default();
    let model = Transformer::random(&config, device, Form { lora: lora_spec(&method).as_ref(), ..Form::default() }, 1)?;
    let switches = Switches { activations, offload, ..Switches::default() };
    let optimizer = OptimizerConfig::default();
    let mut trainer = Trainer::new(model, TrainerSetup { method, optimizer, switches, seed: 1, total_steps: 9 })?;
    let ids: Vec<i32> = (0..tokens).map(|i| i * 7 % 512).collect();
    let labels: Vec<i32> = ids[1..].iter().copied().chain([-100]).collect();
    let pack = packed(&ids, &labels, &[0, tokens]);
    let mut step = || Ok(trainer.step_and_wait(std::slice::from_ref(&pack), 0.0, &NEVER)?.unwrap());
    let reports = (0..3).map(|_| step()).collect::<Result<_>>()?;
    Ok((trainer, reports))
}

#[test]
fn without_headroom_there_is_one_buffer_and_with_it_there_are_two() {
    let Some(device) = gpu() else { return };
    let (_, reference) = large_enough(&device, Activations::Recompute, OffloadPolicy::default(), 1024).unwrap();
    let limit = device.available_bytes().unwrap();
    for (headroom_bytes, buffers) in [(0, 2), (512 << 20, 2), (limit, 1)] {
        let policy = OffloadPolicy { headroom_bytes, ..OffloadPolicy::default() };
        let (trainer, reports) = large_enough(&device, Activations::Offload, policy, 1024).unwrap();
        assert_eq!(bits(&reports), bits(&reference));
        let copies = reports.last().unwrap().copies.unwrap();
        assert_eq!((copies.buffers, copies.blocks, copies.buffer_bytes), (buffers, 3, 1024 * 1024 * 2));
        let why = why(&trainer, Optimization::DoubleBuffer);
        assert_eq!(why.contains("must leave"), buffers == 1, "{why}");
    }
}

#[test]
fn as_memory_gets_short_a_run_goes_on_with_less_or_ends_with_out_of_memory() {
    let Some(device) = gpu() else { return };
    let policy = OffloadPolicy { buffers: 2, ..OffloadPolicy::default() };
    let (trainer, reference) = large_enough(&device, Activations::Offload, policy, 8192).unwrap();
    let Device::Cuda(gpu) = &device else { panic!("a GPU") };
    let used = gpu.driver_used_bytes().unwrap();
    drop(trainer);
    drop(device);
    let (mut ran, mut ended) = (0, 0);
    // A second context of the process may take a little more than the first.
    for missing in 0..16 {
        let device = Device::cuda_within(Some(used + (4 << 25) - (missing << 25))).unwrap();
        match large_enough(&device, Activations::Offload, policy, 8192) {
            Ok((trainer, reports)) => {
                assert_eq!(bits(&reports), bits(&reference), "{missing}");
                println!("{} MiB less: {}", missing * 32, why(&trainer, Optimization::DoubleBuffer));
                ran += 1;
            }
            Err(error) => {
                assert!(error.is::<OutOfMemory>(), "{error:#}");
                println!("{} MiB less: {error:#}", missing * 32);
                ended += 1;
            }
        }
        device.check().unwrap();
    }
    assert!(ran > 0 && ended > 0, "{ran} ran, {ended} ended: the limits tell nothing");
}

#[test]
fn a_carrier_brings_back_what_left_through_pages_and_through_the_ring() {
    let Some(device) = gpu() else { return };
    // Several turns of the ring, and a last piece that is not full.
    let (rows, cols) = (1037_usize, 11_000_usize);
    let bytes = 2 * rows * cols;
    assert!(bytes > 20 << 20);
    let values = |seed| {
        let generator = Philox::new(seed, 0);
        let words = (0..(rows * cols).div_ceil(4) as u64).flat_map(|block| generator.block(block));
        words.take(rows * cols).map(|word| unit_f32(word) - 0.5).collect::<Vec<f32>>()
    };
    for pinned in [3, 1, 0] {
        let mut carrier = Carrier::new(&device, vec![bytes; 3], (pinned * bytes) as u64, Faults::default()).unwrap();
        assert_eq!(carrier.num_pageable(), 3 - pinned);
        let mut want = Vec::new();
        for slot in 0..3 {
            let x = device.tensor(MemoryCategory::Activations, &[rows, cols], values(slot as u64));
            want.push(x.to_vec());
            carrier.store(slot, &x, slot as u32).unwrap();
            carrier.leave(slot, x, slot as u32).unwrap();
        }
        carrier.settle(0);
        let buffer = || device.empty(MemoryCategory::OffloadBuffers, &[rows, cols]);
        for (first, second) in [(2, 1), (0, 2)] {
            let reloads = [
                carrier.reload(first, buffer(), first as u32).unwrap(),
                carrier.reload_behind(second, buffer(), second as u32).unwrap(),
            ];
            let back: Vec<Tensor> = reloads.into_iter().map(|reload| carrier.arrive(reload).unwrap()).collect();
            for (slot, x) in [first, second].into_iter().zip(back) {
                assert!(x.to_vec() == want[slot], "slot {slot}, {pinned} page-locked");
            }
        }
        device.check().unwrap();
    }
}
