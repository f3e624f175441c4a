//! Work lists of packed attention: which rows meet which, built once per batch and window.

use super::mask::DenseMask;
use super::work_list::{self, Reach, Side};
use crate::tensor::{Device, Indices, MemoryCategory};

/// Rows of one tile.
pub const TILE_ROWS: usize = 64;

/// A run of rows (with work by documents: inside one), with the rows of the other side that it meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// First row of the tile in the batch.
    pub start: usize,
    /// One past its last row.
    pub end: usize,
    /// First row of the other side: keys for a query tile, queries for a key tile.
    pub other_start: usize,
    /// One past the last row of the other side.
    pub other_end: usize,
}

/// The tiles of a packed batch for one window: by its documents, or, with a dense mask, the whole square of its rows.
#[derive(Debug)]
pub struct TileList {
    /// Query tiles in the order of their rows; together they cover every row once.
    pub query_tiles: Vec<Tile>,
    /// Key tiles in the order of their rows; together they cover every row once.
    pub key_tiles: Vec<Tile>,
    /// A query sees a key iff `0 ≤ query − key < window`; `usize::MAX` is full attention.
    pub window: usize,
    total_tokens: usize,
    /// On a GPU, i32 [2, T]: first row and one past the last row of each row's document.
    bounds: Option<Indices>,
    /// On a GPU, what the tiled kernels read (see `work_list`).
    work: Option<Indices>,
    /// On the masked path: which pairs count.
    mask: Option<DenseMask>,
}

impl TileList {
    /// Builds the lists from `cu_seqlens` [num_seqs + 1]. `window` counts the query itself; `None` is full attention.
    pub fn new(cu_seqlens: &[i32], window: Option<usize>) -> Self {
        let window = window.unwrap_or(usize::MAX);
        let (mut query_tiles, mut key_tiles) = (Vec::new(), Vec::new());
        for bounds in cu_seqlens.windows(2) {
            let (seq_start, seq_end) = (bounds[0] as usize, bounds[1] as usize);
            for start in (seq_start..seq_end).step_by(TILE_ROWS) {
                let end = (start + TILE_ROWS).min(seq_end);
                let first_key = (start + 1).saturating_sub(window).max(seq_start);
                query_tiles.push(Tile { start, end, other_start: first_key, other_end: end });
                let last_query = (end - 1).saturating_add(window).min(seq_end);
                key_tiles.push(Tile { start, end, other_start: start, other_end: last_query });
            }
        }
        let total_tokens = cu_seqlens.last().map_or(0, |&end| end as usize);
        Self { query_tiles, key_tiles, window, total_tokens, bounds: None, work: None, mask: None }
    }

    /// For the masked path: every tile of the T×T square, and a dense mask that says which of its pairs count, built on the device. Attention
    /// gives the same as with [`Self::on_device`], up to the order of sums, but does work for pairs that no one sees.
    pub fn masked(device: &Device, cu_seqlens: &[i32], window: Option<usize>) -> Self {
        Self::square(device, cu_seqlens, window, false)
    }

    /// As [`Self::masked`], with a mask that is made document by document, as the published baseline does it.
    pub fn masked_by_documents(device: &Device, cu_seqlens: &[i32], window: Option<usize>) -> Self {
        Self::square(device, cu_seqlens, window, true)
    }

    fn square(device: &Device, cu_seqlens: &[i32], window: Option<usize>, by_documents: bool) -> Self {
        let total = cu_seqlens.last().map_or(0, |&end| end as usize);
        let tiles: Vec<Tile> = (0..total)
            .step_by(TILE_ROWS)
            .map(|start| Tile { start, end: (start + TILE_ROWS).min(total), other_start: 0, other_end: total })
            .collect();
        let mut list = Self { query_tiles: tiles.clone(), key_tiles: tiles, ..Self::new(&[0, total as i32], window) };
        list.mask = Some(match device {
            Device::Cpu(_) => DenseMask::on_host(device, cu_seqlens, list.window),
            Device::Cuda(gpu) => {
                let work = work_list::build(cu_seqlens, list.window, Reach::Square);
                let work = list.work.insert(device.indices(MemoryCategory::Metadata, work));
                match by_documents {
                    false => DenseMask::on_gpu(device, gpu, total, work.pointer()),
                    true => DenseMask::by_documents(device, gpu, cu_seqlens, list.window),
                }
            }
        });
        list
    }

    /// Builds the lists and uploads what the device's kernels read of them.
    pub fn on_device(device: &Device, cu_seqlens: &[i32], window: Option<usize>) -> Self {
        let mut list = Self::new(cu_seqlens, window);
        if let Device::Cuda(_) = device {
            let documents = || cu_seqlens.windows(2);
            let starts = documents().flat_map(|w| (w[0]..w[1]).map(|_| w[0]));
            let ends = documents().flat_map(|w| (w[0]..w[1]).map(|_| w[1]));
            list.bounds = Some(device.indices(MemoryCategory::Metadata, starts.chain(ends).collect()));
            let work = work_list::build(cu_seqlens, list.window, Reach::Documents);
            list.work = Some(device.indices(MemoryCategory::Metadata, work));
        }
        list
    }

    /// Lists of the same size in memory of their own on the GPU, for [`Self::copy_from`]: what a recorded graph reads. Those of the host are left out.
    pub fn twin(&self, device: &Device) -> Self {
        let room = |indices: &Indices| device.empty_indices(MemoryCategory::Metadata, indices.len());
        Self {
            query_tiles: Vec::new(),
            key_tiles: Vec::new(),
            bounds: self.bounds.as_ref().map(room),
            work: self.work.as_ref().map(room),
            mask: self.mask.as_ref().map(|mask| mask.twin(device)),
            ..*self
        }
    }

    /// Takes over the GPU's lists of another batch of as many rows, for the same window and path. Lists have their places by the number of rows
    /// alone, and kernels are launched for as many tiles as there can be: a graph that reads these lists serves every such batch.
    pub fn copy_from(&mut self, from: &Self) {
        assert_eq!((self.total_tokens, self.window), (from.total_tokens, from.window), "lists of another size");
        assert_eq!(self.mask.is_some(), from.mask.is_some(), "lists of another path");
        let pairs = [(&mut self.bounds, &from.bounds), (&mut self.work, &from.work)];
        for (to, from) in pairs.into_iter().filter_map(|(to, from)| to.as_mut().zip(from.as_ref())) {
            to.copy_from(from);
        }
        if let Some((to, from)) = self.mask.as_mut().zip(from.mask.as_ref()) {
            to.copy_from(from);
        }
    }

    /// The dense mask of the masked path.
    pub fn mask(&self) -> Option<&DenseMask> {
        self.mask.as_ref()
    }

    /// Address of the document bounds of every row, on a GPU; 0 with a dense mask.
    pub(super) fn bounds_pointer(&self) -> u64 {
        self.bounds.as_ref().map_or(0, Indices::pointer)
    }

    /// Address of the tiled kernels' work lists, on a GPU. They begin with the first key of every row.
    pub(super) fn work_pointer(&self) -> u64 {
        self.work.as_ref().map_or(0, Indices::pointer)
    }

    /// Address of the tiles of one height, address of their number, and the most there can be.
    pub(super) fn work_of(&self, side: Side, height: usize) -> (u64, u64, usize) {
        let place = work_list::place(side, height, self.total_tokens);
        let at = |numbers: usize| self.work_pointer() + (numbers * size_of::<i32>()) as u64;
        (at(place.tiles), at(place.count), place.capacity)
    }

    /// Rows of the batch.
    pub fn total_tokens(&self) -> usize {
        self.total_tokens
    }

    /// Bytes the lists take, those on the device included.
    pub fn num_bytes(&self) -> usize {
        let on_device = [self.bounds.as_ref(), self.work.as_ref()].into_iter().flatten().map(Indices::len);
        let mask = self.mask.as_ref().map_or(0, |mask| mask.stride() * self.total_tokens);
        let tiles = (self.query_tiles.len() + self.key_tiles.len()) * size_of::<Tile>();
        tiles + (on_device.sum::<usize>() + mask) * size_of::<i32>()
    }

    /// On the CPU: whether row `query` sees row `key`, of the same document where there is no dense mask.
    #[inline]
    pub fn sees(&self, query: usize, key: usize) -> bool {
        match &self.mask {
            Some(mask) => mask.sees(query, key),
            None => key <= query && query - key < self.window,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;

    #[test]
    fn tiles_cover_exactly_the_pairs_of_the_dense_mask() {
        let windows = [None, Some(1), Some(2), Some(63), Some(64), Some(65), Some(200)];
        for (window, masked) in windows.into_iter().flat_map(|window| [(window, false), (window, true)]) {
            let cu_seqlens = [0, 1, 1, 130, 258, 259];
            let list = match masked {
                false => TileList::new(&cu_seqlens, window),
                true => TileList::masked(&cpu(1), &cu_seqlens, window),
            };
            let mut by_query = vec![0u8; 259 * 259];
            let mut by_key = vec![0u8; 259 * 259];
            for tile in &list.query_tiles {
                for q in tile.start..tile.end {
                    (tile.other_start..tile.other_end)
                        .filter(|&k| list.sees(q, k))
                        .for_each(|k| by_query[q * 259 + k] += 1);
                }
            }
            for tile in &list.key_tiles {
                for k in tile.start..tile.end {
                    (tile.other_start..tile.other_end)
                        .filter(|&q| list.sees(q, k))
                        .for_each(|q| by_key[q * 259 + k] += 1);
                }
            }
            let document = |row: usize| cu_seqlens.iter().filter(|&&start| start as usize <= row).count();
            for (q, k) in (0..259).flat_map(|q| (0..259).map(move |k| (q, k))) {
                let dense = document(q) == document(k) && k <= q && q - k < window.unwrap_or(usize::MAX);
                assert_eq!(
                    (by_query[q * 259 + k], by_key[q * 259 + k]),
                    (u8::from(dense), u8::from(dense)),
                    "{window:?} {masked} {q} {k}"
                );
            }
        }
    }
}
