//! The engine against values computed by Transformers and PEFT (`tests/golden/README.md`).
//!
//! Every folder with a `case.safetensors` is a family; other values, shapes and documents of the same layout must pass too (`TANDEM_GOLDEN`).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;

use golden_family::{
    Family, NEVER, adapter_values, assert_close, assert_within_bf16, bf16_bound, bf16_deviations, bf16_errors, device,
    full_gradients, golden_file, packed, set_adapters, smollm2,
};
use tandem::data::pack::PackedBatch;
use tandem::formats::safetensors::SafetensorsFile;
use tandem::layers::moe::Choices;
use tandem::model::generate::greedy;
use tandem::tensor::{Device, Precision};
use tandem::train::batch::upload;
use tandem::train::config::{
    Activations, AttentionPath, MemoryPolicy, MethodConfig, MethodKind, OptimizerConfig, Routing, ScheduleKind,
};
use tandem::train::report::MoeReport;
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup};

/// f32 bound by norm for logits, gradients and losses (`tests/golden/README.md`).
const F32_BOUND: f64 = 1e-4;
/// What blocks keep, and rows of a tile of the MLP (0: all at once).
const PASSES: [(Activations, usize); 3] =
    [(Activations::Keep, 0), (Activations::Recompute, 0), (Activations::Recompute, 7)];
/// Bound for what differs in the order of sums alone; gradients of sinks are sums of terms of both signs.
const ORDER_BOUND: f64 = 5e-6;
/// Bound for adapters after several steps: AdamW amplifies tiny gradients.
const ADAPTER_BOUND: f64 = 1e-2;

#[test]
fn golden_logits_and_loss_of_one_packed_batch() {
    for family in Family::all() {
        let model = family.model(&device(2));
        let batch = family.batch();
        let uploaded = upload(&model, &batch).unwrap();
        let rows: Vec<i32> = (0..batch.input_ids.len() as i32).collect();
        let logits = model.logits(&uploaded, &rows, &NEVER).unwrap();
        assert_close(&format!("{}: logits", family.name), logits.f32s(), &family.f32s("logits"), F32_BOUND);
        let losses = model.losses(&uploaded, &NEVER).unwrap().to_vec();
        let sum: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
        assert_close(&format!("{}: loss_sum", family.name), &[sum as f32], &family.f32s("loss_sum"), F32_BOUND);
    }
}

#[test]
fn golden_gradients_of_every_parameter() {
    for family in Family::all() {
        let batch = family.batch();
        let weight = 1.0 / batch.num_label_tokens as f32;
        for (activations, mlp_rows) in PASSES {
            let mut model = family.model(&device(2));
            model.set_mlp_rows(mlp_rows);
            let (sum, grads) = full_gradients(&mut model, std::slice::from_ref(&batch), weight, activations);
            let mean = (sum / batch.num_label_tokens as f64) as f32;
            assert_close(&format!("{}: loss_mean", family.name), &[mean], &family.f32s("loss_mean"), F32_BOUND);
            let mut compared = 0;
            for (id, parameter) in model.params().iter() {
                let Some(want) = family.gradient(parameter) else { continue };
                let got = grads.get(id).unwrap().f32s();
                assert_close(
                    &format!("{}: {activations:?}, tiles of {mlp_rows}, grad.{}", family.name, parameter.name),
                    got,
                    &want,
                    F32_BOUND,
                );
                compared += 1;
            }
            let in_reference = family.case.names().filter(|name| name.starts_with("grad.")).count();
            assert_eq!(compared, in_reference, "{}: every reference gradient is compared", family.name);
        }
    }
}

#[test]
fn golden_adapter_gradients_and_six_adamw_steps() {
    for family in Family::all() {
        for (activations, mlp_rows) in PASSES {
            let mut trainer = family.lora_trainer(&device(2), activations);
            let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
            trainer.set_switches(Switches { memory, ..trainer.switches() });
            let batch = family.batch();
            let mut losses = Vec::new();
            for step in 0..family.f32s("lora_loss").len() {
                let report = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
                losses.push(report.loss as f32);
                if step > 0 {
                    continue;
                }
                for (id, parameter) in trainer.model().params().iter().filter(|(_, p)| p.trainable) {
                    let want = family.f32s(&format!("lora_grad.{}", parameter.name));
                    let got = trainer.grads().get(id).unwrap().to_vec();
                    assert_close(&format!("{}: lora_grad.{}", family.name, parameter.name), &got, &want, F32_BOUND);
                }
            }
            for (step, (got, want)) in losses.iter().zip(family.f32s("lora_loss")).enumerate() {
                assert_close(&format!("{}: lora_loss[{step}]", family.name), &[*got], &[want], F32_BOUND);
            }
            let after = tandem::export::adapter::load(&family.folder.join("adapter_after_6_steps")).unwrap();
            assert_eq!(after.tensors.len(), trainer.model().adapters().count());
            for tensor in after.tensors {
                let ours = trainer.model().adapters().find(|(_, p)| tensor.name.contains(&p.name));
                let (id, _) = ours.unwrap_or_else(|| panic!("{}: no adapter matrix for {}", family.name, tensor.name));
                assert_close(
                    &format!("{}: {} after six steps", family.name, tensor.name),
                    &trainer.model().params().to_vec(id),
                    &tensor.data,
                    ADAPTER_BOUND,
                );
            }
        }
    }
}

#[test]
fn golden_adapters_on_experts_follow_peft_in_every_routing() {
    for family in Family::all() {
        let path = family.folder.join("case_experts.safetensors");
        if !path.exists() {
            continue;
        }
        let case = SafetensorsFile::open(&path).unwrap();
        let method = family.method_of("expert_adapter_after_4_steps");
        let mut reference: Option<Vec<Vec<f32>>> = None;
        for (routing, (activations, mlp_rows)) in
            [Routing::Grouped, Routing::Sorted, Routing::PerExpert].into_iter().zip(PASSES)
        {
            let mut setup = family.setup(method.clone(), activations, true);
            (setup.switches.routing, setup.switches.memory.mlp_rows) = (routing, mlp_rows);
            let mut trainer = Trainer::new(family.model(&device(2)), setup).unwrap();
            set_adapters(&mut trainer, &case);
            let before = adapter_values(&trainer);
            let batch = family.batch();
            for (step, want) in case.to_f32("lora_loss").unwrap().into_iter().enumerate() {
                let report = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
                let what = format!("{}: {routing:?}, lora_loss[{step}]", family.name);
                assert_close(&what, &[report.loss as f32], &[want], F32_BOUND);
                if step > 0 {
                    continue;
                }
                let model = trainer.model();
                for (id, parameter) in model.adapters() {
                    let want = case.to_f32(&format!("lora_grad.{}", parameter.name)).unwrap();
                    let got = model.adapter_layout(id, trainer.grads().get(id).unwrap().to_vec());
                    assert_close(&format!("{}: lora_grad.{}", family.name, parameter.name), &got, &want, F32_BOUND);
                }
                assert_experts_moved(&family.name, &trainer, &before, &report.moe.unwrap());
            }
            let after = tandem::export::adapter::load(&family.folder.join("expert_adapter_after_4_steps")).unwrap();
            after.check_fits(trainer.model().config()).unwrap();
            assert_eq!(after.tensors.len(), trainer.model().adapters().count());
            for tensor in after.tensors {
                let model = trainer.model();
                let name = tensor.name.trim_start_matches("base_model.model.").trim_end_matches(".weight");
                let id = model.params().find(name).unwrap_or_else(|| panic!("{}: no {name}", family.name));
                let got = model.adapter_layout(id, model.params().to_vec(id));
                assert_close(&format!("{}: {name} after four steps", family.name), &got, &tensor.data, ADAPTER_BOUND);
            }
            // Tiles change the order of sums; all else is the same arithmetic.
            let values = adapter_values(&trainer);
            if mlp_rows == 0 {
                assert!(reference.is_none_or(|reference| reference == values), "{}: {routing:?} differs", family.name);
            }
            reference = Some(values);
        }
    }
}

/// Every expert that got tokens has moved in both of its adapter matrices, and no other has.
fn assert_experts_moved(family: &str, trainer: &Trainer, before: &[Vec<f32>], report: &MoeReport) {
    let model = trainer.model();
    let of_experts = model.adapters().zip(before).filter(|((_, p), _)| p.name.contains(".mlp.experts"));
    let mut moved = 0;
    for ((id, parameter), before) in of_experts {
        let layer: usize = parameter.name.split('.').nth(2).unwrap().parse().unwrap();
        let tokens = &report.tokens_per_expert[layer];
        let len = before.len() / tokens.len();
        let values = model.params().to_vec(id);
        for (expert, tokens) in tokens.iter().enumerate() {
            let changed = values[expert * len..][..len] != before[expert * len..][..len];
            // Weight decay moves what is not zero, gradient or no gradient.
            assert!(changed || *tokens == 0, "{family}: expert {expert} of {} stayed", parameter.name);
            moved += usize::from(changed);
        }
    }
    assert!(moved > 0, "{family}: nothing moved");
}

#[test]
fn golden_routings_agree_and_bf16_chooses_nearly_the_same_experts() {
    for family in Family::all() {
        let Some(choices) = family.choices() else { continue };
        let run = |routing| {
            let mut trainer = family.lora_trainer(&device(2), Activations::Recompute);
            trainer.set_switches(Switches { routing, ..trainer.switches() });
            let batch = family.batch();
            let step = |_| trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
            let reports: Vec<_> = (0..3).map(step).collect();
            let losses: Vec<u64> = reports.iter().map(|report| report.loss.to_bits()).collect();
            (losses, reports.last().unwrap().moe.clone().unwrap().tokens_per_expert, adapter_values(&trainer))
        };
        let reference = run(Routing::Grouped);
        for routing in [Routing::Sorted, Routing::PerExpert] {
            assert!(run(routing) == reference, "{}: {routing:?} differs", family.name);
        }
        let tokens = family.batch().input_ids.len() as u64;
        for layer in &reference.1 {
            let all: u64 = layer.iter().sum();
            assert_eq!(all % tokens, 0, "{}: every token goes to as many experts", family.name);
        }
        let mut model = family.model(&Device::cpu(2, Precision::Bf16).unwrap());
        model.set_choices(Some(Choices::default()));
        let batch = upload(&model, &family.batch()).unwrap();
        model.losses(&batch, &NEVER).unwrap();
        let noted = model.choices().unwrap().noted.lock().unwrap();
        let k = model.config().moe.as_ref().unwrap().num_experts_per_tok;
        // Which experts a token goes to, in whichever order.
        let tokens = noted.iter().zip(&choices).flat_map(|(ours, f32s)| ours.chunks(k).zip(f32s.chunks(k)));
        let (mut equal, mut all) = (0, 0);
        tokens.for_each(|(ours, f32s)| {
            (equal, all) = (equal + ours.iter().filter(|expert| f32s.contains(expert)).count(), all + k);
        });
        println!("{}: bf16 chooses {equal} of {all} experts as f32 does", family.name);
        assert!(equal * 100 >= all * 95, "{}: {equal} of {all}", family.name);
    }
}

#[test]
fn golden_auxiliary_losses_of_routers_are_those_of_transformers() {
    let mut compared = 0;
    for family in Family::all() {
        for (activations, mlp_rows) in PASSES {
            let Some((model, of)) = family.with_auxiliary_loss(&device(2)) else { continue };
            let want: Vec<f32> = serde_json::from_value(of["losses"].clone()).unwrap();
            let mut setup = family.setup(family.method(), activations, false);
            setup.switches.memory.mlp_rows = mlp_rows;
            let mut trainer = Trainer::new(model, setup).unwrap();
            set_adapters(&mut trainer, &family.case);
            let batch = family.batch();
            for (step, want) in want.iter().enumerate() {
                let report = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
                let what = format!("{}: {activations:?}, tiles of {mlp_rows}, loss[{step}]", family.name);
                assert_close(&what, &[report.loss as f32], &[*want], F32_BOUND);
                for (id, parameter) in trainer.model().adapters().filter(|_| step == 0) {
                    let want = of["lora_grad"][&parameter.name].as_f64().unwrap() as f32;
                    let values = trainer.grads().get(id).unwrap().to_vec();
                    let norm = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt() as f32;
                    assert_close(&format!("{what}, {}", parameter.name), &[norm], &[want], F32_BOUND);
                }
            }
            compared += 1;
        }
    }
    println!("auxiliary losses: {compared} runs compared");
}

#[test]
fn golden_full_fine_tuning_follows_the_losses_of_transformers() {
    let mut compared = 0;
    for family in Family::all() {
        let Some(want) = family.full_finetune() else { continue };
        let exact = family.full_losses(&device(2), &want, |_| ());
        for (step, (got, want)) in exact.iter().zip(&want.losses).enumerate() {
            assert_close(&format!("{}: loss[{step}]", family.name), &[*got], &[*want], F32_BOUND);
        }
        let bf16 = family.full_losses(&Device::cpu(2, Precision::Bf16).unwrap(), &want, |_| ());
        let bound = bf16_bound("loss", want.bf16_error);
        assert_close(&format!("{}: losses in bf16", family.name), &bf16, &want.losses, bound);
        // State in 8 bits takes nearly the same way: nearer than the arithmetic of bf16 does.
        let in_8_bits = family.full_losses(&device(2), &want, |setup| setup.optimizer.bits = 8);
        assert_ne!(in_8_bits, exact, "{}: some tensors are large enough for 8 bits", family.name);
        assert_close(&format!("{}: losses with 8-bit state", family.name), &in_8_bits, &want.losses, bound / 4.0);
        compared += 1;
    }
    assert!(compared > 0, "no family has losses of full fine-tuning");
}

#[test]
fn golden_packed_equals_unpacked_and_accumulation_of_documents() {
    for family in Family::all() {
        let batch = family.batch();
        let weight = 1.0 / batch.num_label_tokens as f32;
        let (packed_sum, packed) = full_gradients(&mut family.model(&device(2)), &[batch], weight, Activations::Keep);
        let mut model = family.model(&device(2));
        let (sum, grads) = full_gradients(&mut model, &family.documents(), weight, Activations::Keep);
        assert!((packed_sum - sum).abs() <= 1e-6 * sum, "{}: {packed_sum} {sum}", family.name);
        for (id, parameter) in model.params().iter() {
            let (a, b) = (packed.get(id).unwrap().f32s(), grads.get(id).unwrap().f32s());
            assert_close(&format!("{}: {}", family.name, parameter.name), a, b, ORDER_BOUND);
        }
    }
}

#[test]
fn golden_masked_attention_equals_varlen() {
    for family in Family::all() {
        let run = |path| {
            let mut trainer = family.lora_trainer(&device(2), Activations::Recompute);
            trainer.model_mut().set_attention_path(path);
            let batch = [family.batch()];
            let held_out = trainer.evaluate(&batch, &NEVER).unwrap().unwrap().loss;
            let trained = trainer.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap().loss;
            let params = trainer.model().params().iter().filter(|(_, parameter)| parameter.trainable);
            let of = |id, name: &str| (name.to_owned(), trainer.grads().get(id).unwrap().to_vec());
            let grads: Vec<(String, Vec<f32>)> = params.map(|(id, parameter)| of(id, &parameter.name)).collect();
            ([held_out as f32, trained as f32], grads)
        };
        let ((losses, grads), (varlen_losses, varlen_grads)) = (run(AttentionPath::Masked), run(AttentionPath::Varlen));
        assert_close(&format!("{}: losses", family.name), &losses, &varlen_losses, 1e-6);
        assert!(!grads.is_empty(), "{}", family.name);
        for ((name, masked), (_, varlen)) in grads.iter().zip(&varlen_grads) {
            assert_close(&format!("{}: {name}", family.name), masked, varlen, 2e-6);
            let want = family.f32s(&format!("lora_grad.{name}"));
            assert_close(&format!("{}: lora_grad.{name}", family.name), masked, &want, F32_BOUND);
        }
    }
}

#[test]
fn golden_accumulation_of_four_equals_one() {
    for family in Family::all() {
        let run = |steps_of: &dyn Fn(Vec<PackedBatch>) -> Vec<PackedBatch>| {
            let mut trainer = family.lora_trainer(&device(2), Activations::Recompute);
            let micro_batches = steps_of(family.documents());
            let losses: Vec<f32> = (0..4)
                .map(|_| trainer.step_and_wait(&micro_batches, 0.0, &NEVER).unwrap().unwrap().loss as f32)
                .collect();
            losses
        };
        let merge = |batches: &[PackedBatch]| {
            let mut cu_seqlens = vec![0];
            let (mut ids, mut labels) = (Vec::new(), Vec::new());
            for batch in batches {
                ids.extend(&batch.input_ids);
                labels.extend(&batch.labels);
                cu_seqlens.push(ids.len() as i32);
            }
            packed(&ids, &labels, &cu_seqlens)
        };
        let one = run(&|documents| vec![merge(&documents)]);
        let four = run(&|documents| documents.chunks(documents.len().div_ceil(4)).map(merge).collect());
        assert_close(&format!("{}: losses", family.name), &four, &one, 1e-5);
    }
}

#[test]
fn golden_recompute_equals_keep_and_threads_do_not_matter_bit_for_bit() {
    for family in Family::all() {
        let run = |threads, activations| {
            let mut trainer = family.lora_trainer(&device(threads), activations);
            let batch = family.batch();
            let losses: Vec<u64> = (0..4)
                .map(|_| {
                    trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss.to_bits()
                })
                .collect();
            let adapters: Vec<Vec<f32>> = adapter_values(&trainer);
            (losses, adapters)
        };
        let reference = run(1, Activations::Keep);
        for (threads, activations) in [(1, Activations::Recompute), (2, Activations::Keep), (5, Activations::Recompute)]
        {
            assert!(run(threads, activations) == reference, "{}: {threads} threads, {activations:?}", family.name);
        }
    }
}

#[test]
fn golden_bf16_is_as_near_to_f32_as_bf16_in_transformers() {
    for family in Family::all() {
        let device = Device::cpu(2, Precision::Bf16).unwrap();
        let ours = bf16_deviations(&family, &device, AttentionPath::Varlen, 0);
        let logits = ours["logits"];
        let Some(theirs) = bf16_errors(&family) else {
            println!("{}: no bf16_errors.json; bf16 logits differ from f32 by {logits:.2e}", family.name);
            assert!(logits > 1e-4, "{}: bf16 must round", family.name);
            // A few dozen roundings in a row add up to a few of them.
            assert!(logits < 3e-2, "{}: {logits:.2e}", family.name);
            continue;
        };
        let compared = theirs.keys().filter(|name| ours.contains_key(*name)).count();
        assert_eq!(compared, theirs.len(), "{}: every tensor of bf16_errors.json is compared", family.name);
        assert_within_bf16(&family, &ours, &theirs);
        assert!(logits > 1e-3, "{}: bf16 must round", family.name);
    }
}

#[test]
fn golden_smollm2_log_probabilities_and_adapter_losses() {
    let case = SafetensorsFile::open(&golden_file("smollm2.safetensors")).unwrap();
    let (ids, labels) = (case.to_i32("input_ids").unwrap(), case.to_i32("labels").unwrap());
    let batch = packed(&ids, &labels, &case.to_i32("cu_seqlens").unwrap());
    let model = smollm2(&device(0));
    let uploaded = upload(&model, &batch).unwrap();
    let rows: Vec<i32> = (0..ids.len() as i32).collect();
    let logits = model.logits(&uploaded, &rows, &NEVER).unwrap();
    let vocab = model.config().vocab_size;
    let top1: Vec<i32> = logits
        .f32s()
        .chunks_exact(vocab)
        .map(|row| (0..vocab).fold(0, |best, id| if row[id] > row[best] { id } else { best }) as i32)
        .collect();
    let want = case.to_i32("top1").unwrap();
    let different = top1.iter().zip(&want).filter(|(a, b)| a != b).count();
    assert_eq!(different, 0, "top-1 ids of {} positions", want.len());

    let losses = model.losses(&uploaded, &NEVER).unwrap().to_vec();
    let want = case.to_f32("label_logprob").unwrap();
    let supervised: Vec<usize> = (0..labels.len()).filter(|&i| labels[i] != -100).collect();
    let want: Vec<f32> = supervised.iter().map(|&i| -want[i]).collect();
    assert_close("label_logprob", &losses, &want, F32_BOUND);
    let mean = losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64;
    assert_close("loss_mean", &[mean as f32], &case.to_f32("loss_mean").unwrap(), F32_BOUND);

    let method = MethodConfig {
        kind: MethodKind::Lora,
        r: 4,
        lora_alpha: 8.0,
        target_modules: vec!["q_proj".into(), "v_proj".into()],
        ..MethodConfig::default()
    };
    let optimizer = OptimizerConfig {
        lr: 2e-4,
        weight_decay: 0.01,
        max_grad_norm: 0.0,
        schedule: ScheduleKind::Constant,
        ..OptimizerConfig::default()
    };
    let setup = TrainerSetup { method, optimizer, switches: Switches::default(), seed: 0, total_steps: 5 };
    let mut trainer = Trainer::new(model, setup).unwrap();
    set_adapters(&mut trainer, &case);
    for (step, want) in case.to_f32("lora_loss").unwrap().into_iter().enumerate() {
        let report = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
        assert_close(&format!("lora_loss[{step}]"), &[report.loss as f32], &[want], F32_BOUND);
    }
}

#[test]
fn golden_smollm2_knows_the_capital_of_france() {
    let text = std::fs::read_to_string(golden_file("smollm2_generation.json")).unwrap();
    let case: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |key: &str| -> Vec<i32> { serde_json::from_value(case[key].clone()).unwrap() };
    let stop = case["stop_id"].as_i64().unwrap() as i32;
    let limit = case["max_new_tokens"].as_u64().unwrap() as usize;
    let answer = greedy(&smollm2(&device(0)), &ids("prompt_ids"), limit, &[stop]).unwrap();
    assert_eq!(answer, ids("generated_ids"));
    assert!(case["text"].as_str().unwrap().contains("Paris"));
}
