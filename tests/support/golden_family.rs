//! What the tests against reference values share: golden families, packed batches, closeness by norm.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tandem::data::pack::PackedBatch;
use tandem::formats::safetensors::SafetensorsFile;
use tandem::layers::moe::Choices;
use tandem::layers::parameter::{Grads, Parameter};
use tandem::model::loading::Checkpoint;
use tandem::model::transformer::{PassOptions, Transformer};
use tandem::ops::cross_entropy::LossSum;
use tandem::tensor::{Device, Precision, Tensor};
use tandem::train::batch::upload;
use tandem::train::config::{
    Activations, AttentionPath, MemoryPolicy, MethodConfig, MethodKind, OptimizerConfig, ScheduleKind,
};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, TrainerSetup};

pub static NEVER: AtomicBool = AtomicBool::new(false);

pub fn golden() -> PathBuf {
    match std::env::var_os("TANDEM_GOLDEN").filter(|v| !v.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"),
    }
}

/// A reference file: from the golden folder, or, where that has none, from the repository's own.
pub fn golden_file(name: &str) -> PathBuf {
    let path = golden().join(name);
    if path.exists() { path } else { Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name) }
}

pub fn device(threads: usize) -> Device {
    Device::cpu(threads, Precision::F32).unwrap()
}

pub fn error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let distance: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|&b| f64::from(b).powi(2)).sum();
    if norm == 0.0 { distance.sqrt() } else { (distance / norm).sqrt() }
}

#[track_caller]
pub fn assert_close(what: &str, a: &[f32], b: &[f32], bound: f64) {
    let error = error(a, b);
    assert!(error <= bound, "{what}: relative error {error:.3e} above {bound:.1e}");
}

/// The documents of a reference as one packed batch.
pub fn packed(input_ids: &[i32], labels: &[i32], cu_seqlens: &[i32]) -> PackedBatch {
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
pub struct Family {
    pub name: String,
    pub folder: PathBuf,
    pub case: SafetensorsFile,
}

impl Family {
    /// Every family below the golden folder.
    pub fn all() -> Vec<Self> {
        let mut families = Vec::new();
        let mut folders: Vec<PathBuf> =
            std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path()).collect();
        folders.sort();
        for folder in folders.into_iter().filter(|folder| folder.join("case.safetensors").exists()) {
            families.push(Self::at(&folder));
        }
        assert!(!families.is_empty(), "no family below {}", golden().display());
        families
    }

    /// The family in a folder.
    pub fn at(folder: &Path) -> Self {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let case = SafetensorsFile::open(&folder.join("case.safetensors")).unwrap();
        Self { name, folder: folder.to_owned(), case }
    }

    pub fn i32s(&self, name: &str) -> Vec<i32> {
        self.case.to_i32(name).unwrap()
    }

    pub fn f32s(&self, name: &str) -> Vec<f32> {
        self.case.to_f32(name).unwrap()
    }

    pub fn batch(&self) -> PackedBatch {
        packed(&self.i32s("input_ids"), &self.i32s("labels"), &self.i32s("cu_seqlens"))
    }

    /// The documents as batches of one document each.
    pub fn documents(&self) -> Vec<PackedBatch> {
        let (ids, labels, cu) = (self.i32s("input_ids"), self.i32s("labels"), self.i32s("cu_seqlens"));
        let document = |w: &[i32]| {
            let range = w[0] as usize..w[1] as usize;
            packed(&ids[range.clone()], &labels[range], &[0, w[1] - w[0]])
        };
        cu.windows(2).map(document).collect()
    }

    pub fn model(&self, device: &Device) -> Transformer {
        Transformer::load(&Checkpoint::open(&self.folder).unwrap(), device, &mut |_, _| {}).unwrap()
    }

    /// r, lora_alpha and targets of the reference adapter.
    pub fn method(&self) -> MethodConfig {
        self.method_of("adapter_after_6_steps")
    }

    /// Those of the adapter in a folder of the family.
    pub fn method_of(&self, adapter: &str) -> MethodConfig {
        let text = std::fs::read_to_string(self.folder.join(adapter).join("adapter_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut target_modules: Vec<String> = serde_json::from_value(config["target_modules"].clone()).unwrap();
        target_modules.sort();
        let target_parameters = config.get("target_parameters").filter(|targets| !targets.is_null());
        MethodConfig {
            target_parameters: target_parameters
                .map(|t| serde_json::from_value(t.clone()).unwrap())
                .unwrap_or_default(),
            r: config["r"].as_u64().unwrap() as usize,
            lora_alpha: config["lora_alpha"].as_f64().unwrap(),
            use_rslora: config["use_rslora"].as_bool().unwrap(),
            target_modules,
            ..MethodConfig::default()
        }
    }

    /// The reference gradient of a parameter, in the order of the engine's: gpt-oss keeps weights of experts as [experts, in, out]. `None` where the file
    /// has none: files that are kept small have those of experts for one block only.
    pub fn gradient(&self, parameter: &Parameter) -> Option<Vec<f32>> {
        let name = format!("grad.{}", parameter.name);
        let is_there = self.case.info(&name).is_some();
        assert!(is_there || parameter.shape.len() == 3, "{}: no {name}", self.name);
        let values = is_there.then(|| self.f32s(&name))?;
        let text = std::fs::read_to_string(self.folder.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        Some(match parameter.shape[..] {
            [_, out, inner] if config["model_type"] == "gpt_oss" => {
                let of_expert =
                    |values: &[f32]| (0..out * inner).map(|i| values[i % inner * out + i / inner]).collect();
                values.chunks_exact(out * inner).flat_map::<Vec<f32>, _>(of_expert).collect()
            }
            _ => values,
        })
    }

    /// The family's model and its losses with the auxiliary loss of the router (`router_loss.json`); `None` where there are none for it.
    pub fn with_auxiliary_loss(&self, device: &Device) -> Option<(Transformer, serde_json::Value)> {
        let text = std::fs::read_to_string(golden_file("router_loss.json")).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let of = all.get(&self.name)?.clone();
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(self.folder.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let config = std::fs::read_to_string(self.folder.join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&config).unwrap();
        json["output_router_logits"] = true.into();
        json["router_aux_loss_coef"] = all["coef"].clone();
        std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        Some((Transformer::load(&checkpoint, device, &mut |_, _| {}).unwrap(), of))
    }

    /// The choices of experts in f32 for the family's batch, with some for padding behind it; `None` in a dense family.
    pub fn choices(&self) -> Option<Vec<Vec<i32>>> {
        let mut model = self.model(&device(2));
        let k = model.config().moe.as_ref()?.num_experts_per_tok as i32;
        model.set_choices(Some(Choices::default()));
        let batch = upload(&model, &self.batch()).unwrap();
        model.losses(&batch, &NEVER).unwrap();
        let mut noted = model.choices().unwrap().noted.lock().unwrap().clone();
        noted.iter_mut().for_each(|layer| layer.extend((0..64 * k).map(|i| i % k)));
        Some(noted)
    }

    /// As [`Self::choices`], in each of the six steps on the reference's adapter.
    pub fn choices_of_steps(&self) -> Option<Vec<Vec<Vec<i32>>>> {
        let mut trainer = self.lora_trainer(&device(2), Activations::Recompute);
        let k = trainer.model().config().moe.as_ref()?.num_experts_per_tok as i32;
        let batch = self.batch();
        let step = |_| {
            trainer.model_mut().set_choices(Some(Choices::default()));
            trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
            let mut noted = trainer.model().choices().unwrap().noted.lock().unwrap().clone();
            noted.iter_mut().for_each(|layer| layer.extend((0..64 * k).map(|i| i % k)));
            noted
        };
        Some((0..self.f32s("lora_loss").len()).map(step).collect())
    }

    /// Lets a model take the choices of experts of f32, where it has any: a close choice that falls otherwise says nothing about arithmetic.
    pub fn replay(&self, model: &mut Transformer) {
        let choices = self.choices().map(|given| Choices { given: Some(given), ..Choices::default() });
        model.set_choices(choices);
    }

    /// A trainer with the reference's adapter at its start values; on a GPU its passes are recorded.
    pub fn lora_trainer(&self, device: &Device, activations: Activations) -> Trainer {
        self.lora_trainer_with(device, activations, true)
    }

    /// As [`Self::lora_trainer`], with or without CUDA graphs.
    pub fn lora_trainer_with(&self, device: &Device, activations: Activations, cuda_graphs: bool) -> Trainer {
        let setup = self.setup(self.method(), activations, cuda_graphs);
        let mut trainer = Trainer::new(self.model(device), setup).unwrap();
        set_adapters(&mut trainer, &self.case);
        trainer
    }

    /// How the reference's adapter was trained.
    pub fn setup(&self, method: MethodConfig, activations: Activations, cuda_graphs: bool) -> TrainerSetup {
        let optimizer = OptimizerConfig {
            lr: 1e-2,
            weight_decay: 0.01,
            max_grad_norm: 0.0,
            schedule: ScheduleKind::Constant,
            ..OptimizerConfig::default()
        };
        let switches = Switches { activations, cuda_graphs, ..Switches::default() };
        TrainerSetup { method, optimizer, switches, seed: 0, total_steps: 6 }
    }
}

/// The losses of full fine-tuning in Transformers, before each step (`full_finetune.json`, made by `tests/interop/make_full_finetune.py`).
pub struct FullFinetune {
    pub lr: f64,
    /// In f32.
    pub losses: Vec<f32>,
    /// How far Transformers in bf16 with f32 masters is from them.
    pub bf16_error: f64,
}

impl Family {
    /// Its losses of full fine-tuning, where there are some for that family.
    pub fn full_finetune(&self) -> Option<FullFinetune> {
        let text = std::fs::read_to_string(golden_file("full_finetune.json")).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let of = all.get(&self.name)?;
        Some(FullFinetune {
            lr: all["lr"].as_f64().unwrap(),
            losses: serde_json::from_value(of["losses"].clone()).unwrap(),
            bf16_error: of["bf16_error"].as_f64().unwrap(),
        })
    }

    /// Our losses before as many steps on all parameters, with the numbers of the reference; `change` sets what is to be otherwise.
    pub fn full_losses(
        &self,
        device: &Device,
        want: &FullFinetune,
        change: impl FnOnce(&mut TrainerSetup),
    ) -> Vec<f32> {
        let optimizer = OptimizerConfig {
            lr: want.lr,
            weight_decay: 0.01,
            max_grad_norm: 0.0,
            schedule: ScheduleKind::Constant,
            ..OptimizerConfig::default()
        };
        let method = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
        let mut setup = TrainerSetup { method, optimizer, switches: Switches::default(), seed: 0, total_steps: 6 };
        change(&mut setup);
        let mut trainer = Trainer::new(self.model(device), setup).unwrap();
        let batch = self.batch();
        let step = |_| trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss as f32;
        (0..want.losses.len()).map(step).collect()
    }
}

/// The values of all adapters of a trainer.
pub fn adapter_values(trainer: &Trainer) -> Vec<Vec<f32>> {
    let model = trainer.model();
    model.adapters().map(|(id, _)| model.params().to_vec(id)).collect()
}

/// Sets a trainer's adapters to the `lora.…` tensors of a reference file.
pub fn set_adapters(trainer: &mut Trainer, case: &SafetensorsFile) {
    let names: Vec<String> = case.names().filter(|name| name.starts_with("lora.")).map(str::to_owned).collect();
    let values: Vec<Vec<f32>> = names.iter().map(|name| case.to_f32(name).unwrap()).collect();
    let tensors = names.iter().zip(&values).map(|(name, values)| {
        (name["lora.".len()..].to_owned(), case.info(name).unwrap().shape.as_slice(), values.as_slice())
    });
    trainer.model_mut().set_adapters(tensors).unwrap();
}

pub fn pass(weight: f32, activations: Activations) -> PassOptions<'static> {
    PassOptions { weight, share: 1.0, activations, dropout: None, stop: &NEVER }
}

/// Loss sum and every gradient, of batches whose losses are weighted alike.
pub fn full_gradients(
    model: &mut Transformer,
    batches: &[PackedBatch],
    weight: f32,
    activations: Activations,
) -> (f64, Grads) {
    model.train_everything().unwrap();
    let mut grads = Grads::new(model.params());
    let mut loss = LossSum::new(model.device());
    for batch in batches {
        let batch = upload(model, batch).unwrap();
        model.forward_backward(&mut grads, &mut loss, &batch, pass(weight, activations)).unwrap();
    }
    (loss.read(), grads)
}

/// The starter model; fetched when it is not there.
pub fn smollm2(device: &Device) -> Transformer {
    let path = tandem::session::starter::fetch_blocking(&mut |_, _, _| {}, &NEVER).unwrap().unwrap();
    Transformer::load(&Checkpoint::open(&path).unwrap(), device, &mut |_, _| {}).unwrap()
}

/// bf16 keeps 8 bits of significand: one rounding is off by 2^-9 at most.
pub const BF16_ROUNDING: f64 = 1.0 / 512.0;

/// What Transformers' own bf16 run is off by, per tensor (`bf16_errors.json`, made by `tests/interop/make_bf16.py`), where the family has it.
pub fn bf16_errors(family: &Family) -> Option<HashMap<String, f64>> {
    let text = std::fs::read_to_string(family.folder.join("bf16_errors.json")).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

/// The bound for a tensor in bf16: twice the error of Transformers in bf16 for outputs, three times for gradients.
///
/// A loss is a sum in which the errors of tokens cancel by chance, so its error varies (Transformers': 1.6e-5 in one family, up to 6e-4 in
/// the others): its bound is at least half a rounding. The other tensors have many values, and need no floor.
pub fn bf16_bound(name: &str, theirs: f64) -> f64 {
    if name.contains("grad.") {
        3.0 * theirs
    } else if name.contains("loss") {
        2.0 * theirs.max(BF16_ROUNDING / 4.0)
    } else {
        2.0 * theirs
    }
}

/// How far a device that computes in bf16 is from the f32 reference, by tensor, with the MLP over tiles of at most `mlp_rows` rows (0: at once).
pub fn bf16_deviations(family: &Family, device: &Device, path: AttentionPath, mlp_rows: usize) -> HashMap<String, f64> {
    let batch = family.batch();
    let mut model = family.model(device);
    let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
    model.set_attention_path(path);
    model.set_mlp_rows(mlp_rows);
    family.replay(&mut model);
    let uploaded = upload(&model, &batch).unwrap();
    let rows: Vec<i32> = (0..batch.input_ids.len() as i32).collect();
    let logits = model.logits(&uploaded, &rows, &NEVER).unwrap();
    let mut ours = HashMap::from([("logits".to_owned(), error(&unpadded(&logits, &model), &family.f32s("logits")))]);

    let weight = 1.0 / batch.num_label_tokens as f32;
    let (sum, grads) = full_gradients(&mut model, std::slice::from_ref(&batch), weight, Activations::Recompute);
    let mean = (sum / batch.num_label_tokens as f64) as f32;
    ours.insert("loss_mean".into(), error(&[mean], &family.f32s("loss_mean")));
    for (id, parameter) in model.params().iter() {
        let name = format!("grad.{}", parameter.name);
        if let Some(want) = family.gradient(parameter) {
            ours.insert(name, error(&grads.get(id).unwrap().to_vec(), &want));
        }
    }

    let mut trainer = family.lora_trainer(device, Activations::Recompute);
    trainer.set_switches(Switches { attention: path, memory, ..trainer.switches() });
    let choices = family.choices_of_steps();
    let mut losses = Vec::new();
    for step in 0..family.f32s("lora_loss").len() {
        if let Some(choices) = &choices {
            let given = Some(choices[step].clone());
            trainer.model_mut().set_choices(Some(Choices { given, ..Choices::default() }));
        }
        let report = trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap();
        losses.push(report.loss as f32);
        for (id, parameter) in trainer.model().params().iter().filter(|(_, p)| p.trainable && step == 0) {
            let name = format!("lora_grad.{}", parameter.name);
            let error = error(&trainer.grads().get(id).unwrap().to_vec(), &family.f32s(&name));
            ours.insert(name, error);
        }
    }
    ours.insert("lora_loss".into(), error(&losses, &family.f32s("lora_loss")));
    device.check().unwrap();
    ours
}

/// Logits without the columns that pad the vocabulary.
pub fn unpadded(logits: &Tensor, model: &Transformer) -> Vec<f32> {
    let (stride, vocab) = (logits.cols(), model.config().vocab_size);
    logits.to_vec().chunks_exact(stride).flat_map(|row| row[..vocab].to_vec()).collect()
}

/// Fails unless every deviation is within the bound that `theirs` sets.
pub fn assert_within_bf16(family: &Family, ours: &HashMap<String, f64>, theirs: &HashMap<String, f64>) {
    let worst = |kind: &str| {
        let of_kind = ours.iter().filter(|(name, _)| name.starts_with(kind));
        of_kind.filter_map(|(name, error)| Some(error / theirs.get(name)?)).fold(0.0, f64::max)
    };
    println!(
        "{}: bf16 error against the reference's own: logits {:.2}, loss {:.2}, gradients up to {:.2}, adapter gradients up to {:.2}, six losses {:.2}",
        family.name,
        worst("logits"),
        worst("loss_mean"),
        worst("grad."),
        worst("lora_grad."),
        worst("lora_loss")
    );
    // A reference may know fewer gradients of experts.
    for (name, error) in ours.iter().filter(|(name, _)| theirs.contains_key(*name)) {
        let bound = bf16_bound(name, theirs[name]);
        assert!(*error <= bound, "{}: {name} in bf16 is off by {error:.3e}, above {bound:.3e}", family.name);
    }
}
