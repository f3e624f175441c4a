//! Tokens a second of the CPU engine on the starter model: `cargo bench --bench cpu_step [-- tokens steps [full]]`.
//!
//! LoRA r 16 on all linears (or, with `full`, every parameter), one pack of random tokens in documents of 128, every position supervised; recompute and keep.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

use std::sync::atomic::AtomicBool;

use tandem::base::rng::Philox;
use tandem::data::example::Example;
use tandem::data::pack::PackedBatch;
use tandem::model::loading::Checkpoint;
use tandem::model::transformer::Transformer;
use tandem::tensor::{Device, Precision};
use tandem::train::config::{Activations, MethodConfig, MethodKind, OptimizerConfig};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup};

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|arg| arg.parse::<usize>().ok());
    let (tokens, steps) = (numbers.next().unwrap_or(1024), numbers.next().unwrap_or(4));
    let kind = if std::env::args().any(|arg| arg == "full") { MethodKind::Full } else { MethodKind::Lora };
    let path = tandem::base::paths::models().unwrap().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let checkpoint = Checkpoint::open(&path).unwrap();
    for activations in [Activations::Recompute, Activations::Keep] {
        let device = Device::cpu(0, Precision::F32).unwrap();
        let model = Transformer::load(&checkpoint, &device, &mut |_, _| {}).unwrap();
        let vocab = model.config().vocab_size as u32;
        let ids: Vec<i32> = (0..tokens as u64).map(|i| (Philox::new(1, 0).block(i)[0] % vocab) as i32).collect();
        let example =
            |ids: &[i32]| Example { input_ids: ids.to_vec(), labels: ids[1..].iter().copied().chain([-100]).collect() };
        let examples: Vec<Example> = ids.chunks(128).map(example).collect();
        let batch = PackedBatch::from_examples(&examples);
        let setup = TrainerSetup {
            method: MethodConfig { kind, ..MethodConfig::default() },
            optimizer: OptimizerConfig::default(),
            switches: Switches { activations, ..Switches::default() },
            seed: 0,
            total_steps: steps as u64 + 1,
        };
        let mut trainer = Trainer::new(model, setup).unwrap();
        println!("{kind:?}, {activations:?}, {tokens} tokens, {}", device.describe());
        let mut step =
            || trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &AtomicBool::new(false)).unwrap().unwrap();
        step();
        let mut reports: Vec<_> = (0..steps).map(|_| step()).collect();
        reports.sort_by(|a, b| a.step_ms.total_cmp(&b.step_ms));
        let median = &reports[reports.len() / 2];
        println!(
            "  {:.1} tokens/s, step {:.0} ms, peak {} MiB",
            median.tokens_per_sec(),
            median.step_ms,
            median.memory.peak_bytes >> 20
        );
        for time in median.phases.iter().filter(|time| time.total_ms().is_some()) {
            let ms = |ms: Option<f64>| ms.map_or("—".into(), |ms| format!("{ms:.1}"));
            println!(
                "  {:12} forward {:>8} backward {:>8} step {:>8}",
                time.phase.name(),
                ms(time.forward_ms),
                ms(time.backward_ms),
                ms(time.step_ms)
            );
        }
        println!("  not attributed {:.1} ms", median.not_attributed_ms);
    }
}
