//! `config.json` of an exported model: the source's own where there is one, else written from a `ModelConfig`.

use std::f64::consts::PI;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value};

use crate::base::error::Result;
use crate::formats::safetensors::Dtype;
use crate::model::config::{Architecture, Gating, ModelConfig, RopeScaling, yarn_attention_factor};

/// Original contexts and scaling factors of published Llama models, with the two frequency factors they all use.
const LLAMA3_CONTEXT: usize = 8192;
const LLAMA3_LOW: f64 = 1.0;
const LLAMA3_HIGH: f64 = 4.0;

/// The name PyTorch gives a float type.
///
/// # Errors
/// When it is not a type that weights are written in.
pub fn torch_name(dtype: Dtype) -> Result<&'static str> {
    Ok(match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        other => bail!("weights cannot be written as {other}"),
    })
}

/// The source's `config.json` with the type of its weights replaced, under the key it uses (`dtype` of Transformers 5,
/// `torch_dtype` of 4), and without `quantization_config`: what is written is not quantized. Everything else stays.
///
/// # Errors
/// When `text` is not a JSON object.
pub fn with_dtype(text: &str, dtype: Dtype) -> Result<String> {
    let mut value: Value = serde_json::from_str(text).context("it is not valid JSON")?;
    let object = value.as_object_mut().context("it is JSON, but not an object")?;
    object.shift_remove("quantization_config");
    let key = if object.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    object.insert(key.to_owned(), torch_name(dtype)?.into());
    if key == "dtype" && object.contains_key("torch_dtype") {
        object.insert("torch_dtype".to_owned(), torch_name(dtype)?.into());
    }
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// As [`with_dtype`], of a model whose linear layers are stored in NF4: with the `quantization_config` that bitsandbytes' integration in Transformers
/// writes.
///
/// # Errors
/// As [`with_dtype`].
pub fn with_nf4(text: &str, dtype: Dtype, double: bool) -> Result<String> {
    let mut value: Value = serde_json::from_str(&with_dtype(text, dtype)?)?;
    let quantization: [(&str, Value); 13] = [
        ("_load_in_4bit", true.into()),
        ("_load_in_8bit", false.into()),
        ("bnb_4bit_compute_dtype", torch_name(dtype)?.into()),
        ("bnb_4bit_quant_storage", "uint8".into()),
        ("bnb_4bit_quant_type", "nf4".into()),
        ("bnb_4bit_use_double_quant", double.into()),
        ("llm_int8_enable_fp32_cpu_offload", false.into()),
        ("llm_int8_has_fp16_weight", false.into()),
        ("llm_int8_skip_modules", Value::Null),
        ("llm_int8_threshold", 6.0.into()),
        ("load_in_4bit", true.into()),
        ("load_in_8bit", false.into()),
        ("quant_method", "bitsandbytes".into()),
    ];
    let quantization: Map<String, Value> =
        quantization.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let object = value.as_object_mut().context("it is JSON, but not an object")?;
    object.insert("quantization_config".to_owned(), quantization.into());
    Ok(serde_json::to_string_pretty(&value)? + "\n")
}

/// A `config.json` that Transformers 4 and 5 load, for a model whose source has none (a GGUF file).
///
/// # Errors
/// When Transformers has no words for the model: rotary divisors that are not of the Llama 3 form, biases on some
/// projections only, windows that no rule of the family gives.
pub fn synthesize(config: &ModelConfig, dtype: Dtype) -> Result<String> {
    let mut o = Map::new();
    let mut set = |key: &str, value: Value| o.insert(key.to_owned(), value);
    let family = config.architecture;
    set("architectures", vec![family.class_name()].into());
    set("model_type", family.name().into());
    set("vocab_size", config.vocab_size.into());
    set("hidden_size", config.hidden_size.into());
    set("intermediate_size", config.intermediate_size.into());
    set("num_hidden_layers", config.num_hidden_layers.into());
    set("num_attention_heads", config.num_attention_heads.into());
    set("num_key_value_heads", config.num_key_value_heads.into());
    set("head_dim", config.head_dim.into());
    set("hidden_act", "silu".into());
    set("rms_norm_eps", config.rms_norm_eps.into());
    set("max_position_embeddings", config.max_position_embeddings.into());
    set("rope_theta", config.rope_theta.into());
    set("rope_scaling", rope_scaling(config)?);
    set("tie_word_embeddings", config.tie_word_embeddings.into());
    let token = |id: Option<u32>| id.map_or(Value::Null, Value::from);
    set("bos_token_id", token(config.bos_token_id));
    set(
        "eos_token_id",
        match config.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => (*one).into(),
            more => more.to_vec().into(),
        },
    );
    set("pad_token_id", token(config.pad_token_id));
    match family {
        Architecture::Llama | Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::GptOss => {
            ensure!(
                config.qkv_bias == config.o_bias,
                "a {} model with biases on some attention projections only cannot be written as a Hugging Face folder",
                family.name()
            );
            set("attention_bias", config.qkv_bias.into());
        }
        Architecture::Mistral | Architecture::Qwen2 | Architecture::Mixtral => {
            ensure!(
                config.qkv_bias == (family == Architecture::Qwen2) && !config.o_bias,
                "a {} model with these biases cannot be written as a Hugging Face folder",
                family.name()
            );
        }
    }
    if family == Architecture::Llama {
        set("mlp_bias", config.mlp_bias.into());
    }
    for (key, value) in windows(config)?.into_iter().chain(experts(config)?) {
        set(key, value);
    }
    set("torch_dtype", torch_name(dtype)?.into());
    Ok(serde_json::to_string_pretty(&o)? + "\n")
}

/// The keys that give the model's windows in its family.
fn windows(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>> {
    let window = config.sliding_window.iter().flatten().next().copied();
    let same = config.sliding_window.iter().flatten().all(|w| Some(*w) == window);
    ensure!(same, "windows of different widths cannot be written as a Hugging Face folder");
    let value = window.map_or(Value::Null, Value::from);
    let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    let kinds: Vec<&str> = config.sliding_window.iter().map(kind).collect();
    Ok(match config.architecture {
        Architecture::Llama => {
            ensure!(window.is_none(), "a llama model has no sliding window");
            Vec::new()
        }
        Architecture::Mistral | Architecture::Mixtral | Architecture::Qwen3Moe => {
            ensure!(
                window.is_none() || config.sliding_window.iter().all(Option::is_some),
                "a {} model has its window on every block",
                config.architecture.name()
            );
            match config.architecture {
                Architecture::Qwen3Moe => {
                    vec![("use_sliding_window", window.is_some().into()), ("sliding_window", value)]
                }
                _ => vec![("sliding_window", value)],
            }
        }
        Architecture::GptOss => vec![("sliding_window", value), ("layer_types", kinds.into())],
        Architecture::Qwen2 | Architecture::Qwen3 => {
            // Older versions know only the first block with a window.
            let first = config.sliding_window.iter().position(Option::is_some).unwrap_or(config.num_hidden_layers);
            vec![
                ("use_sliding_window", window.is_some().into()),
                ("sliding_window", value),
                ("max_window_layers", first.into()),
                ("layer_types", kinds.into()),
            ]
        }
    })
}

/// The keys that describe the experts of a mixture.
fn experts(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>> {
    let family = config.architecture;
    let Some(moe) = &config.moe else {
        // Such a model may have experts nowhere; its class wants that said.
        return Ok(if family == Architecture::Qwen3Moe { vec![("num_experts", 0.into())] } else { Vec::new() });
    };
    // Qwen3-MoE's key is that of Transformers 4, which 5 reads as well.
    let num_experts = if family == Architecture::Qwen3Moe { "num_experts" } else { "num_local_experts" };
    let mut keys: Vec<(&'static str, Value)> = vec![
        (num_experts, moe.num_experts.into()),
        ("num_experts_per_tok", moe.num_experts_per_tok.into()),
        ("output_router_logits", moe.router_aux_loss_coef.is_some().into()),
    ];
    if let Some(coef) = moe.router_aux_loss_coef {
        keys.push(("router_aux_loss_coef", coef.into()));
    }
    if family == Architecture::Qwen3Moe {
        let dense: Vec<usize> = (0..moe.layers.len()).filter(|&layer| !moe.layers[layer]).collect();
        keys.push(("moe_intermediate_size", moe.moe_intermediate_size.into()));
        keys.push(("norm_topk_prob", moe.norm_topk_prob.into()));
        keys.push(("decoder_sparse_step", 1.into()));
        keys.push(("mlp_only_layers", dense.into()));
    } else {
        ensure!(
            moe.layers.iter().all(|sparse| *sparse) && moe.moe_intermediate_size == config.intermediate_size,
            "a {} model has experts of intermediate_size in every block",
            family.name()
        );
        ensure!(moe.norm_topk_prob, "the experts' weights of a {} model add up to 1", family.name());
    }
    if let Gating::Clamped { alpha, limit } = moe.gating {
        keys.push(("swiglu_alpha", alpha.into()));
        keys.push(("swiglu_limit", limit.into()));
    }
    Ok(keys)
}

fn rope_scaling(config: &ModelConfig) -> Result<Value> {
    let llama3 = |factor: f64, low: f64, high: f64, original: usize| {
        let mut o = Map::new();
        o.insert("rope_type".to_owned(), "llama3".into());
        o.insert("factor".to_owned(), factor.into());
        o.insert("low_freq_factor".to_owned(), low.into());
        o.insert("high_freq_factor".to_owned(), high.into());
        o.insert("original_max_position_embeddings".to_owned(), original.into());
        Value::Object(o)
    };
    Ok(match &config.rope_scaling {
        // Without a word from config.json gpt-oss has its class's scaling.
        RopeScaling::None if config.architecture == Architecture::GptOss => {
            Value::Object(Map::from_iter([("rope_type".to_owned(), "default".into())]))
        }
        RopeScaling::None => Value::Null,
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => {
            let mut keys: Vec<(&str, Value)> = vec![
                ("rope_type", "yarn".into()),
                ("factor", (*factor).into()),
                ("original_max_position_embeddings", (*original_max_position_embeddings).into()),
                ("beta_fast", (*beta_fast).into()),
                ("beta_slow", (*beta_slow).into()),
                ("truncate", (*truncate).into()),
            ];
            if *attention_factor != yarn_attention_factor(*factor) {
                keys.push(("attention_factor", (*attention_factor).into()));
            }
            Value::Object(keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
        }
        RopeScaling::Linear { factor } => {
            let mut o = Map::new();
            o.insert("rope_type".to_owned(), "linear".into());
            o.insert("factor".to_owned(), (*factor).into());
            Value::Object(o)
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            llama3(*factor, *low_freq_factor, *high_freq_factor, *original_max_position_embeddings)
        }
        RopeScaling::Factors(factors) if factors.iter().all(|f| *f == 1.0) => Value::Null,
        RopeScaling::Factors(factors) => {
            // The lowest frequency is divided by the whole factor.
            let factor = f64::from(factors.last().copied().unwrap_or(1.0));
            let divisors = llama3_divisors(config, factor);
            let close = |(a, b): (&f32, f64)| (f64::from(*a) - b).abs() <= 1e-3 * b;
            ensure!(
                factors.len() == divisors.len() && factors.iter().zip(divisors).all(close),
                "the model's rotary divisors are not those of a Llama 3 model, so config.json cannot express them"
            );
            llama3(factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT)
        }
    })
}

/// What the published Llama 3 scaling divides each frequency by: 1 for short wavelengths, `factor` for long ones, and
/// `1 / ((1 − s) / factor + s)` between, with s falling from 1 to 0.
fn llama3_divisors(config: &ModelConfig, factor: f64) -> Vec<f64> {
    let context = LLAMA3_CONTEXT as f64;
    (0..config.head_dim / 2)
        .map(|i| {
            let wavelength = 2.0 * PI * config.rope_theta.powf(2.0 * i as f64 / config.head_dim as f64);
            let s = (context / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW);
            let s = s.clamp(0.0, 1.0);
            1.0 / ((1.0 - s) / factor + s)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    fn golden(family: &str) -> ModelConfig {
        let root = std::env::var_os("TANDEM_GOLDEN")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
        ModelConfig::from_hf_path(&root.join(family)).unwrap()
    }

    const MIXTURES: [&str; 4] = [
        r#"{"model_type": "qwen3_moe", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "mlp_only_layers": [1], "output_router_logits": true, "use_sliding_window": true, "sliding_window": 5}"#,
        r#"{"model_type": "qwen3_moe", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 0}"#,
        r#"{"model_type": "mixtral", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}"#,
        r#"{"model_type": "gpt_oss", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "yarn", "factor": 4.0,
            "attention_factor": 1.25}, "num_local_experts": 4, "swiglu_limit": 6.5}"#,
    ];

    #[test]
    fn golden_configs_survive_synthesis() {
        for family in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"] {
            let config = golden(family);
            let text = synthesize(&config, Dtype::F32).unwrap();
            assert_eq!(ModelConfig::from_hf_json(&text).unwrap(), config, "{family}");
        }
        for text in MIXTURES {
            let config = ModelConfig::from_hf_json(text).unwrap();
            let written = synthesize(&config, Dtype::BF16).unwrap();
            assert_eq!(ModelConfig::from_hf_json(&written).unwrap(), config, "{written}");
        }
        let mut config = golden("qwen3");
        config.sliding_window = vec![Some(9), None, Some(9)];
        config.eos_token_ids = vec![2, 7];
        assert_eq!(ModelConfig::from_hf_json(&synthesize(&config, Dtype::F32).unwrap()).unwrap(), config);
    }

    #[test]
    fn llama3_divisors_are_recognised() {
        let mut config = golden("llama");
        (config.head_dim, config.rope_theta) = (64, 500_000.0);
        let divisors: Vec<f32> = llama3_divisors(&config, 32.0).into_iter().map(|d| d as f32).collect();
        assert_eq!((divisors[0], divisors[31]), (1.0, 32.0));
        assert!(divisors.iter().any(|d| *d > 1.0 && *d < 32.0));
        config.rope_scaling = RopeScaling::Factors(divisors);
        let text = synthesize(&config, Dtype::BF16).unwrap();
        let back = ModelConfig::from_hf_json(&text).unwrap();
        let wanted = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(back.rope_scaling, wanted);
        config.rope_scaling = RopeScaling::Factors(vec![2.0; 32]);
        let e = format!("{:#}", synthesize(&config, Dtype::BF16).unwrap_err());
        assert!(e.contains("rotary divisors"), "{e}");
    }

    #[test]
    fn what_transformers_cannot_say_is_an_error() {
        let mut config = golden("llama");
        config.qkv_bias = true;
        assert!(synthesize(&config, Dtype::F32).is_err());
        let mut config = golden("mistral");
        config.sliding_window[0] = None;
        assert!(synthesize(&config, Dtype::F32).is_err());
    }

    #[test]
    fn only_the_dtype_of_a_copied_config_changes() {
        let text = with_dtype(r#"{"model_type": "llama", "dtype": "bfloat16", "x": [1]}"#, Dtype::F32).unwrap();
        let v: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(v, json!({"model_type": "llama", "dtype": "float32", "x": [1]}));
        let v: Value = serde_json::from_str(&with_dtype("{}", Dtype::BF16).unwrap()).unwrap();
        assert_eq!(v, json!({"torch_dtype": "bfloat16"}));
        assert!(with_dtype("[]", Dtype::F32).is_err());
        assert!(with_dtype("{}", Dtype::I8).is_err());
    }
}
