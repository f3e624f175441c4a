//! A packed batch on the device, with the metadata that all layers share.

use std::sync::Arc;

use anyhow::ensure;

use super::policy::AttentionPath;
use crate::base::error::Result;
use crate::ops::attention::TileList;
use crate::ops::rope::RopeTable;
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
        Ok(Self {
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

/// Work lists by window (on the masked path with their dense masks) and the rotary table: built once per batch, used by all layers in all passes.
#[derive(Debug)]
pub struct SequenceMetadata {
    tiles: Vec<(Option<usize>, TileList)>,
    rope: Arc<RopeTable>,
}

impl SequenceMetadata {
    /// Builds what the distinct `windows` of a model need for `batch`.
    pub fn new(
        device: &Device,
        batch: &DeviceBatch,
        windows: &[Option<usize>],
        path: AttentionPath,
        rope: Arc<RopeTable>,
    ) -> Self {
        let build = match path {
            AttentionPath::Varlen => TileList::on_device,
            AttentionPath::Masked => TileList::masked,
        };
        let mut tiles: Vec<(Option<usize>, TileList)> = Vec::new();
        for &window in windows {
            if !tiles.iter().any(|(known, _)| *known == window) {
                tiles.push((window, build(device, &batch.cu_seqlens, window)));
            }
        }
        Self { tiles, rope }
    }

    /// Lists of the same sizes in memory of their own, for [`Self::copy_from`], with a rotary table that serves every batch of as many tokens.
    pub fn twin(&self, device: &Device, rope: Arc<RopeTable>) -> Self {
        Self { tiles: self.tiles.iter().map(|(window, list)| (*window, list.twin(device))).collect(), rope }
    }

    /// Takes over the work lists of another batch of as many tokens.
    pub fn copy_from(&mut self, from: &Self) {
        for (window, list) in &mut self.tiles {
            list.copy_from(from.tiles(*window));
        }
    }

    /// Work lists of a window that was among `windows`.
    pub fn tiles(&self, window: Option<usize>) -> &TileList {
        let found = self.tiles.iter().position(|(known, _)| *known == window);
        assert!(found.is_some(), "{window:?} is none of the windows the metadata was built for");
        &self.tiles[found.unwrap_or_default()].1
    }

    /// Rotary table.
    pub fn rope(&self) -> &RopeTable {
        &self.rope
    }
}
