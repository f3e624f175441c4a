//! Tests of adapters on disk: PEFT's own files round trip, saving is atomic, contradictions are named.

use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;

const FAMILIES: [&str; 7] = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"];

fn golden(family: &str) -> PathBuf {
    let root = std::env::var_os("TANDEM_GOLDEN")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
    root.join(family)
}

fn golden_adapter(family: &str) -> AdapterWeights {
    load(&golden(family).join("adapter_after_6_steps")).unwrap()
}

fn small() -> AdapterWeights {
    let config = AdapterConfig {
        base_model_name_or_path: None,
        r: 2,
        lora_alpha: 4.0,
        lora_dropout: 0.0,
        use_rslora: false,
        target_modules: vec!["q_proj".into()],
        target_parameters: Vec::new(),
        layers_to_transform: vec![1],
    };
    let module = "model.layers.1.self_attn.q_proj";
    let a = NamedTensor { name: tensor_name(module, Side::A), shape: vec![2, 3], data: vec![1.0; 6] };
    let b = NamedTensor { name: tensor_name(module, Side::B), shape: vec![4, 2], data: vec![2.0; 8] };
    AdapterWeights { config, tensors: vec![a, b] }
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn golden_adapters_round_trip() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("übung/adapter 1");
        let adapter = golden_adapter(family);
        let model = ModelConfig::from_hf_path(&golden(family)).unwrap();
        adapter.check_fits(&model).unwrap();
        let adapted = if model.moe.is_some() { 4 } else { 7 };
        assert_eq!(adapter.tensors.len(), model.num_hidden_layers * adapted * 2);
        save(&adapter, &folder).unwrap();
        assert_eq!(load(&folder).unwrap(), adapter);
        assert_eq!(names_in(&folder), [CONFIG_FILE, WEIGHTS_FILE]);
        // The weights file is PEFT's, value for value and name for name.
        let theirs = SafetensorsFile::open(&golden(family).join("adapter_after_6_steps").join(WEIGHTS_FILE)).unwrap();
        let ours = SafetensorsFile::open(&folder.join(WEIGHTS_FILE)).unwrap();
        assert!(ours.names().eq(theirs.names()));
        assert_eq!(ours.metadata(), theirs.metadata());
        for name in ours.names() {
            assert_eq!(ours.bytes(name).unwrap(), theirs.bytes(name).unwrap(), "{family}: {name}");
        }
    }
}

#[test]
fn names_with_and_without_default() {
    let module = "model.layers.12.mlp.down_proj";
    let name = tensor_name(module, Side::B);
    assert_eq!(name, "base_model.model.model.layers.12.mlp.down_proj.lora_B.weight");
    assert_eq!(parse_name(&name), Some((module, Side::B)));
    assert_eq!(parse_name(&name.replace("lora_B", "lora_A.default")), Some((module, Side::A)));
    assert_eq!(parse_name("model.layers.0.mlp.down_proj.lora_A.weight"), None);
    assert_eq!(parse_name("base_model.model.model.embed_tokens.weight"), None);
    assert_eq!(place("model.layers.0.mlp.q_proj"), None);

    let dir = tempfile::tempdir().unwrap();
    save(&small(), dir.path()).unwrap();
    let file = SafetensorsFile::open(&dir.path().join(WEIGHTS_FILE)).unwrap();
    let specs: Vec<TensorSpec> = file
        .names()
        .map(|n| TensorSpec {
            name: n.replace(".weight", ".default.weight"),
            dtype: Dtype::BF16,
            shape: file.info(n).unwrap().shape.clone(),
        })
        .collect();
    let path = dir.path().join(WEIGHTS_FILE);
    write(&path, &BTreeMap::new(), &specs, |t| Ok(file.to_f32(&t.name.replace(".default", ""))?.into())).unwrap();
    assert_eq!(load(dir.path()).unwrap(), small());
}

#[test]
fn saving_again_replaces_and_leaves_other_files() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("README.md"), "mine").unwrap();
    save(&small(), dir.path()).unwrap();
    let mut next = small();
    next.tensors[0].data[0] = 7.0;
    save(&next, dir.path()).unwrap();
    assert_eq!(load(dir.path()).unwrap(), next);
    let mut other = small();
    other.config.lora_alpha = 1.0;
    save(&other, dir.path()).unwrap();
    assert_eq!(load(dir.path()).unwrap(), other);
    assert_eq!(names_in(dir.path()), ["README.md", CONFIG_FILE, WEIGHTS_FILE]);
}

#[test]
fn a_contradiction_is_named_and_nothing_is_written() {
    let check = |edit: &dyn Fn(&mut AdapterWeights), wanted: &str| {
        let mut adapter = small();
        edit(&mut adapter);
        let dir = tempfile::tempdir().unwrap();
        let e = format!("{:#}", save(&adapter, &dir.path().join("x")).unwrap_err());
        assert!(e.contains(wanted), "{e}");
        assert!(names_in(dir.path()).is_empty());
    };
    check(&|a| a.tensors.truncate(1), "only one of its two");
    check(&|a| a.tensors.clear(), "no LoRA matrices");
    check(&|a| a.config.r = 3, "does not fit r = 3");
    check(&|a| a.config.layers_to_transform = vec![0], "leave out");
    check(&|a| a.config.target_modules = vec!["v_proj".into()], "leave out");
    check(&|a| a.tensors[1].data.truncate(7), "has 7 values");
    check(&|a| a.tensors[1].name = a.tensors[0].name.clone(), "does not fit");
    check(&|a| a.tensors[0].name = "x".into(), "tensor x is not a LoRA matrix");
}

#[test]
fn an_adapter_of_another_model_does_not_fit() {
    let llama = ModelConfig::from_hf_path(&golden("llama")).unwrap();
    let e = format!("{:#}", golden_adapter("mistral").check_fits(&llama).unwrap_err());
    assert!(e.contains("k_proj") || e.contains("q_proj"), "{e}");
    let mut deeper = llama.clone();
    deeper.num_hidden_layers = 4;
    let e = format!("{:#}", golden_adapter("llama").check_fits(&deeper).unwrap_err());
    assert!(e.contains("has no base_model.model.model.layers.3"), "{e}");
    let mut shallower = llama;
    shallower.num_hidden_layers = 2;
    assert!(golden_adapter("llama").check_fits(&shallower).is_err());
}

#[test]
fn broken_folders_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = || format!("{:#}", load(dir.path()).unwrap_err());
    assert!(refusal().contains(CONFIG_FILE));
    save(&small(), dir.path()).unwrap();
    std::fs::rename(dir.path().join(WEIGHTS_FILE), dir.path().join("adapter_model.bin")).unwrap();
    assert!(refusal().contains("adapter_model.bin"));
    let config = dir.path().join(CONFIG_FILE);
    let mut v: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&config).unwrap()).unwrap();
    v["use_dora"] = json!(true);
    std::fs::write(&config, v.to_string()).unwrap();
    assert!(refusal().contains("use_dora"));
}

proptest! {
    #[test]
    fn damaged_adapters_never_panic(in_config: bool, at in 0usize..2000, byte: u8) {
        static WHOLE: LazyLock<[(&str, Vec<u8>); 2]> = LazyLock::new(|| {
            let dir = tempfile::tempdir().unwrap();
            save(&small(), dir.path()).unwrap();
            [CONFIG_FILE, WEIGHTS_FILE].map(|name| (name, std::fs::read(dir.path().join(name)).unwrap()))
        });
        let mut files = WHOLE.clone();
        let bytes = &mut files[usize::from(!in_config)].1;
        let n = bytes.len();
        bytes[at % n] = byte;
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in &files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        if let Ok(adapter) = load(dir.path()) {
            prop_assert!(adapter.check().is_ok());
        }
    }
}
