//! The run configuration file, `run.toml`: its structs, reading it, and the frozen copy of a run folder.

mod check;
mod fields;
mod parse;

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use serde::{Deserialize, Serialize};

pub use self::check::{ConfigError, ConfigErrors, Origin};
pub use self::fields::{FIELDS, Field, FieldKind};
pub use self::parse::Override;
use crate::base::error::Result;
use crate::data::options::{LayoutChoice, Overlong, TrainOn};
use crate::train::config::{MemoryConfig, MethodConfig, OptimizationsConfig, OptimizerConfig, TrainConfig};

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
    /// `[optimizations]`.
    pub optimizations: OptimizationsConfig,
    /// `[memory]`.
    pub memory: MemoryConfig,
}

/// The word that stands for the starter model and the starter dataset in `path` fields.
pub const STARTER: &str = "starter";

impl RunConfig {
    /// Reads a `run.toml`. Relative paths in it start at the file's folder; the result holds absolute ones.
    ///
    /// # Errors
    /// When the file cannot be read, or with [`ConfigErrors`]: all unknown fields, wrong types and values out of
    /// range, each with its line and remedy.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_with(Some(path), &[])
    }

    /// Reads a `run.toml` (or starts from the defaults) and lets `overrides` replace fields.
    ///
    /// Relative paths in overrides start at the current folder.
    ///
    /// # Errors
    /// As [`RunConfig::load`]; an override names its flag where a file's field names its line.
    pub fn load_with(path: Option<&Path>, overrides: &[Override]) -> Result<Self> {
        let Some(path) = path else { return parse::parse("", Path::new(""), Path::new(""), overrides) };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the run configuration {}", path.display()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        parse::parse(&text, path, folder, overrides)
    }

    /// Checks every field, as [`RunConfig::load`] does; for configurations made in the window.
    ///
    /// # Errors
    /// [`ConfigErrors`] with every problem found; each names its field (`method.r`).
    pub fn validate(&self) -> Result<(), ConfigErrors> {
        let problems = check::problems(self);
        if problems.is_empty() { Ok(()) } else { Err(ConfigErrors(problems)) }
    }

    /// The configuration as TOML, every field written out: the frozen `run.toml` of a run folder.
    ///
    /// # Errors
    /// When a path is not valid Unicode.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).context("the run configuration cannot be written as TOML")
    }
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
