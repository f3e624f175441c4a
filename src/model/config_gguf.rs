//! Reading a `ModelConfig` from the metadata of a GGUF file, and the names of its tensors in Hugging Face's spelling.

use anyhow::{Context as _, bail, ensure};

use super::config::{Architecture, Gating, ModelConfig, MoeConfig, RopeScaling, yarn_attention_factor};
use super::config_hf::norm_rounding;
use super::config_moe::router_module;
use crate::base::error::Result;
use crate::formats::gguf::GgufFile;

/// Tensor that holds one rotary divisor a frequency.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

impl ModelConfig {
    /// Read the configuration of a GGUF model. llama.cpp stores Mistral and Mixtral as `llama` and ignores their sliding windows, and so
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
    let key = |name: &str| format!("{arch}.{name}");
    let number = |name: &str| -> Result<Option<usize>> { Ok(file.u32(&key(name))?.map(|v| v as usize)) };
    let required = |name: &str| number(name)?.with_context(|| format!("{} is missing", key(name)));
    let num_experts = number("expert_count")?.unwrap_or(0);
    let architecture = architecture(arch, num_experts)?;

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
    let max_position_embeddings = required("context_length")?;
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
    let intermediate_size = match (architecture, number("expert_feed_forward_length")?) {
        (Architecture::GptOss, Some(width)) => width,
        _ => required("feed_forward_length")?,
    };
    let is_qwen3 = matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe);
    let moe = match num_experts {
        0 => None,
        _ => Some(experts(file, arch, architecture, intermediate_size)?),
    };
    let sliding_window = match architecture {
        // Windows on every second block, the first one among them.
        Architecture::GptOss => {
            let window = required("attention.sliding_window")?;
            (0..num_hidden_layers).map(|layer| layer.is_multiple_of(2).then_some(window)).collect()
        }
        _ => vec![None; num_hidden_layers],
    };
    ModelConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        moe,
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
        rope_scaling: rope_scaling(file, arch, max_position_embeddings)?,
        max_position_embeddings,
        tie_word_embeddings: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias"),
        o_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        qk_norm: is_qwen3,
        attention_sinks: architecture == Architecture::GptOss,
        sliding_window,
        bos_token_id: file.u32("tokenizer.ggml.bos_token_id")?,
        eos_token_ids,
        pad_token_id: file.u32("tokenizer.ggml.padding_token_id")?,
    }
    .checked()
}

/// The family of a file.
fn architecture(arch: &str, num_experts: usize) -> Result<Architecture> {
    let dense = match arch {
        "llama" if num_experts > 0 => return Ok(Architecture::Mixtral),
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        "qwen3moe" => return Ok(Architecture::Qwen3Moe),
        "gpt-oss" => return Ok(Architecture::GptOss),
        _ => bail!(
            "GGUF files of architecture {arch:?} are not supported; Tandem trains llama (Mistral and Mixtral among them), qwen2, qwen3, qwen3moe and gpt-oss"
        ),
    };
    ensure!(num_experts == 0, "it is a {arch} model with {num_experts} experts, which is not supported");
    Ok(dense)
}

/// The sparse part of a mixture. llama.cpp lets the weights of a token's experts add up to 1 in all three families, and has no other gate than theirs.
fn experts(file: &GgufFile, arch: &str, family: Architecture, intermediate_size: usize) -> Result<MoeConfig> {
    let key = |name: &str| format!("{arch}.{name}");
    let number = |name: &str| -> Result<Option<usize>> { Ok(file.u32(&key(name))?.map(|v| v as usize)) };
    let required = |name: &str| number(name)?.with_context(|| format!("{} is missing", key(name)));
    let is_gpt_oss = family == Architecture::GptOss;
    for (name, largest) in [("expert_shared_count", 0), ("expert_group_count", 1)] {
        if let Some(n) = number(name)?.filter(|n| *n > largest) {
            bail!("{} is {n}, which is not supported", key(name));
        }
    }
    // 1 is a softmax over all experts, 3 one over those that were chosen; with weights that add up to 1 they are the same.
    if let Some(n) = number("expert_gating_func")?.filter(|n| !matches!(n, 0 | 1 | 3)) {
        bail!("{} is {n}, which is not supported (softmax is)", key("expert_gating_func"));
    }
    if let Some(scale) = file.f32(&key("expert_weights_scale"))?.filter(|scale| *scale != 0.0 && *scale != 1.0) {
        bail!("{} is {scale}, which is not supported", key("expert_weights_scale"));
    }
    let num_layers = required("block_count")?;
    let is_sparse = |layer| file.tensor(&format!("blk.{layer}.ffn_gate_inp.weight")).is_some();
    Ok(MoeConfig {
        num_experts: required("expert_count")?,
        num_experts_per_tok: required("expert_used_count")?,
        moe_intermediate_size: match family {
            Architecture::Qwen3Moe => required("expert_feed_forward_length")?,
            _ => intermediate_size,
        },
        norm_topk_prob: file.bool(&key("expert_weights_norm"))?.unwrap_or(true),
        router_bias: is_gpt_oss,
        expert_bias: is_gpt_oss,
        gating: if is_gpt_oss { Gating::GPT_OSS } else { Gating::Silu },
        interleaved: is_gpt_oss,
        router_aux_loss_coef: None,
        // Known when the tensors are.
        mxfp4: false,
        layers: (0..num_layers).map(|layer| family != Architecture::Qwen3Moe || is_sparse(layer)).collect(),
    })
}

/// YaRN as llama.cpp computes it, but for gpt-oss, whose ramp has broken ends in the model it was made from.
fn yarn(file: &GgufFile, arch: &str, max_position_embeddings: usize) -> Result<RopeScaling> {
    let key = |name: &str| format!("{arch}.rope.scaling.{name}");
    let number = |name: &str| Ok::<_, anyhow::Error>(file.f32(&key(name))?.filter(|x| *x != 0.0).map(shortest));
    let factor = number("factor")?.with_context(|| format!("{} is missing", key("factor")))?;
    for name in ["yarn_ext_factor", "yarn_log_multiplier"] {
        if let Some(x) = number(name)?.filter(|x| *x != 1.0 || name == "yarn_log_multiplier") {
            bail!("{} is {x}, which is not supported", key(name));
        }
    }
    let given = number("yarn_attn_factor")?.or(number("attn_factor")?).unwrap_or(1.0);
    let original = file.u32(&key("original_context_length"))?.map_or(max_position_embeddings, |n| n as usize);
    Ok(RopeScaling::Yarn {
        factor,
        original_max_position_embeddings: original,
        beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
        truncate: arch != "gpt-oss",
        attention_factor: given * yarn_attention_factor(factor),
    })
}

fn rope_scaling(file: &GgufFile, arch: &str, max_position_embeddings: usize) -> Result<RopeScaling> {
    let kind = file.string(&format!("{arch}.rope.scaling.type"))?.unwrap_or("none");
    let mut factor = file.f32(&format!("{arch}.rope.scaling.factor"))?.filter(|f| *f != 0.0);
    if kind == "none" {
        // Files from before `rope.scaling.type` name a linear factor alone.
        factor = file.f32(&format!("{arch}.rope.scale_linear"))?.filter(|f| *f != 0.0);
    }
    let linear = match kind {
        "yarn" => {
            ensure!(file.tensor(ROPE_FREQS).is_none(), "it has both yarn and {ROPE_FREQS}, which is not supported");
            return yarn(file, arch, max_position_embeddings);
        }
        "none" | "linear" => factor.filter(|f| *f != 1.0).map(shortest),
        other => bail!("rope scaling {other:?} is not supported (none, linear, yarn and rope_freqs are)"),
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
