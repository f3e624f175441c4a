//! The whole engine on tiny random models: gradients against finite differences, packing, dropout, clipping, warm-up, stopping, errors.

use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::base::error::NonFinite;
use crate::data::example::Example;
use crate::data::options::Overlong;
use crate::data::pack::{PackOptions, pack, pad};
use crate::layers::parameter::ParamId;
use crate::model::testing::{VOCAB, tiny};
use crate::ops::cross_entropy::LossSum;
use crate::ops::testing::{Values, assert_close, cpu, dot};
use crate::tensor::{Device, MemoryCategory};
use crate::train::config::ScheduleKind;
use crate::train::config::{Activations, AttentionPath};

static NEVER: AtomicBool = AtomicBool::new(false);

/// A document of random tokens; about three of four labels are trained.
fn document(values: &mut Values, len: usize) -> Example {
    let input_ids: Vec<i32> = (0..len).map(|_| ((values.next() + 1.0) / 2.0 * VOCAB as f32) as i32).collect();
    let labels = (1..=len).map(|next| match input_ids.get(next) {
        Some(&id) if values.next() > -0.5 => id,
        _ => IGNORE_INDEX,
    });
    Example { labels: labels.collect(), input_ids }
}

fn documents(seed: u64, lengths: &[usize]) -> Vec<Example> {
    let mut values = Values::new(seed);
    lengths.iter().map(|&len| document(&mut values, len)).collect()
}

fn batch(seed: u64, lengths: &[usize]) -> PackedBatch {
    PackedBatch::from_examples(&documents(seed, lengths))
}

fn optimizer() -> OptimizerConfig {
    OptimizerConfig { lr: 1e-2, schedule: ScheduleKind::Constant, max_grad_norm: 0.0, ..OptimizerConfig::default() }
}

fn setup(method: MethodConfig, activations: Activations) -> TrainerSetup {
    let switches = Switches { activations, ..Switches::default() };
    TrainerSetup { method, optimizer: optimizer(), switches, seed: 5, total_steps: 10 }
}

fn full() -> MethodConfig {
    MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() }
}

fn lora(lora_dropout: f64) -> MethodConfig {
    MethodConfig { r: 3, lora_alpha: 6.0, lora_dropout, ..MethodConfig::default() }
}

fn trainer(device: &Device, model: &Value, setup: TrainerSetup) -> Trainer {
    Trainer::new(tiny(device, model), setup).unwrap()
}

/// Gives every `lora_B` random values, so that gradients reach `lora_A`.
fn fill_adapters(trainer: &mut Trainer) {
    let mut values = Values::new(23);
    for (id, _, mut value) in trainable(trainer).into_iter().filter(|(_, name, _)| name.ends_with("lora_B")) {
        value.iter_mut().for_each(|x| *x = 0.3 * values.next());
        trainer.model.params_mut().set(id, &value);
    }
}

fn step(trainer: &mut Trainer, batches: &[PackedBatch]) -> StepReport {
    trainer.step_and_wait(batches, 0.0, &NEVER).unwrap().unwrap()
}

fn trainable(trainer: &Trainer) -> Vec<(ParamId, String, Vec<f32>)> {
    let params = trainer.model.params();
    params.iter().filter(|(_, p)| p.trainable).map(|(id, p)| (id, p.name.clone(), params.to_vec(id))).collect()
}

fn assert_same_bits(what: &str, a: &Trainer, b: &Trainer) {
    for ((_, name, a), (_, _, b)) in trainable(a).iter().zip(&trainable(b)) {
        assert!(a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())), "{what}: {name}");
    }
}

/// Loss sum and gradients of the mean loss over `batches`, without an update.
fn gradients(trainer: &mut Trainer, batches: &[PackedBatch]) -> f64 {
    let num_label_tokens: usize = batches.iter().map(|b| b.num_label_tokens).sum();
    trainer.grads.zero();
    let Trainer { model, grads, setup, .. } = trainer;
    let options = PassOptions {
        weight: 1.0 / num_label_tokens as f32,
        share: 1.0,
        activations: setup.switches.activations,
        dropout: None,
        stop: &NEVER,
    };
    let mut loss = LossSum::new(model.device());
    for batch in batches {
        model.forward_backward(grads, &mut loss, &upload(model, batch).unwrap(), options).unwrap();
    }
    loss.read()
}

/// Checks the gradient of every trainable parameter along a direction of length 1 that is half gradient, half random.
fn assert_gradients(what: &str, trainer: &mut Trainer, batch: &PackedBatch) {
    gradients(trainer, std::slice::from_ref(batch));
    let mut values = Values::new(31);
    for (id, name, start) in trainable(trainer) {
        let gradient = trainer.grads.get(id).unwrap().to_vec();
        let unit = |x: Vec<f32>| {
            let norm = dot(&x, &x).sqrt() as f32;
            assert!(norm > 0.0, "{what}: the gradient of {name} is zero");
            x.into_iter().map(|x| x / norm).collect::<Vec<f32>>()
        };
        let mixed = unit(gradient.clone()).into_iter().zip(unit(values.vec(start.len()))).map(|(g, r)| g + r);
        let direction = unit(mixed.collect());
        let h = 1e-2f32;
        let mut loss = |step: f32| {
            let moved: Vec<f32> = start.iter().zip(&direction).map(|(w0, d)| w0 + step * d).collect();
            trainer.model.params_mut().set(id, &moved);
            trainer.evaluate(std::slice::from_ref(batch), &NEVER).unwrap().unwrap().loss
        };
        let numeric = (loss(h) - loss(-h)) / (2.0 * f64::from(h));
        loss(0.0);
        let analytic = dot(&gradient, &direction);
        let error = (numeric - analytic).abs();
        assert!(
            error <= 1e-2 * analytic.abs() + 1e-4,
            "{what}: {name}: {analytic} by formula, {numeric} by difference"
        );
    }
}

const MODELS: [&str; 5] = ["tied llama", "llama with biases", "mistral", "mistral that sees one token", "qwen3"];

fn model(name: &str) -> Value {
    match name {
        "tied llama" => json!({"tie_word_embeddings": true}),
        "llama with biases" => json!({"attention_bias": true, "mlp_bias": true}),
        "mistral" => json!({"model_type": "mistral", "sliding_window": 4}),
        "mistral that sees one token" => json!({"model_type": "mistral", "sliding_window": 1}),
        _ => json!({"model_type": "qwen3", "tie_word_embeddings": true, "head_dim": 10}),
    }
}

#[test]
fn full_gradients_agree_with_finite_differences() {
    let batch = batch(1, &[9, 1, 14, 2, 70]);
    for name in MODELS {
        for activations in [Activations::Keep, Activations::Recompute] {
            let mut trainer = trainer(&cpu(2), &model(name), setup(full(), activations));
            if name.ends_with("sees one token") {
                // Alone in its softmax a token's weight is 1, whatever q and k are: they train nothing, and their gradients are noise.
                let frozen = |n: &str| n.contains("q_proj") || n.contains("k_proj");
                gradients(&mut trainer, std::slice::from_ref(&batch));
                for (id, name, _) in trainable(&trainer).into_iter().filter(|(_, name, _)| frozen(name)) {
                    let gradient = trainer.grads.get(id).unwrap().f32s();
                    assert!(dot(gradient, gradient).sqrt() < 1e-6, "{name}");
                }
                for (id, _, _) in trainable(&trainer).into_iter().filter(|(_, name, _)| frozen(name)) {
                    trainer.model.params_mut().set_trainable(id, false);
                }
            }
            assert_gradients(&format!("{name}, {activations:?}"), &mut trainer, &batch);
        }
    }
}

#[test]
fn adapter_gradients_agree_with_finite_differences_also_above_frozen_blocks() {
    let batch = batch(2, &[5, 30, 1]);
    for layers in [vec![], vec![1], vec![2, 0]] {
        for modules in [vec!["all-linear"], vec!["q_proj", "v_proj"], vec!["down_proj"]] {
            let method = MethodConfig {
                layers_to_transform: layers.clone(),
                target_modules: modules.iter().map(|&m| m.to_owned()).collect(),
                use_rslora: true,
                ..lora(0.0)
            };
            let mut trainer = trainer(&cpu(2), &model("qwen3"), setup(method, Activations::Recompute));
            fill_adapters(&mut trainer);
            assert_gradients(&format!("{layers:?} {modules:?}"), &mut trainer, &batch);
        }
    }
}

#[test]
fn a_tied_table_gets_the_gradients_of_both_its_uses() {
    // 7 is only read, 9 is only predicted, 11 is neither.
    let example = Example { input_ids: vec![7, 8, 9], labels: vec![8, 9, IGNORE_INDEX] };
    let batch = PackedBatch::from_examples(&[example]);
    let table_gradient = |tied: bool| {
        let mut trainer =
            trainer(&cpu(1), &json!({"tie_word_embeddings": tied}), setup(full(), Activations::Recompute));
        if !tied {
            // The same model with two tables.
            let params = trainer.model.params_mut();
            let [table, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| params.find(name).unwrap());
            params.set(head, &params.to_vec(table));
        }
        gradients(&mut trainer, std::slice::from_ref(&batch));
        let of = |name: &str| {
            let found = trainable(&trainer).into_iter().find(|(_, n, _)| n == name);
            found.map(|(id, ..)| trainer.grads.get(id).unwrap().to_vec())
        };
        (of("model.embed_tokens.weight").unwrap(), of("lm_head.weight"))
    };
    let ((tied, none), (embedding, Some(head))) = (table_gradient(true), table_gradient(false)) else {
        panic!("an untied model has a head of its own")
    };
    assert_eq!(none, None);
    let sum: Vec<f32> = embedding.iter().zip(&head).map(|(a, b)| a + b).collect();
    assert_close("tied", &tied, &sum, 1e-5);
    let row = |x: &[f32], id: usize| dot(&x[id * 20..][..20], &x[id * 20..][..20]).sqrt();
    assert!(row(&embedding, 7) > 1e-4 && row(&embedding, 11) == 0.0);
    assert!(row(&head, 9) > 1e-4 && row(&head, 11) > 0.0, "every logit takes part in the softmax");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn packed_and_padded_batches_train_like_single_documents(
        lengths in prop::collection::vec(1usize..24, 1..9), seed in 0u64..1000, which in 0..MODELS.len(), packing: bool,
    ) {
        let examples = documents(seed, &lengths);
        let single: Vec<PackedBatch> = examples.iter().map(|e| PackedBatch::from_examples([e])).collect();
        prop_assume!(single.iter().any(|b| b.num_label_tokens > 0));
        let options = PackOptions { packing, pack_len: 40, overlong: Overlong::Truncate, pad_id: 0 };
        let packed = if packing { pack(&examples, &options, seed) } else { pad(&examples, &options, seed) }.unwrap();
        let run = |batches: &[PackedBatch]| {
            let mut trainer = trainer(&cpu(2), &model(MODELS[which]), setup(full(), Activations::Keep));
            (gradients(&mut trainer, batches), trainer)
        };
        let ((loss, one), (packed_loss, all)) = (run(&single), run(&packed.batches));
        prop_assert!((loss - packed_loss).abs() <= 1e-5 * loss, "{loss} {packed_loss}");
        for (id, name, _) in trainable(&one) {
            let (a, b) = (all.grads.get(id).unwrap().f32s(), one.grads.get(id).unwrap().f32s());
            let difference: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
            let (error, size) = (dot(&difference, &difference).sqrt(), dot(b, b).sqrt());
            // Gradients that are zero but for rounding have no relative error.
            prop_assert!(error <= 1e-4 * size + 1e-6, "{}: {name}: {error} of {size}", MODELS[which]);
        }
    }
}

#[test]
fn dropout_masks_come_again_in_recompute_and_on_any_number_of_threads() {
    let batches = [batch(3, &[20, 30]), batch(4, &[50])];
    let run = |threads, activations| {
        let mut trainer = trainer(&cpu(threads), &model("tied llama"), setup(lora(0.3), activations));
        let losses: Vec<u64> = (0..4).map(|_| step(&mut trainer, &batches).loss.to_bits()).collect();
        (losses, trainer)
    };
    let (losses, kept) = run(1, Activations::Keep);
    for (threads, activations) in [(1, Activations::Recompute), (3, Activations::Keep), (3, Activations::Recompute)] {
        let (other_losses, other) = run(threads, activations);
        assert_eq!(losses, other_losses, "{threads} threads, {activations:?}");
        assert_same_bits("adapters", &kept, &other);
    }
}

#[test]
fn dropout_differs_by_step_and_micro_batch_and_is_off_in_evaluation() {
    let batch = batch(3, &[40]);
    let with_dropout = |p| {
        let mut setup = setup(lora(p), Activations::Recompute);
        setup.optimizer.lr = 0.0;
        let mut trainer = trainer(&cpu(2), &model("tied llama"), setup);
        fill_adapters(&mut trainer);
        trainer
    };
    let mut plain = with_dropout(0.0);
    let without = step(&mut plain, std::slice::from_ref(&batch)).loss;
    let mut trainer = with_dropout(0.5);
    let evaluated = trainer.evaluate(std::slice::from_ref(&batch), &NEVER).unwrap().unwrap().loss;
    assert!((evaluated - without).abs() < 1e-6, "{evaluated} {without}");
    // With a learning rate of 0 only the masks differ between steps.
    let (one, two) =
        (step(&mut trainer, std::slice::from_ref(&batch)), step(&mut trainer, std::slice::from_ref(&batch)));
    assert!((one.loss - two.loss).abs() > 1e-4 && (one.loss - without).abs() > 1e-4, "{} {}", one.loss, two.loss);
    // The mean over two micro-batches of the same data is not that of one: each has its own mask.
    let mut again = with_dropout(0.5);
    let pair = step(&mut again, &[batch.clone(), batch.clone()]);
    assert!((pair.loss - one.loss).abs() > 1e-4);
}

#[test]
fn every_trainable_tensor_moves() {
    let batch = batch(6, &[61, 40, 3]);
    for name in ["tied llama", "llama with biases", "qwen3"] {
        for method in [lora(0.1), full()] {
            let mut trainer = trainer(&cpu(2), &model(name), setup(method, Activations::Recompute));
            let before = trainable(&trainer);
            let losses: Vec<f64> = (0..3).map(|_| step(&mut trainer, std::slice::from_ref(&batch)).loss).collect();
            assert!(losses[2] < losses[0], "{name}: {losses:?}");
            for ((id, parameter, before), (_, _, after)) in before.iter().zip(trainable(&trainer)) {
                let gradient = trainer.grads.get(*id).unwrap().f32s();
                assert!(dot(gradient, gradient) > 0.0, "{name}: the gradient of {parameter} is zero");
                // Adam moves a value by about lr a step unless its gradients cancel.
                let moved = before.iter().zip(&after).filter(|(a, b)| (*a - *b).abs() > 1e-4).count();
                assert!(2 * moved > before.len(), "{name}: {moved} of {} values of {parameter} moved", before.len());
            }
            let frozen = trainer.model.params().iter().filter(|(_, p)| !p.trainable).count();
            assert_eq!(trainer.optimizer.updates(), 3);
            assert_eq!(frozen == 0, trainer.setup.method.kind == MethodKind::Full, "{name}");
        }
    }
}

#[test]
fn micro_batches_without_supervised_tokens_change_nothing() {
    let unsupervised = {
        let mut examples = documents(8, &[12, 1]);
        examples.iter_mut().for_each(|e| e.labels.fill(IGNORE_INDEX));
        PackedBatch::from_examples(&examples)
    };
    let supervised = batch(9, &[30, 1, 1]);
    let run = |batches: &[PackedBatch]| {
        let mut trainer = trainer(&cpu(2), &model("tied llama"), setup(full(), Activations::Keep));
        let report = step(&mut trainer, batches);
        (report, trainer)
    };
    let (alone, a) = run(std::slice::from_ref(&supervised));
    let (both, b) = run(&[supervised.clone(), unsupervised.clone()]);
    assert_eq!((alone.loss, alone.grad_norm), (both.loss, both.grad_norm));
    assert_eq!(both.total_tokens, alone.total_tokens + 13);
    assert_same_bits("weights", &a, &b);

    let mut trainer = trainer(&cpu(1), &model("tied llama"), setup(lora(0.0), Activations::Keep));
    let error = trainer.step_and_wait(std::slice::from_ref(&unsupervised), 0.0, &NEVER).unwrap_err().to_string();
    assert!(error.contains("without a supervised token"), "{error}");
    let error = trainer.evaluate(&[unsupervised], &NEVER).unwrap_err().to_string();
    assert!(error.contains("no supervised token"), "{error}");
    let mut wrong = supervised;
    wrong.num_label_tokens += 1;
    let error = trainer.step_and_wait(&[wrong], 0.0, &NEVER).unwrap_err().to_string();
    assert!(error.contains("supervised tokens; it has"), "{error}");
}

#[test]
fn a_stopped_step_leaves_no_trace() {
    let batch = batch(10, &[40]);
    let new = || trainer(&cpu(2), &model("tied llama"), setup(lora(0.2), Activations::Recompute));
    let (mut stopped, mut fresh) = (new(), new());
    assert!(stopped.step_and_wait(std::slice::from_ref(&batch), 0.0, &AtomicBool::new(true)).unwrap().is_none());
    assert!(stopped.evaluate(std::slice::from_ref(&batch), &AtomicBool::new(true)).unwrap().is_none());
    assert_eq!(stopped.steps_done(), 0);
    assert_same_bits("after the stop", &stopped, &fresh);
    let (a, b) = (step(&mut stopped, std::slice::from_ref(&batch)), step(&mut fresh, std::slice::from_ref(&batch)));
    assert_eq!((a.step, a.loss, a.grad_norm), (b.step, b.loss, b.grad_norm));
    assert_same_bits("after the step", &stopped, &fresh);
}

#[test]
fn late_reports_come_in_turn_and_flush_gives_the_last() {
    let batches: Vec<Vec<PackedBatch>> = (0..4).map(|i| vec![batch(20 + i, &[20, 9 + i as usize])]).collect();
    let new = || trainer(&cpu(2), &model("tied llama"), setup(lora(0.2), Activations::Keep));
    let (mut prompt, mut late) = (new(), new());
    late.report_late();
    let submit = |trainer: &mut Trainer, batches: &[PackedBatch], stop: bool| {
        trainer.step(batches, 0.0, &AtomicBool::new(stop)).unwrap()
    };
    let report = |stepped| match stepped {
        Stepped::Submitted(report) => report.map(|report| *report),
        Stepped::Stopped => panic!("nobody stopped it"),
    };
    let key = |report: &StepReport| (report.step, report.loss.to_bits(), report.total_tokens, report.lr.to_bits());
    let wanted: Vec<_> =
        batches.iter().map(|batches| key(&report(submit(&mut prompt, batches, false)).unwrap())).collect();
    assert_eq!(prompt.flush().unwrap(), None, "the CPU has told everything");

    let mut told: Vec<StepReport> = Vec::new();
    assert_eq!(report(submit(&mut late, &batches[0], false)), None);
    told.extend(report(submit(&mut late, &batches[1], false)));
    assert_eq!((told.len(), late.steps_done()), (1, 2));
    // Neither a stop nor a batch that does not fit loses what is still to come, and neither counts.
    assert_eq!(submit(&mut late, &batches[2], true), Stepped::Stopped);
    let mut wrong = batches[2].clone();
    wrong[0].num_label_tokens += 1;
    assert!(late.step(&wrong, 0.0, &NEVER).is_err());
    assert_eq!(late.steps_done(), 2);
    told.extend(late.flush().unwrap());
    assert_eq!((told.len(), late.flush().unwrap()), (2, None));
    assert_eq!(report(submit(&mut late, &batches[2], false)), None, "after a flush it begins anew");
    told.extend(report(submit(&mut late, &batches[3], false)));
    told.extend(late.flush().unwrap());
    assert_eq!(told.iter().map(key).collect::<Vec<_>>(), wanted);
    assert_same_bits("adapters", &prompt, &late);
    assert_eq!(step(&mut late, &batches[0]).step, 5, "waiting gives a step's own report");
}

#[test]
fn after_a_late_step_that_is_not_finite_no_more_are_taken() {
    let batch = batch(11, &[30]);
    let mut trainer = trainer(&cpu(2), &model("tied llama"), setup(full(), Activations::Keep));
    trainer.report_late();
    step(&mut trainer, std::slice::from_ref(&batch));
    let params = trainer.model.params_mut();
    let norm = params.find("model.norm.weight").unwrap();
    params.set(norm, &vec![f32::NAN; params.get(norm).len()]);
    let submitted = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap();
    assert_eq!(submitted, Stepped::Submitted(None));
    let error = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap_err().downcast::<NonFinite>().unwrap();
    assert_eq!((error.step, error.tensor.as_str(), trainer.steps_done()), (2, "model.norm.weight", 1));
    assert_eq!(trainer.flush().unwrap(), None, "the step behind it was left out");
    let error = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap_err().to_string();
    assert!(error.contains("start again from what was saved"), "{error}");
}

#[test]
fn non_finite_values_name_step_and_tensor() {
    let batch = batch(11, &[30]);
    let new = |method| {
        let mut trainer = trainer(&cpu(2), &model("tied llama"), setup(method, Activations::Recompute));
        step(&mut trainer, std::slice::from_ref(&batch));
        trainer
    };
    let set = |trainer: &mut Trainer, name: &str, value: f32| {
        let params = trainer.model.params_mut();
        let id = params.find(name).unwrap();
        params.set(id, &vec![value; params.get(id).len()]);
    };
    let refusal = |mut trainer: Trainer| {
        let before = trainable(&trainer);
        let error = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap_err();
        assert_eq!(trainer.steps_done(), 1, "no update is made");
        let unchanged = trainable(&trainer)
            .iter()
            .zip(&before)
            .all(|((_, _, a), (_, _, b))| a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())));
        assert!(unchanged, "no value changes");
        error.downcast::<NonFinite>().unwrap()
    };

    // A weight that is not finite itself.
    let mut trainer = new(full());
    set(&mut trainer, "model.layers.1.mlp.up_proj.weight", f32::NAN);
    let error = refusal(trainer);
    assert_eq!((error.step, error.tensor.as_str()), (2, "model.layers.1.mlp.up_proj.weight"));
    assert!(error.value.is_nan());

    // A gradient that overflows under a finite loss: z = s·lora_A·x and the gradient of v are huge, and v itself is 0.
    let method = MethodConfig { lora_alpha: 3e20, target_modules: vec!["v_proj".into()], ..lora(0.0) };
    let mut trainer = self::trainer(&cpu(1), &model("tied llama"), setup(method, Activations::Keep));
    set(&mut trainer, "model.layers.2.self_attn.v_proj.weight", 0.0);
    set(&mut trainer, "model.layers.2.self_attn.v_proj.lora_A", 1e10);
    set(&mut trainer, "model.layers.2.self_attn.o_proj.weight", 1e12);
    let error =
        trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap_err().downcast::<NonFinite>().unwrap();
    assert_eq!((error.step, error.tensor.as_str()), (1, "the gradient of model.layers.2.self_attn.v_proj.lora_B"));
    assert!(!error.value.is_finite());
}

#[test]
fn clipping_scales_the_whole_gradient() {
    let batch = batch(12, &[40, 20]);
    // With an eps that dwarfs the second moment, AdamW's first step is lr·g / eps: proportional to the gradient.
    let moved = |max_grad_norm| {
        let mut setup = setup(full(), Activations::Keep);
        setup.optimizer = OptimizerConfig { lr: 1e3, eps: 1e3, max_grad_norm, ..optimizer() };
        let mut trainer = trainer(&cpu(2), &model("tied llama"), setup);
        let before = trainable(&trainer);
        let report = step(&mut trainer, std::slice::from_ref(&batch));
        let after = trainable(&trainer);
        let moves: Vec<f32> =
            before.iter().zip(&after).flat_map(|((_, _, a), (_, _, b))| a.iter().zip(b)).map(|(a, b)| a - b).collect();
        let squares: f64 =
            before.iter().map(|(id, ..)| trainer.grads.get(*id).unwrap().f32s()).map(|g| dot(g, g)).sum();
        assert!(
            (squares.sqrt() - report.grad_norm).abs() < 1e-6 * report.grad_norm,
            "the norm is that before clipping"
        );
        (report, moves)
    };
    let (free, moves) = moved(0.0);
    assert!(!free.clipped && free.grad_norm > 0.1);
    let limit = free.grad_norm / 4.0;
    let (clipped, clipped_moves) = moved(limit);
    assert!(clipped.clipped);
    assert_eq!(clipped.grad_norm, free.grad_norm);
    let scaled: Vec<f32> = moves.iter().map(|m| m / 4.0).collect();
    assert_close("moves", &clipped_moves, &scaled, 1e-3);
    let (loose, loose_moves) = moved(free.grad_norm * 2.0);
    assert!(!loose.clipped);
    assert_eq!(loose_moves, moves);
}

#[test]
fn warm_up_starts_at_zero_and_weight_decay_spares_norms() {
    let batch = batch(13, &[30]);
    let mut setup = setup(full(), Activations::Keep);
    setup.optimizer = OptimizerConfig { lr: 1e-3, warmup_steps: 2, schedule: ScheduleKind::Linear, ..optimizer() };
    setup.total_steps = 4;
    let mut warm = trainer(&cpu(1), &model("tied llama"), setup.clone());
    let untouched = trainer(&cpu(1), &model("tied llama"), setup.clone());
    let mut rates = vec![step(&mut warm, std::slice::from_ref(&batch)).lr];
    assert_same_bits("a rate of 0 moves nothing", &warm, &untouched);
    rates.extend((0..3).map(|_| step(&mut warm, std::slice::from_ref(&batch)).lr));
    assert_eq!(rates, [0.0, 5e-4, 1e-3, 5e-4]);

    // An eps that is larger than any gradient leaves decay as the only force.
    setup.optimizer = OptimizerConfig { lr: 0.1, eps: 1e20, weight_decay: 0.5, ..optimizer() };
    let mut decayed = trainer(&cpu(1), &json!({"attention_bias": true}), setup);
    let before = trainable(&decayed);
    step(&mut decayed, std::slice::from_ref(&batch));
    for ((_, name, before), (_, _, after)) in before.iter().zip(trainable(&decayed)) {
        let spared = name.contains("norm") || name.ends_with("bias");
        let want: Vec<f32> = before.iter().map(|x| if spared { *x } else { x * 0.95 }).collect();
        assert_close(name, &after, &want, 1e-6);
    }
}

#[test]
fn recompute_keeps_only_the_inputs_of_blocks() {
    let batch = batch(14, &[120, 60]);
    let peak = |activations| {
        let device = cpu(1);
        let mut trainer = trainer(&device, &model("qwen3"), setup(lora(0.1), activations));
        let report = step(&mut trainer, std::slice::from_ref(&batch));
        let of = |category| report.memory.categories.iter().find(|c| c.category == category).copied().unwrap();
        assert_eq!(of(MemoryCategory::Activations).now_bytes, 0, "nothing outlives the step");
        assert_eq!(of(MemoryCategory::Workspace).now_bytes, 0, "nothing outlives the step");
        of(MemoryCategory::Activations).peak_bytes
    };
    let (keep, recompute) = (peak(Activations::Keep), peak(Activations::Recompute));
    let stream = 180 * 20 * 4;
    // Three blocks: what recompute spares is what two blocks keep besides their inputs.
    let block = (keep - 4 * stream) / 3;
    assert!(recompute <= 4 * stream + block + stream, "{recompute} of {keep}");
}

#[test]
fn a_masked_run_trains_and_evaluates_by_a_dense_mask() {
    let batch = [batch(16, &[120, 60])];
    let metadata_bytes = |attention, evaluate: bool| {
        let setup = {
            let mut setup = setup(lora(0.0), Activations::Keep);
            setup.switches.attention = attention;
            setup
        };
        let mut trainer = trainer(&cpu(1), &model("tied llama"), setup);
        if evaluate {
            trainer.evaluate(&batch, &NEVER).unwrap().unwrap();
        } else {
            step(&mut trainer, &batch);
        }
        let memory = trainer.model().device().memory();
        memory.categories.iter().find(|c| c.category == MemoryCategory::Metadata).unwrap().peak_bytes
    };
    for evaluate in [false, true] {
        let [varlen, masked] =
            [AttentionPath::Varlen, AttentionPath::Masked].map(|attention| metadata_bytes(attention, evaluate));
        // 180 bits a row: 6 words, rounded up to 8.
        assert_eq!(masked - varlen, 180 * 8 * 4, "evaluate: {evaluate}");
    }
}

#[test]
fn precision_bf16_trains_and_keeps_masters() {
    let batch = batch(15, &[50, 30]);
    for method in [lora(0.0), full()] {
        let run = |precision| {
            let device = Device::cpu(2, precision).unwrap();
            let mut setup = setup(method.clone(), Activations::Recompute);
            // Steps of 1e-4 are lost in weights of bf16 (spacing 2^-8) unless a master adds them up.
            setup.optimizer.lr = 1e-4;
            let mut trainer = trainer(&device, &model("qwen3"), setup);
            (0..30).map(|_| step(&mut trainer, std::slice::from_ref(&batch)).loss).collect::<Vec<f64>>()
        };
        let (f32s, bf16s) = (run(crate::tensor::Precision::F32), run(crate::tensor::Precision::Bf16));
        let fallen = |losses: &[f64]| losses[0] - losses[29];
        assert!(fallen(&f32s) > 1e-3, "{:?}: {f32s:?}", method.kind);
        let ratio = fallen(&bf16s) / fallen(&f32s);
        assert!((0.7..1.4).contains(&ratio), "{:?}: {bf16s:?} against {f32s:?}", method.kind);
        let distance = f32s.iter().zip(&bf16s).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
        assert!(distance < 3e-2, "{:?}: {distance}", method.kind);
    }
}
