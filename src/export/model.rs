//! A whole model as a Hugging Face folder: weights, config.json, and the tokenizer files of its source.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Map, Value};

use super::hf_config;
use crate::base::error::Result;
use crate::base::files;
use crate::formats::gguf::GgufFile;
use crate::formats::safetensors::{Dtype, TensorSpec, write};
use crate::model::config::ModelConfig;
use crate::model::file_tensors::{FileTensor, file_tensors};
use crate::model::loading::{INDEX_FILE, SINGLE_FILE};

/// Weights beyond this go into a further file, as in Transformers.
pub const MAX_SHARD_BYTES: usize = 5_000_000_000;

/// Files that are copied from the source's folder where they exist: tokenizer, template, generation defaults, licence.
const COPIED: [&str; 14] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "USE_POLICY.md",
    "vocab.json",
];

/// Write the model into `folder`, which must not exist yet (or be empty) and appears only when it is complete. `values`
/// is asked once for each weight of [`ModelConfig::expected_tensors`], and what it gives is written as the family's files have it
/// ([`file_tensors`]); `source` is the folder or GGUF file the model was
/// loaded from. Returns notes for the user: what the folder lacks to be used on its own.
///
/// # Errors
/// When the folder holds something, `values` fails, a file cannot be written, or config.json cannot express the model.
pub fn save<'a>(
    folder: &Path,
    config: &ModelConfig,
    dtype: Dtype,
    source: &Path,
    values: impl FnMut(&str) -> Result<Cow<'a, [f32]>>,
) -> Result<Vec<String>> {
    save_sharded(folder, config, dtype, source, MAX_SHARD_BYTES, values)
}

fn save_sharded<'a>(
    folder: &Path,
    config: &ModelConfig,
    dtype: Dtype,
    source: &Path,
    max_shard_bytes: usize,
    mut values: impl FnMut(&str) -> Result<Cow<'a, [f32]>>,
) -> Result<Vec<String>> {
    let context = || format!("cannot save the model in {}", folder.display());
    let from_folder = source.is_dir();
    let config_text = if from_folder {
        let path = source.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        hf_config::with_dtype(&text, dtype).with_context(|| format!("cannot use {}", path.display()))?
    } else {
        hf_config::synthesize(config, dtype)?
    };
    let tensors = file_tensors(config);
    let shards = shards(&tensors, dtype, max_shard_bytes);
    let mut notes = Vec::new();
    files::create_folder_atomic(folder, |new| {
        write_weights(new, &shards, &tensors, &mut values)?;
        write_text(&new.join("config.json"), &config_text)?;
        notes = if from_folder { copy_files(source, new)? } else { from_gguf(source, new)? };
        Ok(())
    })
    .with_context(context)?;
    Ok(notes)
}

/// Name of one of several files of weights, counted from 0.
pub(super) fn shard_name(number: usize, of: usize) -> String {
    format!("model-{:05}-of-{of:05}.safetensors", number + 1)
}

/// The weights in the order of computation, split into files of at most `max_bytes` (a single larger weight has a file of
/// its own).
fn shards(tensors: &[FileTensor], dtype: Dtype, max_bytes: usize) -> Vec<Vec<TensorSpec>> {
    let mut shards: Vec<Vec<TensorSpec>> = Vec::new();
    let mut used = 0;
    for tensor in tensors {
        let spec = TensorSpec { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() };
        let bytes = spec.num_bytes();
        match shards.last_mut() {
            Some(last) if used + bytes <= max_bytes => {
                used += bytes;
                last.push(spec);
            }
            _ => {
                used = bytes;
                shards.push(vec![spec]);
            }
        }
    }
    shards
}

fn write_weights<'a>(
    folder: &Path,
    shards: &[Vec<TensorSpec>],
    tensors: &[FileTensor],
    values: &mut impl FnMut(&str) -> Result<Cow<'a, [f32]>>,
) -> Result<()> {
    // They are asked for in this order, and the tensors of one weight follow each other.
    let mut tensors = tensors.iter();
    let mut weight: Option<(&str, Cow<'a, [f32]>)> = None;
    let mut values = |spec: &TensorSpec| -> Result<Cow<'a, [f32]>> {
        let tensor = tensors.next().filter(|tensor| tensor.name == spec.name).context("it is out of order")?;
        if tensor.is_whole_weight() {
            return values(&tensor.weight);
        }
        if weight.as_ref().is_none_or(|(name, _)| *name != tensor.weight) {
            weight = None;
            weight = Some((&tensor.weight, values(&tensor.weight)?));
        }
        let (_, whole) = weight.as_ref().context("there is no weight")?;
        Ok(tensor.values(whole).into_owned().into())
    };
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    if let [only] = shards {
        return write(&folder.join(SINGLE_FILE), &metadata, only, values);
    }
    let mut map = Map::new();
    let mut total_bytes = 0;
    for (i, shard) in shards.iter().enumerate() {
        let name = shard_name(i, shards.len());
        write(&folder.join(&name), &metadata, shard, &mut values)?;
        for t in shard {
            total_bytes += t.num_bytes();
            map.insert(t.name.clone(), name.clone().into());
        }
    }
    write_index(folder, map, total_bytes)
}

/// Writes the index of several files of weights: which tensor lies in which.
pub(super) fn write_index(folder: &Path, weight_map: Map<String, Value>, total_bytes: usize) -> Result<()> {
    let mut index = Map::new();
    index.insert("metadata".to_owned(), Value::Object(Map::from_iter([("total_size".to_owned(), total_bytes.into())])));
    index.insert("weight_map".to_owned(), Value::Object(weight_map));
    write_text(&folder.join(INDEX_FILE), &(serde_json::to_string_pretty(&index)? + "\n"))
}

pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    files::write_atomic(path, |out| Ok(out.write_all(text.as_bytes())?))
}

/// Copy the files beside the weights; notes what is missing.
pub(super) fn copy_files(source: &Path, folder: &Path) -> Result<Vec<String>> {
    for name in COPIED {
        let from = source.join(name);
        if from.is_file() {
            let bytes = std::fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
            files::write_atomic(&folder.join(name), |out| Ok(out.write_all(&bytes)?))?;
        }
    }
    let has = |name: &str| folder.join(name).is_file();
    let mut notes = Vec::new();
    if !["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"].into_iter().any(has) {
        notes.push(format!("{} has no tokenizer files, so the exported folder has none either", source.display()));
    }
    Ok(notes)
}

/// What can be taken over from a GGUF source, and notes about the rest.
fn from_gguf(source: &Path, folder: &Path) -> Result<Vec<String>> {
    let file = GgufFile::open(source)?;
    if let Some(template) = file.string("tokenizer.chat_template")? {
        write_text(&folder.join("chat_template.jinja"), template)?;
    }
    let origin = match file.string("general.base_model.0.repo_url")?.or(file.string("general.source.url")?) {
        Some(url) => format!(" ({url})"),
        None => String::new(),
    };
    Ok(vec![
        format!(
            "the source is a GGUF file, which keeps its tokenizer inside: copy tokenizer.json and tokenizer_config.json of the original model{origin} into the folder before you use it with Transformers"
        ),
        "config.json was written from the GGUF file's metadata".to_owned(),
    ])
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::path::PathBuf;

    use super::*;
    use crate::formats::gguf_write::GgufBuilder;
    use crate::formats::safetensors::SafetensorsFile;
    use crate::model::loading::Checkpoint;

    fn golden(family: &str) -> PathBuf {
        let root = std::env::var_os("TANDEM_GOLDEN")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
        root.join(family)
    }

    /// Names and shapes of the tensors in a folder's files, sorted.
    fn stored_names(folder: &Path) -> Vec<(String, Vec<usize>)> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("model") && name.ends_with(".safetensors") {
                let file = SafetensorsFile::open(&path).unwrap();
                found.extend(file.names().map(|name| (name.to_owned(), file.info(name).unwrap().shape.clone())));
            }
        }
        found.sort();
        found
    }

    #[test]
    fn golden_models_survive_export_whole_and_sharded() {
        for family in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"] {
            let model = Checkpoint::open(&golden(family)).unwrap();
            for max_bytes in [MAX_SHARD_BYTES, 200_000] {
                let dir = tempfile::tempdir().unwrap();
                let folder = dir.path().join("out");
                let values = |name: &str| Ok(model.tensor_f32(name)?.into());
                let notes =
                    save_sharded(&folder, model.config(), Dtype::F32, &golden(family), max_bytes, values).unwrap();
                assert_eq!(notes.len(), 1, "{notes:?}");
                assert_eq!(stored_names(&folder), stored_names(&golden(family)), "{family}");
                assert_eq!(folder.join(INDEX_FILE).exists(), max_bytes == 200_000);
                let back = Checkpoint::open(&folder).unwrap();
                assert_eq!(back.config(), model.config());
                for name in model.tensor_names() {
                    assert_eq!(back.tensor_f32(name).unwrap(), model.tensor_f32(name).unwrap());
                }
                assert!(folder.join("generation_config.json").exists());
            }
        }
    }

    #[test]
    fn a_gguf_source_gives_a_folder_that_opens_and_notes_what_it_lacks() {
        let model = Checkpoint::open(&golden("qwen3")).unwrap();
        let mut gguf = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        gguf.write_all(&GgufBuilder::new().string("tokenizer.chat_template", "{{ x }}").build()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("out");
        let values = |name: &str| Ok(model.tensor_f32(name)?.into());
        let notes = save(&folder, model.config(), Dtype::BF16, gguf.path(), values).unwrap();
        assert!(notes[0].contains("tokenizer.json"), "{notes:?}");
        assert_eq!(std::fs::read_to_string(folder.join("chat_template.jinja")).unwrap(), "{{ x }}");
        let back = Checkpoint::open(&folder).unwrap();
        assert_eq!((back.dtype_summary().as_str(), back.config()), ("bf16", model.config()));
    }

    #[test]
    fn nothing_is_overwritten_and_failures_leave_nothing() {
        let model = Checkpoint::open(&golden("llama")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("mine"), "x").unwrap();
        let values = |name: &str| Ok(model.tensor_f32(name)?.into());
        assert!(save(dir.path(), model.config(), Dtype::F32, &golden("llama"), values).is_err());
        let out = dir.path().join("out");
        let none = |_: &str| anyhow::bail!("gone");
        assert!(save(&out, model.config(), Dtype::F32, &golden("llama"), none).is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
