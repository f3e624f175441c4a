//! Greedy generation, for checking a model: each token runs the whole text again, so it is meant for short answers.

use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, ensure};

use super::batch::{BatchSlices, DeviceBatch};
use super::transformer::Transformer;
use crate::base::error::Result;

/// Continues `prompt_ids` with the likeliest token each time, for at most `max_new_tokens` tokens or until one of `stop_ids`,
/// which is not part of the answer.
///
/// # Errors
/// When the prompt is empty or holds a token outside the vocabulary, or the model's logits are NaN.
pub fn greedy(model: &Transformer, prompt_ids: &[i32], max_new_tokens: usize, stop_ids: &[i32]) -> Result<Vec<i32>> {
    ensure!(!prompt_ids.is_empty(), "an empty prompt has nothing to continue");
    let mut ids = prompt_ids.to_vec();
    for _ in 0..max_new_tokens {
        let position_ids: Vec<i32> = (0..ids.len() as i32).collect();
        let cu_seqlens = [0, ids.len() as i32];
        let slices = BatchSlices { input_ids: &ids, labels: &[], position_ids: &position_ids, cu_seqlens: &cu_seqlens };
        let batch = DeviceBatch::new(model.device(), slices, model.config().vocab_size)?;
        let last = [ids.len() as i32 - 1];
        let logits = model.logits(&batch, &last, &AtomicBool::new(false)).context("generation was stopped")?;
        let best = logits
            .to_vec()
            .into_iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), |best, (id, logit)| if logit > best.1 { (id, logit) } else { best });
        ensure!(best.1 > f32::NEG_INFINITY, "the model's logits are not numbers: its weights hold NaN or infinity");
        let id = best.0 as i32;
        if stop_ids.contains(&id) {
            break;
        }
        ids.push(id);
    }
    Ok(ids.split_off(prompt_ids.len()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::testing::tiny;
    use crate::ops::testing::cpu;

    #[test]
    fn it_continues_with_the_likeliest_token_until_a_stop_token() {
        let mut model = tiny(&cpu(2), &json!({}));
        let prompt = [5, 6, 7];
        let answer = greedy(&model, &prompt, 6, &[]).unwrap();
        assert_eq!(answer.len(), 6);
        // The first half continued is the second half.
        let longer: Vec<i32> = prompt.iter().chain(&answer[..3]).copied().collect();
        assert_eq!(greedy(&model, &longer, 3, &[]).unwrap(), answer[3..]);
        let stop = answer[4];
        let until = answer.iter().position(|&id| id == stop).unwrap();
        assert_eq!(
            greedy(&model, &prompt, 6, &[stop]).unwrap(),
            answer[..until],
            "the stop token is no part of the answer"
        );
        assert!(greedy(&model, &[], 1, &[]).is_err());
        assert!(greedy(&model, &[61], 1, &[]).unwrap_err().to_string().contains("vocabulary"));

        let head = model.params().find("model.norm.weight").unwrap();
        let width = model.params().get(head).len();
        model.params_mut().set(head, &vec![f32::NAN; width]);
        assert!(greedy(&model, &prompt, 1, &[]).unwrap_err().to_string().contains("NaN"));
    }
}
