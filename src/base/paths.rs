//! The folders Tandem reads and writes: cache of models, runs, settings.

use std::path::PathBuf;

use anyhow::Context as _;

use super::error::Result;

/// The folder of everything Tandem keeps for this user. `TANDEM_HOME` overrides it.
///
/// # Errors
/// When the system does not say where a user's data lives and `TANDEM_HOME` is not set.
pub fn home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("TANDEM_HOME").filter(|v| !v.is_empty()) {
        return Ok(PathBuf::from(home));
    }
    let dirs = directories::ProjectDirs::from("", "", "tandem")
        .context("this system names no data folder for the user; set TANDEM_HOME to a folder")?;
    Ok(dirs.data_dir().to_path_buf())
}

/// Where downloaded models are kept: `<home>/models`.
///
/// # Errors
/// As [`home`].
pub fn models() -> Result<PathBuf> {
    Ok(home()?.join("models"))
}

/// Where runs are kept when the run configuration names no folder: `<home>/runs`.
///
/// # Errors
/// As [`home`].
pub fn runs() -> Result<PathBuf> {
    Ok(home()?.join("runs"))
}

/// Where things are kept that can be made again: the system's cache folder for Tandem, or `<home>/cache` where `TANDEM_HOME` is set.
///
/// # Errors
/// As [`home`].
pub fn cache() -> Result<PathBuf> {
    if std::env::var_os("TANDEM_HOME").is_some_and(|v| !v.is_empty()) {
        return Ok(home()?.join("cache"));
    }
    let dirs = directories::ProjectDirs::from("", "", "tandem")
        .context("this system names no cache folder for the user; set TANDEM_HOME to a folder")?;
    Ok(dirs.cache_dir().to_path_buf())
}
