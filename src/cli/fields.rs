//! The flags that override fields of a run configuration, shared by all commands that take one.

use std::path::PathBuf;

use anyhow::{anyhow, bail};
use clap::Args;
use tandem::base::error::Result;
use tandem::session::config::{Override, RunConfig, STARTER};
use tandem::session::estimate;

/// A run configuration and flags over it. Values are checked with the file, so that both give the same errors.
#[derive(Args)]
pub struct FieldArgs {
    /// The run configuration; may be left out when --model and --data are given.
    #[arg(value_name = "RUN.TOML")]
    pub config: Option<PathBuf>,
    /// Override any field, as --set optimizer.weight_decay=0.01; may be repeated.
    #[arg(long, value_name = "SECTION.FIELD=VALUE")]
    set: Vec<String>,
    /// Model folder, GGUF file, or `starter`.
    #[arg(long, value_name = "PATH", help_heading = "Fields")]
    model: Option<String>,
    /// Dataset file, or `starter`.
    #[arg(long, value_name = "PATH", help_heading = "Fields")]
    data: Option<String>,
    /// Name of the run.
    #[arg(long, value_name = "TEXT", help_heading = "Fields")]
    name: Option<String>,
    /// Folder that gets the run's folder.
    #[arg(long, value_name = "PATH", help_heading = "Fields")]
    runs_dir: Option<String>,
    /// Seed of shuffling, held-out split, adapters and dropout.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    seed: Option<String>,
    /// Tokens in a pack.
    #[arg(long, alias = "pack", value_name = "N", help_heading = "Fields")]
    pack_len: Option<String>,
    /// What trains: the words of `kind` in [method].
    #[arg(long, value_name = "WORD", help_heading = "Fields")]
    method: Option<String>,
    /// Rank of the adapters.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    r: Option<String>,
    /// Scale numerator of the adapters.
    #[arg(long, value_name = "X", help_heading = "Fields")]
    lora_alpha: Option<String>,
    /// Peak learning rate.
    #[arg(long, value_name = "X", help_heading = "Fields")]
    lr: Option<String>,
    /// Optimizer steps; 0: as many as --epochs takes.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    max_steps: Option<String>,
    /// Passes over the training data.
    #[arg(long, value_name = "X", help_heading = "Fields")]
    epochs: Option<String>,
    /// Packs in one optimizer step.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    grad_accum_steps: Option<String>,
    /// Measure the held-out loss every N steps; 0: only at the end.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    eval_every: Option<String>,
    /// Save every N steps; 0: only at the end.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    save_every: Option<String>,
    /// `auto`, `keep`, `recompute` or `offload`.
    #[arg(long, value_name = "WORD", help_heading = "Fields")]
    activations: Option<String>,
    /// `varlen` or `masked`.
    #[arg(long, value_name = "WORD", help_heading = "Fields")]
    attention: Option<String>,
    /// `auto`, `cpu` or `cuda`.
    #[arg(long, value_name = "WORD", help_heading = "Fields")]
    device: Option<String>,
    /// GiB of the GPU's memory to use at most; 0: all that is free.
    #[arg(long, value_name = "X", help_heading = "Fields")]
    vram_gib: Option<String>,
    /// CPU threads; 0: one a core.
    #[arg(long, value_name = "N", help_heading = "Fields")]
    threads: Option<String>,
    /// `f32` or `bf16`.
    #[arg(long, value_name = "WORD", help_heading = "Fields")]
    precision: Option<String>,
}

impl FieldArgs {
    /// Takes a first argument that is a dataset and no configuration for `--data`.
    ///
    /// # Errors
    /// When `--data` is given too, or there is no `--model`, whose tokenizer is needed.
    pub fn accept_dataset(&mut self) -> Result<()> {
        let is_dataset = |path: &PathBuf| path.extension().is_none_or(|e| e != "toml");
        let Some(path) = self.config.take_if(|path| is_dataset(path)) else { return Ok(()) };
        if self.data.is_some() {
            bail!("{} is a dataset, and --data names another one: give one of them", path.display());
        }
        if self.model.is_none() {
            bail!("{} is a dataset: give the model it is for, as --model FOLDER or --model starter", path.display());
        }
        self.data = Some(
            path.into_os_string()
                .into_string()
                .map_err(|path| anyhow!("{} is not valid Unicode; rename the file", PathBuf::from(path).display()))?,
        );
        Ok(())
    }

    /// The known shape that `--model` names, where neither a configuration nor data are given.
    pub fn shape(&self) -> Option<&str> {
        let alone = self.config.is_none() && self.data.is_none();
        self.model.as_deref().filter(|model| alone && estimate::is_shape(model))
    }

    /// The configuration for [`Self::shape`], which needs no data.
    pub fn run_config_of_shape(&self) -> Result<RunConfig> {
        let data = Override { flag: "--model".into(), field: "data.path".into(), value: STARTER.into() };
        RunConfig::load_with(None, &[self.overrides()?, vec![data]].concat())
    }

    /// The configuration: the file, then `--set`, then the flags of single fields.
    pub fn run_config(&self) -> Result<RunConfig> {
        RunConfig::load_with(self.config.as_deref(), &self.overrides()?)
    }

    fn overrides(&self) -> Result<Vec<Override>> {
        let mut overrides = Vec::new();
        for change in &self.set {
            let Some((field, value)) = change.split_once('=') else {
                bail!("--set {change}: write it as --set SECTION.FIELD=VALUE, for example --set method.r=8");
            };
            let (field, value) = (field.trim().to_owned(), value.trim().to_owned());
            overrides.push(Override { flag: format!("--set {field}"), field, value });
        }
        let flags = [
            ("--model", "model.path", &self.model),
            ("--data", "data.path", &self.data),
            ("--name", "name", &self.name),
            ("--runs-dir", "runs_dir", &self.runs_dir),
            ("--seed", "seed", &self.seed),
            ("--pack-len", "packing.pack_len", &self.pack_len),
            ("--method", "method.kind", &self.method),
            ("--r", "method.r", &self.r),
            ("--lora-alpha", "method.lora_alpha", &self.lora_alpha),
            ("--lr", "optimizer.lr", &self.lr),
            ("--max-steps", "train.max_steps", &self.max_steps),
            ("--epochs", "train.epochs", &self.epochs),
            ("--grad-accum-steps", "train.grad_accum_steps", &self.grad_accum_steps),
            ("--eval-every", "train.eval_every", &self.eval_every),
            ("--save-every", "train.save_every", &self.save_every),
            ("--activations", "train.activations", &self.activations),
            ("--attention", "train.attention", &self.attention),
            ("--device", "train.device", &self.device),
            ("--vram-gib", "train.vram_limit_gib", &self.vram_gib),
            ("--threads", "train.threads", &self.threads),
            ("--precision", "train.precision", &self.precision),
        ];
        for (flag, field, value) in flags {
            if let Some(value) = value {
                overrides.push(Override { flag: flag.into(), field: field.into(), value: value.clone() });
            }
        }
        Ok(overrides)
    }
}
