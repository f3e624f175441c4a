//! Shape and options of a model, independent of the file they were read from.

use anyhow::{bail, ensure};

pub use super::config_moe::{Gating, MoeConfig};
use crate::base::error::Result;
use crate::formats::mxfp4;
use crate::ops::rms_norm::NormRounding;

/// Families of models that the engine trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama and everything stored as such (SmolLM2, TinyLlama …).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: norms on the heads of q and k.
    Qwen3,
    /// Qwen3 with experts, in all blocks or some.
    Qwen3Moe,
    /// Mistral with experts in all blocks.
    Mixtral,
    /// gpt-oss: experts with biases and clamped gates, attention with sinks.
    GptOss,
}

impl Architecture {
    /// All of them, in the order in which messages list them.
    pub const ALL: [Self; 7] =
        [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Qwen3Moe, Self::Mixtral, Self::GptOss];

    /// The name in `model_type` of config.json.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
            Self::GptOss => "gpt_oss",
        }
    }

    /// The name in `architectures` of config.json.
    pub fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::GptOss => "GptOssForCausalLM",
        }
    }

    /// The architecture with this `model_type`.
    ///
    /// # Errors
    /// When it is none of those the engine trains; the message lists them.
    pub fn from_name(name: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|a| a.name() == name) {
            Some(found) => Ok(found),
            None => bail!(
                "models of type {name:?} are not supported; Tandem trains {}",
                Self::ALL.map(Self::name).join(", ")
            ),
        }
    }
}

/// How rotary frequencies are changed for contexts longer than those of pre-training.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a smooth passage between (Llama 3.1 and later).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// Context length of pre-training.
        original_max_position_embeddings: usize,
    },
    /// High frequencies kept, low ones divided by `factor`, a ramp between; cosines and sines multiplied by `attention_factor` (YaRN).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Context length of pre-training.
        original_max_position_embeddings: usize,
        /// Frequencies that turn more often than this in the original context are kept.
        beta_fast: f64,
        /// Frequencies that turn less often than this in the original context are divided.
        beta_slow: f64,
        /// Whether the ends of the ramp are whole numbers.
        truncate: bool,
        /// Factor on cosines and sines, [`yarn_attention_factor`] unless the model names another.
        attention_factor: f64,
    },
    /// One divisor a frequency, f32 [head_dim / 2]: how GGUF files store the scaling (`rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// What YaRN multiplies cosines and sines by where the model does not say: `0.1·ln(factor) + 1`.
pub fn yarn_attention_factor(factor: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
}

/// Everything the engine needs to know about a model besides its weights. Names as in config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP of a dense block.
    pub intermediate_size: usize,
    /// The experts of a mixture; `None` for a dense model.
    pub moe: Option<MoeConfig>,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// When a norm rounds.
    pub norm_rounding: NormRounding,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Change of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases on the three projections of the MLP.
    pub mlp_bias: bool,
    /// RMSNorm on the heads of q and k.
    pub qk_norm: bool,
    /// A learned score a head that takes part in the softmax and has no value (gpt-oss).
    pub attention_sinks: bool,
    /// One entry a block: with a window w, query q sees key k only if q − k < w; `None` sees all before it.
    pub sliding_window: Vec<Option<usize>>,
    /// Token put before a text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Token for padding, where the model has one.
    pub pad_token_id: Option<u32>,
}

impl ModelConfig {
    /// The different windows that layers have; `None` is full attention.
    pub fn windows(&self) -> Vec<Option<usize>> {
        let mut windows: Vec<Option<usize>> = self.sliding_window.clone();
        windows.sort_unstable();
        windows.dedup();
        windows
    }

    /// The weight of the auxiliary loss that balances experts, and these; `None` where the model trains without it.
    pub fn auxiliary_loss(&self) -> Option<(f64, &MoeConfig)> {
        let moe = self.moe.as_ref()?;
        moe.router_aux_loss_coef.map(|coef| (coef, moe))
    }

    /// Rows of `q_proj`: query heads times head width.
    pub fn q_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Rows of `k_proj` and of `v_proj`.
    pub fn kv_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// The experts of a block, where it has some.
    pub fn experts(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.layers.get(layer) == Some(&true))
    }

    /// Names and shapes of all weights such a model has, in the order of computation: Hugging Face's names, for experts those that Transformers 5
    /// gives them in memory. A tied head is not listed. `out` comes before `in`, for each expert of a stack, too.
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (h, i, q, kv) = (self.hidden_size, self.intermediate_size, self.q_size(), self.kv_size());
        let mut out = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, h])];
        for layer in 0..self.num_hidden_layers {
            let mut add =
                |name: &str, shape: &[usize]| out.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            add("input_layernorm.weight", &[h]);
            for (name, rows) in [("q_proj", q), ("k_proj", kv), ("v_proj", kv)] {
                add(&format!("self_attn.{name}.weight"), &[rows, h]);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}.bias"), &[rows]);
                }
            }
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            if self.attention_sinks {
                add("self_attn.sinks", &[self.num_attention_heads]);
            }
            add("self_attn.o_proj.weight", &[h, q]);
            if self.o_bias {
                add("self_attn.o_proj.bias", &[h]);
            }
            add("post_attention_layernorm.weight", &[h]);
            if let Some(moe) = self.experts(layer) {
                moe.tensors(self.architecture, h).iter().for_each(|(name, shape)| add(name, shape));
                continue;
            }
            for (name, rows, columns) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
                add(&format!("mlp.{name}.weight"), &[rows, columns]);
                if self.mlp_bias {
                    add(&format!("mlp.{name}.bias"), &[rows]);
                }
            }
        }
        out.push(("model.norm.weight".to_owned(), vec![h]));
        if !self.tie_word_embeddings {
            out.push(("lm_head.weight".to_owned(), vec![self.vocab_size, h]));
        }
        out
    }

    /// Weights of a block's linear layers that a token meets: of experts those that it goes to, and their router.
    pub fn active_weights(&self, layer: usize) -> usize {
        let inner = match self.experts(layer) {
            None => 3 * self.intermediate_size,
            Some(moe) => 3 * moe.num_experts_per_tok * moe.moe_intermediate_size + moe.num_experts,
        };
        self.hidden_size * (2 * self.q_size() + 2 * self.kv_size() + inner)
    }

    /// Number of parameters; a tied head counts once.
    pub fn num_parameters(&self) -> u64 {
        self.expected_tensors().iter().map(|(_, shape)| shape.iter().map(|&d| d as u64).product::<u64>()).sum()
    }

    /// Check that the numbers make a model before anything is sized by them.
    ///
    /// # Errors
    /// When a number is out of its sane range or two contradict each other; the message names them.
    pub(super) fn checked(self) -> Result<Self> {
        let range = |name: &str, value: usize, max: usize| {
            ensure!((1..=max).contains(&value), "{name} is {value}; expected 1 to {max}");
            Ok(())
        };
        range("vocab_size", self.vocab_size, 1 << 22)?;
        range("hidden_size", self.hidden_size, 1 << 17)?;
        range("intermediate_size", self.intermediate_size, 1 << 20)?;
        range("num_hidden_layers", self.num_hidden_layers, 1024)?;
        range("num_attention_heads", self.num_attention_heads, 4096)?;
        range("num_key_value_heads", self.num_key_value_heads, self.num_attention_heads)?;
        range("head_dim", self.head_dim, 4096)?;
        range("max_position_embeddings", self.max_position_embeddings, 1 << 30)?;
        ensure!(
            self.head_dim.is_multiple_of(2),
            "head_dim is {}; rotary embedding needs an even number",
            self.head_dim
        );
        ensure!(
            self.num_attention_heads.is_multiple_of(self.num_key_value_heads),
            "num_attention_heads ({}) is not a multiple of num_key_value_heads ({})",
            self.num_attention_heads,
            self.num_key_value_heads
        );
        ensure!(
            self.sliding_window.len() == self.num_hidden_layers,
            "there are {} windows for {} blocks",
            self.sliding_window.len(),
            self.num_hidden_layers
        );
        ensure!(!self.sliding_window.contains(&Some(0)), "sliding_window is 0; expected 1 or more, or none at all");
        let positive = |name: &str, value: f64| {
            ensure!(value.is_finite() && value > 0.0, "{name} is {value}; expected a number above 0");
            Ok(())
        };
        if let Some(moe) = self.moe.as_ref().filter(|moe| moe.mxfp4) {
            for (name, width) in
                [("hidden_size", self.hidden_size), ("the width of an expert", moe.moe_intermediate_size)]
            {
                ensure!(
                    width.is_multiple_of(mxfp4::BLOCK),
                    "{name} is {width}; weights in MXFP4 come in blocks of {}",
                    mxfp4::BLOCK
                );
            }
        }
        if let Some(moe) = &self.moe {
            moe.check(self.num_hidden_layers)?;
        }
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope_theta)?;
        match &self.rope_scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("the factor of the rope scaling", *factor)?,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                positive("the factor of the rope scaling", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                ensure!(
                    high_freq_factor.is_finite() && high_freq_factor > low_freq_factor,
                    "high_freq_factor ({high_freq_factor}) must be larger than low_freq_factor ({low_freq_factor})"
                );
                range("original_max_position_embeddings", *original_max_position_embeddings, 1 << 30)?;
            }
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate: _,
            } => {
                positive("the factor of the rope scaling", *factor)?;
                positive("beta_slow", *beta_slow)?;
                ensure!(
                    beta_fast.is_finite() && beta_fast >= beta_slow,
                    "beta_fast ({beta_fast}) must not be smaller than beta_slow ({beta_slow})"
                );
                positive("attention_factor", *attention_factor)?;
                ensure!(self.rope_theta != 1.0, "rope_theta is 1; yarn needs another base");
                range("original_max_position_embeddings", *original_max_position_embeddings, 1 << 30)?;
            }
            RopeScaling::Factors(factors) => {
                ensure!(
                    factors.len() == self.head_dim / 2,
                    "there are {} rope factors; expected head_dim / 2 = {}",
                    factors.len(),
                    self.head_dim / 2
                );
                for f in factors {
                    positive("a rope factor", f64::from(*f))?;
                }
            }
        }
        Ok(self)
    }
}
