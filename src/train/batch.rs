//! From the loader's packed batch to the device.

use std::borrow::Cow;

use anyhow::ensure;

use crate::base::error::Result;
use crate::data::pack::PackedBatch;
use crate::model::batch::{BatchSlices, DeviceBatch};
use crate::model::transformer::Transformer;
use crate::tensor::Device;

/// Uploads `batch` for `model`. Stop 5 of the walk. On a GPU it is padded to one of few sizes ([`bucket`]), whether passes are recorded or not, so that
/// both give the same bits; the batch's own counts stay as they are. With an auxiliary loss, in which padding would take part, there is none.
///
/// # Errors
/// When the batch does not fit the model (a token outside its vocabulary) or its parts do not fit each other.
pub fn upload(model: &Transformer, batch: &PackedBatch) -> Result<DeviceBatch> {
    let padded = match model.device() {
        Device::Cuda(_) if !model.has_auxiliary_loss() => padded(batch),
        Device::Cuda(_) | Device::Cpu(_) => Cow::Borrowed(batch),
    };
    let slices = BatchSlices {
        input_ids: &padded.input_ids,
        labels: &padded.labels,
        position_ids: &padded.position_ids,
        cu_seqlens: &padded.cu_seqlens,
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

/// Tokens to which a batch of `total_tokens` is padded on a GPU: a recorded pass serves all batches of one size, and packs differ by a little. At most
/// 7 tokens, or 1/32 of the batch, are padding.
pub fn bucket(total_tokens: usize) -> usize {
    total_tokens.next_multiple_of((total_tokens.next_power_of_two() / 64).max(8))
}

/// Tokens that the device computes for a batch of `total_tokens`.
pub fn bucket_on(device: &Device, total_tokens: usize) -> usize {
    match device {
        Device::Cpu(_) => total_tokens,
        Device::Cuda(_) => bucket(total_tokens),
    }
}

/// The batch with padding up to its [`bucket`]: a document of its own at the end, in which nothing is supervised.
pub(super) fn padded(batch: &PackedBatch) -> Cow<'_, PackedBatch> {
    let missing = bucket(batch.total_tokens()) - batch.total_tokens();
    let Some(&last) = batch.input_ids.last().filter(|_| missing > 0) else { return Cow::Borrowed(batch) };
    let mut padded = batch.clone();
    padded.push_padding(last, missing);
    Cow::Owned(padded)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use serde_json::json;

    use super::*;
    use crate::data::example::{Example, IGNORE_INDEX};
    use crate::layers::parameter::Grads;
    use crate::model::policy::{Activations, AttentionPath};
    use crate::model::testing::tiny;
    use crate::model::transformer::PassOptions;
    use crate::ops::cross_entropy::LossSum;
    use crate::ops::testing::{assert_close, cpu};

    fn document(ids: &[i32]) -> Example {
        Example { input_ids: ids.to_vec(), labels: [&ids[1..], &[IGNORE_INDEX]].concat() }
    }

    #[test]
    fn buckets_are_few_and_waste_little() {
        for total in 1..20_000 {
            let bucket = bucket(total);
            assert!(bucket >= total && bucket - total < (total / 32).max(8), "{total}: {bucket}");
            assert_eq!((self::bucket(bucket), bucket % 8), (bucket, 0), "{total}");
        }
        assert_eq!([1, 8, 9, 512, 513, 4097, 8192, 8193].map(bucket), [8, 8, 16, 512, 528, 4224, 8192, 8448]);
        let mut buckets: Vec<usize> = (4097..=8192).map(bucket).collect();
        buckets.dedup();
        assert_eq!(buckets.len(), 32);
    }

    #[test]
    fn padding_is_a_document_at_the_end_that_teaches_nothing() {
        let batch = PackedBatch::from_examples(&[document(&[3, 4, 5]), document(&[6, 7])]);
        let padded = padded(&batch);
        padded.check().unwrap();
        assert_eq!(padded.input_ids, [3, 4, 5, 6, 7, 7, 7, 7]);
        assert_eq!(padded.labels[5..], [IGNORE_INDEX; 3]);
        assert_eq!(padded.position_ids, [0, 1, 2, 0, 1, 0, 1, 2]);
        assert_eq!(padded.cu_seqlens, [0, 3, 5, 8]);
        assert_eq!(padded.num_label_tokens, batch.num_label_tokens);
        assert!(matches!(self::padded(&padded), Cow::Borrowed(_)), "a full bucket stays as it is");
    }

    #[test]
    fn padding_changes_neither_loss_nor_gradients() {
        let ids: Vec<i32> = (0..43).map(|i| i * 17 % 61).collect();
        let batch = PackedBatch::from_examples(&[document(&ids[..30]), document(&ids[30..])]);
        let padded = padded(&batch);
        assert_eq!(padded.total_tokens(), 48);
        let mut model = tiny(&cpu(2), &json!({"tie_word_embeddings": true}));
        model.train_everything().unwrap();
        for path in [AttentionPath::Varlen, AttentionPath::Masked] {
            model.set_attention_path(path);
            let run = |batch: &PackedBatch| {
                let (mut grads, mut loss) = (Grads::new(model.params()), LossSum::new(model.device()));
                let options = PassOptions {
                    weight: 1.0 / batch.num_label_tokens as f32,
                    activations: Activations::Recompute,
                    share: 1.0,
                    dropout: None,
                    stop: &AtomicBool::new(false),
                };
                model.forward_backward(&mut grads, &mut loss, &upload(&model, batch).unwrap(), options).unwrap();
                (loss.read(), grads)
            };
            let ((loss, grads), (padded_loss, padded_grads)) = (run(&batch), run(&padded));
            assert!((loss - padded_loss).abs() < 1e-5 * loss, "{path:?}: {loss} against {padded_loss}");
            for (id, parameter) in model.params().iter() {
                let [grads, padded] = [&grads, &padded_grads].map(|grads| grads.get(id).unwrap().to_vec());
                assert_close(&format!("{path:?} {}", parameter.name), &padded, &grads, 1e-5);
            }
        }
    }
}
