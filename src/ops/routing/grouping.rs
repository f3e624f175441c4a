//! Pairs of tokens and experts in the order of their experts: a stable counting sort, and one expert's pairs.

use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, MemoryCategory};

/// Blocks that a sort has at most: each of them reads what all before it have counted.
const MAX_BLOCKS: usize = 128;
/// Pairs of a block at least.
const MIN_PAIRS: usize = 512;
/// Threads of a block.
const THREADS: u32 = 512;

/// Rows in the order of their experts; those of an expert in the order of their pairs.
#[derive(Debug)]
pub struct Grouping {
    /// First row of each expert, and the number of rows: [E + 1].
    pub offsets: Indices,
    /// Pair of each row, [R].
    pub source: Indices,
    /// Row of each pair, [R].
    pub place: Indices,
}

impl Grouping {
    /// Room for `pairs` pairs and `num_experts` experts. Its values are not set.
    pub fn room(device: &Device, category: MemoryCategory, pairs: usize, num_experts: usize) -> Self {
        Self {
            offsets: device.empty_indices(category, num_experts + 1),
            source: device.empty_indices(category, pairs),
            place: device.empty_indices(category, pairs),
        }
    }

    /// E.
    pub fn num_experts(&self) -> usize {
        self.offsets.len() - 1
    }
}

/// Blocks of a sort of so many pairs, and the pairs of each.
fn blocks(pairs: usize) -> (usize, usize) {
    let blocks = pairs.div_ceil(MIN_PAIRS).clamp(1, MAX_BLOCKS);
    (blocks, pairs.div_ceil(blocks))
}

/// Sorts the pairs by `experts` [R], stable: a histogram of each block, then each block's rows behind those of the blocks before it.
pub fn group(device: &Device, experts: &Indices, grouping: &mut Grouping) {
    let (pairs, num_experts) = (experts.len(), grouping.num_experts());
    assert!(grouping.source.len() == pairs && grouping.place.len() == pairs, "shapes of a grouping");
    match device {
        Device::Cpu(_) => {
            let Grouping { offsets, source, place } = grouping;
            let offsets = offsets.i32s_mut();
            offsets.fill(0);
            experts.i32s().iter().for_each(|e| offsets[*e as usize + 1] += 1);
            (0..num_experts).for_each(|e| offsets[e + 1] += offsets[e]);
            let mut next = offsets[..num_experts].to_vec();
            let (source, place) = (source.i32s_mut(), place.i32s_mut());
            for (pair, e) in experts.i32s().iter().enumerate() {
                let row = &mut next[*e as usize];
                source[*row as usize] = pair as i32;
                place[pair] = *row;
                *row += 1;
            }
        }
        Device::Cuda(gpu) => {
            assert!(num_experts <= super::MAX_EXPERTS && pairs <= i32::MAX as usize, "a sort that the kernels take");
            let (blocks, each) = blocks(pairs);
            let histograms = device.empty_indices(MemoryCategory::Workspace, blocks * num_experts);
            let launch = Launch::new(blocks, THREADS);
            let (pairs, each, width) = (pairs as i32, each as i32, num_experts as i32);
            let args = kernel_args![experts.pointer(), histograms.pointer(), pairs, each, width];
            gpu.launch("group_histograms", launch, args);
            let args = kernel_args![
                experts.pointer(),
                histograms.pointer(),
                grouping.offsets.pointer(),
                grouping.source.pointer(),
                grouping.place.pointer(),
                pairs,
                each,
                width
            ];
            gpu.launch("group_rows", launch, args);
        }
    }
}

/// One expert's part of a grouping, as the published baseline makes it: the pairs of `experts` [R] that are `expert`'s go, in order, to
/// `grouping.source` from row `first` on, their rows to `grouping.place`, and how many there are to `found` [1], for the host to read. Offsets stay.
pub fn find(
    device: &Device,
    experts: &Indices,
    expert: usize,
    first: usize,
    grouping: &mut Grouping,
    found: &mut Indices,
) {
    let pairs = experts.len();
    assert!(
        grouping.source.len() == pairs && grouping.place.len() == pairs && found.len() == 1,
        "shapes of one expert's pairs"
    );
    match device {
        Device::Cpu(_) => {
            let (source, place) = (grouping.source.i32s_mut(), grouping.place.i32s_mut());
            let mut row = first;
            for (pair, _) in experts.i32s().iter().enumerate().filter(|(_, e)| **e as usize == expert) {
                source[row] = pair as i32;
                place[pair] = row as i32;
                row += 1;
            }
            found.i32s_mut()[0] = (row - first) as i32;
        }
        Device::Cuda(gpu) => {
            assert!(pairs <= i32::MAX as usize, "a sort that the kernels take");
            let (blocks, each) = blocks(pairs);
            let counts = device.empty_indices(MemoryCategory::Workspace, blocks);
            let launch = Launch::new(blocks, THREADS);
            let (pairs, each, expert) = (pairs as i32, each as i32, expert as i32);
            let args = kernel_args![experts.pointer(), counts.pointer(), pairs, each, expert];
            gpu.launch("find_counts", launch, args);
            let args = kernel_args![
                experts.pointer(),
                counts.pointer(),
                grouping.source.pointer(),
                grouping.place.pointer(),
                found.pointer(),
                pairs,
                each,
                expert,
                first as i32
            ];
            gpu.launch("find_rows", launch, args);
        }
    }
}
