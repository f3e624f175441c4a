//! Reading a `ModelConfig` from a Hugging Face `config.json`, in the spellings of Transformers 4 and 5.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value};

use super::config::{Architecture, ModelConfig, RopeScaling, yarn_attention_factor};
use super::config_moe;
use crate::base::error::Result;
use crate::formats::nf4;
use crate::ops::rms_norm::NormRounding;

/// The object of config.json with typed access.
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The value, with `null` counted as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn usize(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) => Ok(Some(v)),
            None => bail!("{key} is {value}; expected a whole number"),
        }
    }

    pub(super) fn required(&self, key: &str) -> Result<usize> {
        self.usize(key)?.with_context(|| format!("{key} is missing"))
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(v) => Ok(Some(v)),
            None => bail!("{key} is {value}; expected a number"),
        }
    }

    /// A list of whole numbers; empty where the key is absent.
    pub(super) fn usizes(&self, key: &str) -> Result<Vec<usize>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let number = |item: &Value| item.as_u64().and_then(|n| usize::try_from(n).ok());
        let numbers = value.as_array().and_then(|items| items.iter().map(number).collect());
        numbers.with_context(|| format!("{key} is {value}; expected a list of whole numbers"))
    }

    pub(super) fn bool(&self, key: &str) -> Result<bool> {
        self.bool_or(key, false)
    }

    fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(value) => bail!("{key} is {value}; expected true or false"),
        }
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(value) => bail!("{key} is {value}; expected text"),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Fields<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(o)) if o.is_empty() => Ok(None),
            Some(Value::Object(o)) => Ok(Some(Fields(o))),
            Some(value) => bail!("{key} is {value}; expected an object"),
        }
    }

    /// Token ids: a number, a list of numbers, or nothing. Negative ones (old files write −1) mean none.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = match value {
            Value::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let mut ids = Vec::new();
        for item in items {
            let id = item.as_i64().with_context(|| format!("{key} is {value}; expected token ids"))?;
            if id >= 0 {
                ids.push(u32::try_from(id).with_context(|| format!("{key} is {value}; expected token ids"))?);
            }
        }
        Ok(ids)
    }
}

impl ModelConfig {
    /// Read `config.json` of a Hugging Face model. `path` is the file or the folder that holds it; end tokens that only
    /// `generation_config.json` beside it names are added.
    ///
    /// # Errors
    /// When the file cannot be read, or as [`ModelConfig::from_hf_json`].
    pub fn from_hf_path(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let mut config = Self::from_hf_json(&text).with_context(|| format!("cannot use {}", file.display()))?;
        let generation = file.with_file_name("generation_config.json");
        if generation.is_file() {
            let text = std::fs::read_to_string(&generation)
                .with_context(|| format!("cannot read {}", generation.display()))?;
            let ids = object(&text)
                .and_then(|o| Fields(&o).token_ids("eos_token_id"))
                .with_context(|| format!("cannot use {}", generation.display()))?;
            for id in ids {
                if !config.eos_token_ids.contains(&id) {
                    config.eos_token_ids.push(id);
                }
            }
        }
        Ok(config)
    }

    /// Read the text of a `config.json`. Where a key is absent, the default of the family's configuration class in
    /// Transformers holds.
    ///
    /// # Errors
    /// When it is not JSON, a key is missing or wrong, or the model needs what the engine does not do: another
    /// architecture, activation or rope type, weights quantized in another way than NF4.
    pub fn from_hf_json(text: &str) -> Result<Self> {
        let object = object(text)?;
        let f = Fields(&object);
        let model_type =
            f.string("model_type")?.context("model_type is missing: it is not the configuration of a model")?;
        let architecture = Architecture::from_name(model_type)?;
        if let Some(class) = f.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str)
            && !class.ends_with("ForCausalLM")
        {
            bail!("architectures names {class}; Tandem trains causal language models ({})", architecture.class_name());
        }
        if let Some(q) = f.object("quantization_config")? {
            check_quantization(&q, architecture)?;
        }
        if let Some(act) = f.string("hidden_act")?.filter(|a| !matches!(*a, "silu" | "swish")) {
            bail!("hidden_act {act:?} is not supported (silu is)");
        }

        let hidden_size = f.required("hidden_size")?;
        let num_attention_heads = f.required("num_attention_heads")?;
        let num_key_value_heads = match f.usize("num_key_value_heads")? {
            Some(n) => n,
            None if f.0.contains_key("num_key_value_heads") => num_attention_heads,
            None => match architecture {
                Architecture::Llama => num_attention_heads,
                Architecture::Mistral | Architecture::Mixtral | Architecture::GptOss => 8,
                Architecture::Qwen2 | Architecture::Qwen3 => 32,
                Architecture::Qwen3Moe => 4,
            },
        };
        let head_dim = match f.usize("head_dim")? {
            Some(d) => d,
            None if architecture == Architecture::Qwen3 && !f.0.contains_key("head_dim") => 128,
            None if architecture == Architecture::GptOss && !f.0.contains_key("head_dim") => 64,
            None => {
                ensure!(
                    num_attention_heads > 0 && hidden_size.is_multiple_of(num_attention_heads),
                    "hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_attention_heads}) and there is no head_dim"
                );
                hidden_size / num_attention_heads
            }
        };
        let max_position_embeddings = f.usize("max_position_embeddings")?.unwrap_or(match architecture {
            Architecture::Llama => 2048,
            Architecture::Mistral | Architecture::Mixtral | Architecture::GptOss => 131_072,
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe => 32_768,
        });
        let (rope_theta, rope_scaling) = rope(&f, architecture, max_position_embeddings)?;
        let num_hidden_layers = f.required("num_hidden_layers")?;
        // Before one window a layer is allocated.
        ensure!(num_hidden_layers <= 1024, "num_hidden_layers is {num_hidden_layers}; expected 1 to 1024");
        let attention_bias = f.bool("attention_bias")?;
        let (qkv_bias, o_bias) = match architecture {
            Architecture::Llama | Architecture::Qwen3 | Architecture::Qwen3Moe => (attention_bias, attention_bias),
            Architecture::Mistral | Architecture::Mixtral => (false, false),
            Architecture::GptOss => {
                let bias = f.bool_or("attention_bias", true)?;
                (bias, bias)
            }
            Architecture::Qwen2 => (true, false),
        };
        Self {
            architecture,
            vocab_size: f.required("vocab_size")?,
            hidden_size,
            intermediate_size: f.required("intermediate_size")?,
            moe: config_moe::from_hf(&f, architecture, num_hidden_layers)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rms_norm_eps: f.f64("rms_norm_eps")?.unwrap_or(match architecture {
                Architecture::Mixtral | Architecture::GptOss => 1e-5,
                _ => 1e-6,
            }),
            norm_rounding: norm_rounding(architecture),
            rope_theta,
            rope_scaling,
            max_position_embeddings,
            tie_word_embeddings: f.bool("tie_word_embeddings")?,
            qkv_bias,
            o_bias,
            mlp_bias: architecture == Architecture::Llama && f.bool("mlp_bias")?,
            qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
            attention_sinks: architecture == Architecture::GptOss,
            sliding_window: sliding_window(&f, architecture, num_hidden_layers)?,
            bos_token_id: token_ids(&f, "bos_token_id", architecture, 1)?.first().copied(),
            eos_token_ids: token_ids(&f, "eos_token_id", architecture, 2)?,
            pad_token_id: f.token_ids("pad_token_id")?.first().copied(),
        }
        .checked()
    }
}

/// When the norms of a family round: gpt-oss casts what the weight was multiplied with, the others what it will be.
pub(super) fn norm_rounding(family: Architecture) -> NormRounding {
    if family == Architecture::GptOss { NormRounding::AfterWeight } else { NormRounding::BeforeWeight }
}

/// Refuses quantized weights, except NF4 by bitsandbytes and gpt-oss's MXFP4. An absent `bnb_4bit_quant_type` is FP4, as in Transformers.
fn check_quantization(q: &Fields<'_>, family: Architecture) -> Result<()> {
    match q.string("quant_method").ok().flatten().unwrap_or("an unnamed method") {
        "mxfp4" if family == Architecture::GptOss => Ok(()),
        "bitsandbytes" if q.bool("load_in_8bit")? => bail!(
            "the weights are stored in 8 bits by bitsandbytes (load_in_8bit), which Tandem does not read; {}",
            nf4::REMEDY
        ),
        "bitsandbytes" => match q.string("bnb_4bit_quant_type")?.unwrap_or("fp4") {
            "nf4" => Ok(()),
            other => bail!(
                "the weights are stored as {} by bitsandbytes, which Tandem does not read; {}",
                other.to_uppercase(),
                nf4::REMEDY
            ),
        },
        method => bail!("the weights are stored quantized ({method}); use the unquantized model in f32, f16 or bf16"),
    }
}

/// Token ids, with the class default of Llama, Mistral and Mixtral where the key is absent (`null` means none).
fn token_ids(f: &Fields<'_>, key: &str, architecture: Architecture, default: u32) -> Result<Vec<u32>> {
    let has_default = matches!(architecture, Architecture::Llama | Architecture::Mistral | Architecture::Mixtral);
    if has_default && !f.0.contains_key(key) { Ok(vec![default]) } else { f.token_ids(key) }
}

fn object(text: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text).context("it is not valid JSON")? {
        Value::Object(o) => Ok(o),
        _ => bail!("it is JSON, but not an object"),
    }
}

/// Rotary base and scaling. Transformers 4 writes `rope_theta` and `rope_scaling`; 5 writes `rope_parameters` with both
/// in it. As in Transformers, a `rope_scaling` that is there wins, and a theta inside the object wins.
fn rope(f: &Fields<'_>, family: Architecture, max_position_embeddings: usize) -> Result<(f64, RopeScaling)> {
    let key = if f.object("rope_scaling")?.is_some() { "rope_scaling" } else { "rope_parameters" };
    let theta = f.f64("rope_theta")?.unwrap_or(match family {
        Architecture::Mixtral => 1e6,
        Architecture::GptOss => 150_000.0,
        _ => 10_000.0,
    });
    let Some(p) = f.object(key)? else {
        let scaling = if family == Architecture::GptOss { GPT_OSS_ROPE } else { RopeScaling::None };
        return Ok((theta, scaling));
    };
    if p.0.values().any(Value::is_object) {
        bail!("{key} differs by layer type, which is not supported");
    }
    for (where_, fields) in [("", f), (key, &p)] {
        if let Some(part) = fields.f64("partial_rotary_factor")?.filter(|v| *v != 1.0) {
            bail!("partial_rotary_factor {part} {where_} is not supported (only 1 is)");
        }
    }
    let theta = p.f64("rope_theta")?.unwrap_or(theta);
    let kind = p.string("rope_type")?.or(p.string("type")?).unwrap_or("default");
    let number = |name: &str| p.f64(name)?.with_context(|| format!("{key}: {name} is missing for rope type {kind}"));
    let original = || -> Result<usize> {
        let named = p.usize("original_max_position_embeddings")?.or(f.usize("original_max_position_embeddings")?);
        Ok(named.unwrap_or(max_position_embeddings))
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: number("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        },
        "yarn" => {
            let original = original()?;
            let factor = p.f64("factor")?.unwrap_or(max_position_embeddings as f64 / original as f64);
            // As in Transformers, 0 counts as absent here.
            let given = |name: &str| Ok::<_, anyhow::Error>(p.f64(name)?.filter(|x| *x != 0.0));
            let attention_factor = match (p.f64("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
                (Some(given), ..) => given,
                (None, Some(one), Some(all)) => yarn_mscale(factor, one) / yarn_mscale(factor, all),
                _ => yarn_attention_factor(factor),
            };
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: given("beta_fast")?.unwrap_or(32.0),
                beta_slow: given("beta_slow")?.unwrap_or(1.0),
                truncate: p.bool_or("truncate", true)?,
                attention_factor,
            }
        }
        other => bail!("rope type {other:?} is not supported (default, linear, llama3 and yarn are)"),
    };
    Ok((theta, scaling))
}

/// The scaling of a gpt-oss model that names none: the default of its class. Its attention factor is `0.1·ln(32) + 1`.
const GPT_OSS_ROPE: RopeScaling = RopeScaling::Yarn {
    factor: 32.0,
    original_max_position_embeddings: 4096,
    beta_fast: 32.0,
    beta_slow: 1.0,
    truncate: false,
    attention_factor: 1.346_573_590_279_972_7,
};

/// YaRN's factor with a weight on its logarithm.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// One window a layer, by the rules of each family in Transformers.
fn sliding_window(f: &Fields<'_>, architecture: Architecture, num_layers: usize) -> Result<Vec<Option<usize>>> {
    // Absent means the class default; null and 0 mean none.
    let default = match architecture {
        Architecture::Mixtral => None,
        Architecture::GptOss => Some(128),
        _ => Some(4096),
    };
    let window = if f.0.contains_key("sliding_window") { f.usize("sliding_window")? } else { default };
    let window = window.filter(|w| *w > 0);
    let used = f.bool("use_sliding_window")?;
    match architecture {
        Architecture::Llama => Ok(vec![None; num_layers]),
        Architecture::Mistral | Architecture::Mixtral => Ok(vec![window; num_layers]),
        Architecture::Qwen3Moe => Ok(vec![window.filter(|_| used); num_layers]),
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = window.filter(|_| used);
            if let Some(types) = f.get("layer_types") {
                return windows_by_type(types, window, num_layers);
            }
            let first = f.usize("max_window_layers")?.unwrap_or(28);
            Ok((0..num_layers).map(|layer| window.filter(|_| layer >= first)).collect())
        }
        Architecture::GptOss => match f.get("layer_types") {
            Some(types) => windows_by_type(types, window, num_layers),
            None => {
                ensure!(window.is_some(), "sliding_window is off, but every second block of a gpt_oss model needs it");
                Ok((0..num_layers).map(|layer| window.filter(|_| layer.is_multiple_of(2))).collect())
            }
        },
    }
}

/// One window a layer as `layer_types` says.
fn windows_by_type(types: &Value, window: Option<usize>, num_layers: usize) -> Result<Vec<Option<usize>>> {
    let types = types.as_array().with_context(|| format!("layer_types is {types}; expected a list"))?;
    ensure!(types.len() == num_layers, "layer_types has {} entries; num_hidden_layers is {num_layers}", types.len());
    let window_of = |t: &Value| match t.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => {
            bail!("layer_types asks for sliding_attention, but sliding_window or use_sliding_window is off")
        }
        _ => bail!("layer type {t} is not supported (full_attention and sliding_attention are)"),
    };
    types.iter().map(window_of).collect()
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
