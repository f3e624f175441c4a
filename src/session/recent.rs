//! Models and datasets used lately, kept in `<home>/recent.json`.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::base::error::Result;
use crate::base::{files, paths};

/// Entries kept of each kind.
const KEPT: usize = 12;

/// Models and datasets used lately, newest first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Recent {
    /// Model folders and GGUF files.
    pub models: Vec<PathBuf>,
    /// Dataset files.
    pub datasets: Vec<PathBuf>,
}

impl Recent {
    /// Reads `<home>/recent.json`; nothing there means nothing used yet.
    ///
    /// # Errors
    /// When the file cannot be read, or is not what [`Recent::save`] writes.
    pub fn load() -> Result<Self> {
        Self::load_from(&file()?)
    }

    /// Puts a model first.
    pub fn add_model(&mut self, path: &Path) {
        add(&mut self.models, path);
    }

    /// Puts a dataset first.
    pub fn add_dataset(&mut self, path: &Path) {
        add(&mut self.datasets, path);
    }

    /// Writes `<home>/recent.json` in one rename, so that a reader never sees half of it.
    ///
    /// # Errors
    /// When the folder cannot be made or written.
    pub fn save(&self) -> Result<()> {
        self.save_to(&file()?)
    }

    fn load_from(file: &Path) -> Result<Self> {
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error).with_context(|| format!("{} cannot be read", file.display())),
        };
        serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged; delete it to start with an empty list", file.display()))
    }

    fn save_to(&self, file: &Path) -> Result<()> {
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        }
        files::write_atomic(file, |to| Ok(serde_json::to_writer_pretty(to, self)?))
    }
}

fn file() -> Result<PathBuf> {
    Ok(paths::home()?.join("recent.json"))
}

fn add(list: &mut Vec<PathBuf>, path: &Path) {
    list.retain(|known| known != path);
    list.insert(0, path.to_path_buf());
    list.truncate(KEPT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_first_without_doubles_and_bounded() {
        let mut recent = Recent::default();
        for i in 0..20 {
            recent.add_dataset(Path::new(&format!("/d/{i}.jsonl")));
        }
        recent.add_dataset(Path::new("/d/15.jsonl"));
        assert_eq!(recent.datasets.len(), KEPT);
        assert_eq!(recent.datasets[0], Path::new("/d/15.jsonl"));
        assert_eq!(recent.datasets[1], Path::new("/d/19.jsonl"));
        assert_eq!(recent.datasets.iter().filter(|p| p.ends_with("15.jsonl")).count(), 1);
    }

    #[test]
    fn round_trips_and_names_a_damaged_file() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("home").join("recent.json");
        assert_eq!(Recent::load_from(&file).expect("missing is empty"), Recent::default());
        let mut recent = Recent::default();
        recent.add_model(Path::new("/modelle/größe 1/m.gguf"));
        recent.save_to(&file).expect("save");
        assert_eq!(Recent::load_from(&file).expect("load"), recent);
        std::fs::write(&file, "{").expect("write");
        let error = Recent::load_from(&file).expect_err("damaged");
        assert!(error.to_string().contains("recent.json is damaged"), "{error}");
    }
}
