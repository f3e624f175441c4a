//! What a model folder or GGUF file holds, and which models are on this machine. Reads headers, never weights.

mod discover;

use std::path::{Path, PathBuf};

use anyhow::Context as _;

pub use self::discover::{FoundModel, Places, Refusal, discover};
use super::starter;
use crate::base::error::Result;
use crate::base::units;
use crate::data::tokenizer::Tokenizer;
use crate::formats::peft::expert_targets;
use crate::model::config::ModelConfig;
use crate::model::loading::Checkpoint;
use crate::train::config::{MethodConfig, MethodKind};

/// The word for all projections.
const ALL_LINEAR: &str = "all-linear";
/// The projections of an MLP.
pub const MLP: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

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
    /// Projections of a block with their outputs and inputs: `("q_proj", 576, 576)`; those of an MLP only where a block has one.
    pub projections: Vec<(&'static str, usize, usize)>,
    /// The experts of its blocks; `None` for a dense model.
    pub experts: Option<ExpertsInfo>,
    /// Whether the model brings a chat template.
    pub has_chat_template: bool,
    /// The token that ends an answer, as text.
    pub end_token: Option<String>,
    /// Whether padding is written with a token that ends no answer.
    pub pad_differs: bool,
    /// What the user should know before training.
    pub warnings: Vec<String>,
}

/// The routed experts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertsInfo {
    /// Experts of a block.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// Which blocks have them; the others have an MLP.
    pub layers: Vec<bool>,
    /// Weights of one expert with their outputs and inputs: `("gate_up_proj", 1536, 2048)`.
    pub projections: [(&'static str, usize, usize); 2],
}

impl ExpertsInfo {
    /// Blocks that have experts.
    pub fn num_layers(&self) -> usize {
        self.layers.iter().filter(|has| **has).count()
    }

    /// `32 experts, 4 a token`, and in how many blocks where it is not all.
    pub fn describe(&self) -> String {
        let words = format!("{} experts, {} a token", self.num_experts, self.num_experts_per_tok);
        match self.num_layers() {
            all if all == self.layers.len() => words,
            some => format!("{words}, in {some} of {} layers", self.layers.len()),
        }
    }
}

impl ModelInfo {
    /// Whether some block has an MLP, so that its projections can have adapters.
    pub fn has_mlp(&self) -> bool {
        self.experts.as_ref().is_none_or(|experts| experts.num_layers() < self.num_hidden_layers)
    }

    /// Weights that a method trains.
    pub fn num_trainable(&self, method: &MethodConfig) -> u64 {
        if method.kind == MethodKind::Full {
            return self.num_parameters;
        }
        (0..self.num_hidden_layers).map(|layer| self.num_trainable_in(layer, method)).sum()
    }

    /// Weights of adapters in a block. Those on experts are in every block that has some, whatever `layers_to_transform` says.
    fn num_trainable_in(&self, layer: usize, method: &MethodConfig) -> u64 {
        let chosen = &method.layers_to_transform;
        let is_chosen = chosen.is_empty() || chosen.contains(&layer);
        let targets = &method.target_modules;
        let all = targets.iter().any(|target| target == ALL_LINEAR);
        let experts = self.experts.as_ref().filter(|experts| experts.layers.get(layer) == Some(&true));
        let is_there = |name: &str| experts.is_none() || !MLP.contains(&name);
        let wanted = |name: &str| all || targets.iter().any(|target| target == name);
        let linears = self.projections.iter().filter(|(name, ..)| is_chosen && is_there(name) && wanted(name));
        let of_linears: usize = linears.map(|(_, outputs, inputs)| method.r * (outputs + inputs)).sum();
        let of_experts = experts.map_or(0, |experts| {
            let on = expert_targets(&method.target_parameters).unwrap_or_default();
            let weights = experts.projections.iter().zip(on).filter(|(_, on)| *on);
            weights.map(|((_, outputs, inputs), _)| experts.num_experts * method.r * (outputs + inputs)).sum()
        });
        (of_linears + of_experts) as u64
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
        let kept =
            if config.moe.is_some() { "QLoRA keeps linear layers so, experts not" } else { "QLoRA keeps them so" };
        warnings.push(format!(
            "stored in 4 bits (NF4): {kept}; other methods hold them dequantized, {} of weights on a GPU, {} on the CPU",
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
        experts: experts(config),
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

fn experts(config: &ModelConfig) -> Option<ExpertsInfo> {
    let (moe, hidden) = (config.moe.as_ref()?, config.hidden_size);
    Some(ExpertsInfo {
        num_experts: moe.num_experts,
        num_experts_per_tok: moe.num_experts_per_tok,
        layers: moe.layers.clone(),
        projections: [
            ("gate_up_proj", 2 * moe.moe_intermediate_size, hidden),
            ("down_proj", hidden, moe.moe_intermediate_size),
        ],
    })
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
