//! Tests of opening models: the golden folders, the same model as shards and as GGUF, and what is said about broken ones.

use std::io::Write as _;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::formats::gguf_value::GgmlType;
use crate::formats::gguf_write::GgufBuilder;
use crate::formats::safetensors::{Dtype, SafetensorsFile, TensorSpec, write};
use crate::model::testing::gguf_header;

fn golden(family: &str) -> PathBuf {
    let root = std::env::var_os("TANDEM_GOLDEN")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
    root.join(family)
}

fn refusal(path: &Path) -> String {
    format!("{:#}", Checkpoint::open(path).unwrap_err())
}

#[test]
fn golden_folders_open_and_every_tensor_reads() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let c = Checkpoint::open(&golden(family)).unwrap();
        assert_eq!(c.config().architecture.name(), family);
        assert_eq!(c.dtype_summary(), "f32");
        assert!(c.ignored_tensors().is_empty(), "{family}: {:?}", c.ignored_tensors());
        let mut elements = 0;
        for name in c.tensor_names() {
            let values = c.tensor_f32(name).unwrap();
            assert_eq!(values.len(), c.shape(name).unwrap().iter().product::<usize>());
            assert!(values.iter().all(|v| v.is_finite()), "{family}: {name}");
            elements += values.len() as u64;
        }
        assert_eq!(elements, c.num_parameters());
        assert_eq!(c.bytes_on_disk(), 4 * elements);
        // The reference has a gradient for every parameter: same names, same number.
        let case = SafetensorsFile::open(&golden(family).join("case.safetensors")).unwrap();
        let grads: Vec<&str> = case.names().filter_map(|n| n.strip_prefix("grad.")).collect();
        let mut names: Vec<&str> = c.tensor_names().iter().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, grads, "{family}");
    }
}

/// Copy a golden folder's config.json and write its weights through `split` into shards.
fn sharded(family: &str, dir: &Path, shards: usize) -> Checkpoint {
    let c = Checkpoint::open(&golden(family)).unwrap();
    std::fs::copy(golden(family).join("config.json"), dir.join("config.json")).unwrap();
    let mut map = serde_json::Map::new();
    for s in 0..shards {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", s + 1);
        let specs: Vec<TensorSpec> = c
            .tensor_names()
            .iter()
            .skip(s)
            .step_by(shards)
            .map(|n| TensorSpec { name: n.clone(), dtype: Dtype::BF16, shape: c.shape(n).unwrap().to_vec() })
            .collect();
        write(&dir.join(&file), &BTreeMap::new(), &specs, |t| Ok(c.tensor_f32(&t.name)?.into())).unwrap();
        map.extend(specs.iter().map(|t| (t.name.clone(), json!(file))));
    }
    std::fs::write(dir.join(INDEX_FILE), json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    c
}

#[test]
fn shards_are_one_model_and_a_missing_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let whole = sharded("qwen3", dir.path(), 3);
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.dtype_summary(), "bf16");
    assert_eq!(c.bytes_on_disk() * 2, whole.bytes_on_disk());
    for name in c.tensor_names() {
        let (a, b) = (whole.tensor_f32(name).unwrap(), c.tensor_f32(name).unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| half::bf16::from_f32(*a).to_f32() == *b), "{name}");
    }
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    let e = refusal(dir.path());
    assert!(e.contains("1 of 3") && e.contains("model-00002-of-00003.safetensors"), "{e}");
    let index = json!({"weight_map": {"x": "../x.safetensors"}});
    std::fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
    assert!(refusal(dir.path()).contains("plain name"));
}

/// The GGUF name of a Hugging Face tensor, by asking the reader's table the other way round.
fn gguf_name(hf: &str, layers: usize) -> String {
    let tops = ["token_embd.weight", "output_norm.weight", "output.weight"].map(str::to_owned);
    let modules = ["attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"];
    let blocks = (0..layers).flat_map(|l| {
        modules
            .into_iter()
            .chain(["ffn_gate", "ffn_up", "ffn_down"])
            .flat_map(move |m| ["weight", "bias"].map(|k| format!("blk.{l}.{m}.{k}")))
    });
    tops.into_iter().chain(blocks).find(|n| hf_name(Architecture::Llama, n).as_deref() == Some(hf)).unwrap()
}

/// A golden folder as the GGUF file llama.cpp's converter would make of it.
fn as_gguf(family: &str) -> (Checkpoint, GgufBuilder) {
    let c = Checkpoint::open(&golden(family)).unwrap();
    let m = c.config();
    let mut b = gguf_header(m, family);
    for name in c.tensor_names() {
        let mut values = c.tensor_f32(name).unwrap();
        let shape = c.shape(name).unwrap();
        let heads = match name {
            n if family == "llama" && n.contains("q_proj") => m.num_attention_heads,
            n if family == "llama" && n.contains("k_proj") => m.num_key_value_heads,
            _ => 0,
        };
        if heads > 0 {
            // reshape (heads, 2, d/2, in), swap axes 1 and 2.
            let (half, row) = (m.head_dim / 2, shape[1]);
            let at = |h: usize, t: usize, j: usize| ((h * 2 + t) * half + j) * row;
            let mut out = Vec::new();
            for h in 0..heads {
                for j in 0..half {
                    for t in 0..2 {
                        out.extend_from_slice(&values[at(h, t, j)..at(h, t, j) + row]);
                    }
                }
            }
            values = out;
        }
        b = b.tensor_f32(&gguf_name(name, m.num_hidden_layers), shape, &values);
    }
    (c, b)
}

fn gguf_file(b: &GgufBuilder) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(&b.build()).unwrap();
    file
}

#[test]
fn golden_folders_and_their_gguf_files_hold_the_same_weights() {
    for family in ["llama", "qwen2", "qwen3"] {
        let (folder, b) = as_gguf(family);
        let file = gguf_file(&b.tensor_f32("blk.0.attn_rot_embd", &[1], &[0.0]));
        let c = Checkpoint::open(file.path()).unwrap();
        assert_eq!(c.tensor_names(), folder.tensor_names());
        for name in c.tensor_names() {
            assert_eq!(c.tensor_f32(name).unwrap(), folder.tensor_f32(name).unwrap(), "{family}: {name}");
        }
        assert_eq!(c.ignored_tensors(), ["blk.0.attn_rot_embd"]);
        assert!(c.is_gguf());
        assert_eq!(c.config().qkv_bias, family == "qwen2");
        assert_eq!(c.config().tie_word_embeddings, folder.config().tie_word_embeddings);
    }
}

#[test]
fn unsupported_quantization_is_named_before_anything_is_read() {
    let b = GgufBuilder::new()
        .string("general.architecture", "llama")
        .u32("llama.embedding_length", 256)
        .u32("llama.block_count", 1)
        .u32("llama.feed_forward_length", 256)
        .u32("llama.attention.head_count", 4)
        .u32("llama.context_length", 128)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .tensor("token_embd.weight", GgmlType(14), &[2, 256], &[0; 420]);
    let e = refusal(gguf_file(&b).path());
    assert!(e.contains("model.embed_tokens.weight is quantized as Q6_K"), "{e}");
}

/// A copy of the golden llama folder that a test may break.
fn copy() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::write(dir.path().join(name), std::fs::read(golden("llama").join(name)).unwrap()).unwrap();
    }
    dir
}

fn edit_config(dir: &Path, key: &str, value: Value) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn wrong_shapes_and_missing_tensors_are_named() {
    let dir = copy();
    edit_config(dir.path(), "intermediate_size", json!(96));
    let e = refusal(dir.path());
    assert!(e.contains("mlp.gate_proj.weight has shape [128, 64]") && e.contains("[96, 64]"), "{e}");
    let dir = copy();
    edit_config(dir.path(), "num_hidden_layers", json!(4));
    let e = refusal(dir.path());
    assert!(e.contains("model.layers.3.input_layernorm.weight and 8 others missing"), "{e}");
    let dir = copy();
    edit_config(dir.path(), "tie_word_embeddings", json!(false));
    assert!(refusal(dir.path()).contains("lm_head.weight missing"));
    let dir = copy();
    edit_config(dir.path(), "num_hidden_layers", json!(2));
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.ignored_tensors().len(), 9);
    assert!(c.tensor_f32("model.layers.2.input_layernorm.weight").is_err());
}

#[test]
fn folders_that_are_no_models_say_what_to_choose() {
    let e = refusal(&golden("llama").join("adapter_after_6_steps"));
    assert!(e.contains("an adapter, not a model"), "{e}");
    assert!(refusal(&golden("llama").join("model.safetensors")).contains("choose the folder"));
    let dir = copy();
    std::fs::rename(dir.path().join("model.safetensors"), dir.path().join("pytorch_model.bin")).unwrap();
    assert!(refusal(dir.path()).contains("save_pretrained"));
    std::fs::remove_file(dir.path().join("pytorch_model.bin")).unwrap();
    assert!(refusal(dir.path()).contains("neither model.safetensors nor"));
    std::fs::rename(dir.path().join("config.json"), dir.path().join("x.gguf")).unwrap();
    assert!(refusal(dir.path()).contains("choose its GGUF file itself"));
    assert!(refusal(&dir.path().join("absent")).contains("absent"));
}

#[test]
fn a_truncated_model_says_so() {
    let dir = copy();
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1024]).unwrap();
    assert!(refusal(dir.path()).contains("1.00 KiB missing"));
}

#[test]
fn descriptions_count_parameters() {
    let c = Checkpoint::open(&golden("llama")).unwrap();
    assert!(c.describe().starts_with("llama, 3 blocks, hidden size 64, "), "{}", c.describe());
    assert!(c.describe().contains(&units::count(c.num_parameters())));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn damaged_folders_never_panic(in_config: bool, at in 0usize..6000, byte: u8) {
        let dir = copy();
        let path = dir.path().join(if in_config { "config.json" } else { "model.safetensors" });
        let mut bytes = std::fs::read(&path).unwrap();
        let n = bytes.len();
        bytes[at % n] = byte;
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(c) = Checkpoint::open(dir.path()) {
            for name in c.tensor_names() {
                prop_assert!(c.tensor_f32(name).is_ok());
            }
        }
    }

    #[test]
    fn damaged_gguf_files_never_panic(at in 0usize..3000, byte: u8) {
        static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| as_gguf("llama").1.build());
        let mut bytes = WHOLE.clone();
        bytes[at] = byte;
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        if let Ok(c) = Checkpoint::open(file.path()) {
            for name in c.tensor_names() {
                prop_assert!(c.tensor_f32(name).is_ok());
            }
        }
    }
}
