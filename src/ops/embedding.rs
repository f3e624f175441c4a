//! Token embedding: row lookup, and its gradient without atomics.

use rayon::prelude::*;

use super::MIN_ROWS_PER_TASK;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, Tensor, View};

/// `table` [V, H], `input_ids` [T] → `x` [T, H]. Ids must lie in `0..V` (checked where batches are made).
pub fn forward(device: &Device, table: &Tensor, input_ids: &Indices, x: &mut Tensor) {
    let width = table.cols();
    assert_eq!((x.cols(), x.rows()), (width, input_ids.len()), "shapes of embedding");
    match device {
        Device::Cpu(_) => {
            let rows = x.f32s_mut().par_chunks_exact_mut(width).zip(input_ids.i32s().par_iter());
            rows.with_min_len(MIN_ROWS_PER_TASK).for_each(|(x, &id)| {
                x.copy_from_slice(&table.f32s()[id as usize * width..][..width]);
            });
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![table.pointer(), input_ids.pointer(), x.pointer(), width as i32];
            gpu.launch("gather_rows", Launch::new(input_ids.len(), 256), args);
        }
    }
}

/// `dtable[id] += Σ dx[t]` over the positions `t` that hold `id`, in the order of the positions.
pub fn backward<'d>(device: &Device, dx: impl Into<View<'d>>, input_ids: &Indices, dtable: &mut Tensor) {
    let (dx, width) = (dx.into(), dtable.cols());
    assert_eq!((dx.cols(), dx.rows()), (width, input_ids.len()), "shapes of embedding backward");
    match device {
        Device::Cpu(_) => {
            let dtable = dtable.f32s_mut();
            for (dx, &id) in dx.f32s().chunks(dx.stride()).zip(input_ids.i32s()) {
                for (sum, value) in dtable[id as usize * width..][..width].iter_mut().zip(dx) {
                    *sum += value;
                }
            }
        }
        Device::Cuda(gpu) => {
            let (tokens, stride) = (input_ids.len() as i32, dx.stride() as i64);
            let args = kernel_args![dx.pointer(), input_ids.pointer(), dtable.pointer(), tokens, width as i32, stride];
            gpu.launch("embedding_backward", Launch::new(width.div_ceil(64), 64), args);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn repeated_ids_add_up() {
        let device = cpu(2);
        let mut v = Values::new(9);
        let table = v.tensor(&device, &[5, 4]);
        let ids = device.indices(MemoryCategory::Metadata, vec![3, 0, 3]);
        let mut x = device.empty(MemoryCategory::Workspace, &[3, 4]);
        forward(&device, &table, &ids, &mut x);
        assert_eq!(x.f32s()[..4], x.f32s()[8..], "the same id, the same row");
        assert_eq!(x.f32s()[4..8], table.f32s()[..4]);
        let mut grad = device.zeros(MemoryCategory::Gradients, &[5, 4]);
        backward(&device, &x, &ids, &mut grad);
        let want: Vec<f32> = table.f32s()[12..16].iter().map(|x| 2.0 * x).collect();
        assert_eq!(grad.f32s()[12..16], want);
        assert!(grad.f32s()[4..12].iter().all(|&x| x == 0.0));
    }
}
