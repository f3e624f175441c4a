//! Boundaries and positions of a packed batch from the lengths of its documents, one operation after another: what a layer does that keeps nothing of
//! them (the published baseline of the metadata cache).

use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, MemoryCategory};

const METADATA: MemoryCategory = MemoryCategory::Metadata;

/// `cu_seqlens` [n + 1]: 0, then the running sums of `lengths` [n].
pub fn cumulative_lengths(device: &Device, lengths: &Indices) -> Indices {
    match device {
        Device::Cpu(_) => {
            let sums = lengths.i32s().iter().scan(0, |sum, length| {
                *sum += length;
                Some(*sum)
            });
            device.indices(METADATA, std::iter::once(0).chain(sums).collect())
        }
        Device::Cuda(gpu) => {
            let cu_seqlens = device.empty_indices(METADATA, lengths.len() + 1);
            let args = kernel_args![lengths.pointer(), cu_seqlens.pointer(), lengths.len() as i32];
            gpu.launch("cumulative_lengths", Launch::new(1, 1024), args);
            cu_seqlens
        }
    }
}

/// The greatest of `lengths`, on the host: from a GPU this waits for the device.
pub fn longest(device: &Device, lengths: &Indices) -> i32 {
    match device {
        Device::Cpu(_) => lengths.i32s().iter().copied().max().unwrap_or(0),
        Device::Cuda(gpu) => {
            let out = device.empty_indices(METADATA, 1);
            gpu.launch(
                "longest",
                Launch::new(1, 1024),
                kernel_args![lengths.pointer(), out.pointer(), lengths.len() as i32],
            );
            out.to_vec()[0]
        }
    }
}

/// Position of each of `tokens` tokens in its document, from `cu_seqlens` [n + 1].
pub fn document_positions(device: &Device, cu_seqlens: &Indices, tokens: usize) -> Indices {
    match device {
        Device::Cpu(_) => {
            let documents = cu_seqlens.i32s().windows(2);
            device.indices(METADATA, documents.flat_map(|bounds| 0..bounds[1] - bounds[0]).collect())
        }
        Device::Cuda(gpu) => {
            let positions = device.empty_indices(METADATA, tokens);
            let args =
                kernel_args![cu_seqlens.pointer(), positions.pointer(), cu_seqlens.len() as i32 - 1, tokens as i32];
            gpu.launch("document_positions", Launch::elements(tokens, 1), args);
            positions
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;

    #[test]
    fn boundaries_and_positions_are_those_of_the_lengths() {
        let device = cpu(1);
        let lengths = device.indices(METADATA, vec![1, 0, 3, 2]);
        let cu_seqlens = cumulative_lengths(&device, &lengths);
        assert_eq!(cu_seqlens.i32s(), [0, 1, 1, 4, 6]);
        assert_eq!(longest(&device, &lengths), 3);
        assert_eq!(document_positions(&device, &cu_seqlens, 6).i32s(), [0, 0, 1, 2, 0, 1]);
    }
}
