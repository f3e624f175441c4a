//! Finding models in the places where tools keep them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{bytes_on_disk, model_name};
use crate::base::paths;
use crate::model::loading::Checkpoint;

/// A model found on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundModel {
    /// The folder or GGUF file.
    pub path: PathBuf,
    /// Its name for people.
    pub name: String,
    /// Where it was found: `Tandem`, `HF cache`, `LM Studio`, `recent`.
    pub place: &'static str,
    /// Bytes on disk.
    pub bytes: u64,
    /// Its parameters, or why Tandem cannot train it.
    pub verdict: Result<u64, Refusal>,
}

/// Why a model cannot be trained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The reason in a few words.
    pub reason: String,
    /// The reason with the file it is about.
    pub details: String,
}

/// The folders to look in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Places {
    /// Tandem's own models folder.
    pub tandem: Option<PathBuf>,
    /// Hugging Face hub caches.
    pub hugging_face: Vec<PathBuf>,
    /// LM Studio's models folders.
    pub lm_studio: Vec<PathBuf>,
    /// Models used lately, wherever they are.
    pub recent: Vec<PathBuf>,
}

impl Places {
    /// The places of this user. `HF_HUB_CACHE` and `HF_HOME` count as they do for Hugging Face's own tools.
    pub fn of_user(recent: &[PathBuf]) -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = directories::BaseDirs::new().map(|dirs| dirs.home_dir().to_path_buf());
        let below = |path: &str| home.iter().map(|home| home.join(path)).collect::<Vec<_>>();
        let hugging_face = match variable("HF_HUB_CACHE").or_else(|| Some(variable("HF_HOME")?.join("hub"))) {
            Some(hub) => vec![hub],
            None => below(".cache/huggingface/hub"),
        };
        Self {
            tandem: paths::models().ok(),
            hugging_face,
            lm_studio: [below(".lmstudio/models"), below(".cache/lm-studio/models")].concat(),
            recent: recent.to_vec(),
        }
    }
}

/// Looks for models; those Tandem can train come first, by name. `None` when `stop` was raised.
///
/// A folder that cannot be read counts as empty: it is one of several places, and the path field takes any path.
pub fn discover(places: &Places, stop: &AtomicBool) -> Option<Vec<FoundModel>> {
    let mut candidates: Vec<(PathBuf, &'static str)> = Vec::new();
    if let Some(folder) = &places.tandem {
        candidates.extend(models_below(folder, 1).into_iter().map(|path| (path, "Tandem")));
    }
    for hub in &places.hugging_face {
        for repository in sorted(hub).into_iter().filter(|path| file_name(path).starts_with("models--")) {
            let snapshot = newest_snapshot(&repository);
            candidates.extend(snapshot.iter().flat_map(|path| models_below(path, 0)).map(|path| (path, "HF cache")));
        }
    }
    for folder in &places.lm_studio {
        candidates.extend(models_below(folder, 3).into_iter().map(|path| (path, "LM Studio")));
    }
    candidates.extend(places.recent.iter().filter(|path| path.exists()).map(|path| (path.clone(), "recent")));

    let mut found: Vec<FoundModel> = Vec::new();
    for (path, place) in candidates {
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        if !found.iter().any(|model| model.path == path) {
            found.push(look_at(path, place));
        }
    }
    found.sort_by_cached_key(|model| (model.verdict.is_err(), model.name.to_lowercase()));
    Some(found)
}

fn look_at(path: PathBuf, place: &'static str) -> FoundModel {
    let verdict = Checkpoint::open(&path).map(|checkpoint| checkpoint.num_parameters());
    FoundModel {
        name: model_name(&path),
        place,
        bytes: bytes_on_disk(&path),
        verdict: verdict
            .map_err(|error| Refusal { reason: error.root_cause().to_string(), details: format!("{error:#}") }),
        path,
    }
}

/// Model folders (with a `config.json`) and GGUF files in `folder` and `depth` levels of folders below it.
fn models_below(folder: &Path, depth: usize) -> Vec<PathBuf> {
    if folder.join("config.json").is_file() {
        return vec![folder.to_path_buf()];
    }
    let mut found = Vec::new();
    for path in sorted(folder) {
        let hidden = file_name(&path).starts_with('.');
        if is_model_gguf(&path) {
            found.push(path);
        } else if depth > 0 && !hidden && path.is_dir() {
            found.extend(models_below(&path, depth - 1));
        }
    }
    found
}

/// A GGUF file that is a language model; `mmproj` files are the vision part of another one.
fn is_model_gguf(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("gguf")) && path.is_file() && !file_name(path).starts_with("mmproj")
}

/// The snapshot that `refs/main` names, or the newest one.
fn newest_snapshot(repository: &Path) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    if let Ok(revision) = std::fs::read_to_string(repository.join("refs").join("main")) {
        let named = snapshots.join(revision.trim());
        if named.is_dir() {
            return Some(named);
        }
    }
    let modified = |path: &PathBuf| path.metadata().and_then(|metadata| metadata.modified()).ok();
    sorted(&snapshots).into_iter().filter(|path| path.is_dir()).max_by_key(modified)
}

fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, "{}").expect("write");
    }

    #[test]
    fn all_places_are_searched_and_what_cannot_train_says_why() {
        let root = tempfile::tempdir().expect("folder");
        let at = |path: &str| root.path().join(path);
        touch(&at("tandem/a.gguf"));
        touch(&at("tandem/.fetch-x/b.gguf"));
        touch(&at("hub/models--Org--Old-New/snapshots/1/config.json"));
        touch(&at("hub/models--Org--Old-New/snapshots/2/config.json"));
        touch(&at("hub/models--Org--Old-New/refs/main"));
        std::fs::write(at("hub/models--Org--Old-New/refs/main"), "1\n").expect("write");
        touch(&at("hub/datasets--x/snapshots/1/config.json"));
        touch(&at("lm/org/repo/c.gguf"));
        touch(&at("lm/org/repo/mmproj-c.gguf"));
        let places = Places {
            tandem: Some(at("tandem")),
            hugging_face: vec![at("hub"), at("no such folder")],
            lm_studio: vec![at("lm")],
            recent: vec![at("tandem/a.gguf"), at("gone.gguf")],
        };
        let found = discover(&places, &AtomicBool::new(false)).expect("not stopped");
        let seen: Vec<_> = found.iter().map(|model| (model.name.as_str(), model.place)).collect();
        assert_eq!(seen, [("a", "Tandem"), ("c", "LM Studio"), ("Old-New", "HF cache")]);
        assert!(found[2].path.ends_with("snapshots/1"));
        for model in &found {
            assert!(!model.verdict.as_ref().expect_err("not a model").reason.is_empty());
        }
        assert_eq!(discover(&places, &AtomicBool::new(true)), None);
    }
}
