//! From parameter names to layers: which parameter of a checkpoint each layer reads.

use std::collections::HashMap;

use anyhow::Context as _;

use super::block::Block;
use super::config::ModelConfig;
use crate::base::error::Result;
use crate::layers::attention::Attention;
use crate::layers::linear::Linear;
use crate::layers::mlp::Mlp;
use crate::layers::norm::RmsNorm;
use crate::layers::parameter::{ParamId, Params};
use crate::ops::attention::AttentionShape;

/// Parameters by name.
pub(super) struct Names(HashMap<String, ParamId>);

impl Names {
    pub(super) fn new(params: &Params) -> Self {
        Self(params.iter().map(|(id, parameter)| (parameter.name.clone(), id)).collect())
    }

    pub(super) fn id(&self, name: &str) -> Result<ParamId> {
        self.0.get(name).copied().with_context(|| format!("the model has no tensor {name}"))
    }

    pub(super) fn norm(&self, module: &str, config: &ModelConfig, width: usize) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: self.id(&format!("{module}.weight"))?, eps: config.rms_norm_eps as f32, width })
    }

    fn linear(&self, module: &str, in_features: usize, out_features: usize, bias: bool) -> Result<Linear> {
        let weight = self.id(&format!("{module}.weight"))?;
        let bias = if bias { Some(self.id(&format!("{module}.bias"))?) } else { None };
        Ok(Linear { weight, bias, lora: None, in_features, out_features })
    }

    pub(super) fn block(&self, config: &ModelConfig, index: usize) -> Result<Block> {
        let name = format!("model.layers.{index}");
        let attn = format!("{name}.self_attn");
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        let head_norm = |module: &str| {
            config.qk_norm.then(|| self.norm(&format!("{attn}.{module}"), config, config.head_dim)).transpose()
        };
        Ok(Block {
            index: index as u32,
            input_layernorm: self.norm(&format!("{name}.input_layernorm"), config, hidden)?,
            self_attn: Attention {
                q_proj: self.linear(&format!("{attn}.q_proj"), hidden, q_size, config.qkv_bias)?,
                k_proj: self.linear(&format!("{attn}.k_proj"), hidden, kv_size, config.qkv_bias)?,
                v_proj: self.linear(&format!("{attn}.v_proj"), hidden, kv_size, config.qkv_bias)?,
                o_proj: self.linear(&format!("{attn}.o_proj"), q_size, hidden, config.o_bias)?,
                q_norm: head_norm("q_norm")?,
                k_norm: head_norm("k_norm")?,
                shape: AttentionShape {
                    num_heads: config.num_attention_heads,
                    num_kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim,
                    scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
                },
            },
            post_attention_layernorm: self.norm(&format!("{name}.post_attention_layernorm"), config, hidden)?,
            mlp: Mlp {
                gate_proj: self.linear(&format!("{name}.mlp.gate_proj"), hidden, inner, config.mlp_bias)?,
                up_proj: self.linear(&format!("{name}.mlp.up_proj"), hidden, inner, config.mlp_bias)?,
                down_proj: self.linear(&format!("{name}.mlp.down_proj"), inner, hidden, config.mlp_bias)?,
            },
            window: config.sliding_window[index],
        })
    }
}
