//! The run configuration file, `run.toml`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::data::options::{LayoutChoice, Overlong, TrainOn};
use crate::train::config::{MethodConfig, OptimizerConfig, TrainConfig};

/// A whole run as written in `run.toml`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Name of the run; empty means made from model and data.
    pub name: String,
    /// Seed of shuffling, held-out split, adapter initialization and dropout.
    pub seed: u64,
    /// Folder that gets the run's folder; empty means the user's runs folder.
    pub runs_dir: Option<PathBuf>,
    /// `[model]`.
    pub model: ModelSection,
    /// `[data]`.
    pub data: DataSection,
    /// `[packing]`.
    pub packing: PackingSection,
    /// `[method]`.
    pub method: MethodConfig,
    /// `[optimizer]`.
    pub optimizer: OptimizerConfig,
    /// `[train]`.
    pub train: TrainConfig,
}

/// `[model]`: what to fine-tune.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// A Hugging Face model folder or a GGUF file; `starter` means the starter model.
    pub path: PathBuf,
    /// A chat template file that replaces the model's own.
    pub chat_template: Option<PathBuf>,
}

/// `[data]`: what to train on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// A `.jsonl` or `.txt` file; `starter` means the starter dataset.
    pub path: PathBuf,
    /// Layout of its rows.
    pub layout: LayoutChoice,
    /// For `mapping`: the user's text, with `{column}` where a column's value goes.
    pub prompt: Option<String>,
    /// For `mapping`: the assistant's text, with `{column}` where a column's value goes.
    pub completion: Option<String>,
    /// System message put before every conversation that has none.
    pub system: Option<String>,
    /// Which tokens are trained.
    pub train_on: TrainOn,
    /// Share of the records held out for evaluation, 0 ≤ x < 1; ignored when `eval_path` is set.
    pub eval_fraction: f64,
    /// A dataset of its own for evaluation.
    pub eval_path: Option<PathBuf>,
    /// Use only the first so many records; 0 means all.
    pub max_records: usize,
}

impl Default for DataSection {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            layout: LayoutChoice::Auto,
            prompt: None,
            completion: None,
            system: None,
            train_on: TrainOn::Assistant,
            eval_fraction: 0.05,
            eval_path: None,
            max_records: 0,
        }
    }
}

/// `[packing]`: how documents become batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PackingSection {
    /// Pack documents; off means one document a row, padded, for comparison.
    pub enabled: bool,
    /// Tokens in a pack.
    pub pack_len: usize,
    /// What happens to longer documents.
    pub overlong: Overlong,
}

impl Default for PackingSection {
    fn default() -> Self {
        Self { enabled: true, pack_len: 1024, overlong: Overlong::Truncate }
    }
}
