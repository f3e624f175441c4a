//! Tests of reading a model's configuration from config.json and from GGUF metadata.

use std::io::Write as _;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::formats::gguf::GgufFile;
use crate::formats::gguf_write::GgufBuilder;
use crate::model::config::{Architecture, ModelConfig, RopeScaling};

fn base(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": true
    })
}

fn with(model_type: &str, extra: Value) -> Value {
    let mut v = base(model_type);
    for (k, x) in extra.as_object().unwrap() {
        v[k] = x.clone();
    }
    v
}

fn read(v: &Value) -> ModelConfig {
    ModelConfig::from_hf_json(&v.to_string()).unwrap()
}

fn refusal(v: &Value) -> String {
    format!("{:#}", ModelConfig::from_hf_json(&v.to_string()).unwrap_err())
}

#[test]
fn golden_configs_are_read() {
    let root = std::env::var_os("TANDEM_GOLDEN")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
    let llama = ModelConfig::from_hf_path(&root.join("llama")).unwrap();
    assert_eq!(llama.architecture, Architecture::Llama);
    assert_eq!((llama.rope_theta, llama.head_dim, llama.tie_word_embeddings), (500_000.0, 16, true));
    assert_eq!(
        llama.rope_scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64
        }
    );
    let mistral = ModelConfig::from_hf_path(&root.join("mistral")).unwrap();
    assert_eq!(mistral.sliding_window, [Some(16); 3]);
    assert_eq!((mistral.head_dim, mistral.q_size(), mistral.kv_size()), (32, 128, 64));
    let qwen2 = ModelConfig::from_hf_path(&root.join("qwen2")).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.o_bias && !qwen2.qk_norm);
    assert_eq!(qwen2.head_dim, 16);
    let qwen3 = ModelConfig::from_hf_path(&root.join("qwen3")).unwrap();
    assert!(qwen3.qk_norm && !qwen3.qkv_bias);
    assert_eq!((qwen3.bos_token_id, qwen3.eos_token_ids.as_slice(), qwen3.pad_token_id), (Some(1), &[2][..], Some(0)));
}

#[test]
fn both_spellings_of_rope_mean_the_same() {
    let scaling = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let four = read(&with("llama", json!({"rope_theta": 500000.0, "rope_scaling": scaling})));
    let mut both = scaling.clone();
    both["rope_theta"] = json!(500000.0);
    let five = read(&with("llama", json!({"rope_parameters": both})));
    assert_eq!(four, five);
    let old = read(&with("llama", json!({"rope_scaling": {"type": "linear", "factor": 2}})));
    assert_eq!(old.rope_scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(old.rope_theta, 10_000.0);
    assert_eq!(read(&with("llama", json!({"rope_scaling": null}))).rope_scaling, RopeScaling::None);
}

#[test]
fn windows_follow_each_family() {
    assert_eq!(read(&with("llama", json!({"sliding_window": 9}))).sliding_window, [None; 4]);
    assert_eq!(read(&base("mistral")).sliding_window, [Some(4096); 4]);
    assert_eq!(read(&with("mistral", json!({"sliding_window": null}))).sliding_window, [None; 4]);
    assert_eq!(read(&with("mistral", json!({"sliding_window": 0}))).sliding_window, [None; 4]);
    let on = json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 3});
    assert_eq!(read(&with("qwen2", on.clone())).sliding_window, [None, None, None, Some(7)]);
    let off = json!({"use_sliding_window": false, "sliding_window": 7, "max_window_layers": 3});
    assert_eq!(read(&with("qwen2", off)).sliding_window, [None; 4]);
    let mut typed = with("qwen3", on);
    let (full, sliding) = ("full_attention", "sliding_attention");
    typed["layer_types"] = json!([sliding, full, sliding, full]);
    assert_eq!(read(&typed).sliding_window, [Some(7), None, Some(7), None]);
    typed["use_sliding_window"] = json!(false);
    assert!(refusal(&typed).contains("use_sliding_window is off"));
    typed["layer_types"] = json!([full]);
    assert!(refusal(&typed).contains("1 entries"));
}

#[test]
fn defaults_of_the_families() {
    let mut v = base("llama");
    v.as_object_mut().unwrap().retain(|k, _| k != "head_dim" && k != "num_key_value_heads");
    let c = read(&v);
    assert_eq!((c.head_dim, c.num_key_value_heads), (16, 4));
    v["model_type"] = json!("qwen3");
    v["num_key_value_heads"] = json!(2);
    assert_eq!(read(&v).head_dim, 128);
    let c = read(&with("llama", json!({"attention_bias": true, "mlp_bias": true})));
    assert!(c.qkv_bias && c.o_bias && c.mlp_bias);
    let c = read(&with("llama", json!({"eos_token_id": [5, 6], "pad_token_id": -1})));
    assert_eq!((c.eos_token_ids.as_slice(), c.pad_token_id), (&[5, 6][..], None));
    assert_eq!((c.bos_token_id, read(&base("llama")).eos_token_ids), (Some(1), vec![2]));
    assert_eq!(read(&with("llama", json!({"bos_token_id": null}))).bos_token_id, None);
    assert_eq!((read(&base("qwen2")).bos_token_id, read(&base("qwen2")).eos_token_ids), (None, vec![]));
}

#[test]
fn refusals_say_what_is_supported() {
    assert!(refusal(&base("gemma3")).contains("Tandem trains llama, mistral, qwen2, qwen3"));
    assert!(refusal(&with("llama", json!({"hidden_act": "gelu"}))).contains("silu"));
    assert!(refusal(&with("llama", json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}))).contains("\"yarn\""));
    let q = json!({"quantization_config": {"quant_method": "gptq"}});
    assert!(refusal(&with("llama", q)).contains("gptq"));
    let class = json!({"architectures": ["LlamaForSequenceClassification"]});
    assert!(refusal(&with("llama", class)).contains("LlamaForSequenceClassification"));
    assert!(refusal(&with("llama", json!({"num_key_value_heads": 3}))).contains("num_key_value_heads (3)"));
    assert!(refusal(&with("llama", json!({"hidden_size": 0}))).contains("hidden_size is 0"));
    assert!(refusal(&with("llama", json!({"num_hidden_layers": 4_000_000_000u64}))).contains("num_hidden_layers"));
    assert!(refusal(&with("llama", json!({"vocab_size": -4}))).contains("vocab_size"));
    assert!(refusal(&with("llama", json!({"head_dim": 15}))).contains("even"));
    assert!(refusal(&json!({"model_type": "llama"})).contains("hidden_size is missing"));
    assert!(refusal(&json!([1])).contains("not an object"));
}

#[test]
fn expected_tensors_count_what_transformers_counts() {
    // SmolLM2-135M: 134,515,008 parameters with its tied head.
    let v = json!({
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
        "rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": true
    });
    let c = read(&v);
    assert_eq!(c.num_parameters(), 134_515_008);
    assert_eq!(c.expected_tensors().len(), 272);
}

fn gguf(builder: GgufBuilder) -> crate::base::error::Result<ModelConfig> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&builder.build()).unwrap();
    ModelConfig::from_gguf(&GgufFile::open(file.path()).unwrap())
}

fn gguf_base(arch: &str) -> GgufBuilder {
    let k = |s: &str| format!("{arch}.{s}");
    GgufBuilder::new()
        .string("general.architecture", arch)
        .u32(&k("embedding_length"), 64)
        .u32(&k("block_count"), 2)
        .u32(&k("feed_forward_length"), 128)
        .u32(&k("attention.head_count"), 4)
        .u32(&k("attention.head_count_kv"), 2)
        .u32(&k("context_length"), 128)
        .f32(&k("attention.layer_norm_rms_epsilon"), 1e-5)
        .tensor_f32("token_embd.weight", &[5, 1], &[0.0; 5])
}

#[test]
fn gguf_metadata_becomes_the_same_config() {
    let c = gguf(gguf_base("llama").f32("llama.rope.freq_base", 1e6).u32("tokenizer.ggml.eos_token_id", 3)).unwrap();
    assert_eq!((c.rms_norm_eps, c.rope_theta, c.head_dim, c.vocab_size), (1e-5, 1e6, 16, 5));
    assert_eq!((c.tie_word_embeddings, c.eos_token_ids.as_slice()), (true, &[3][..]));
    let c = gguf(gguf_base("qwen3").u32("qwen3.attention.key_length", 32)).unwrap();
    assert_eq!((c.architecture, c.head_dim, c.qk_norm), (Architecture::Qwen3, 32, true));
    let factors = [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0];
    let c = gguf(gguf_base("llama").tensor_f32("rope_freqs.weight", &[8], &factors)).unwrap();
    assert_eq!(c.rope_scaling, RopeScaling::Factors(factors.to_vec()));
    let linear = gguf_base("llama").string("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(gguf(linear).unwrap().rope_scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn gguf_refusals_name_the_reason() {
    let refusal = |b| format!("{:#}", gguf(b).unwrap_err());
    assert!(refusal(GgufBuilder::new().string("general.architecture", "gemma3")).contains("gemma3"));
    assert!(refusal(gguf_base("llama").u32("llama.expert_count", 8)).contains("mixture of experts"));
    assert!(refusal(gguf_base("llama").u32("split.count", 3)).contains("one of 3 parts"));
    assert!(refusal(gguf_base("llama").string("llama.rope.scaling.type", "yarn")).contains("yarn"));
    assert!(refusal(gguf_base("llama").tensor_f32("rope_freqs.weight", &[2], &[1.0; 2])).contains("head_dim / 2 = 8"));
    assert!(refusal(gguf_base("llama").u32("llama.rope.dimension_count", 8)).contains("rope.dimension_count is 8"));
}

proptest! {
    #[test]
    fn damaged_json_never_panics(at in 0usize..600, byte in 32u8..127) {
        let mut text = with("qwen2", json!({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}})).to_string();
        let at = at % text.len();
        text.replace_range(at..=at, &(byte as char).to_string());
        if let Ok(c) = ModelConfig::from_hf_json(&text) {
            prop_assert!(c.head_dim > 0 && c.sliding_window.len() == c.num_hidden_layers);
        }
    }
}
