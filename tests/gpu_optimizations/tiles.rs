//! The MLP in tiles and packs joined into passes on a GPU.

use serde_json::json;
use tandem::base::rng::{Philox, unit_f32};
use tandem::data::pack::PackedBatch;
use tandem::model::config::ModelConfig;
use tandem::model::transformer::Transformer;
use tandem::tensor::{Device, MemoryCategory};
use tandem::train::config::{Activations, MemoryPolicy, MethodConfig, MethodKind, OptimizerConfig};
use tandem::train::report::{Optimization, StepReport};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup, lora_spec};

use super::super::golden_family::{BF16_ROUNDING, Family, NEVER, error, packed};
use super::{Faults, bits, gpu, offload, run, why};

#[test]
fn an_mlp_in_tiles_gives_the_same_bits_recorded_or_not_offloaded_or_not() {
    let Some(device) = gpu() else { return };
    for family in Family::all() {
        for mlp_rows in [7, 24] {
            let mut reference = None;
            for (activations, buffers) in
                [(Activations::Recompute, 0), (Activations::Offload, 1), (Activations::Offload, 2)]
            {
                for cuda_graphs in [false, true] {
                    let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
                    let offload = offload(buffers);
                    let switches = Switches { activations, offload, memory, cuda_graphs, ..Switches::default() };
                    let (trainer, reports) = run(&family, &device, switches, Faults::default(), 8);
                    let got = bits(&reports);
                    let what = format!("{}: {switches:?}", family.name);
                    assert_eq!(&got, reference.get_or_insert_with(|| got.clone()), "{what}");
                    assert_eq!(trainer.unrecorded(), None, "{what}");
                    let counters = reports.last().unwrap().counters.unwrap();
                    assert_eq!((counters.host_syncs, counters.allocations), (0, 0), "{what}");
                    assert!(why(&trainer, Optimization::MlpTiles).contains(": on ("), "{what}");
                }
            }
        }
    }
}

#[test]
fn joined_packs_give_the_bits_of_one_pack() {
    let Some(device) = gpu() else { return };
    for family in Family::all() {
        let (packs, whole) = (family.documents(), family.batch());
        assert_eq!(PackedBatch::joined(&packs), whole, "{}", family.name);
        let run = |packs: &[PackedBatch], pass_tokens| {
            let memory = MemoryPolicy { pass_tokens, ..MemoryPolicy::default() };
            let mut trainer = family.lora_trainer(&device, Activations::Recompute);
            trainer.set_switches(Switches { memory, ..trainer.switches() });
            let reports: Vec<StepReport> =
                (0..6).map(|_| trainer.step_and_wait(packs, 0.0, &NEVER).unwrap().unwrap()).collect();
            assert_eq!(trainer.unrecorded(), None, "{}", family.name);
            reports
        };
        let one = run(std::slice::from_ref(&whole), 0);
        let joined = run(&packs, whole.total_tokens());
        assert_eq!(bits(&joined), bits(&one), "{}", family.name);
        // In several passes sums come in another order, and batches have other sizes.
        for pass_tokens in [0, whole.total_tokens() / 2] {
            // The first step, before rounding moved an adapter.
            for (apart, one) in run(&packs, pass_tokens).iter().zip(&one).take(1) {
                assert_eq!(apart.total_tokens, one.total_tokens);
                assert_eq!(apart.num_label_tokens, one.num_label_tokens);
                let error = (apart.loss - one.loss).abs() / one.loss;
                assert!(error < BF16_ROUNDING, "{}, passes of {pass_tokens}: {error:.2e}", family.name);
            }
        }
    }
}

/// Gradients of one step of a model of real widths over a document of 2,000 tokens, its loss, and the most that its passes held.
fn first_step(device: &Device, method: &MethodConfig, mlp_rows: usize) -> (Vec<(String, Vec<f32>)>, f64, u64) {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "vocab_size": 512,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "attention_bias": false,
    });
    let config = ModelConfig::from_hf_json(&config.to_string()).unwrap();
    let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
    let switches = Switches { activations: Activations::Recompute, memory, ..Switches::default() };
    let optimizer = OptimizerConfig::default();
    let setup = TrainerSetup { method: method.clone(), optimizer, switches, seed: 1, total_steps: 9 };
    let model = Transformer::random(&config, device, setup.form(lora_spec(method).as_ref()), 1).unwrap();
    let mut trainer = Trainer::new(model, setup).unwrap();
    // B of fresh adapters is zero, and so would gradients of A be.
    let adapters: Vec<_> = trainer.model().adapters().map(|(id, parameter)| (id, parameter.len())).collect();
    for (number, (id, len)) in adapters.into_iter().enumerate() {
        let generator = Philox::new(7, number as u64);
        let words = (0..len.div_ceil(4) as u64).flat_map(|block| generator.block(block));
        let values: Vec<f32> = words.take(len).map(|word| 0.1 * (unit_f32(word) - 0.5)).collect();
        trainer.model_mut().params_mut().set(id, &values);
    }
    device.reset_memory_peaks();
    let ids: Vec<i32> = (0..2000).map(|i| i * 7 % 512).collect();
    let labels: Vec<i32> = ids[1..].iter().copied().chain([-100]).collect();
    let report = trainer.step_and_wait(&[packed(&ids, &labels, &[0, 2000])], 0.0, &NEVER).unwrap().unwrap();
    let gradient = |id, name: &str| (name.to_owned(), trainer.grads().get(id).unwrap().to_vec());
    let trained = trainer.model().params().iter().filter(|(_, parameter)| parameter.trainable);
    let held = |category| matches!(category, MemoryCategory::Activations | MemoryCategory::Workspace);
    let peak = report.memory.categories.iter().filter(|bytes| held(bytes.category)).map(|bytes| bytes.peak_bytes).sum();
    (trained.map(|(id, parameter)| gradient(id, &parameter.name)).collect(), report.loss, peak)
}

#[test]
fn tiles_of_real_widths_give_what_the_whole_gives_and_take_less_memory() {
    let Some(device) = gpu() else { return };
    let lora = |kind, r, lora_dropout| MethodConfig { kind, r, lora_dropout, ..MethodConfig::default() };
    for method in [
        lora(MethodKind::Lora, 16, 0.0),
        lora(MethodKind::Lora, 32, 0.0),
        lora(MethodKind::Lora, 40, 0.0),
        lora(MethodKind::Lora, 16, 0.1),
        lora(MethodKind::Qlora, 16, 0.0),
        lora(MethodKind::Full, 16, 0.0),
    ] {
        let (whole, whole_loss, whole_bytes) = first_step(&device, &method, 0);
        for mlp_rows in [300, 1024] {
            let what = format!("{:?} r{} dropout {}, tiles of {mlp_rows}", method.kind, method.r, method.lora_dropout);
            let (tiled, loss, bytes) = first_step(&device, &method, mlp_rows);
            let errors = tiled.iter().zip(&whole).map(|((name, tiled), (_, whole))| (error(tiled, whole), name));
            let (worst, name) = errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            println!("{what}: {name} differs by {worst:.2e}, {bytes} of {whole_bytes} bytes");
            // Products of other heights may sum in another order, and what they give is rounded to bf16 in every block.
            assert!(worst < 8.0 * BF16_ROUNDING, "{what}: {name} differs by {worst:.2e}");
            assert!((loss - whole_loss).abs() < BF16_ROUNDING * whole_loss, "{what}: {loss} against {whole_loss}");
            assert!(bytes < whole_bytes, "{what}: {bytes} of {whole_bytes} bytes");
        }
    }
}
