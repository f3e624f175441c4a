//! What a model folder or GGUF file holds, and which models are on this machine. Reads headers, never weights.

mod discover;

use std::path::{Path, PathBuf};

use anyhow::Context as _;

pub use self::discover::{FoundModel, Places, Refusal, discover};
use super::starter;
use crate::base::error::Result;
use crate::base::units;
use crate::data::tokenizer::Tokenizer;
use crate::model::config::ModelConfig;
use crate::model::loading::Checkpoint;
use crate::train::config::{MethodConfig, MethodKind};

/// A model as shown before training.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// The folder or file.
    pub path: PathBuf,
    /// Its name for people.
    pub name: String,
    /// Architecture as in config.json: `LlamaForCausalLM`.
    pub architecture: &'static str,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Parameters; a tied head counts once.
    pub num_parameters: u64,
    /// The element format that most bytes are stored in: `bf16`, `Q4_1`.
    pub dtype: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Whether the output projection is the embedding.
    pub tied: bool,
    /// Projections of a dense block with their outputs and inputs: `("q_proj", 576, 576)`.
    pub projections: Vec<(&'static str, usize, usize)>,
    /// Experts of a sparse block, and those that a token is sent to; `None` for a dense model.
    pub experts: Option<(usize, usize)>,
    /// One entry a block: whether it has experts instead of the MLP's three projections.
    pub sparse: Vec<bool>,
    /// Whether the model brings a chat template.
    pub has_chat_template: bool,
    /// The token that ends an answer, as text.
    pub end_token: Option<String>,
    /// Whether padding is written with a token that ends no answer.
    pub pad_differs: bool,
    /// What the user should know before training.
    pub warnings: Vec<String>,
}

impl ModelInfo {
    /// Weights that a method trains.
    pub fn num_trainable(&self, method: &MethodConfig) -> u64 {
        if method.kind == MethodKind::Full {
            return self.num_parameters;
        }
        let targets = &method.target_modules;
        let all = targets.iter().any(|target| target == "all-linear");
        let chosen = self.projections.iter().filter(|(name, ..)| all || targets.iter().any(|target| target == name));
        let layers = &method.layers_to_transform;
        let adapted = |layer: &usize| layers.is_empty() || layers.contains(layer);
        let blocks = (0..self.num_hidden_layers).filter(adapted).count();
        let dense = (0..self.num_hidden_layers).filter(adapted).filter(|&layer| self.sparse.get(layer) != Some(&true));
        let dense = dense.count();
        let of = |(name, outputs, inputs): &(&str, usize, usize)| {
            let is_mlp = matches!(*name, "gate_proj" | "up_proj" | "down_proj");
            (method.r * (outputs + inputs) * if is_mlp { dense } else { blocks }) as u64
        };
        chosen.map(of).sum()
    }
}

/// Looks at a model (`starter` stands for the starter model).
///
/// # Errors
/// When it is not a model Tandem trains, or a file of it is damaged or missing.
pub fn inspect(path: &Path) -> Result<ModelInfo> {
    let path = starter::resolve_model(path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let tokenizer = Tokenizer::open(&path).with_context(|| format!("the tokenizer of {}", path.display()))?;
    let config = checkpoint.config();
    let eos = tokenizer.eos_ids();
    let has_chat_template = tokenizer.chat_template_source().is_some();
    let mut warnings = Vec::new();
    if !has_chat_template {
        warnings.push("no chat template: only plain text can be trained, unless you name a template file".to_owned());
    }
    if eos.is_empty() {
        warnings.push("no end token: the tuned model will not know when to stop".to_owned());
    }
    if tokenizer.vocab_size() > config.vocab_size {
        warnings.push(format!(
            "the tokenizer has {} tokens and the model only {}: records with the others will fail",
            tokenizer.vocab_size(),
            config.vocab_size
        ));
    }
    if let Some(quantized) = checkpoint.quantized() {
        warnings.push(format!(
            "stored in 4 bits (NF4): QLoRA keeps them so; other methods hold them dequantized, {} of weights on a GPU, {} on the CPU",
            units::bytes(quantized.num_elements * 2),
            units::bytes(quantized.num_elements * 4)
        ));
    }
    let pad_differs = !eos.contains(&tokenizer.pad_id());
    Ok(ModelInfo {
        name: model_name(&path),
        architecture: config.architecture.class_name(),
        num_hidden_layers: config.num_hidden_layers,
        hidden_size: config.hidden_size,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        num_parameters: checkpoint.num_parameters(),
        dtype: checkpoint.dtype_summary(),
        bytes: checkpoint.bytes_on_disk(),
        tied: config.tie_word_embeddings,
        projections: projections(config),
        experts: config.moe.as_ref().map(|moe| (moe.num_experts, moe.num_experts_per_tok)),
        sparse: (0..config.num_hidden_layers).map(|layer| config.experts(layer).is_some()).collect(),
        has_chat_template,
        end_token: eos.first().and_then(|id| tokenizer.token(*id)),
        pad_differs,
        warnings,
        path,
    })
}

fn projections(config: &ModelConfig) -> Vec<(&'static str, usize, usize)> {
    let (hidden, mlp, q, kv) = (config.hidden_size, config.intermediate_size, config.q_size(), config.kv_size());
    vec![
        ("q_proj", q, hidden),
        ("k_proj", kv, hidden),
        ("v_proj", kv, hidden),
        ("o_proj", hidden, q),
        ("gate_proj", mlp, hidden),
        ("up_proj", mlp, hidden),
        ("down_proj", hidden, mlp),
    ]
}

/// Name of a model for people: the file without `.gguf`, the folder, or the repository for a Hugging Face snapshot.
pub fn model_name(path: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if let Some(stem) = name(path).as_deref().and_then(|name| name.strip_suffix(".gguf")) {
        return stem.to_owned();
    }
    if let Some(snapshots) = path.parent().filter(|parent| parent.ends_with("snapshots"))
        && let Some(repository) = snapshots.parent().and_then(name)
        && let Some(id) = repository.strip_prefix("models--")
    {
        return id.rsplit("--").next().unwrap_or(id).to_owned();
    }
    name(path).unwrap_or_else(|| path.display().to_string())
}

/// Size of a GGUF file, or of the weight files of a folder (links followed).
fn bytes_on_disk(path: &Path) -> u64 {
    let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
    if path.is_file() {
        return size(path);
    }
    std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| size(&path))
        .sum()
}

#[cfg(test)]
mod tests;
