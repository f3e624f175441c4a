//! What the model sees, as plain data: packs with their tokens as text, the histogram of lengths.

use crate::data::example::IGNORE_INDEX;
use crate::data::pack::PackedBatch;

/// One token of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenView {
    /// Its id.
    pub id: i32,
    /// Its text; empty where a character needs the next tokens to be whole (it is shown at the last of them).
    pub text: String,
    /// Whether the model is trained to predict it.
    pub trained: bool,
    /// Whether it ends an answer.
    pub end: bool,
}

/// One document of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentView {
    /// Its tokens.
    pub tokens: Vec<TokenView>,
    /// Whether it is a run of padding.
    pub padding: bool,
}

/// One pack as the model sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackView {
    /// The documents in their order.
    pub documents: Vec<DocumentView>,
    /// Tokens that are trained.
    pub trained: usize,
    /// Tokens that are read only.
    pub read_only: usize,
    /// Slots of the pack that hold no document.
    pub unused: usize,
}

impl PackView {
    /// Shows a batch. `pack_len` is the room it has; `text_of` turns ids into text, special tokens included; `is_end`
    /// says which tokens end an answer.
    pub fn new(
        batch: &PackedBatch,
        pack_len: usize,
        text_of: &dyn Fn(&[i32]) -> String,
        is_end: &dyn Fn(i32) -> bool,
    ) -> Self {
        let padding = padded_documents(batch);
        let mut documents = Vec::with_capacity(batch.num_seqs());
        for (document, bounds) in batch.cu_seqlens.windows(2).enumerate() {
            let range = bounds[0] as usize..bounds[1] as usize;
            let (ids, labels) = (&batch.input_ids[range.clone()], &batch.labels[range]);
            let tokens = texts_of(ids, text_of).into_iter().enumerate().map(|(i, text)| TokenView {
                id: ids[i],
                text,
                // A label sits on the token before the one it trains.
                trained: i > 0 && labels[i - 1] != IGNORE_INDEX,
                end: is_end(ids[i]),
            });
            documents.push(DocumentView { tokens: tokens.collect(), padding: padding[document] });
        }
        let tokens = || documents.iter().filter(|document| !document.padding).flat_map(|document| &document.tokens);
        let (trained, used) = (tokens().filter(|token| token.trained).count(), tokens().count());
        Self { trained, read_only: used - trained, unused: pack_len.saturating_sub(used), documents }
    }

    /// The documents that are not padding.
    pub fn num_records(&self) -> usize {
        self.documents.iter().filter(|document| !document.padding).count()
    }
}

/// Which sequences of a batch are padding: those without a label whose lengths sum up to the batch's padding. Padding
/// is always one repeated token, which no document of a training set is.
fn padded_documents(batch: &PackedBatch) -> Vec<bool> {
    let same = |ids: &[i32]| ids.windows(2).all(|pair| pair[0] == pair[1]);
    batch
        .cu_seqlens
        .windows(2)
        .map(|bounds| {
            let range = bounds[0] as usize..bounds[1] as usize;
            batch.num_padding_tokens > 0
                && same(&batch.input_ids[range.clone()])
                && batch.labels[range].iter().all(|label| *label == IGNORE_INDEX)
        })
        .collect()
}

/// Text of each token. A character that several tokens share is given to the last of them; bytes that never become a
/// character stay as U+FFFD at the last of theirs.
pub fn texts_of(ids: &[i32], text_of: &dyn Fn(&[i32]) -> String) -> Vec<String> {
    /// Tokens after which an incomplete character is given up: UTF-8 has at most 4 bytes.
    const LONGEST: usize = 4;
    let mut texts = Vec::with_capacity(ids.len());
    // Some tokenizers drop a blank before the first token of a text, so each is decoded after the one before it.
    let (mut context, mut start) = (0, 0);
    for end in 1..=ids.len() {
        let before = text_of(&ids[context..start]);
        let whole = text_of(&ids[context..end]);
        let text = whole.strip_prefix(before.as_str()).unwrap_or(&whole);
        if text.ends_with('\u{FFFD}') && end < ids.len() && end - start < LONGEST {
            texts.push(String::new());
            continue;
        }
        texts.push(text.to_owned());
        (context, start) = (end - 1, end);
    }
    texts
}

/// How many documents have which length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram {
    /// Tokens a bin spans; bin `i` holds lengths from `i · bin_tokens` to below `(i + 1) · bin_tokens`.
    pub bin_tokens: usize,
    /// Documents in each bin.
    pub bins: Vec<usize>,
    /// Longest document in tokens.
    pub longest: usize,
}

impl Histogram {
    /// Counts lengths in at most `max_bins` bins of a width that people read easily (1, 2 or 4 times a power of two).
    pub fn new(lengths: &[usize], max_bins: usize) -> Self {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let bin_tokens = (longest / max_bins.max(1) + 1).next_power_of_two();
        let mut bins = vec![0; longest / bin_tokens + 1];
        for length in lengths {
            bins[length / bin_tokens] += 1;
        }
        Self { bin_tokens, bins, longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::example::Example;

    /// Bytes as tokens: 256 and above are special.
    fn decode(ids: &[i32]) -> String {
        let mut text = String::new();
        let mut bytes = Vec::new();
        for &id in ids {
            match u8::try_from(id) {
                Ok(byte) => bytes.push(byte),
                Err(_) => {
                    text += &String::from_utf8_lossy(&std::mem::take(&mut bytes));
                    text += "<end>";
                }
            }
        }
        text + &String::from_utf8_lossy(&bytes)
    }

    #[test]
    fn characters_made_of_several_tokens_stay_whole() {
        let ids: Vec<i32> = "aé😀b".bytes().map(i32::from).collect();
        assert_eq!(texts_of(&ids, &decode), ["a", "", "é", "", "", "", "😀", "b"]);
        // A byte that begins no character is shown, and the next ones are not lost.
        assert_eq!(texts_of(&[0xFF, 97, 256], &decode).concat(), "\u{FFFD}a<end>");
    }

    #[test]
    fn a_token_is_trained_when_the_label_before_it_says_so() {
        let first = Example { input_ids: vec![97, 98, 256], labels: vec![-100, 256, -100] };
        let second = Example { input_ids: vec![99, 256], labels: vec![256, -100] };
        let batch = PackedBatch::from_examples([&first, &second]);
        let view = PackView::new(&batch, 8, &decode, &|id| id == 256);
        assert_eq!(view.num_records(), 2);
        assert_eq!((view.trained, view.read_only, view.unused), (2, 3, 3));
        let trained: Vec<bool> = view.documents[0].tokens.iter().map(|token| token.trained).collect();
        assert_eq!(trained, [false, false, true]);
        assert!(view.documents[1].tokens[1].end && view.documents[1].tokens[1].trained);
    }

    #[test]
    fn padding_is_unused_room() {
        let example = Example { input_ids: vec![97, 98], labels: vec![98, -100] };
        let mut batch = PackedBatch::from_examples([&example]);
        batch.input_ids.extend([0, 0, 0]);
        batch.labels.extend([-100; 3]);
        batch.position_ids.extend([0, 1, 2]);
        batch.cu_seqlens.push(5);
        batch.num_padding_tokens = 3;
        let view = PackView::new(&batch, 5, &decode, &|_| false);
        assert_eq!((view.num_records(), view.unused, view.trained, view.read_only), (1, 3, 1, 1));
        assert!(view.documents[1].padding);
    }

    #[test]
    fn histogram_bins_hold_every_length() {
        let histogram = Histogram::new(&[0, 5, 16, 17, 300], 40);
        assert_eq!((histogram.bin_tokens, histogram.longest), (8, 300));
        assert_eq!(histogram.bins.iter().sum::<usize>(), 5);
        assert_eq!((histogram.bins[0], histogram.bins[2]), (2, 2));
        assert!(histogram.bins.len() <= 40);
        assert_eq!(Histogram::new(&[], 40).bins, [0]);
    }
}
