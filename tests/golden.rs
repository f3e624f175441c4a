//! The engine against values computed by Transformers and PEFT (`tests/golden/README.md`).
//!
//! Every folder with a `case.safetensors` is a family; other values, shapes and documents of the same layout must pass too (`TANDEM_GOLDEN`).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tandem::data::pack::PackedBatch;
use tandem::formats::safetensors::SafetensorsFile;
use tandem::layers::parameter::Grads;
use tandem::model::generate::greedy;
use tandem::model::loading::Checkpoint;
use tandem::model::transformer::{PassOptions, Transformer};
use tandem::ops::cross_entropy::LossSum;
use tandem::tensor::{Device, Precision};
use tandem::train::batch::upload;
use tandem::train::config::{Activations, MethodConfig, MethodKind, OptimizerConfig, ScheduleKind};
use tandem::train::trainer::{Trainer, TrainerSetup};

/// f32 bound by norm for logits, gradients and losses (`tests/golden/README.md`).
const F32_BOUND: f64 = 1e-4;
/// Bound for adapters after several steps: AdamW amplifies tiny gradients.
const ADAPTER_BOUND: f64 = 1e-2;

static NEVER: AtomicBool = AtomicBool::new(false);

fn golden() -> PathBuf {
    match std::env::var_os("TANDEM_GOLDEN").filter(|v| !v.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
    }
}

/// A reference file: from the golden folder, or, where that has none, from the repository's own.
fn golden_file(name: &str) -> PathBuf {
    let path = golden().join(name);
    if path.exists() { path } else { Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name) }
}

fn device(threads: usize) -> Device {
    Device::cpu(threads, Precision::F32).unwrap()
}

fn error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let distance: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|&b| f64::from(b).powi(2)).sum();
    if norm == 0.0 { distance.sqrt() } else { (distance / norm).sqrt() }
}

#[track_caller]
fn assert_close(what: &str, a: &[f32], b: &[f32], bound: f64) {
    let error = error(a, b);
    assert!(error <= bound, "{what}: relative error {error:.3e} above {bound:.1e}");
}

/// The documents of a reference as one packed batch.
fn packed(input_ids: &[i32], labels: &[i32], cu_seqlens: &[i32]) -> PackedBatch {
    let lengths = cu_seqlens.windows(2).map(|w| w[1] - w[0]);
    let batch = PackedBatch {
        input_ids: input_ids.to_vec(),
        labels: labels.to_vec(),
        position_ids: lengths.clone().flat_map(|n| 0..n).collect(),
        cu_seqlens: cu_seqlens.to_vec(),
        max_seqlen: lengths.max().unwrap() as usize,
        num_label_tokens: labels.iter().filter(|&&label| label != -100).count(),
        ..PackedBatch::default()
    };
    batch.check().unwrap();
    batch
}

/// A model family with its reference values.
struct Family {
    name: String,
    folder: PathBuf,
    case: SafetensorsFile,
}

impl Family {
    /// Every dense family below the golden folder. Families of architectures that the engine does not train must be refused with a reason.
    fn all() -> Vec<Self> {
        let mut families = Vec::new();
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.sort();
        for folder in folders.into_iter().filter(|folder| folder.join("case.safetensors").exists()) {
            let name = folder.file_name().unwrap().to_string_lossy().into_owned();
            let config: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
            if !["llama", "mistral", "qwen2", "qwen3"].contains(&config["model_type"].as_str().unwrap()) {
                let refusal = Checkpoint::open(&folder)
                    .err()
                    .unwrap_or_else(|| panic!("{name} opened but is not a dense family"));
                println!("{name}: not a dense family, refused: {refusal:#}");
                assert!(
                    format!("{refusal:#}").contains("supported"),
                    "the refusal of {name} must say what is supported: {refusal:#}"
                );
                continue;
            }
            let case = SafetensorsFile::open(&folder.join("case.safetensors")).unwrap();
            families.push(Self { name, folder, case });
        }
        assert!(!families.is_empty(), "no family below {}", golden().display());
        families
    }

    fn i32s(&self, name: &str) -> Vec<i32> {
        self.case.to_i32(name).unwrap()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.case.to_f32(name).unwrap()
    }

    fn batch(&self) -> PackedBatch {
        packed(&self.i32s("input_ids"), &self.i32s("labels"), &self.i32s("cu_seqlens"))
    }

    /// The documents as batches of one document each.
    fn documents(&self) -> Vec<PackedBatch> {
        let (ids, labels, cu) = (self.i32s("input_ids"), self.i32s("labels"), self.i32s("cu_seqlens"));
        let document = |w: &[i32]| {
            let range = w[0] as usize..w[1] as usize;
            packed(&ids[range.clone()], &labels[range], &[0, w[1] - w[0]])
        };
        cu.windows(2).map(document).collect()
    }

    fn model(&self, device: &Device) -> Transformer {
        Transformer::load(&Checkpoint::open(&self.folder).unwrap(), device, &mut |_, _| {}).unwrap()
    }

    /// r and lora_alpha of the reference adapter.
    fn method(&self) -> MethodConfig {
        let text = std::fs::read_to_string(self.folder.join("adapter_after_6_steps/adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut target_modules: Vec<String> = serde_json::from_value(config["target_modules"].clone()).unwrap();
        target_modules.sort();
        MethodConfig {
            r: config["r"].as_u64().unwrap() as usize,
            lora_alpha: config["lora_alpha"].as_f64().unwrap(),
            use_rslora: config["use_rslora"].as_bool().unwrap(),
            target_modules,
            ..MethodConfig::default()
        }
    }

    /// A trainer with the reference's adapter at its start values.
    fn lora_trainer(&self, device: &Device, activations: Activations) -> Trainer {
        let optimizer = OptimizerConfig {
            lr: 1e-2,
            weight_decay: 0.01,
            max_grad_norm: 0.0,
            schedule: ScheduleKind::Constant,
            ..OptimizerConfig::default()
        };
        let setup = TrainerSetup { method: self.method(), optimizer, activations, seed: 0, total_steps: 6 };
        let mut trainer = Trainer::new(self.model(device), setup).unwrap();
        set_adapters(&mut trainer, &self.case);
        trainer
    }
}

/// Sets a trainer's adapters to the `lora.…` tensors of a reference file.
fn set_adapters(trainer: &mut Trainer, case: &SafetensorsFile) {
    let names: Vec<String> = case.names().filter(|name| name.starts_with("lora.")).map(str::to_owned).collect();
    let values: Vec<Vec<f32>> = names.iter().map(|name| case.to_f32(name).unwrap()).collect();
    let tensors = names.iter().zip(&values).map(|(name, values)| {
        (name["lora.".len()..].to_owned(), case.info(name).unwrap().shape.as_slice(), values.as_slice())
    });
    trainer.model_mut().set_adapters(tensors).unwrap();
}

fn pass(weight: f32, activations: Activations) -> PassOptions<'static> {
    PassOptions { weight, activations, dropout: None, stop: &NEVER }
}

/// Loss sum and every gradient, of batches whose losses are weighted alike.
fn full_gradients(
    model: &mut Transformer,
    batches: &[PackedBatch],
    weight: f32,
    activations: Activations,
) -> (f64, Grads) {
    model.train_everything();
    let mut grads = Grads::new(model.device(), model.params());
    let mut loss = LossSum::new(model.device());
    for batch in batches {
        let batch = upload(model, batch).unwrap();
        model.forward_backward(&mut grads, &mut loss, &batch, pass(weight, activations)).unwrap();
    }
    (loss.read(), grads)
}

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
        for activations in [Activations::Keep, Activations::Recompute] {
            let mut model = family.model(&device(2));
            let (sum, grads) = full_gradients(&mut model, std::slice::from_ref(&batch), weight, activations);
            let mean = (sum / batch.num_label_tokens as f64) as f32;
            assert_close(&format!("{}: loss_mean", family.name), &[mean], &family.f32s("loss_mean"), F32_BOUND);
            let mut compared = 0;
            for (id, parameter) in model.params().iter() {
                let want = family.f32s(&format!("grad.{}", parameter.name));
                let got = grads.get(id).unwrap().f32s();
                assert_close(
                    &format!("{}: {activations:?} grad.{}", family.name, parameter.name),
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
        for activations in [Activations::Keep, Activations::Recompute] {
            let mut trainer = family.lora_trainer(&device(2), activations);
            let batch = family.batch();
            let mut losses = Vec::new();
            for step in 0..family.f32s("lora_loss").len() {
                let report = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
                losses.push(report.loss as f32);
                if step > 0 {
                    continue;
                }
                for (id, parameter) in trainer.model().params().iter().filter(|(_, p)| p.trainable) {
                    let want = family.f32s(&format!("lora_grad.{}", parameter.name));
                    let got = trainer.grads().get(id).unwrap().f32s();
                    assert_close(&format!("{}: lora_grad.{}", family.name, parameter.name), got, &want, F32_BOUND);
                }
            }
            for (step, (got, want)) in losses.iter().zip(family.f32s("lora_loss")).enumerate() {
                assert_close(&format!("{}: lora_loss[{step}]", family.name), &[*got], &[want], F32_BOUND);
            }
            let after = tandem::export::adapter::load(&family.folder.join("adapter_after_6_steps")).unwrap();
            assert_eq!(after.tensors.len(), trainer.model().adapters().count());
            for tensor in after.tensors {
                let ours = trainer.model().adapters().find(|p| tensor.name.contains(&p.name));
                let ours = ours.unwrap_or_else(|| panic!("{}: no adapter matrix for {}", family.name, tensor.name));
                assert_close(
                    &format!("{}: {} after six steps", family.name, tensor.name),
                    ours.value.f32s(),
                    &tensor.data,
                    ADAPTER_BOUND,
                );
            }
        }
    }
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
            assert_close(&format!("{}: {}", family.name, parameter.name), a, b, 2e-6);
        }
    }
}

#[test]
fn golden_accumulation_of_four_equals_one() {
    for family in Family::all() {
        let run = |steps_of: &dyn Fn(Vec<PackedBatch>) -> Vec<PackedBatch>| {
            let mut trainer = family.lora_trainer(&device(2), Activations::Recompute);
            let micro_batches = steps_of(family.documents());
            let losses: Vec<f32> =
                (0..4).map(|_| trainer.step(&micro_batches, 0.0, &NEVER).unwrap().unwrap().loss as f32).collect();
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
                .map(|_| trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss.to_bits())
                .collect();
            let adapters: Vec<Vec<f32>> = trainer.model().adapters().map(|p| p.value.f32s().to_vec()).collect();
            (losses, adapters)
        };
        let reference = run(1, Activations::Keep);
        for (threads, activations) in [(1, Activations::Recompute), (2, Activations::Keep), (5, Activations::Recompute)]
        {
            assert!(run(threads, activations) == reference, "{}: {threads} threads, {activations:?}", family.name);
        }
    }
}

/// bf16 keeps 8 bits of significand: one rounding is off by 2^-9 at most.
const BF16_ROUNDING: f64 = 1.0 / 512.0;

/// What Transformers' own bf16 run is off by, per tensor (`bf16_errors.json`, made by `tests/interop/make_bf16.py`), where the family has it.
fn bf16_errors(family: &Family) -> Option<HashMap<String, f64>> {
    let text = std::fs::read_to_string(family.folder.join("bf16_errors.json")).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

/// The bound for a tensor in bf16: twice the error of Transformers in bf16 for outputs, three times for gradients.
///
/// A loss is a sum in which the errors of tokens cancel by chance, so its error varies (Transformers': 1.6e-5 in one family, up to 6e-4 in
/// the others): its bound is at least half a rounding. The other tensors have many values, and need no floor.
fn bf16_bound(name: &str, theirs: f64) -> f64 {
    if name.contains("grad.") {
        3.0 * theirs
    } else if name.contains("loss") {
        2.0 * theirs.max(BF16_ROUNDING / 4.0)
    } else {
        2.0 * theirs
    }
}

#[test]
fn golden_bf16_is_as_near_to_f32_as_bf16_in_transformers() {
    for family in Family::all() {
        let device = Device::cpu(2, Precision::Bf16).unwrap();
        let batch = family.batch();
        let mut model = family.model(&device);
        let uploaded = upload(&model, &batch).unwrap();
        let rows: Vec<i32> = (0..batch.input_ids.len() as i32).collect();
        let logits = model.logits(&uploaded, &rows, &NEVER).unwrap();
        let mut ours = vec![("logits".to_owned(), error(logits.f32s(), &family.f32s("logits")))];
        let Some(theirs) = bf16_errors(&family) else {
            let error = ours[0].1;
            println!("{}: no bf16_errors.json; bf16 logits differ from f32 by {error:.2e}", family.name);
            assert!(error > 1e-4, "{}: bf16 must round", family.name);
            // A few dozen roundings in a row add up to a few of them.
            assert!(error < 3e-2, "{}: {error:.2e}", family.name);
            continue;
        };

        let weight = 1.0 / batch.num_label_tokens as f32;
        let (sum, grads) = full_gradients(&mut model, std::slice::from_ref(&batch), weight, Activations::Recompute);
        let mean = (sum / batch.num_label_tokens as f64) as f32;
        ours.push(("loss_mean".into(), error(&[mean], &family.f32s("loss_mean"))));
        for (id, parameter) in model.params().iter() {
            let name = format!("grad.{}", parameter.name);
            let error = error(grads.get(id).unwrap().f32s(), &family.f32s(&name));
            ours.push((name, error));
        }

        let mut trainer = family.lora_trainer(&device, Activations::Recompute);
        let mut losses = Vec::new();
        for step in 0..family.f32s("lora_loss").len() {
            let report = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
            losses.push(report.loss as f32);
            for (id, parameter) in trainer.model().params().iter().filter(|(_, p)| p.trainable && step == 0) {
                let name = format!("lora_grad.{}", parameter.name);
                let error = error(trainer.grads().get(id).unwrap().f32s(), &family.f32s(&name));
                ours.push((name, error));
            }
        }
        ours.push(("lora_loss".into(), error(&losses, &family.f32s("lora_loss"))));

        assert_eq!(ours.len(), theirs.len(), "{}: every tensor of bf16_errors.json is compared", family.name);
        let ratio = |name: &str, error: f64| error / theirs[name];
        let worst = |kind: &str| {
            let of_kind = ours.iter().filter(|(name, _)| name.starts_with(kind));
            of_kind.map(|(name, error)| ratio(name, *error)).fold(0.0, f64::max)
        };
        println!(
            "{}: bf16 error against Transformers' own: logits {:.2}, loss {:.2}, gradients up to {:.2}, adapter gradients up to {:.2}, six losses {:.2}",
            family.name,
            worst("logits"),
            worst("loss_mean"),
            worst("grad."),
            worst("lora_grad."),
            worst("lora_loss")
        );
        for (name, error) in &ours {
            let bound = bf16_bound(name, theirs[name]);
            assert!(*error <= bound, "{}: {name} in bf16 is off by {error:.3e}, above {bound:.3e}", family.name);
        }
        assert!(ours[0].1 > 1e-3, "{}: bf16 must round", family.name);
    }
}

/// The starter model; fetched when it is not there.
fn smollm2(device: &Device) -> Transformer {
    let path = tandem::session::starter::fetch_blocking(&mut |_, _, _| {}, &NEVER).unwrap().unwrap();
    Transformer::load(&Checkpoint::open(&path).unwrap(), device, &mut |_, _| {}).unwrap()
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
    let setup = TrainerSetup { method, optimizer, activations: Activations::Recompute, seed: 0, total_steps: 5 };
    let mut trainer = Trainer::new(model, setup).unwrap();
    set_adapters(&mut trainer, &case);
    for (step, want) in case.to_f32("lora_loss").unwrap().into_iter().enumerate() {
        let report = trainer.step(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
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
