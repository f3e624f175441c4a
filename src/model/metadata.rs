//! What layers need to know about the documents of a batch: built once and kept in a cache, or built anew by every layer (its baselines).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::batch::DeviceBatch;
use super::policy::{AttentionPath, Metadata};
use crate::layers::attention::Sequences;
use crate::ops::attention::TileList;
use crate::ops::rope::RopeTable;
use crate::ops::sequence;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, Indices, MemoryCategory};

/// What the layers of one window need to know about the documents of one batch.
#[derive(Debug)]
pub struct SequenceMetadata {
    tiles: TileList,
    /// `None` where the positions that came with the batch serve.
    position_ids: Option<Indices>,
    rope: Arc<RopeTable>,
}

impl SequenceMetadata {
    /// As layers read it.
    pub fn sequences<'a>(&'a self, batch: &'a DeviceBatch) -> Sequences<'a> {
        let position_ids = self.position_ids.as_ref().unwrap_or(&batch.position_ids);
        Sequences { tiles: &self.tiles, rope: &self.rope, position_ids }
    }

    /// Bytes that it takes, the rotary table not counted.
    pub fn num_bytes(&self) -> usize {
        self.tiles.num_bytes() + self.position_ids.as_ref().map_or(0, |ids| ids.len() * size_of::<i32>())
    }

    /// The same sizes in memory of its own on the GPU, for [`Self::copy_from`], with a rotary table that serves every batch of as many tokens: what a
    /// recorded pass reads.
    pub(super) fn twin(&self, device: &Device, rope: Arc<RopeTable>) -> Self {
        Self { tiles: self.tiles.twin(device), position_ids: None, rope }
    }

    /// Takes over the work lists of another batch of as many tokens.
    pub(super) fn copy_from(&mut self, from: &Self) {
        self.tiles.copy_from(&from.tiles);
    }

    fn build(device: &Device, batch: &DeviceBatch, key: Key, rope: &Arc<RopeTable>, how: Metadata) -> Self {
        let (window, path) = (key.window, key.path);
        let tiles = |cu_seqlens: &[i32]| match (path, how) {
            (AttentionPath::Varlen, _) => TileList::on_device(device, cu_seqlens, window),
            (AttentionPath::Masked, Metadata::Published) => TileList::masked_by_documents(device, cu_seqlens, window),
            (AttentionPath::Masked, _) => TileList::masked(device, cu_seqlens, window),
        };
        let rope = Arc::clone(rope);
        if how != Metadata::Published {
            return Self { tiles: tiles(&batch.cu_seqlens), position_ids: None, rope };
        }
        let lengths = batch.cu_seqlens.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
        let lengths = device.indices(MemoryCategory::Metadata, lengths);
        let cu_seqlens = sequence::cumulative_lengths(device, &lengths);
        // Kernels of the baseline take it as an argument. Ours do not; reading it back is what it costs.
        let longest = sequence::longest(device, &lengths);
        debug_assert!(longest as usize <= batch.total_tokens());
        let position_ids = Some(sequence::document_positions(device, &cu_seqlens, batch.total_tokens()));
        Self { tiles: tiles(&batch.cu_seqlens), position_ids, rope }
    }
}

/// What an entry was built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    batch: u64,
    window: Option<usize>,
    path: AttentionPath,
}

/// What a cache did, counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CacheCounts {
    /// Times that a layer asked.
    pub lookups: u64,
    /// Times that the answer was there.
    pub hits: u64,
    /// Times that it was built.
    pub builds: u64,
    /// Entries given up for others while their batch was in work: more variants than the cache holds.
    pub evictions: u64,
    /// Bytes built.
    pub built_bytes: u64,
}

/// One kept entry, as shown to people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheEntry {
    /// Window of the layers that it serves; `None` is full attention.
    pub window: Option<u32>,
    /// Whether it is a mask (T×T bits) or tile lists.
    pub path: AttentionPath,
    /// Bytes.
    pub bytes: u64,
    /// Times that it answered after the first.
    pub hits: u64,
}

impl std::ops::Sub for CacheCounts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            lookups: self.lookups - before.lookups,
            hits: self.hits - before.hits,
            builds: self.builds - before.builds,
            evictions: self.evictions - before.evictions,
            built_bytes: self.built_bytes - before.built_bytes,
        }
    }
}

/// How metadata is had, and how many entries are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MetadataPolicy {
    /// Kept or built anew.
    pub metadata: Metadata,
    /// Most entries that are kept; 0: one for each window of the model.
    pub capacity: usize,
}

/// Metadata by batch, window and path.
#[derive(Debug)]
pub struct MetadataCache {
    policy: MetadataPolicy,
    capacity: usize,
    num_windows: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct Entry {
    key: Key,
    metadata: Arc<SequenceMetadata>,
    /// Built before the pass, and no layer has asked for it yet: the first one to ask counts as the one that had it built.
    fresh: bool,
    /// Answers after the first.
    hits: u64,
}

#[derive(Debug, Default)]
struct State {
    /// The last one used at the back.
    entries: VecDeque<Entry>,
    counts: CacheCounts,
}

impl MetadataCache {
    /// An empty cache for a model with the given distinct windows.
    pub fn new(policy: MetadataPolicy, num_windows: usize) -> Self {
        // One batch is in work.
        let capacity = if policy.capacity == 0 { num_windows } else { policy.capacity };
        Self { policy, capacity: capacity.max(1), num_windows, state: Mutex::default() }
    }

    /// How metadata is had.
    pub fn policy(&self) -> MetadataPolicy {
        self.policy
    }

    /// Whether all that a pass over a batch needs is built before it and kept until it is done.
    pub fn holds_all(&self) -> bool {
        self.policy.metadata == Metadata::Cached && self.capacity >= self.num_windows
    }

    /// Builds the metadata of `batch` for `windows`, as far as they are kept: layers find them.
    pub fn prepare(
        &self,
        device: &Device,
        batch: &DeviceBatch,
        windows: &[Option<usize>],
        path: AttentionPath,
        rope: &Arc<RopeTable>,
    ) {
        if !self.holds_all() {
            return;
        }
        let mut state = self.lock();
        for &window in windows {
            let key = Key { batch: batch.id, window, path };
            if !state.entries.iter().any(|entry| entry.key == key) {
                let metadata = self.build(&mut state, device, batch, key, rope, Pass::Forward);
                self.keep(&mut state, Entry { key, metadata, fresh: true, hits: 0 });
            }
        }
    }

    /// The metadata of `batch` for a window and path: those that are kept, or new ones.
    pub fn get_or_build(
        &self,
        device: &Device,
        batch: &DeviceBatch,
        window: Option<usize>,
        path: AttentionPath,
        rope: &Arc<RopeTable>,
        pass: Pass,
    ) -> Arc<SequenceMetadata> {
        let key = Key { batch: batch.id, window, path };
        let mut state = self.lock();
        state.counts.lookups += 1;
        if let Some(at) = state.entries.iter().position(|entry| entry.key == key)
            && let Some(entry) = state.entries.remove(at)
        {
            let hit = u64::from(!entry.fresh);
            state.counts.hits += hit;
            let metadata = Arc::clone(&entry.metadata);
            state.entries.push_back(Entry { fresh: false, hits: entry.hits + hit, ..entry });
            return metadata;
        }
        let metadata = self.build(&mut state, device, batch, key, rope, pass);
        if self.policy.metadata == Metadata::Cached {
            self.keep(&mut state, Entry { key, metadata: Arc::clone(&metadata), fresh: false, hits: 0 });
        }
        metadata
    }

    /// What is kept of a batch, if it is; not counted.
    pub(super) fn kept(
        &self,
        batch: &DeviceBatch,
        window: Option<usize>,
        path: AttentionPath,
    ) -> Option<Arc<SequenceMetadata>> {
        let key = Key { batch: batch.id, window, path };
        self.lock().entries.iter().find(|entry| entry.key == key).map(|entry| Arc::clone(&entry.metadata))
    }

    /// Counts the lookups of a pass that was recorded: `lookups` of them, by layers with `window`, of what was built for it before.
    pub fn count_recorded(&self, window: Option<usize>, lookups: u64) {
        let mut state = self.lock();
        let State { entries, counts } = &mut *state;
        counts.lookups += lookups;
        if let Some(entry) = entries.iter_mut().find(|entry| entry.key.window == window) {
            let hits = lookups.saturating_sub(u64::from(std::mem::take(&mut entry.fresh)));
            entry.hits += hits;
            counts.hits += hits;
        }
    }

    /// What is kept at present.
    pub fn entries(&self) -> Vec<CacheEntry> {
        let state = self.lock();
        let entries = state.entries.iter().map(|Entry { key, metadata, hits, .. }| CacheEntry {
            window: key.window.and_then(|window| u32::try_from(window).ok()),
            path: key.path,
            bytes: metadata.num_bytes() as u64,
            hits: *hits,
        });
        entries.collect()
    }

    fn build(
        &self,
        state: &mut State,
        device: &Device,
        batch: &DeviceBatch,
        key: Key,
        rope: &Arc<RopeTable>,
        pass: Pass,
    ) -> Arc<SequenceMetadata> {
        let _phase = device.clock().enter(Phase::Metadata, pass, None);
        let built = Arc::new(SequenceMetadata::build(device, batch, key, rope, self.policy.metadata));
        state.counts.builds += 1;
        state.counts.built_bytes += built.num_bytes() as u64;
        built
    }

    fn keep(&self, state: &mut State, entry: Entry) {
        // Those of a batch that is done go without being missed.
        state.entries.retain(|kept| kept.key.batch == entry.key.batch);
        while state.entries.len() >= self.capacity {
            state.entries.pop_front();
            state.counts.evictions += 1;
        }
        state.entries.push_back(entry);
    }

    /// What the cache did so far.
    pub fn counts(&self) -> CacheCounts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::batch::BatchSlices;
    use crate::ops::testing::cpu;

    fn batch(device: &Device) -> DeviceBatch {
        let slices = BatchSlices {
            input_ids: &[1; 6],
            labels: &[1; 6],
            position_ids: &[0, 0, 1, 2, 0, 1],
            cu_seqlens: &[0, 1, 4, 6],
        };
        DeviceBatch::new(device, slices, 2).unwrap()
    }

    /// Two passes of six layers with alternating windows; with `prepare`, what is kept was built before them.
    fn passes(metadata: Metadata, capacity: usize, prepare: bool) -> CacheCounts {
        let device = cpu(1);
        let rope = Arc::new(RopeTable::new(&device, &[1.0], 6));
        let cache = MetadataCache::new(MetadataPolicy { metadata, capacity }, 2);
        for batch in [batch(&device), batch(&device)] {
            if prepare {
                cache.prepare(&device, &batch, &[None, Some(2)], AttentionPath::Varlen, &rope);
            }
            for layer in 0..6 {
                let window = (layer % 2 == 0).then_some(2);
                let found = cache.get_or_build(&device, &batch, window, AttentionPath::Varlen, &rope, Pass::Forward);
                assert_eq!(found.sequences(&batch).position_ids.i32s(), [0, 0, 1, 2, 0, 1]);
                assert_eq!(found.tiles.window, window.unwrap_or(usize::MAX));
            }
        }
        cache.counts()
    }

    #[test]
    fn one_build_for_a_batch_and_window_serves_all_layers() {
        for prepare in [false, true] {
            let counts = passes(Metadata::Cached, 0, prepare);
            assert_eq!((counts.lookups, counts.hits, counts.builds, counts.evictions), (12, 8, 4, 0));
            assert!(counts.built_bytes > 0);
        }
    }

    #[test]
    fn a_recorded_pass_counts_as_its_layers_do() {
        let device = cpu(1);
        let rope = Arc::new(RopeTable::new(&device, &[1.0], 6));
        let cache = MetadataCache::new(MetadataPolicy::default(), 2);
        for _ in 0..2 {
            cache.prepare(&device, &batch(&device), &[None, Some(2)], AttentionPath::Varlen, &rope);
            cache.count_recorded(None, 3);
            cache.count_recorded(Some(2), 3);
        }
        let counts = cache.counts();
        assert_eq!((counts.lookups, counts.hits, counts.builds, counts.evictions), (12, 8, 4, 0));
        assert_eq!(
            cache.entries().iter().map(|entry| (entry.window, entry.hits)).collect::<Vec<_>>(),
            [(None, 2), (Some(2), 2)]
        );
    }

    #[test]
    fn one_entry_thrashes_where_windows_alternate() {
        let counts = passes(Metadata::Cached, 1, true);
        assert_eq!((counts.lookups, counts.hits, counts.builds), (12, 0, 12));
        assert_eq!(counts.evictions, 10, "all but the first of each batch push another out");
    }

    #[test]
    fn baselines_keep_nothing() {
        for metadata in [Metadata::Fused, Metadata::Published] {
            let counts = passes(metadata, 0, true);
            assert_eq!((counts.lookups, counts.hits, counts.builds, counts.evictions), (12, 0, 12, 0));
        }
    }
}
