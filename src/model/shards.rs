//! The safetensors files of a model folder as one table of tensors.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context as _, anyhow, bail, ensure};
use serde_json::Value;

use crate::base::error::Result;
use crate::formats::nf4::{self, Nf4};
use crate::formats::safetensors::{SafetensorsFile, TensorInfo};

/// File of weights of a Hugging Face folder that has only one.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Index of the weights of a Hugging Face folder that has several.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The weight files of a folder.
#[derive(Debug)]
pub(super) struct Shards {
    files: Vec<SafetensorsFile>,
    /// Which file holds each tensor.
    table: BTreeMap<String, usize>,
}

impl Shards {
    /// Opens the weight files of `folder`. As in Transformers, the single file wins over an index.
    ///
    /// # Errors
    /// When there are none, one is missing or damaged, or the index names a tensor that its file does not hold.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let single = folder.join(SINGLE_FILE);
        if single.is_file() {
            let file = SafetensorsFile::open(&single)?;
            let table = file.names().map(|n| (n.to_owned(), 0)).collect();
            return Ok(Self { files: vec![file], table });
        }
        let index = folder.join(INDEX_FILE);
        if !index.is_file() {
            return Err(no_weights(folder));
        }
        let map = weight_map(&index).with_context(|| format!("cannot use {}", index.display()))?;
        let shards: Vec<String> = map.values().cloned().collect::<BTreeSet<_>>().into_iter().collect();
        let missing: Vec<&str> = shards.iter().map(String::as_str).filter(|s| !folder.join(s).is_file()).collect();
        if !missing.is_empty() {
            bail!(
                "{}: {} of {} weight files missing: {}; fetch the model again",
                folder.display(),
                missing.len(),
                shards.len(),
                missing.join(", ")
            );
        }
        let files = shards.iter().map(|s| SafetensorsFile::open(&folder.join(s))).collect::<Result<Vec<_>>>()?;
        let number: HashMap<&String, usize> = shards.iter().enumerate().map(|(i, s)| (s, i)).collect();
        let table: BTreeMap<String, usize> =
            map.iter().filter_map(|(name, shard)| Some((name.clone(), *number.get(shard)?))).collect();
        for (name, &file) in &table {
            ensure!(
                files[file].info(name).is_some(),
                "{} says that tensor {name} is in {}, but it is not; fetch the model again",
                index.display(),
                files[file].path().display()
            );
        }
        Ok(Self { files, table })
    }

    /// Names of all tensors, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.table.keys().map(String::as_str)
    }

    /// The file that holds a tensor, and its type and shape.
    pub(super) fn find(&self, name: &str) -> Option<(&SafetensorsFile, &TensorInfo)> {
        let file = &self.files[*self.table.get(name)?];
        Some((file, file.info(name)?))
    }

    /// The file that holds a tensor.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub(super) fn file(&self, name: &str) -> Result<&SafetensorsFile> {
        let (file, _) = self.find(name).with_context(|| format!("no weight file holds a tensor named {name}"))?;
        Ok(file)
    }

    /// Whether a tensor is stored as NF4 or FP4: in parts, of which at least one is there.
    pub(super) fn is_in_4_bits(&self, name: &str) -> bool {
        nf4::SUFFIXES.iter().any(|suffix| self.table.contains_key(&format!("{name}{suffix}")))
    }

    /// A weight in NF4, whose parts may be in different files.
    ///
    /// # Errors
    /// As [`Nf4::read`].
    pub(super) fn nf4(&self, name: &str) -> Result<Nf4<'_>> {
        Nf4::read(&|suffix| {
            let name = format!("{name}{suffix}");
            let (file, info) = self.find(&name)?;
            Some((info.dtype, file.bytes(&name).ok()?))
        })
    }
}

/// Tensor name to shard name, from the text of an index.
fn weight_map(index: &Path) -> Result<BTreeMap<String, String>> {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(index)?).context("it is not valid JSON")?;
    let map = json.get("weight_map").and_then(Value::as_object).context("weight_map is missing")?;
    map.iter()
        .map(|(name, shard)| {
            let shard = shard.as_str().with_context(|| format!("weight_map: {name} is not the name of a file"))?;
            // A shard lies beside its index: no path may lead out of the folder.
            let plain = Path::new(shard).file_name().is_some_and(|f| f == shard);
            ensure!(plain, "weight_map: {shard:?} is not the plain name of a file");
            Ok((name.clone(), shard.to_owned()))
        })
        .collect()
}

/// Names of the folder's files that `wanted` accepts, sorted.
pub(super) fn files_where(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|n| wanted(n))
        .collect();
    found.sort();
    found
}

/// Why a folder with config.json has no weights that can be read.
fn no_weights(folder: &Path) -> anyhow::Error {
    let name = folder.display();
    let pickled = files_where(folder, |n| n.starts_with("pytorch_model") && n.ends_with(".bin"));
    if let Some(first) = pickled.first() {
        return anyhow!(
            "{name} holds its weights as {first}, a format that can run code when it is opened, so Tandem does not read it; \
             take a version with {SINGLE_FILE}, or convert it in Python: \
             AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        );
    }
    anyhow!("{name} has neither {SINGLE_FILE} nor {INDEX_FILE}; fetch the model again")
}
