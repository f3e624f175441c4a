//! From a configuration to parameters and the layers over them: which tensors lie in which matrix, and who reads what.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};

use super::block::{Block, PROJECTIONS};
use super::config::{ModelConfig, MoeConfig};
use super::policy::{Dequantized, Placement};
use crate::base::error::Result;
use crate::layers::attention::{Attention, QkNorms};
use crate::layers::embedding::Embedding;
use crate::layers::feed_forward::FeedForward;
use crate::layers::head::Head;
use crate::layers::mlp::Mlp;
use crate::layers::moe::{Experts, Moe, Router};
use crate::layers::norm::RmsNorm;
use crate::layers::parameter::{MatrixId, ParamId, Params, Part};
use crate::layers::projection::{Linear, Projection};
use crate::ops::attention::AttentionShape;
use crate::ops::routing::{self, RouterWeights};
use crate::tensor::{Device, MemoryCategory};

/// The table of token embeddings.
const EMBEDDING: &str = "model.embed_tokens.weight";
/// Why a table that is the head's as well stays on the device.
pub(super) const TIED: &str = "the head multiplies by the same table";

/// A model whose parameters are all zero.
pub(super) struct Skeleton {
    pub params: Params,
    pub embed_tokens: Embedding,
    pub blocks: Vec<Block>,
    pub head: Head,
    /// Why the embedding's table is on the device although it was to be in host memory.
    pub embedding_refused: Option<String>,
}

/// Makes the parameters of `config.expected_tensors()`, in that order, and the layers. `rank(layer, module)` is the rank of the adapter that a
/// projection will get, so that its matrix has room for it from the start; without room it grows when the adapter comes. With `nf4`, the linear layers of
/// blocks are in NF4, their scales in 8 bits where it says so. Experts that the
/// file has in MXFP4 stay so unless they are to be dequantized once. The embedding's table lies where `embedding` says, if it can.
pub(super) fn skeleton(
    config: &ModelConfig,
    device: &Device,
    rank: &dyn Fn(usize, &str) -> usize,
    nf4: Option<bool>,
    dequantized: Dequantized,
    embedding: Placement,
) -> Result<Skeleton> {
    check_widths(config, device)?;
    let in_mxfp4 = dequantized == Dequantized::Scratch && config.moe.as_ref().is_some_and(|moe| moe.mxfp4);
    let mut params = Params::new(device);
    let mut parts = HashMap::new();
    let mut matrices = Vec::new();
    for layer in 0..config.num_hidden_layers {
        for (modules, sizes) in PROJECTIONS.into_iter().zip(sizes(config)).take(num_projections(config, layer)) {
            let columns: usize = modules.iter().map(|module| adapter_columns(device, rank(layer, module))).sum();
            let out_features: usize = sizes.outputs.iter().sum();
            let matrix = match nf4 {
                None => params.push_matrix(out_features + columns, device.stride(sizes.input + columns)),
                Some(double) => params.push_packed_matrix(&sizes.outputs, sizes.input, columns, double),
            };
            let mut row = 0;
            for (module, &rows) in modules.iter().zip(&sizes.outputs) {
                let part = Part { matrix, row, col: 0, rows, cols: sizes.input };
                parts.insert(format!("model.layers.{layer}.{module}.weight"), part);
                row += rows;
            }
            matrices.push(matrix);
        }
    }
    let mut embedding_refused = None;
    for (name, shape) in config.expected_tensors() {
        if let Some(part) = parts.get(&name) {
            params.push_part(&name, *part);
            continue;
        }
        if let [experts, out, inner] = shape[..]
            && in_mxfp4
        {
            params.push_mxfp4(&name, [experts, out, inner]);
            continue;
        }
        if name.ends_with(".self_attn.sinks") {
            params.push_f32(&name, &shape);
            continue;
        }
        let mut value = None;
        if name == EMBEDDING && embedding == Placement::Host {
            let mapped = match config.tie_word_embeddings {
                true => Err(TIED.into()),
                false => device.zeros_mapped(MemoryCategory::Weights, &shape, device.dtype()),
            };
            value = mapped.map_err(|why| embedding_refused = Some(why)).ok();
        }
        params.push(&name, value.unwrap_or_else(|| device.zeros(MemoryCategory::Weights, &shape)));
    }
    device.check().context("making room for the weights")?;

    let names = Names(params.iter().map(|(id, parameter)| (parameter.name.clone(), id)).collect());
    let embed_tokens = Embedding { weight: names.id(EMBEDDING)? };
    let weight = if config.tie_word_embeddings { embed_tokens.weight } else { names.id("lm_head.weight")? };
    let head = Head { norm: names.norm("model.norm", config, config.hidden_size)?, weight };
    let mut matrices = matrices.as_slice();
    let mut blocks = Vec::new();
    let mut layers_with_experts = 0;
    for layer in 0..config.num_hidden_layers {
        let (of_block, others) = matrices.split_at(num_projections(config, layer));
        let block = names.block(config, layer, of_block, layers_with_experts)?;
        layers_with_experts += usize::from(block.experts().is_some());
        blocks.push(block);
        matrices = others;
    }
    Ok(Skeleton { params, embed_tokens, blocks, head, embedding_refused })
}

/// The GPU's kernels move eight values at once, and keep a head in the registers of a warp.
fn check_widths(config: &ModelConfig, device: &Device) -> Result<()> {
    if let Device::Cpu(_) = device {
        return Ok(());
    }
    let experts = config.moe.as_ref();
    if let Some(moe) = experts {
        let (experts, chosen) = (moe.num_experts, moe.num_experts_per_tok);
        ensure!(
            experts <= routing::MAX_EXPERTS && chosen <= routing::MAX_EXPERTS_PER_TOKEN,
            "the model has {experts} experts and sends a token to {chosen}; the GPU engine takes up to {} and {}: set train.device = \"cpu\" for \
             this model",
            routing::MAX_EXPERTS,
            routing::MAX_EXPERTS_PER_TOKEN
        );
    }
    let widths = [
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("moe_intermediate_size", experts.map_or(8, |moe| moe.moe_intermediate_size)),
        ("head_dim", config.head_dim),
    ];
    for (name, width) in widths {
        let advice = "set train.device = \"cpu\" for this model";
        ensure!(width.is_multiple_of(8), "{name} is {width}; the GPU engine takes multiples of 8: {advice}");
        ensure!(
            name != "head_dim" || width <= 256,
            "{name} is {width}; the GPU engine takes heads up to 256: {advice}"
        );
    }
    Ok(())
}

/// How many of [`PROJECTIONS`] a block has: those of attention alone where it has experts.
fn num_projections(config: &ModelConfig, layer: usize) -> usize {
    if config.experts(layer).is_some() { 2 } else { PROJECTIONS.len() }
}

/// Columns that an adapter of that rank takes in a matrix.
pub(super) fn adapter_columns(device: &Device, rank: usize) -> usize {
    device.padded(rank)
}

/// Widths of a projection's input and of its outputs.
struct Sizes {
    input: usize,
    outputs: Vec<usize>,
}

/// Those of [`PROJECTIONS`].
fn sizes(config: &ModelConfig) -> [Sizes; PROJECTIONS.len()] {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.q_size(), config.kv_size());
    let sizes = |input, outputs: &[usize]| Sizes { input, outputs: outputs.to_vec() };
    [sizes(hidden, &[q, kv, kv]), sizes(q, &[hidden]), sizes(hidden, &[inner, inner]), sizes(inner, &[hidden])]
}

/// Parameters by name.
struct Names(HashMap<String, ParamId>);

impl Names {
    fn id(&self, name: &str) -> Result<ParamId> {
        self.0.get(name).copied().with_context(|| format!("the model has no tensor {name}"))
    }

    fn norm(&self, module: &str, config: &ModelConfig, width: usize) -> Result<RmsNorm> {
        let (weight, eps) = (self.id(&format!("{module}.weight"))?, config.rms_norm_eps as f32);
        Ok(RmsNorm { weight, eps, rounding: config.norm_rounding, width })
    }

    fn projection(&self, block: &str, modules: &[&str], sizes: &Sizes, matrix: MatrixId) -> Result<Projection> {
        let mut first = 0;
        let linears = modules.iter().zip(&sizes.outputs).map(|(module, &out_features)| {
            let weight = self.id(&format!("{block}.{module}.weight"))?;
            // The configuration said which tensors there are.
            let bias = self.0.get(&format!("{block}.{module}.bias")).copied();
            let linear = Linear { weight, bias, lora: None, first, out_features };
            first += out_features;
            Ok(linear)
        });
        let linears = linears.collect::<Result<_>>()?;
        Ok(Projection { linears, matrix, in_features: sizes.input, out_features: first, adapter_columns: 0 })
    }

    fn moe(&self, config: &ModelConfig, moe: &MoeConfig, number: usize, index: usize) -> Result<Moe> {
        let (hidden, inner) = (config.hidden_size, moe.moe_intermediate_size);
        let block = format!("model.layers.{number}");
        // The configuration said which tensors there are.
        let bias = |name: &str| self.0.get(&format!("{block}.mlp.{name}")).copied();
        let experts = |name: &str, in_features, out_features| {
            Ok::<_, anyhow::Error>(Experts {
                weight: self.id(&format!("{block}.mlp.experts.{name}"))?,
                bias: bias(&format!("experts.{name}_bias")),
                lora: None,
                in_features,
                out_features,
            })
        };
        let router = if moe.router_bias { "router" } else { "gate" };
        Ok(Moe {
            block: number as u32,
            index,
            router: Router {
                weight: self.id(&format!("{block}.mlp.{router}.weight"))?,
                bias: bias(&format!("{router}.bias")),
                weights: if moe.norm_topk_prob { RouterWeights::Chosen } else { RouterWeights::All },
            },
            gate_up: experts("gate_up_proj", hidden, 2 * inner)?,
            down: experts("down_proj", inner, hidden)?,
            activation: moe.activation(),
            num_experts: moe.num_experts,
            top_k: moe.num_experts_per_tok,
        })
    }

    fn block(&self, config: &ModelConfig, index: usize, matrices: &[MatrixId], with_experts: usize) -> Result<Block> {
        let name = format!("model.layers.{index}");
        let attn = format!("{name}.self_attn");
        let all_sizes = sizes(config);
        let made = PROJECTIONS.iter().zip(&all_sizes).zip(matrices);
        let made = made.map(|((modules, sizes), &matrix)| self.projection(&name, modules, sizes, matrix));
        let mut made = made.collect::<Result<Vec<Projection>>>()?.into_iter();
        let mut next = || made.next().context("a block lacks a projection");
        let (qkv_proj, o_proj) = (next()?, next()?);
        let mlp = match config.experts(index) {
            Some(moe) => FeedForward::Moe(self.moe(config, moe, index, with_experts)?),
            None => FeedForward::Mlp(Mlp { gate_up_proj: next()?, down_proj: next()? }),
        };
        let head_norm = |module: &str| self.norm(&format!("{attn}.{module}"), config, config.head_dim);
        let qk_norm = || Ok::<_, anyhow::Error>(QkNorms { q_norm: head_norm("q_norm")?, k_norm: head_norm("k_norm")? });
        Ok(Block {
            index: index as u32,
            input_layernorm: self.norm(&format!("{name}.input_layernorm"), config, config.hidden_size)?,
            self_attn: Attention {
                qkv_proj,
                o_proj,
                qk_norm: config.qk_norm.then(qk_norm).transpose()?,
                sinks: config.attention_sinks.then(|| self.id(&format!("{attn}.sinks"))).transpose()?,
                shape: AttentionShape {
                    num_heads: config.num_attention_heads,
                    num_kv_heads: config.num_key_value_heads,
                    head_dim: config.head_dim,
                    scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
                },
            },
            post_attention_layernorm: self.norm(
                &format!("{name}.post_attention_layernorm"),
                config,
                config.hidden_size,
            )?,
            mlp,
            window: config.sliding_window[index],
        })
    }
}
