//! Models that bitsandbytes stored in 4 bits: loaded, trained on, and refused, through files and the `tandem` program.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/nf4_folder.rs"]
mod nf4_folder;
mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};
use tandem::formats::safetensors::Dtype;
use tandem::model::loading::Checkpoint;
use tandem::session::event::{RunEvent, TimedEvent};
use tandem::tensor::MemoryCategory;

/// Tiny models in a folder: as f32, in NF4, and what the second becomes.
struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    fn new(double: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let plain = support::tiny_model(folder.path());
        nf4_folder::nf4_copy(&plain, &folder.path().join("nf4"), double);
        nf4_folder::dequantized_copy(&folder.path().join("nf4"), &folder.path().join("dequantized"));
        Self { folder }
    }

    fn nf4(&self) -> PathBuf {
        self.folder.path().join("nf4")
    }

    fn refusal(&self) -> String {
        format!("{:#}", Checkpoint::open(&self.nf4()).unwrap_err())
    }

    fn set_config(&self, key: &str, value: Value) {
        let path = self.nf4().join("config.json");
        let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        config[key] = value;
        fs::write(path, config.to_string()).unwrap();
    }

    /// Writes the weights anew, changed by `change`, as `shards` files.
    fn rewrite(&self, shards: usize, change: impl Fn(&mut Tensors)) {
        let path = self.nf4().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: Tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
        change(&mut tensors);
        fs::remove_file(&path).unwrap();
        let mut map = serde_json::Map::new();
        for shard in 0..shards {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let views = tensors.iter().skip(shard).step_by(shards).map(|(tensor, (dtype, shape, bytes))| {
                (tensor.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            });
            let views: Vec<(&str, TensorView<'_>)> = views.collect();
            map.extend(views.iter().map(|(tensor, _)| ((*tensor).to_owned(), json!(name))));
            serialize_to_file(views, None, &self.nf4().join(name)).unwrap();
        }
        fs::write(self.nf4().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    }
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

const UP: &str = "model.layers.1.mlp.up_proj.weight";

/// Trains 6 steps and gives the events.
fn train(folder: &Path, model: &str, method: &str, train: &str) -> Vec<TimedEvent> {
    let text = format!(
        "name = \"t\"\nruns_dir = \"runs\"\n[model]\npath = {model:?}\n[data]\npath = \"data set.jsonl\"\neval_fraction = 0.1\n\
         [packing]\npack_len = 128\n[method]\n{method}\n[optimizer]\nlr = 0.02\n[train]\nmax_steps = 6\nthreads = 1\ndevice = \"cpu\"\n{train}"
    );
    fs::write(folder.join("run.toml"), text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.current_dir(folder).env("TANDEM_HOME", folder.join("tandem"));
    let output = command.args(["train", "run.toml", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(events: &[TimedEvent]) -> Vec<u64> {
    let loss = |event: &TimedEvent| match &event.event {
        RunEvent::Step { report, .. } => Some(report.loss.to_bits()),
        _ => None,
    };
    events.iter().filter_map(loss).collect()
}

fn notes(events: &[TimedEvent]) -> String {
    let note = |event: &TimedEvent| match &event.event {
        RunEvent::Note { text, .. } => Some(text.clone() + "\n"),
        _ => None,
    };
    events.iter().filter_map(note).collect()
}

#[test]
fn a_run_on_a_4_bit_folder_is_that_on_its_dequantized_weights_bit_for_bit() {
    for (double, settings) in [(true, ""), (false, "precision = \"bf16\"\n")] {
        let models = Models::new(double);
        let folder = models.folder.path();
        support::dataset(folder, 60);
        let (nf4, plain) = (train(folder, "nf4", "r = 4", settings), train(folder, "dequantized", "r = 4", settings));
        let original = train(folder, "tiny módel", "r = 4", settings);
        assert_eq!(losses(&nf4).len(), 6);
        assert_eq!(losses(&nf4), losses(&plain));
        assert_ne!(losses(&nf4), losses(&original), "quantizing must change the weights");
        // 2 blocks of q, k, v, o, gate, up, down: 2 · (2 · 32² + 2 · 16 · 32 + 3 · 64 · 32) values of 4 bytes.
        let told = notes(&nf4);
        assert!(told.contains("14 weights are stored in 4 bits") && told.contains("in f32: 72.00 KiB"), "{told}");
        assert!(!notes(&plain).contains("4 bits"));
    }
}

#[test]
fn qlora_trains_on_what_is_stored_and_on_what_it_quantizes_alike() {
    let models = Models::new(true);
    let folder = models.folder.path();
    support::dataset(folder, 60);
    let qlora = |model: &str, rest: &str| train(folder, model, &format!("kind = \"qlora\"\nr = 4\n{rest}"), "");
    let (quantized, stored) = (qlora("tiny módel", ""), qlora("nf4", ""));
    assert_eq!(losses(&quantized).len(), 6);
    assert_eq!(losses(&quantized), losses(&stored), "quantizing while loading gives what is stored");
    assert_eq!(losses(&stored), losses(&train(folder, "dequantized", "r = 4", "")), "in 4 bits and as their values");
    assert!(!notes(&stored).contains("4 bits"), "nothing is held dequantized");
    let resident = train(folder, "nf4", "kind = \"qlora\"\nr = 4", "[memory]\ndequantized = \"resident\"\n");
    assert_eq!(losses(&resident), losses(&stored));
    assert_ne!(losses(&qlora("tiny módel", "double_quant = false")), losses(&quantized), "scales in f32 are others");
    // Peak memory of weights, as the run told it.
    let weights = |events: &[TimedEvent]| {
        let bytes = events.iter().find_map(|event| match &event.event {
            RunEvent::Step { report, .. } => {
                let found = report.memory.categories.iter().find(|c| c.category == MemoryCategory::Weights);
                found.map(|c| c.peak_bytes)
            }
            _ => None,
        });
        bytes.unwrap()
    };
    assert!(weights(&stored) + 60_000 < weights(&resident), "{} of {}", weights(&stored), weights(&resident));
}

#[test]
fn a_quantized_folder_is_that_of_bitsandbytes_and_is_not_written_over() {
    let models = Models::new(true);
    let folder = models.folder.path();
    let quantize = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
        command.current_dir(folder).env("TANDEM_HOME", folder.join("tandem"));
        command.arg("quantize").args(args).output().unwrap()
    };
    let output = quantize(&["tiny módel", "ours", "--dtype", "f32"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("ours: "));
    let [ours, theirs] = [folder.join("ours"), models.nf4()].map(|path| {
        let bytes = fs::read(path.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter();
        tensors
            .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
            .collect::<Tensors>()
    });
    assert!(ours.len() > 14 * 5 && ours == theirs, "every part of every weight");
    let config: Value = serde_json::from_str(&fs::read_to_string(folder.join("ours/config.json")).unwrap()).unwrap();
    assert_eq!(config["quantization_config"]["bnb_4bit_quant_type"], "nf4");
    assert!(folder.join("ours/tokenizer.json").is_file());
    let again = quantize(&["tiny módel", "ours"]);
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("ours"));
    // What is in 4 bits already stays as it is; the rest is rounded as asked.
    assert!(quantize(&["ours", "again"]).status.success());
    let again = Checkpoint::open(&folder.join("again")).unwrap();
    assert_eq!(again.tensor_f32(UP).unwrap(), Checkpoint::open(&models.nf4()).unwrap().tensor_f32(UP).unwrap());
}

#[test]
fn a_full_fine_tune_of_a_4_bit_folder_is_saved_unquantized() {
    let models = Models::new(true);
    let folder = models.folder.path();
    support::dataset(folder, 60);
    let events = train(folder, "nf4", "kind = \"full\"", "");
    let run = events.iter().find_map(|event| match &event.event {
        RunEvent::Started(info) => Some(info.folder.clone()),
        _ => None,
    });
    let saved = Checkpoint::open(&folder.join(run.unwrap()).join("model")).unwrap();
    assert_eq!((saved.quantized(), saved.dtype_summary().as_str()), (None, "f32"));
    let before = Checkpoint::open(&models.nf4()).unwrap().tensor_f32(UP).unwrap();
    assert_ne!(saved.tensor_f32(UP).unwrap(), before);
}

#[test]
fn weights_and_their_scales_may_lie_in_different_files() {
    let models = Models::new(true);
    let whole = Checkpoint::open(&models.nf4()).unwrap();
    let values: Vec<Vec<f32>> = whole.tensor_names().iter().map(|name| whole.tensor_f32(name).unwrap()).collect();
    assert!(whole.describe().contains("nf4"), "{}", whole.describe());
    let quantized = whole.quantized().unwrap();
    assert_eq!((quantized.num_weights, quantized.num_elements), (14, 18432));
    // Half a byte a value, a byte for 64, and four for each of the 14 nested scales.
    assert_eq!(quantized.num_bytes, 18432 / 2 + 18432 / 64 + 14 * 4);
    models.rewrite(3, |_| {});
    let sharded = Checkpoint::open(&models.nf4()).unwrap();
    assert!(sharded.ignored_tensors().is_empty(), "{:?}", sharded.ignored_tensors());
    for (name, values) in whole.tensor_names().iter().zip(values) {
        assert_eq!(sharded.tensor_f32(name).unwrap(), values, "{name}");
    }
}

#[test]
fn a_damaged_4_bit_weight_is_named_with_what_is_wrong() {
    let suffixes = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4"];
    for suffix in suffixes {
        let models = Models::new(true);
        models.rewrite(1, |tensors| drop(tensors.remove(&format!("{UP}{suffix}")).unwrap()));
        let e = models.refusal();
        assert!(
            e.contains(UP) && e.contains("model-00001-of-00001") && e.contains(suffix) && e.contains("missing"),
            "{e}"
        );
    }
    let models = Models::new(false);
    models.rewrite(1, |tensors| {
        let (_, shape, bytes) = tensors.get_mut(&format!("{UP}.absmax")).unwrap();
        bytes.truncate(bytes.len() - 4);
        shape[0] -= 1;
    });
    let e = models.refusal();
    assert!(e.contains(UP) && e.contains("damaged") && e.contains(".absmax"), "{e}");
    // A state that agrees with itself, not with the configuration.
    let models = Models::new(true);
    models.rewrite(1, |tensors| {
        let (_, shape, bytes) = tensors.get_mut(&format!("{UP}.quant_state.bitsandbytes__nf4")).unwrap();
        *bytes = String::from_utf8(bytes.clone()).unwrap().replace("[64, 32]", "[32, 64]").into_bytes();
        shape[0] = bytes.len();
    });
    assert!(models.refusal().contains("has shape [32, 64]; the configuration asks for [64, 32]"));
    // Scales are looked at when they are read.
    let models = Models::new(true);
    models.rewrite(1, |tensors| {
        let (_, _, bytes) = tensors.get_mut(&format!("{UP}.nested_absmax")).unwrap();
        bytes.copy_from_slice(&f32::INFINITY.to_le_bytes());
    });
    let e = format!("{:#}", Checkpoint::open(&models.nf4()).unwrap().tensor_f32(UP).unwrap_err());
    assert!(e.contains(UP) && e.contains("not finite"), "{e}");
}

#[test]
fn fp4_and_8_bits_are_refused_with_file_kind_and_remedy() {
    let models = Models::new(true);
    for (config, kind) in [
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "fp4"}), "FP4"),
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "FP4"),
        (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), "load_in_8bit"),
    ] {
        models.set_config("quantization_config", config);
        let e = models.refusal();
        assert!(e.contains("config.json") && e.contains(kind) && e.contains("take the unquantized model"), "{e}");
    }
    // The weights say it themselves where the configuration does not.
    models.set_config("quantization_config", Value::Null);
    models.rewrite(1, |tensors| {
        let state = tensors.remove(&format!("{UP}.quant_state.bitsandbytes__nf4")).unwrap();
        tensors.insert(format!("{UP}.quant_state.bitsandbytes__fp4"), state);
    });
    let e = models.refusal();
    assert!(e.contains(UP) && e.contains("FP4") && e.contains("take the unquantized model"), "{e}");

    let models = Models::new(true);
    models.rewrite(1, |tensors| {
        tensors.retain(|name, _| !name.starts_with(UP));
        tensors.insert(UP.to_owned(), (Dtype::I8, vec![64, 32], vec![1; 64 * 32]));
        tensors.insert(UP.replace(".weight", ".SCB"), (Dtype::F32, vec![64], vec![0; 256]));
    });
    let e = models.refusal();
    assert!(e.contains(UP) && e.contains("load_in_8bit") && e.contains("take the unquantized model"), "{e}");
}
