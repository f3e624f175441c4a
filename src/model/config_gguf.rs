//! Reading a `ModelConfig` from the metadata of a GGUF file, and the names of its tensors in Hugging Face's spelling.

use anyhow::{Context as _, bail, ensure};

use super::config::{Architecture, ModelConfig, RopeScaling};
use super::config_hf::norm_rounding;
use super::config_moe::router_module;
use crate::base::error::Result;
use crate::formats::gguf::GgufFile;

/// Tensor that holds one rotary divisor a frequency.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

impl ModelConfig {
    /// Read the configuration of a GGUF model. llama.cpp stores Mistral as `llama` and ignores its sliding window, and so
    /// does this.
    ///
    /// # Errors
    /// When it is not a model, a key is missing or wrong, or the model needs what the engine does not do.
    pub fn from_gguf(file: &GgufFile) -> Result<Self> {
        read(file).with_context(|| format!("cannot use {}", file.path().display()))
    }
}

fn read(file: &GgufFile) -> Result<ModelConfig> {
    let kind = file.string("general.type")?.unwrap_or("model");
    ensure!(kind == "model", "it holds {kind:?}, not a model");
    if let Some(n) = file.u32("split.count")?.filter(|n| *n > 1) {
        bail!("it is one of {n} parts; join them with llama.cpp's `llama-gguf-split --merge` and use the result");
    }
    let arch = file.string("general.architecture")?.context("general.architecture is missing")?;
    let architecture = match Architecture::from_name(arch)? {
        Architecture::Mistral => {
            bail!("GGUF files of architecture \"mistral\" are not known; llama.cpp writes \"llama\"")
        }
        known => known,
    };
    let key = |name: &str| format!("{arch}.{name}");
    let number = |name: &str| -> Result<Option<usize>> { Ok(file.u32(&key(name))?.map(|v| v as usize)) };
    let required = |name: &str| number(name)?.with_context(|| format!("{} is missing", key(name)));
    if number("expert_count")?.is_some_and(|n| n > 0) {
        bail!("it is a mixture of experts, which is not supported; Tandem trains dense llama, qwen2 and qwen3 models");
    }

    let hidden_size = required("embedding_length")?;
    let num_hidden_layers = required("block_count")?;
    ensure!(num_hidden_layers <= 1024, "{} is {num_hidden_layers}; expected 1 to 1024", key("block_count"));
    let num_attention_heads = required("attention.head_count")?;
    let head_dim = match number("attention.key_length")? {
        Some(d) => d,
        None => {
            ensure!(
                num_attention_heads > 0 && hidden_size.is_multiple_of(num_attention_heads),
                "embedding_length ({hidden_size}) is not a multiple of attention.head_count ({num_attention_heads})"
            );
            hidden_size / num_attention_heads
        }
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(d) = number(name)?.filter(|d| *d != head_dim) {
            bail!("{} is {d} and the head width {head_dim}; different ones are not supported", key(name));
        }
    }
    let has = |name: &str| file.tensor(name).is_some();
    let vocab_size = match number("vocab_size")? {
        Some(n) => n,
        None => {
            let embedding = file.tensor("token_embd.weight").context("tensor token_embd.weight is missing")?;
            embedding.shape.first().copied().unwrap_or(0)
        }
    };
    let mut eos_token_ids = Vec::new();
    for name in ["eos_token_id", "eot_token_id"] {
        let id = file.u32(&format!("tokenizer.ggml.{name}"))?;
        eos_token_ids.extend(id.filter(|id| !eos_token_ids.contains(id)));
    }
    ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size: required("feed_forward_length")?,
        moe: None,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: number("attention.head_count_kv")?.unwrap_or(num_attention_heads),
        head_dim,
        rms_norm_eps: shortest(
            file.f32(&key("attention.layer_norm_rms_epsilon"))?
                .with_context(|| format!("{} is missing", key("attention.layer_norm_rms_epsilon")))?,
        ),
        norm_rounding: norm_rounding(architecture),
        rope_theta: shortest(file.f32(&key("rope.freq_base"))?.unwrap_or(10_000.0)),
        rope_scaling: rope_scaling(file, arch)?,
        max_position_embeddings: required("context_length")?,
        tie_word_embeddings: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias"),
        o_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        qk_norm: architecture == Architecture::Qwen3,
        attention_sinks: architecture == Architecture::GptOss,
        sliding_window: vec![None; num_hidden_layers],
        bos_token_id: file.u32("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
        pad_token_id: file.u32("tokenizer.ggml.padding_token_id")?,
    }
    .checked()
}

fn rope_scaling(file: &GgufFile, arch: &str) -> Result<RopeScaling> {
    let kind = file.string(&format!("{arch}.rope.scaling.type"))?.unwrap_or("none");
    let mut factor = file.f32(&format!("{arch}.rope.scaling.factor"))?.filter(|f| *f != 0.0);
    if kind == "none" {
        // Files from before `rope.scaling.type` name a linear factor alone.
        factor = file.f32(&format!("{arch}.rope.scale_linear"))?.filter(|f| *f != 0.0);
    }
    let linear = match kind {
        "none" | "linear" => factor.filter(|f| *f != 1.0).map(shortest),
        other => bail!("rope scaling {other:?} is not supported (none, linear and rope_freqs are)"),
    };
    match (linear, file.tensor(ROPE_FREQS).is_some()) {
        (None, false) => Ok(RopeScaling::None),
        (Some(factor), false) => Ok(RopeScaling::Linear { factor }),
        (None, true) => Ok(RopeScaling::Factors(file.to_f32(ROPE_FREQS)?)),
        (Some(_), true) => bail!("it has both a linear rope scaling and {ROPE_FREQS}, which is not supported"),
    }
}

/// The f64 whose shortest decimal form is that of `x`: 1e-5 stored as f32 becomes 1e-5, as config.json would say it.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// The Hugging Face name of a GGUF tensor; `None` for one that no supported model uses. Gate and up rows of experts, which are apart in GGUF files,
/// are called as if there were such weights.
pub fn hf_name(family: Architecture, gguf: &str) -> Option<String> {
    let top = match gguf {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = top {
        return Some(name.to_owned());
    }
    let (layer, rest) = gguf.strip_prefix("blk.")?.split_once('.')?;
    layer.parse::<usize>().ok().filter(|n| n.to_string() == layer)?;
    let (module, kind) = rest.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))?;
    let expert_weight = |module: &str| {
        let bias = if kind == "bias" { "_bias" } else { "" };
        Some(format!("model.layers.{layer}.mlp.experts.{module}{bias}"))
    };
    match module {
        "attn_sinks" => return Some(format!("model.layers.{layer}.self_attn.sinks")),
        "ffn_gate_exps" => return expert_weight("gate_proj"),
        "ffn_up_exps" => return expert_weight("up_proj"),
        "ffn_gate_up_exps" => return expert_weight("gate_up_proj"),
        "ffn_down_exps" => return expert_weight("down_proj"),
        _ => {}
    }
    // Files of Mixtral from before experts were stacked: ffn_gate.3.weight.
    if let Some((module, expert)) = module.split_once('.') {
        let expert: usize = expert.parse().ok().filter(|n: &usize| n.to_string() == expert)?;
        let module = match module {
            "ffn_gate" => "gate_proj",
            "ffn_up" => "up_proj",
            "ffn_down" => "down_proj",
            _ => return None,
        };
        return Some(format!("model.layers.{layer}.mlp.experts.{expert}.{module}.{kind}"));
    }
    let module = match module {
        "attn_norm" => "input_layernorm",
        // gpt-oss calls it by its place, the others by what reads it.
        "ffn_norm" | "post_attention_norm" => "post_attention_layernorm",
        "ffn_gate_inp" => router_module(family),
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{module}.{kind}"))
}
