//! From the loader's packed batch to the device.

use anyhow::ensure;

use crate::base::error::Result;
use crate::data::pack::PackedBatch;
use crate::model::batch::{BatchSlices, DeviceBatch};
use crate::model::transformer::Transformer;

/// Uploads `batch` for `model`. Stop 5 of the walk.
///
/// # Errors
/// When the batch does not fit the model (a token outside its vocabulary) or its parts do not fit each other.
pub fn upload(model: &Transformer, batch: &PackedBatch) -> Result<DeviceBatch> {
    let slices = BatchSlices {
        input_ids: &batch.input_ids,
        labels: &batch.labels,
        position_ids: &batch.position_ids,
        cu_seqlens: &batch.cu_seqlens,
    };
    let uploaded = DeviceBatch::new(model.device(), slices, model.config().vocab_size)?;
    // The loss is divided by the batch's own count: a wrong one would scale loss and gradient.
    ensure!(
        uploaded.targets.len() == batch.num_label_tokens,
        "the batch says it has {} supervised tokens; it has {}",
        batch.num_label_tokens,
        uploaded.targets.len()
    );
    Ok(uploaded)
}
