//! Tests of reading a model's configuration from config.json and from GGUF metadata.

use std::io::Write as _;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::formats::gguf::GgufFile;
use crate::formats::gguf_write::GgufBuilder;
use crate::model::config::{Architecture, Gating, ModelConfig, MoeConfig, RopeScaling};
use crate::ops::rms_norm::NormRounding;

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
    assert!(
        refusal(&with("llama", json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}}))).contains("\"dynamic\"")
    );
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

/// The configuration of gpt-oss-20b as it is published, without what the engine does not read.
fn gpt_oss_20b() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "eos_token_id": 200_002, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect::<Vec<_>>(),
        "max_position_embeddings": 131_072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
        "pad_token_id": 199_999, "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-5, "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false},
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201_088
    })
}

#[test]
fn gpt_oss_is_read_as_published() {
    let c = read(&gpt_oss_20b());
    assert_eq!((c.architecture, c.norm_rounding), (Architecture::GptOss, NormRounding::AfterWeight));
    assert!(c.attention_sinks && c.qkv_bias && c.o_bias && !c.qk_norm);
    assert_eq!(c.sliding_window[..3], [Some(128), None, Some(128)]);
    let moe = MoeConfig {
        num_experts: 32,
        num_experts_per_tok: 4,
        moe_intermediate_size: 2880,
        norm_topk_prob: true,
        router_bias: true,
        expert_bias: true,
        gating: Gating::Clamped { alpha: 1.702, limit: 7.0 },
        interleaved: true,
        router_aux_loss_coef: None,
        mxfp4: true,
        layers: vec![true; 24],
    };
    assert_eq!(c.moe.as_ref(), Some(&moe));
    // The model card's 20.9 billion parameters.
    assert_eq!(c.num_parameters(), 20_914_757_184);
    let RopeScaling::Yarn { attention_factor, truncate, .. } = c.rope_scaling else { panic!("{:?}", c.rope_scaling) };
    assert!((attention_factor - 1.346_573_590_279_972_7).abs() < 1e-15 && !truncate);
    // The defaults of the class say the same.
    let mut v = gpt_oss_20b();
    let absent = ["layer_types", "rope_scaling", "rope_theta", "sliding_window", "head_dim", "attention_bias"];
    v.as_object_mut().unwrap().retain(|k, _| !absent.contains(&k.as_str()));
    assert_eq!(read(&v), c);
    v["sliding_window"] = Value::Null;
    assert!(refusal(&v).contains("sliding_window is off"));
    v["output_router_logits"] = json!(true);
    v["sliding_window"] = json!(64);
    assert_eq!(read(&v).moe.unwrap().router_aux_loss_coef, Some(0.9));
}

#[test]
fn yarn_reads_its_optional_keys() {
    let yarn = |extra: Value| {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        rope.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        match read(&with("qwen3", json!({"rope_scaling": rope}))).rope_scaling {
            RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, truncate, .. } => {
                (attention_factor, beta_fast, beta_slow, truncate)
            }
            other => panic!("{other:?}"),
        }
    };
    let factor = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(json!({})), (factor, 32.0, 1.0, true));
    assert_eq!(yarn(json!({"attention_factor": 1.5, "beta_fast": 16})), (1.5, 16.0, 1.0, true));
    let both = (0.2 * 4f64.ln() + 1.0) / factor;
    assert_eq!(yarn(json!({"mscale": 2.0, "mscale_all_dim": 1.0, "truncate": false})), (both, 32.0, 1.0, false));
    assert_eq!(yarn(json!({"mscale": 2.0, "mscale_all_dim": 0.0})).0, factor);
    let crossed = json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}});
    assert!(refusal(&with("qwen3", crossed)).contains("beta_fast (1)"));
}

#[test]
fn mixtures_have_the_defaults_of_their_families() {
    let c = read(&with("qwen3_moe", json!({"num_experts": 16, "mlp_only_layers": [3], "decoder_sparse_step": 2})));
    let moe = c.moe.as_ref().unwrap();
    assert_eq!((moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size), (16, 8, 768));
    assert!(!moe.norm_topk_prob && !moe.router_bias && !moe.interleaved && c.qk_norm && c.head_dim == 16);
    assert_eq!(moe.layers, [false, true, false, false]);
    assert!(c.experts(1).is_some() && c.experts(3).is_none() && c.experts(9).is_none());
    let names: Vec<String> = c.expected_tensors().into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().any(|n| n == "model.layers.0.mlp.gate_proj.weight"));
    assert!(names.iter().any(|n| n == "model.layers.1.mlp.experts.gate_up_proj"));
    assert!(!names.iter().any(|n| n.starts_with("model.layers.1.mlp.gate_proj")));
    assert_eq!(c.sliding_window, [None; 4]);
    let on = json!({"use_sliding_window": true, "sliding_window": 7});
    assert_eq!(read(&with("qwen3_moe", on)).sliding_window, [Some(7); 4]);
    assert_eq!(read(&with("qwen3_moe", json!({"num_experts": 0}))).moe, None);

    let mut v = base("mixtral");
    v.as_object_mut().unwrap().retain(|k, _| !matches!(k.as_str(), "head_dim" | "rms_norm_eps"));
    let c = read(&v);
    let moe = c.moe.as_ref().unwrap();
    assert_eq!((moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size), (8, 2, 128));
    assert!(moe.norm_topk_prob && moe.gating == Gating::Silu);
    assert_eq!((c.rope_theta, c.rms_norm_eps, c.sliding_window), (1e6, 1e-5, vec![None; 4]));
    assert_eq!((c.bos_token_id, c.eos_token_ids.as_slice(), c.head_dim), (Some(1), &[2][..], 16));
    assert_eq!(c.norm_rounding, NormRounding::BeforeWeight);
}

#[test]
fn mixtures_that_are_not_supported_say_why() {
    let refuse = |extra: Value| refusal(&with("mixtral", extra));
    assert!(refuse(json!({"router_jitter_noise": 0.1})).contains("routes without noise"));
    assert!(refuse(json!({"n_shared_experts": 1})).contains("all tokens share"));
    assert!(refuse(json!({"num_local_experts": 4, "num_experts": 8})).contains("contradict"));
    assert!(refuse(json!({"num_experts_per_tok": 9})).contains("num_experts_per_tok is 9; expected 1 to 8"));
    assert!(refuse(json!({"quantization_config": {"quant_method": "mxfp4"}})).contains("mxfp4"));
    assert!(refusal(&with("qwen3_moe", json!({"decoder_sparse_step": 0}))).contains("decoder_sparse_step"));
    assert!(refusal(&with("qwen3_moe", json!({"mlp_only_layers": "all"}))).contains("whole numbers"));
    assert!(refusal(&with("gpt_oss", json!({"swiglu_limit": 0}))).contains("swiglu_limit is 0"));
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
    assert!(refusal(gguf_base("qwen2").u32("qwen2.expert_count", 8)).contains("with 8 experts"));
    let mixtral = || gguf_base("llama").u32("llama.expert_count", 8);
    assert!(refusal(mixtral()).contains("llama.expert_used_count is missing"));
    let mixtral = || mixtral().u32("llama.expert_used_count", 2);
    assert!(refusal(mixtral().u32("llama.expert_gating_func", 2)).contains("expert_gating_func is 2"));
    assert!(refusal(mixtral().u32("llama.expert_shared_count", 1)).contains("expert_shared_count is 1"));
    assert!(refusal(gguf_base("gpt-oss")).contains("gpt-oss.attention.sliding_window is missing"));
    assert!(refusal(gguf_base("llama").u32("split.count", 3)).contains("one of 3 parts"));
    assert!(refusal(gguf_base("llama").string("llama.rope.scaling.type", "longrope")).contains("longrope"));
    assert!(
        refusal(gguf_base("llama").string("llama.rope.scaling.type", "yarn")).contains("scaling.factor is missing")
    );
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
