//! The list of runs: a scan of the runs folder, so that copying or deleting a run's folder is all it takes.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::config::RunConfig;
use super::event::Outcome;
use super::run_folder::{self, CONFIG_FILE, STORE_FILE};
use super::store;
use crate::base::error::Result;
use crate::base::paths;

/// How a run in the list stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunStatus {
    /// Some process runs it now.
    Live,
    /// It ended.
    Ended(Outcome),
    /// Its process ended without a word.
    Interrupted,
}

impl RunStatus {
    /// The status in one word.
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Live => "running",
            Self::Ended(Outcome::Completed) => "completed",
            Self::Ended(Outcome::Stopped) => "stopped",
            Self::Ended(Outcome::Failed(_)) => "failed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// One run of the list.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// Its folder.
    pub folder: PathBuf,
    /// Its name.
    pub name: String,
    /// Name of the model.
    pub model: String,
    /// Name of the dataset.
    pub data: String,
    /// How it stands.
    pub status: RunStatus,
    /// When it began, in milliseconds since the Unix epoch.
    pub began_unix_ms: Option<i64>,
    /// When it last said something, in milliseconds since the Unix epoch.
    pub last_unix_ms: Option<i64>,
    /// Steps done.
    pub steps: u64,
    /// Steps planned, once training began.
    pub total_steps: Option<u64>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// The last held-out loss.
    pub last_eval_loss: Option<f64>,
}

/// Runs found, and folders that are none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunList {
    /// Runs, the newest first.
    pub runs: Vec<RunSummary>,
    /// Folders that could not be read, with the reason.
    pub skipped: Vec<(PathBuf, String)>,
}

/// Lists the runs of the user's runs folder.
///
/// # Errors
/// As [`list_in`].
pub fn list() -> Result<RunList> {
    list_in(&paths::runs()?)
}

/// Lists the runs in `folder`; a folder that does not exist holds none.
///
/// # Errors
/// When the folder cannot be read. Damaged and foreign folders in it are skipped, with the reason.
pub fn list_in(folder: &Path) -> Result<RunList> {
    let mut list = RunList::default();
    if !folder.exists() {
        return Ok(list);
    }
    let context = || format!("cannot read the runs folder {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        if !path.is_dir() {
            continue;
        }
        match summarize(&path) {
            Ok(run) => list.runs.push(run),
            Err(error) => list.skipped.push((path, format!("{error:#}"))),
        }
    }
    list.runs.sort_by(|a, b| b.began_unix_ms.cmp(&a.began_unix_ms).then_with(|| b.folder.cmp(&a.folder)));
    list.skipped.sort();
    Ok(list)
}

/// Reads what the list shows of one run folder.
///
/// # Errors
/// When it is not one: no readable `run.toml` or `run.sqlite`.
pub fn summarize(folder: &Path) -> Result<RunSummary> {
    let live = run_folder::is_live(folder);
    let stored = store::summary(folder)?;
    let text = std::fs::read_to_string(folder.join(CONFIG_FILE))
        .with_context(|| format!("{} has a {STORE_FILE} but no readable {CONFIG_FILE}", folder.display()))?;
    // Not `RunConfig::load`: an old run stays readable when a range has become narrower since.
    let config: RunConfig =
        toml::from_str(&text).with_context(|| format!("cannot read {}", folder.join(CONFIG_FILE).display()))?;
    let status = match stored.outcome {
        Some(outcome) => RunStatus::Ended(outcome),
        None if live => RunStatus::Live,
        None => RunStatus::Interrupted,
    };
    let model = stored.info.as_ref().map_or_else(|| run_folder::short_name(&config.model.path), |i| i.model.clone());
    Ok(RunSummary {
        folder: folder.to_owned(),
        name: run_folder::run_name(&config),
        model,
        data: run_folder::short_name(&config.data.path),
        status,
        began_unix_ms: stored.began_unix_ms,
        last_unix_ms: stored.last_unix_ms,
        steps: stored.steps,
        total_steps: stored.info.map(|i| i.total_steps),
        last_loss: stored.last_loss,
        last_eval_loss: stored.last_eval_loss,
    })
}
