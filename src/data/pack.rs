//! Packing: examples into batches of at most `pack_len` tokens, and the padded form for comparison.
//!
//! Three steps, each a pure function: [`fit`] cuts documents that are too long, [`plan`] decides which documents share
//! a batch (from lengths, seed and epoch only), [`PlannedBatch::build`] copies the tokens. [`pack`] and [`pad`] do all three.

use std::collections::BTreeMap;

use anyhow::ensure;

use super::example::{Example, IGNORE_INDEX};
use super::options::Overlong;
use crate::base::error::Result;
use crate::base::rng::Philox;

/// Several documents one after another, with what keeps them apart. Stop 3 of the walk.
///
/// `total_tokens` is `input_ids.len()`. Padding, if any, is a sequence of its own in `cu_seqlens`: a document never
/// attends to it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackedBatch {
    /// Token ids, i32 [total_tokens].
    pub input_ids: Vec<i32>,
    /// Targets, i32 [total_tokens], already shifted inside each document; −100 where nothing is trained.
    pub labels: Vec<i32>,
    /// Position inside its document, i32 [total_tokens]; restarts at 0 in every document.
    pub position_ids: Vec<i32>,
    /// Cumulative document starts, i32 [num_seqs + 1], first 0, last total_tokens.
    pub cu_seqlens: Vec<i32>,
    /// Length of the longest document in this batch.
    pub max_seqlen: usize,
    /// How many labels are not −100.
    pub num_label_tokens: usize,
    /// How many of the tokens are padding.
    pub num_padding_tokens: usize,
}

impl PackedBatch {
    /// A batch of these documents in this order, without padding.
    pub fn from_examples<'a>(examples: impl IntoIterator<Item = &'a Example>) -> Self {
        let mut batch = Self { cu_seqlens: vec![0], ..Self::default() };
        for example in examples {
            batch.push(&example.input_ids, &example.labels);
        }
        batch
    }

    /// Batches as one: their sequences, runs of padding included, one after another in that order. Positions, labels and boundaries stay those of each
    /// sequence, so no document sees another.
    pub fn joined<'a>(batches: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self { cu_seqlens: vec![0], ..Self::default() };
        for batch in batches {
            let before = all.input_ids.len() as i32;
            all.input_ids.extend_from_slice(&batch.input_ids);
            all.labels.extend_from_slice(&batch.labels);
            all.position_ids.extend_from_slice(&batch.position_ids);
            all.cu_seqlens.extend(batch.cu_seqlens.iter().skip(1).map(|end| before + end));
            all.max_seqlen = all.max_seqlen.max(batch.max_seqlen);
            all.num_label_tokens += batch.num_label_tokens;
            all.num_padding_tokens += batch.num_padding_tokens;
        }
        all
    }

    /// All tokens, padding included.
    pub fn total_tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Sequences, runs of padding included.
    pub fn num_seqs(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1)
    }

    /// Appends one document. An empty one changes nothing.
    fn push(&mut self, input_ids: &[i32], labels: &[i32]) {
        if input_ids.is_empty() {
            return;
        }
        self.input_ids.extend_from_slice(input_ids);
        self.labels.extend_from_slice(labels);
        self.position_ids.extend(0..input_ids.len() as i32);
        self.cu_seqlens.push(self.input_ids.len() as i32);
        self.max_seqlen = self.max_seqlen.max(input_ids.len());
        self.num_label_tokens += labels.iter().filter(|l| **l != IGNORE_INDEX).count();
    }

    /// Appends padding as a sequence of its own.
    pub fn push_padding(&mut self, pad_id: i32, n: usize) {
        self.push(&vec![pad_id; n], &vec![IGNORE_INDEX; n]);
        self.num_padding_tokens += n;
    }

    /// Checks every invariant: lengths agree, boundaries rise from 0 to `total_tokens`, positions restart at each, a
    /// label is −100 or the next token of the same document, counts are right.
    ///
    /// # Errors
    /// Naming the first invariant that does not hold, and where.
    pub fn check(&self) -> Result<()> {
        let total = self.input_ids.len();
        ensure!(self.labels.len() == total, "{} labels for {total} tokens", self.labels.len());
        ensure!(self.position_ids.len() == total, "{} positions for {total} tokens", self.position_ids.len());
        ensure!(self.cu_seqlens.first() == Some(&0), "cu_seqlens does not start at 0");
        ensure!(
            self.cu_seqlens.last().is_some_and(|end| *end as usize == total),
            "cu_seqlens does not end at {total} tokens"
        );
        let mut longest = 0;
        for (seq, bounds) in self.cu_seqlens.windows(2).enumerate() {
            ensure!(bounds[0] < bounds[1], "sequence {seq} of the batch is empty or runs backwards");
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            ensure!(end <= total, "sequence {seq} ends at {end} of {total} tokens");
            longest = longest.max(end - start);
            for t in start..end {
                ensure!(
                    self.position_ids[t] as usize == t - start,
                    "token {t} has position {}, {} expected",
                    self.position_ids[t],
                    t - start
                );
                let label = self.labels[t];
                let next = (t + 1 < end).then(|| self.input_ids[t + 1]);
                ensure!(
                    label == IGNORE_INDEX || Some(label) == next,
                    "label {label} of token {t} is neither −100 nor the next token of its document"
                );
            }
        }
        ensure!(self.max_seqlen == longest, "max_seqlen is {}, the longest sequence has {longest}", self.max_seqlen);
        let supervised = self.labels.iter().filter(|l| **l != IGNORE_INDEX).count();
        ensure!(
            self.num_label_tokens == supervised,
            "num_label_tokens is {}, {supervised} are set",
            self.num_label_tokens
        );
        ensure!(self.num_padding_tokens <= total, "more padding than tokens");
        Ok(())
    }
}

/// How documents become batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackOptions {
    /// Several documents a batch without padding; off means one document a row, padded to the longest row.
    pub packing: bool,
    /// Most tokens in a batch, padding included.
    pub pack_len: usize,
    /// What happens to longer documents.
    pub overlong: Overlong,
    /// Token id of padding.
    pub pad_id: i32,
}

/// What happened to the documents on their way into batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PackCounts {
    /// Documents that came in.
    pub num_documents: usize,
    /// Documents longer than `pack_len`.
    pub num_overlong: usize,
    /// Over-length documents that were cut at `pack_len`.
    pub num_truncated: usize,
    /// Over-length documents that were cut into pieces.
    pub num_split: usize,
    /// Over-length documents that were left out.
    pub num_dropped: usize,
    /// Truncated documents and pieces left out because nothing in them is trained any more.
    pub num_unsupervised: usize,
    /// Tokens that came in and are in no batch.
    pub num_lost_tokens: usize,
}

/// Batches, and what happened on the way.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Packed {
    /// The batches in training order.
    pub batches: Vec<PackedBatch>,
    /// What was cut or left out.
    pub counts: PackCounts,
}

/// Cuts or drops documents longer than `pack_len` as `options.overlong` says; the others pass unchanged and in order.
///
/// The last label of a cut document or piece is −100, because the token it would predict is not in the same piece.
///
/// # Errors
/// When `pack_len` is below 2 (no token could predict another).
pub fn fit(examples: Vec<Example>, options: &PackOptions) -> Result<(Vec<Example>, PackCounts)> {
    let pack_len = options.pack_len;
    ensure!(pack_len >= 2, "pack_len is {pack_len}; it must be at least 2 tokens");
    ensure!(pack_len <= i32::MAX as usize, "pack_len is {pack_len}; it must be at most {}", i32::MAX);
    let mut counts = PackCounts { num_documents: examples.len(), ..PackCounts::default() };
    let mut out = Vec::with_capacity(examples.len());
    for example in examples {
        let len = example.input_ids.len();
        if len <= pack_len {
            out.push(example);
            continue;
        }
        counts.num_overlong += 1;
        let kept = match options.overlong {
            Overlong::Truncate => {
                counts.num_truncated += 1;
                counts.num_lost_tokens += len - pack_len;
                1
            }
            Overlong::Split => {
                counts.num_split += 1;
                len.div_ceil(pack_len)
            }
            Overlong::Drop => {
                counts.num_dropped += 1;
                counts.num_lost_tokens += len;
                0
            }
        };
        for (input_ids, labels) in example.input_ids.chunks(pack_len).zip(example.labels.chunks(pack_len)).take(kept) {
            let mut labels = labels.to_vec();
            if let Some(last) = labels.last_mut() {
                *last = IGNORE_INDEX;
            }
            if labels.iter().all(|l| *l == IGNORE_INDEX) {
                counts.num_unsupervised += 1;
                counts.num_lost_tokens += input_ids.len();
            } else {
                out.push(Example { input_ids: input_ids.to_vec(), labels });
            }
        }
    }
    Ok((out, counts))
}

/// Which documents share a batch, by index, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedBatch {
    /// Indices of the documents.
    pub documents: Vec<u32>,
    /// Length to which each document is padded; 0 means no padding.
    pub padded_to: usize,
}

impl PlannedBatch {
    /// Copies the documents' tokens into a batch.
    pub fn build(&self, examples: &[Example], pad_id: i32) -> PackedBatch {
        let mut batch = PackedBatch { cu_seqlens: vec![0], ..PackedBatch::default() };
        for index in &self.documents {
            let example = &examples[*index as usize];
            batch.push(&example.input_ids, &example.labels);
            batch.push_padding(pad_id, self.padded_to.saturating_sub(example.input_ids.len()));
        }
        batch
    }
}

/// Plans one epoch: a pure function of the lengths, the options and (`seed`, `epoch`). Every document with tokens is in
/// exactly one batch. No length may exceed `options.pack_len` (see [`fit`]).
pub fn plan(lengths: &[usize], options: &PackOptions, seed: u64, epoch: u64) -> Vec<PlannedBatch> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).filter(|i| lengths[*i as usize] > 0).collect();
    Philox::new(seed, epoch_stream(epoch, 0)).shuffle(&mut order);
    let mut batches = if options.packing {
        best_fit_decreasing(lengths, order, options.pack_len)
    } else {
        padded_rows(lengths, &order, options.pack_len)
    };
    // Best fit leaves full batches of long documents first and loose ones of short documents last.
    Philox::new(seed, epoch_stream(epoch, 1)).shuffle(&mut batches);
    batches
}

/// Streams of the data floor: the upper half names the use, so that no other user of the same seed shares one.
fn epoch_stream(epoch: u64, purpose: u64) -> u64 {
    ((0xDA7A_0000 + purpose) << 32) | (epoch & 0xFFFF_FFFF)
}

/// Best-fit decreasing: the longest document first, each into the fullest batch that still takes it. At most 11/9 of
/// the best possible number of batches, plus one. The shuffled order decides between equal lengths.
fn best_fit_decreasing(lengths: &[usize], mut order: Vec<u32>, pack_len: usize) -> Vec<PlannedBatch> {
    order.sort_by_key(|i| std::cmp::Reverse(lengths[*i as usize]));
    let mut batches: Vec<PlannedBatch> = Vec::new();
    // Free tokens → batches with exactly that much room.
    let mut by_room: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for document in order {
        let len = lengths[document as usize];
        let found =
            by_room.range_mut(len..).next().and_then(|(room, list)| Some((*room, list.pop()?, list.is_empty())));
        let (room, batch) = match found {
            Some((room, batch, emptied)) => {
                if emptied {
                    by_room.remove(&room);
                }
                (room, batch)
            }
            None => {
                batches.push(PlannedBatch { documents: Vec::new(), padded_to: 0 });
                (pack_len.max(len), batches.len() as u32 - 1)
            }
        };
        batches[batch as usize].documents.push(document);
        if room > len {
            by_room.entry(room - len).or_default().push(batch);
        }
    }
    batches
}

/// Rows in shuffled order, as many a batch as fit when each is padded to the longest of the batch.
fn padded_rows(lengths: &[usize], order: &[u32], pack_len: usize) -> Vec<PlannedBatch> {
    let mut batches: Vec<PlannedBatch> = Vec::new();
    for document in order {
        let len = lengths[*document as usize];
        match batches.last_mut() {
            Some(batch) if (batch.documents.len() + 1) * batch.padded_to.max(len) <= pack_len => {
                batch.documents.push(*document);
                batch.padded_to = batch.padded_to.max(len);
            }
            _ => batches.push(PlannedBatch { documents: vec![*document], padded_to: len }),
        }
    }
    batches
}

/// Packs examples into batches of at most `pack_len` tokens: [`fit`], [`plan`] for epoch 0, build.
///
/// # Errors
/// As [`fit`].
pub fn pack(examples: &[Example], options: &PackOptions, seed: u64) -> Result<Packed> {
    batches(examples, &PackOptions { packing: true, ..*options }, seed)
}

/// The padded form: every document in a row of its own, rows padded to the longest of their batch.
///
/// # Errors
/// As [`fit`].
pub fn pad(examples: &[Example], options: &PackOptions, seed: u64) -> Result<Packed> {
    batches(examples, &PackOptions { packing: false, ..*options }, seed)
}

fn batches(examples: &[Example], options: &PackOptions, seed: u64) -> Result<Packed> {
    let (fitted, counts) = fit(examples.to_vec(), options)?;
    let planned = plan(&lengths(&fitted), options, seed, 0);
    Ok(Packed { batches: planned.iter().map(|p| p.build(&fitted, options.pad_id)).collect(), counts })
}

/// Tokens of each example.
pub fn lengths(examples: &[Example]) -> Vec<usize> {
    examples.iter().map(|e| e.input_ids.len()).collect()
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
