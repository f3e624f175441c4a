//! A packed batch on the device.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::ensure;

use crate::base::error::Result;
use crate::tensor::{Device, Indices, MemoryCategory};

/// The host's description of a packed batch: what `DeviceBatch::new` uploads.
#[derive(Debug, Clone, Copy)]
pub struct BatchSlices<'a> {
    /// Token ids [T].
    pub input_ids: &'a [i32],
    /// Shifted targets [T], −100 where nothing is trained; empty when there are none.
    pub labels: &'a [i32],
    /// Position inside its document [T].
    pub position_ids: &'a [i32],
    /// Cumulative document starts [num_seqs + 1].
    pub cu_seqlens: &'a [i32],
}

/// A packed batch on the device. Stop 5 of the walk.
#[derive(Debug)]
pub struct DeviceBatch {
    /// Number of the batch in this process: what its metadata are kept under.
    pub id: u64,
    /// Token ids [T].
    pub input_ids: Indices,
    /// Position of every token in its document [T].
    pub position_ids: Indices,
    /// Cumulative document starts [num_seqs + 1].
    pub cu_seqlens: Vec<i32>,
    /// Numbers of the supervised rows [R].
    pub rows: Indices,
    /// Their targets [R].
    pub targets: Indices,
    /// Positions that occur: one more than the largest.
    pub num_positions: usize,
}

impl DeviceBatch {
    /// Uploads a batch for a model with `vocab_size` tokens.
    ///
    /// # Errors
    /// When a token, a target, a position or a boundary cannot be right.
    pub fn new(device: &Device, batch: BatchSlices<'_>, vocab_size: usize) -> Result<Self> {
        let BatchSlices { input_ids, labels, position_ids, cu_seqlens } = batch;
        let total = input_ids.len();
        ensure!(total > 0, "a batch without tokens");
        ensure!(position_ids.len() == total, "{} positions for {total} tokens", position_ids.len());
        ensure!(labels.is_empty() || labels.len() == total, "{} labels for {total} tokens", labels.len());
        let in_vocabulary = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab_size);
        if let Some(id) = input_ids.iter().find(|&&id| !in_vocabulary(id)) {
            anyhow::bail!(
                "token {id} is outside the model's vocabulary of {vocab_size}: tokenizer and model do not belong together"
            );
        }
        let ends = cu_seqlens.first() == Some(&0) && cu_seqlens.last() == i32::try_from(total).ok().as_ref();
        ensure!(ends && cu_seqlens.is_sorted(), "cu_seqlens must rise from 0 to {total}, found {cu_seqlens:?}");
        let num_positions = position_ids.iter().max().map_or(0, |&p| p as usize + 1);
        ensure!(position_ids.iter().all(|&p| p >= 0) && num_positions <= total, "position ids must lie in 0..{total}");
        let supervised = || labels.iter().enumerate().filter(|&(_, &label)| label != -100);
        if let Some((row, label)) = supervised().find(|&(_, &label)| !in_vocabulary(label)) {
            anyhow::bail!("label {label} at position {row} is outside the model's vocabulary of {vocab_size}");
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            input_ids: device.indices(MemoryCategory::Metadata, input_ids.to_vec()),
            position_ids: device.indices(MemoryCategory::Metadata, position_ids.to_vec()),
            cu_seqlens: cu_seqlens.to_vec(),
            rows: device.indices(MemoryCategory::Metadata, supervised().map(|(row, _)| row as i32).collect()),
            targets: device.indices(MemoryCategory::Metadata, supervised().map(|(_, &label)| label).collect()),
            num_positions,
        })
    }

    /// What the blocks read of a batch of as many tokens, in memory of its own, for [`Self::copy_from`]: ids and positions, none of them supervised.
    pub fn twin(&self, device: &Device) -> Self {
        let room = |len| device.empty_indices(MemoryCategory::Metadata, len);
        Self {
            id: self.id,
            input_ids: room(self.total_tokens()),
            position_ids: room(self.total_tokens()),
            cu_seqlens: Vec::new(),
            rows: room(0),
            targets: room(0),
            num_positions: self.total_tokens(),
        }
    }

    /// Takes over ids and positions of another batch of as many tokens.
    pub fn copy_from(&mut self, from: &Self) {
        self.input_ids.copy_from(&from.input_ids);
        self.position_ids.copy_from(&from.position_ids);
    }

    /// Tokens of the batch.
    pub fn total_tokens(&self) -> usize {
        self.input_ids.len()
    }
}
