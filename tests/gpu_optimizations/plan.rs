//! The memory plan against a real device.

use tandem::model::config::ModelConfig;
use tandem::model::transformer::Transformer;
use tandem::tensor::Device;
use tandem::tensor::cuda::Pool;
use tandem::train::config::{ActivationsChoice, MethodConfig, MethodKind, OptimizerConfig};
use tandem::train::plan::{Machine, Planner, Workload, largest_batch};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup, lora_spec};

use super::super::golden_family::NEVER;
use super::gpu;

const LLAMA_1B: &str = include_str!("../../assets/models/llama-3.2-1b.json");

#[test]
fn a_run_takes_what_its_plan_says_to_the_byte_and_asks_for_two_slabs() {
    if gpu().is_none() {
        return;
    }
    for (kind, activations, tokens) in [
        (MethodKind::Lora, ActivationsChoice::Keep, 2048),
        (MethodKind::Lora, ActivationsChoice::Recompute, 8192),
        (MethodKind::Qlora, ActivationsChoice::Recompute, 4096),
        (MethodKind::Qlora, ActivationsChoice::Offload, 8192),
        (MethodKind::Full, ActivationsChoice::Recompute, 1024),
    ] {
        // One of its own: its arenas are empty.
        let device = Device::cuda().unwrap();
        let Device::Cuda(gpu) = &device else { panic!("a GPU") };
        let config = ModelConfig::from_hf_json(LLAMA_1B).unwrap();
        let setup = TrainerSetup {
            method: MethodConfig { kind, ..MethodConfig::default() },
            optimizer: OptimizerConfig::default(),
            switches: Switches::default(),
            seed: 1,
            total_steps: 10,
        };
        let work = Workload { tokens, longest: tokens / 2, batches: 2 };
        let machine = Machine::of(gpu);
        let planner = Planner { config, setup, activations, memory: None, work, machine };
        let plan = planner.plan();
        assert!(plan.fits(), "{}", plan.why);
        plan.reserve(gpu);
        let need = plan.need().unwrap();
        let lora = lora_spec(&planner.setup.method);
        let setup = TrainerSetup { switches: plan.choice().switches, ..planner.setup.clone() };
        let model = Transformer::random(&planner.config, &device, setup.form(lora.as_ref()), 1).unwrap();
        let mut trainer = Trainer::new(model, setup).unwrap();
        trainer.follow(&plan);
        let batch = largest_batch(work).unwrap();
        assert!(trainer.rehearse(&batch, &NEVER).unwrap());
        let after_rehearsal = gpu.counters().allocations;
        let smaller = largest_batch(Workload { tokens: tokens / 2, longest: 300, batches: 1 }).unwrap();
        for batches in [vec![batch.clone(), smaller.clone()], vec![batch.clone()], vec![smaller, batch]] {
            trainer.step_and_wait(&batches, 0.0, &NEVER).unwrap();
            trainer.step_and_wait(&batches, 0.0, &NEVER).unwrap();
        }
        let what = format!("{kind:?}, {activations:?}, {tokens}");
        let slabs = [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool).slabs);
        assert_eq!(slabs, [need.lasting_bytes, need.pass_bytes], "{what}");
        assert_eq!((after_rehearsal, gpu.counters().allocations), (2, 2), "{what}");
        assert_eq!(device.memory().peak_bytes, need.peak_bytes, "{what}");
        assert_eq!(gpu.pinned_bytes().peak, need.pinned_bytes, "{what}");
        println!(
            "{what}: {} in slabs; {:?} by the driver, {} planned, {} of it before, {} assumed for the library",
            need.slab_bytes(),
            gpu.driver_used_bytes(),
            need.vram_bytes(),
            need.before_bytes,
            need.library_bytes
        );
    }
}
