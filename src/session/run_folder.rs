//! The folder of one run: where it lies, its lock, and the names of what is in it.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::config::{RunConfig, STARTER};
use crate::base::error::Result;
use crate::base::paths;

/// The frozen configuration.
pub const CONFIG_FILE: &str = "run.toml";
/// The store of steps and events.
pub const STORE_FILE: &str = "run.sqlite";
/// Held by the process that runs the run, for as long as it does.
pub const LOCK_FILE: &str = "run.lock";

/// A run's folder, held by this process.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Keeps the system's lock on `run.lock`; the system lets go of it when the process ends, however it ends.
    _lock: File,
}

impl RunFolder {
    /// Makes a new folder `<runs_dir>/<name>-<date>-<time>` with the frozen `run.toml` in it.
    ///
    /// An existing folder is never used again: the name gets `-2`, `-3`, … instead.
    ///
    /// # Errors
    /// When the folder or the files in it cannot be written.
    pub fn create(config: &RunConfig) -> Result<Self> {
        let runs = match &config.runs_dir {
            Some(folder) => folder.clone(),
            None => paths::runs()?,
        };
        fs::create_dir_all(&runs).with_context(|| {
            format!("cannot make the runs folder {}; set runs_dir to a folder you can write to", runs.display())
        })?;
        let base = format!("{}-{}", slug(&run_name(config)), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
        let path = create_unique(&runs, &base)?;
        let lock_path = path.join(LOCK_FILE);
        let lock = File::create_new(&lock_path).with_context(|| format!("cannot write {}", lock_path.display()))?;
        // A file system without locks only loses the difference between a live and an interrupted run.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            bail!("{} is held by another process", lock_path.display());
        }
        let config_path = path.join(CONFIG_FILE);
        fs::write(&config_path, config.to_toml()?)
            .with_context(|| format!("cannot write {}", config_path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// Where the folder is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn create_unique(runs: &Path, base: &str) -> Result<PathBuf> {
    for attempt in 1..10_000 {
        let path = if attempt == 1 { runs.join(base) } else { runs.join(format!("{base}-{attempt}")) };
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).with_context(|| format!("cannot make the run's folder {}", path.display())),
        }
    }
    bail!("{} already holds thousands of runs named {base}", runs.display())
}

/// Whether some process runs the run of this folder now.
pub fn is_live(folder: &Path) -> bool {
    let Ok(lock) = File::open(folder.join(LOCK_FILE)) else { return false };
    matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// The run's name: as given, else made from model and data.
pub fn run_name(config: &RunConfig) -> String {
    if !config.name.is_empty() {
        return config.name.clone();
    }
    format!("{}-{}", short_name(&config.model.path), short_name(&config.data.path))
}

/// Name of a model or dataset as people say it: the folder's name, or the file's without extension.
pub fn short_name(path: &Path) -> String {
    if path == Path::new(STARTER) {
        return STARTER.into();
    }
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// A name as a folder name: what file systems or shells stumble over becomes `-`.
fn slug(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars().take(80) {
        if c.is_alphanumeric() || matches!(c, '.' | '_') {
            out.push(c);
        } else if !out.ends_with('-') {
            out.push('-');
        }
    }
    let out = out.trim_matches(['-', '.']);
    if out.is_empty() { "run".into() } else { out.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(folder: &Path, name: &str) -> RunConfig {
        RunConfig { name: name.into(), runs_dir: Some(folder.to_owned()), ..RunConfig::default() }
    }

    #[test]
    fn two_runs_of_one_name_get_two_folders() {
        let home = tempfile::tempdir().unwrap();
        let first = RunFolder::create(&config(home.path(), "a run")).unwrap();
        let second = RunFolder::create(&config(home.path(), "a run")).unwrap();
        assert_ne!(first.path(), second.path());
        for run in [&first, &second] {
            assert!(run.path().file_name().unwrap().to_str().unwrap().starts_with("a-run-20"));
            assert_eq!(
                fs::read_to_string(run.path().join(CONFIG_FILE)).unwrap().lines().next(),
                Some("name = \"a run\"")
            );
        }
    }

    #[test]
    fn a_run_is_live_as_long_as_its_folder_is_held() {
        let home = tempfile::tempdir().unwrap();
        let run = RunFolder::create(&config(home.path(), "x")).unwrap();
        let path = run.path().to_owned();
        assert!(is_live(&path));
        assert!(is_live(&path), "looking does not take the lock away");
        drop(run);
        assert!(!is_live(&path));
        assert!(!is_live(home.path()), "a folder without a lock is not live");
    }

    #[test]
    fn names_become_safe_folder_names() {
        assert_eq!(slug("a/b\\c: d"), "a-b-c-d");
        assert_eq!(slug("../.."), "run");
        assert_eq!(slug("한국어 v1.2"), "한국어-v1.2");
    }

    #[test]
    fn a_run_without_a_name_is_named_after_model_and_data() {
        let mut config = RunConfig::default();
        config.model.path = "/m/tiny.gguf".into();
        config.data.path = STARTER.into();
        assert_eq!(run_name(&config), "tiny-starter");
    }
}
