//! The dense mask of the masked path: a bit for every pair of rows, built once per batch and window.

use super::work_list::first_keys;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, Indices, MemoryCategory};

/// Keys in one word.
const WORD: usize = 32;
/// Words whose multiple a row takes: kernels read rows as 16 bytes.
const ALIGNMENT: usize = 4;

/// Which row sees which, as u32 [T, ⌈T/32⌉ rounded up to a multiple of 4]: bit k % 32 of word k / 32 of row q is 1 where query q sees key k. Every
/// row sees itself, so no row is 0 throughout. Bits past T are 0.
#[derive(Debug)]
pub struct DenseMask {
    /// The words; their bits, not their values, are meant.
    words: Indices,
    stride: usize,
}

impl DenseMask {
    /// On the CPU, from `cu_seqlens` [num_seqs + 1] and a window that counts the query itself.
    pub(super) fn on_host(device: &Device, cu_seqlens: &[i32], window: usize) -> Self {
        let first_key = first_keys(cu_seqlens, window);
        let stride = stride(first_key.len());
        let mut words = vec![0i32; first_key.len() * stride];
        for ((query, &first), row) in first_key.iter().enumerate().zip(words.chunks_exact_mut(stride.max(1))) {
            (first..=query).for_each(|key| row[key / WORD] |= 1 << (key % WORD));
        }
        Self { words: device.indices(MemoryCategory::Metadata, words), stride }
    }

    /// On a GPU, built there from the address of i32 [T], the first key that each row sees.
    pub(super) fn on_gpu(device: &Device, gpu: &Gpu, total_tokens: usize, first_key: u64) -> Self {
        let stride = stride(total_tokens);
        let words = device.empty_indices(MemoryCategory::Metadata, total_tokens * stride);
        let args = kernel_args![first_key, words.pointer(), total_tokens as i32, stride as i32];
        gpu.launch("attention_mask", Launch::elements(words.len(), ALIGNMENT), args);
        Self { words, stride }
    }

    /// On a GPU, an operation for each document and one for the window: how a layer makes its mask that keeps none (the published baseline).
    pub(super) fn by_documents(device: &Device, gpu: &Gpu, cu_seqlens: &[i32], window: usize) -> Self {
        let total = cu_seqlens.last().map_or(0, |&end| end as usize);
        let stride = stride(total);
        let words = device.empty_indices(MemoryCategory::Metadata, total * stride);
        gpu.zero(words.pointer(), words.len() * size_of::<u32>());
        let rows = |words: usize, rows: usize| Launch {
            grid: [rows as u32, words.div_ceil(128) as u32, 1],
            ..Launch::new(1, 128)
        };
        for bounds in cu_seqlens.windows(2).filter(|bounds| bounds[0] < bounds[1]) {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            let launch = rows((end - 1) / WORD - start / WORD + 1, end - start);
            gpu.launch("mask_document", launch, kernel_args![words.pointer(), bounds[0], bounds[1], stride as i32]);
        }
        if window < total {
            let args = kernel_args![words.pointer(), stride as i32, window as i32];
            gpu.launch("mask_window", rows(stride, total), args);
        }
        Self { words, stride }
    }

    /// Room for a mask of the same size, for [`Self::copy_from`].
    pub(super) fn twin(&self, device: &Device) -> Self {
        Self { words: device.empty_indices(MemoryCategory::Metadata, self.words.len()), stride: self.stride }
    }

    /// Takes over a mask of the same size.
    pub(super) fn copy_from(&mut self, from: &Self) {
        self.words.copy_from(&from.words);
    }

    /// On the CPU: whether row `query` sees row `key`.
    #[inline]
    pub(super) fn sees(&self, query: usize, key: usize) -> bool {
        self.words.i32s()[query * self.stride + key / WORD] >> (key % WORD) & 1 == 1
    }

    /// Words from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// A copy of the words on the host. From a GPU this waits for the device.
    pub fn words(&self) -> Vec<u32> {
        self.words.to_vec().into_iter().map(i32::cast_unsigned).collect()
    }

    /// Address of the words on a GPU.
    pub(super) fn pointer(&self) -> u64 {
        self.words.pointer()
    }
}

fn stride(total_tokens: usize) -> usize {
    total_tokens.div_ceil(WORD).next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;

    #[test]
    fn bits_are_those_of_the_definition() {
        // One-token documents, an empty one, and, as padding is, a document at the end.
        let cu_seqlens = [0, 1, 1, 2, 40, 171, 300, 301, 429, 445];
        let (total, document) = (445, |row: usize| cu_seqlens.iter().filter(|&&start| start as usize <= row).count());
        for window in [usize::MAX, 1, 2, 63, 64, 65, 200] {
            let mask = DenseMask::on_host(&cpu(1), &cu_seqlens, window);
            let words = mask.words();
            assert_eq!((mask.stride(), words.len()), (16, 445 * 16));
            for (q, k) in (0..total).flat_map(|q| (0..16 * WORD).map(move |k| (q, k))) {
                let dense = k < total && document(q) == document(k) && k <= q && q - k < window;
                let bit = words[q * 16 + k / WORD] >> (k % WORD) & 1 == 1;
                assert_eq!((bit, mask.sees(q, k)), (dense, dense), "window {window}: {q} {k}");
            }
        }
    }
}
