//! What a GPU reads and writes over the bus gives the bits that it gives on the device.

use tandem::model::loading::Checkpoint;
use tandem::model::transformer::{Form, Transformer};
use tandem::tensor::{DType, Device, MemoryCategory};
use tandem::train::config::{Activations, MemoryPolicy, MethodConfig, MethodKind, Placement};
use tandem::train::report::Optimization;
use tandem::train::switches::Switches;
use tandem::train::trainer::Trainer;

use super::super::golden_family::{Family, NEVER, adapter_values, set_adapters};
use super::{bits, gpu, steps};

fn in_host() -> MemoryPolicy {
    MemoryPolicy { embedding: Placement::Host, optimizer_state: Placement::Host, ..MemoryPolicy::default() }
}

fn trainer(family: &Family, device: &Device, kind: MethodKind, state_bits: u32, memory: MemoryPolicy) -> Trainer {
    let checkpoint = Checkpoint::open(&family.folder).unwrap();
    let method = MethodConfig { kind, ..family.method() };
    let embedding = if kind == MethodKind::Full { Placement::Device } else { memory.embedding };
    let form = Form { embedding, ..Form::default() };
    let model = Transformer::load_unless_stopped(&checkpoint, device, form, &mut |_, _| {}, &NEVER).unwrap().unwrap();
    let mut setup = family.setup(method, Activations::Recompute, true);
    setup.optimizer.bits = state_bits;
    setup.switches.memory = memory;
    let mut trainer = Trainer::new(model, setup).unwrap();
    if kind == MethodKind::Lora {
        set_adapters(&mut trainer, &family.case);
    }
    trainer
}

fn is_on(trainer: &Trainer, placement: Optimization) -> bool {
    trainer.choices().iter().any(|choice| choice.optimization == placement && choice.on)
}

#[test]
fn mapped_memory_is_written_and_read_like_the_devices() {
    let Some(device) = gpu() else { return };
    let Device::Cuda(gpu) = &device else { panic!("a GPU") };
    let before = gpu.pinned_bytes().now;
    for dtype in [DType::F32, DType::Bf16] {
        let mut x = device.zeros_mapped(MemoryCategory::Weights, &[3, 40], dtype).unwrap();
        assert!(x.is_mapped() && x.to_vec().iter().all(|&x| x == 0.0));
        let values: Vec<f32> = (0..120).map(|i| (i % 64) as f32).collect();
        x.set(&values);
        assert_eq!(x.to_vec(), values);
        x.view_mut().row_range(1, 2).columns(8, 3).set(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
        assert_eq!(x.view().row_range(1, 2).columns(8, 3).to_vec(), [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
        assert_eq!(x.view().row_range(1, 1).columns(7, 1).to_vec(), values[47..48]);
        // Kernels see what the host wrote, and the host what they wrote.
        x.fill_zero();
        assert!(x.to_vec().iter().all(|&x| x == 0.0));
    }
    let mut bytes = device.zero_mapped_bytes(MemoryCategory::Optimizer, 1000).unwrap();
    let values: Vec<u8> = (0..1000).map(|i| i as u8).collect();
    bytes.set(&values);
    assert_eq!(bytes.to_vec(), values);
    let large = device.zeros_mapped(MemoryCategory::Optimizer, &[3 << 20], DType::F32).unwrap();
    assert_eq!(
        gpu.pinned_bytes().now - before,
        (4 << 20) + (12 << 20),
        "small ones share a slab, large ones have their own"
    );
    drop(large);
    assert_eq!(gpu.pinned_bytes().now - before, 4 << 20);
    device.check().unwrap();
}

#[test]
fn what_lies_in_host_memory_changes_no_bit_and_nobody_waits_for_it() {
    let mut tables = 0;
    for family in Family::all() {
        for (kind, state_bits) in [(MethodKind::Lora, 32), (MethodKind::Full, 32), (MethodKind::Full, 8)] {
            // One of its own: page-locked slabs stay for as long as their device.
            let Some(device) = gpu() else { return };
            let run = |memory| {
                let mut trainer = trainer(&family, &device, kind, state_bits, memory);
                let reports = steps(&family, &mut trainer, 6);
                (trainer, reports)
            };
            let what = format!("{}, {kind:?}, {state_bits} bits", family.name);
            let (on_device, reference) = {
                let (trainer, reports) = run(MemoryPolicy::default());
                (adapter_values(&trainer), reports)
            };
            let (moved, reports) = run(in_host());
            assert_eq!(bits(&reports), bits(&reference), "{what}");
            assert_eq!(adapter_values(&moved), on_device, "{what}");
            assert!(is_on(&moved, Optimization::HostOptimizerState), "{what}");
            assert_eq!(moved.unrecorded(), None, "{what}: passes are recorded as ever");
            let counters = reports.last().unwrap().counters.unwrap();
            assert_eq!((counters.host_syncs, counters.allocations), (0, 0), "{what}");
            let state = |reports: &[tandem::train::report::StepReport]| {
                let memory = &reports.last().unwrap().memory;
                let state = memory.categories.iter().find(|bytes| bytes.category == MemoryCategory::Optimizer).unwrap();
                (state.now_bytes, memory.pinned.unwrap().now)
            };
            let ((device_before, pinned_before), (device_after, pinned_after)) = (state(&reference), state(&reports));
            assert!(device_after < device_before && pinned_after > pinned_before, "{what}");
            tables += u32::from(is_on(&moved, Optimization::HostEmbedding));
        }
    }
    assert!(tables > 0, "no family has a table that can lie in host memory");
}

#[test]
fn moving_between_steps_and_going_back_to_a_snapshot_change_no_bit() {
    let Some(device) = gpu() else { return };
    for family in Family::all() {
        for (kind, state_bits) in [(MethodKind::Lora, 32), (MethodKind::Full, 8)] {
            let what = format!("{}, {kind:?}, {state_bits} bits", family.name);
            let mut still = trainer(&family, &device, kind, state_bits, MemoryPolicy::default());
            let reference = bits(&steps(&family, &mut still, 8));
            let mut moved = trainer(&family, &device, kind, state_bits, MemoryPolicy::default());
            let mut got = bits(&steps(&family, &mut moved, 3));
            let switches = moved.switches();
            moved.set_switches(Switches { memory: in_host(), ..switches });
            let snapshot = moved.snapshot();
            got.extend(bits(&steps(&family, &mut moved, 2)));
            moved.restore(&snapshot);
            assert_eq!(bits(&steps(&family, &mut moved, 2)), got[3..], "{what}: from a snapshot");
            moved.set_switches(switches);
            got.extend(bits(&steps(&family, &mut moved, 3)));
            assert_eq!(got, reference, "{what}");
        }
    }
    device.check().unwrap();
}
