//! A model as a Hugging Face folder whose linear layers are in NF4, as bitsandbytes stores them.

use std::path::Path;

use anyhow::{Context as _, ensure};
use rayon::prelude::*;
use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::Map;

use super::hf_config;
use super::model::{copy_files, shard_name, write_index, write_text};
use crate::base::error::Result;
use crate::base::files;
use crate::formats::nf4::{Nf4, round};
use crate::formats::safetensors::{Dtype, write_values};
use crate::model::block::PROJECTIONS;
use crate::model::loading::{Checkpoint, SINGLE_FILE};

/// Bytes of weights that are held before they are written: the size of a file.
const MAX_SHARD_BYTES: usize = 1 << 30;

/// A tensor to write.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Writes the model of `checkpoint` into `folder`, which must not exist yet (or be empty) and appears only when it is complete: the linear layers of
/// its blocks in NF4, with `double` their scales in 8 bits, and the rest in `dtype`, to which weights are rounded before they are quantized. What is in
/// NF4 already stays as it is. `progress` gets weights done and weights in all. Returns notes for the user: what the folder lacks to be used on its own.
///
/// # Errors
/// When the source is a GGUF file or a mixture of experts, the folder holds something, a weight is not finite, or a file cannot be written.
pub fn save(
    folder: &Path,
    checkpoint: &Checkpoint,
    dtype: Dtype,
    double: bool,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<String>> {
    let source = checkpoint.path();
    ensure!(!checkpoint.is_gguf(), "{} is a GGUF file; only Hugging Face folders are quantized", source.display());
    ensure!(
        checkpoint.config().moe.is_none(),
        "{} is a mixture of experts; most of it are its experts, which bitsandbytes does not store in 4 bits",
        source.display()
    );
    let path = source.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config = hf_config::with_nf4(&text, dtype, double).with_context(|| format!("cannot use {}", path.display()))?;
    let mut notes = Vec::new();
    files::create_folder_atomic(folder, |new| {
        write_weights(new, checkpoint, dtype, double, progress)?;
        write_text(&new.join("config.json"), &config)?;
        notes = copy_files(source, new)?;
        Ok(())
    })
    .with_context(|| format!("cannot save the model in {}", folder.display()))?;
    Ok(notes)
}

fn write_weights(
    folder: &Path,
    checkpoint: &Checkpoint,
    dtype: Dtype,
    double: bool,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let names = checkpoint.tensor_names();
    // A file is named by how many there are, which is known when the last is full.
    let mut shards: Vec<Vec<String>> = Vec::new();
    let (mut held, mut total_bytes): (Vec<Stored>, usize) = (Vec::new(), 0);
    let unfinished = |number: usize| folder.join(format!("{number}.part"));
    for (done, name) in names.iter().enumerate() {
        held.extend(stored(checkpoint, name, dtype, double)?);
        progress(done + 1, names.len());
        let bytes: usize = held.iter().map(|tensor| tensor.bytes.len()).sum();
        if bytes >= MAX_SHARD_BYTES || done + 1 == names.len() {
            write_file(&unfinished(shards.len()), &held)?;
            total_bytes += bytes;
            shards.push(held.drain(..).map(|tensor| tensor.name).collect());
        }
    }
    if shards.len() == 1 {
        return Ok(std::fs::rename(unfinished(0), folder.join(SINGLE_FILE))?);
    }
    let mut map = Map::new();
    for (number, names) in shards.iter().enumerate() {
        let file = shard_name(number, shards.len());
        std::fs::rename(unfinished(number), folder.join(&file))?;
        map.extend(names.iter().map(|name| (name.clone(), file.clone().into())));
    }
    write_index(folder, map, total_bytes)
}

/// What a weight becomes: its parts in NF4, or itself.
fn stored(checkpoint: &Checkpoint, name: &str, dtype: Dtype, double: bool) -> Result<Vec<Stored>> {
    let shape = checkpoint.shape(name).with_context(|| format!("the model has no tensor named {name}"))?;
    let is_linear = PROJECTIONS.iter().copied().flatten().any(|module| name.ends_with(&format!(".{module}.weight")));
    let parts = |weight: &Nf4<'_>| -> Result<Vec<Stored>> {
        let each = weight.parts()?.into_iter();
        let part = each.map(|part| Stored {
            name: format!("{name}{}", part.suffix),
            dtype: part.dtype,
            shape: part.shape,
            bytes: part.bytes.into_owned(),
        });
        Ok(part.collect())
    };
    if is_linear && let Some(weight) = checkpoint.tensor_nf4(name)? {
        return parts(&weight);
    }
    let mut values = checkpoint.tensor_f32(name)?;
    if is_linear {
        values.par_iter_mut().for_each(|x| *x = round(*x, dtype));
        return parts(&Nf4::quantize(name, &values, shape, dtype, double)?);
    }
    let mut bytes = Vec::with_capacity(values.len() * dtype.bitsize() / 8);
    write_values(&mut bytes, dtype, &values)?;
    Ok(vec![Stored { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }])
}

fn write_file(path: &Path, tensors: &[Stored]) -> Result<()> {
    let views = tensors.iter().map(|Stored { name, dtype, shape, bytes }| {
        Ok((name, TensorView::new(*dtype, shape.clone(), bytes).with_context(|| format!("tensor {name}"))?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    serialize_to_file(views, Some(metadata), path).with_context(|| format!("cannot write {}", path.display()))
}
