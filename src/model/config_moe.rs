//! The sparse part of a mixture of experts: what its blocks have instead of one MLP, and where config.json says so.

use anyhow::{bail, ensure};

use super::config::Architecture;
use super::config_hf::Fields;
use crate::base::error::Result;
use crate::ops::expert_activation::{self, ExpertActivation};

/// How an expert makes one value of its gate and up values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// `silu(gate)·up`.
    Silu,
    /// `(up + 1)·gate·σ(alpha·gate)`, with gate at most `limit` and up within ±`limit` (gpt-oss).
    Clamped {
        /// Factor in the sigmoid.
        alpha: f64,
        /// Where gate and up are clamped.
        limit: f64,
    },
}

/// The experts of a model and the router over them. Names as in config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Experts of a sparse block.
    pub num_experts: usize,
    /// Experts that each token is sent to.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Whether the weights of a token's experts are made to add up to 1.
    pub norm_topk_prob: bool,
    /// Bias on the router.
    pub router_bias: bool,
    /// Biases on the two projections of every expert.
    pub expert_bias: bool,
    /// How gate and up become one value.
    pub gating: Gating,
    /// Whether gate and up rows take turns (gate first); else all gate rows come before all up rows.
    pub interleaved: bool,
    /// Weight of the auxiliary loss that balances experts; `None` where the model trains without it (`output_router_logits` is off).
    pub router_aux_loss_coef: Option<f64>,
    /// Whether the file has the weights of experts in MXFP4: they stay so unless they are to be dequantized once.
    pub mxfp4: bool,
    /// One entry a block: whether it has experts (else it has one MLP of the model's `intermediate_size`).
    pub layers: Vec<bool>,
}

impl Gating {
    /// That of gpt-oss where its files do not say.
    pub const GPT_OSS: Self = Self::Clamped { alpha: 1.702, limit: 7.0 };
}

impl MoeConfig {
    /// What lies between the projections of an expert.
    pub(super) fn activation(&self) -> ExpertActivation {
        let kind = match self.gating {
            Gating::Silu => expert_activation::Gating::Silu,
            Gating::Clamped { alpha, limit } => {
                expert_activation::Gating::Clamped { alpha: alpha as f32, limit: limit as f32 }
            }
        };
        ExpertActivation { kind, interleaved: self.interleaved }
    }

    /// Names (without `model.layers.N.`) and shapes of the weights that a sparse block has instead of an MLP's.
    pub(super) fn tensors(&self, family: Architecture, hidden_size: usize) -> Vec<(String, Vec<usize>)> {
        let (e, i, h) = (self.num_experts, self.moe_intermediate_size, hidden_size);
        let router = router_module(family);
        let mut out = vec![(format!("{router}.weight"), vec![e, h])];
        let mut add = |name: String, shape: Vec<usize>| out.push((name, shape));
        if self.router_bias {
            add(format!("{router}.bias"), vec![e]);
        }
        for (name, rows, columns) in [("gate_up_proj", 2 * i, h), ("down_proj", h, i)] {
            add(format!("mlp.experts.{name}"), vec![e, rows, columns]);
            if self.expert_bias {
                add(format!("mlp.experts.{name}_bias"), vec![e, rows]);
            }
        }
        out
    }

    pub(super) fn check(&self, num_hidden_layers: usize) -> Result<()> {
        let range = |name: &str, value: usize, max: usize| {
            ensure!((1..=max).contains(&value), "{name} is {value}; expected 1 to {max}");
            Ok(())
        };
        range("num_experts", self.num_experts, 1 << 14)?;
        range("num_experts_per_tok", self.num_experts_per_tok, self.num_experts)?;
        range("moe_intermediate_size", self.moe_intermediate_size, 1 << 20)?;
        ensure!(
            self.layers.len() == num_hidden_layers,
            "experts are described for {} blocks of {num_hidden_layers}",
            self.layers.len()
        );
        if let Some(coef) = self.router_aux_loss_coef {
            ensure!(coef.is_finite() && coef >= 0.0, "router_aux_loss_coef is {coef}; expected 0 or more");
        }
        if let Gating::Clamped { alpha, limit } = self.gating {
            for (name, value) in [("swiglu_alpha", alpha), ("swiglu_limit", limit)] {
                ensure!(value.is_finite() && value > 0.0, "{name} is {value}; expected a number above 0");
            }
        }
        Ok(())
    }
}

/// The module of a sparse block that chooses experts.
pub(super) fn router_module(family: Architecture) -> &'static str {
    if family == Architecture::GptOss { "mlp.router" } else { "mlp.gate" }
}

/// The sparse part of a `config.json`; `None` for a dense model. Defaults are those of each family's class in Transformers.
///
/// # Errors
/// When a key is wrong, or the model needs what the engine does not do.
pub(super) fn from_hf(f: &Fields<'_>, family: Architecture, num_hidden_layers: usize) -> Result<Option<MoeConfig>> {
    let (experts, per_token) = match family {
        Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => return Ok(None),
        Architecture::Qwen3Moe => (128, 8),
        Architecture::Mixtral => (8, 2),
        Architecture::GptOss => (128, 4),
    };
    for key in ["shared_expert_intermediate_size", "num_shared_experts", "n_shared_experts"] {
        if let Some(n) = f.usize(key)?.filter(|n| *n > 0) {
            bail!("{key} is {n}: experts that all tokens share are not supported");
        }
    }
    if let Some(noise) = f.f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        bail!(
            "router_jitter_noise is {noise}: Tandem routes without noise; set it to 0 in config.json to train the model so"
        );
    }
    // Both spellings are in use, the first one since Transformers 5.
    let num_experts = match (f.usize("num_local_experts")?, f.usize("num_experts")?) {
        (Some(local), Some(all)) if local != all => {
            bail!("num_local_experts ({local}) and num_experts ({all}) contradict each other")
        }
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) => experts,
    };
    let is_gpt_oss = family == Architecture::GptOss;
    let layers = match family {
        Architecture::Qwen3Moe => sparse_layers(f, num_experts, num_hidden_layers)?,
        _ => vec![true; num_hidden_layers],
    };
    if !layers.contains(&true) {
        return Ok(None);
    }
    let width = match family {
        Architecture::Qwen3Moe => f.usize("moe_intermediate_size")?.unwrap_or(768),
        _ => f.required("intermediate_size")?,
    };
    let aux_loss = f.f64("router_aux_loss_coef")?.unwrap_or(0.001);
    Ok(Some(MoeConfig {
        num_experts,
        num_experts_per_tok: f.usize("num_experts_per_tok")?.unwrap_or(per_token),
        moe_intermediate_size: width,
        norm_topk_prob: family != Architecture::Qwen3Moe || f.bool("norm_topk_prob")?,
        router_bias: is_gpt_oss,
        expert_bias: is_gpt_oss,
        gating: if is_gpt_oss {
            let number = |key: &str, default: f64| Ok::<_, anyhow::Error>(f.f64(key)?.unwrap_or(default));
            Gating::Clamped { alpha: number("swiglu_alpha", 1.702)?, limit: number("swiglu_limit", 7.0)? }
        } else {
            Gating::Silu
        },
        interleaved: is_gpt_oss,
        router_aux_loss_coef: f.bool("output_router_logits")?.then_some(aux_loss),
        mxfp4: match f.object("quantization_config")? {
            Some(q) => q.string("quant_method")? == Some("mxfp4"),
            None => false,
        },
        layers,
    }))
}

/// Which blocks of a Qwen3-MoE model have experts: every `decoder_sparse_step`-th, but for `mlp_only_layers`.
fn sparse_layers(f: &Fields<'_>, num_experts: usize, num_hidden_layers: usize) -> Result<Vec<bool>> {
    let step = f.usize("decoder_sparse_step")?.unwrap_or(1);
    ensure!(step > 0, "decoder_sparse_step is 0; expected 1 or more");
    let dense = f.usizes("mlp_only_layers")?;
    Ok((0..num_hidden_layers).map(|n| num_experts > 0 && !dense.contains(&n) && (n + 1).is_multiple_of(step)).collect())
}
