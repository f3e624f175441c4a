//! Element by element: residual sums, biases, rounding, gathering and scattering of rows.

use rayon::prelude::*;

use super::MIN_ROWS_PER_TASK;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, Indices, MemoryCategory, Precision, Tensor};

/// Values that one task handles at least.
const MIN_VALUES_PER_TASK: usize = 16_384;

/// `x += y`, rounded to the storage format.
pub fn add_assign(device: &Device, x: &mut Tensor, y: &Tensor) {
    assert_eq!(x.len(), y.len(), "shapes of add_assign");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let values = x.f32s_mut().par_iter_mut().zip(y.f32s()).with_min_len(MIN_VALUES_PER_TASK);
            values.for_each(|(x, y)| *x = precision.round(*x + y));
        }
        Device::Cuda(gpu) => launch_add(gpu, x, y, x),
    }
}

/// `z = x + y`, rounded to the storage format.
pub fn add(device: &Device, x: &Tensor, y: &Tensor, z: &mut Tensor) {
    assert_eq!((x.len(), y.len()), (z.len(), z.len()), "shapes of add");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let values = z.f32s_mut().par_iter_mut().zip(x.f32s()).zip(y.f32s()).with_min_len(MIN_VALUES_PER_TASK);
            values.for_each(|((z, x), y)| *z = precision.round(x + y));
        }
        Device::Cuda(gpu) => launch_add(gpu, x, y, z),
    }
}

/// `y = x`.
pub fn copy(device: &Device, x: &Tensor, y: &mut Tensor) {
    assert_eq!(x.len(), y.len(), "shapes of copy");
    match device {
        Device::Cpu(_) => y.f32s_mut().copy_from_slice(x.f32s()),
        Device::Cuda(gpu) => gpu.copy(x.pointer(), y.pointer(), x.len() * x.dtype().num_bytes()),
    }
}

/// Sets every row of `y` [T, N] to `bias` [N].
pub fn broadcast_rows(device: &Device, bias: &Tensor, y: &mut Tensor) {
    let width = y.cols();
    assert_eq!(bias.len(), width, "shapes of broadcast_rows");
    match device {
        Device::Cpu(_) => {
            let rows = y.f32s_mut().par_chunks_exact_mut(width).with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each(|y| y.copy_from_slice(bias.f32s()));
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![bias.pointer(), y.pointer(), y.rows() as i64, width as i32];
            gpu.launch("broadcast_rows", Launch::elements(y.len(), 1), args);
        }
    }
}

/// `dbias [N] += Σ_rows dy [T, N]`.
pub fn sum_rows(device: &Device, dy: &Tensor, dbias: &mut Tensor) {
    let width = dy.cols();
    assert_eq!(dbias.len(), width, "shapes of sum_rows");
    match device {
        Device::Cpu(_) => {
            for row in dy.f32s().chunks_exact(width) {
                for (sum, value) in dbias.f32s_mut().iter_mut().zip(row) {
                    *sum += value;
                }
            }
        }
        Device::Cuda(gpu) => {
            let runs = dy.rows().div_ceil(64);
            let partials = device.empty_f32(MemoryCategory::Workspace, &[runs, width]);
            let grid = Launch { grid: [runs as u32, width.div_ceil(256) as u32, 1], ..Launch::new(1, 256) };
            let args = kernel_args![dy.pointer(), partials.pointer(), dy.rows() as i64, width as i32];
            gpu.launch("sum_rows_partials", grid, args);
            add_partials(gpu, &partials, dbias);
        }
    }
}

/// Rounds every value to the storage format.
pub fn round(device: &Device, x: &mut Tensor) {
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            if precision != Precision::F32 {
                x.f32s_mut().par_chunks_mut(MIN_VALUES_PER_TASK).for_each(|x| precision.round_slice(x));
            }
        }
        // A GPU's activations are stored in bf16: every kernel has rounded already.
        Device::Cuda(_) => {}
    }
}

/// `y [R, H] = x[rows[r], :]`.
pub fn gather_rows(device: &Device, x: &Tensor, rows: &Indices, y: &mut Tensor) {
    let width = x.cols();
    assert_eq!((y.cols(), y.rows()), (width, rows.len()), "shapes of gather_rows");
    match device {
        Device::Cpu(_) => {
            for (y, &row) in y.f32s_mut().chunks_exact_mut(width).zip(rows.i32s()) {
                y.copy_from_slice(&x.f32s()[row as usize * width..][..width]);
            }
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![x.pointer(), rows.pointer(), y.pointer(), width as i32];
            gpu.launch("gather_rows", Launch::new(rows.len(), 256), args);
        }
    }
}

/// `x = 0`, then `x[rows[r], :] = y [R, H]`. `rows` names no row twice.
pub fn scatter_rows(device: &Device, y: &Tensor, rows: &Indices, x: &mut Tensor) {
    let width = x.cols();
    assert_eq!((y.cols(), y.rows()), (width, rows.len()), "shapes of scatter_rows");
    match device {
        Device::Cpu(_) => {
            x.f32s_mut().fill(0.0);
            for (y, &row) in y.f32s().chunks_exact(width).zip(rows.i32s()) {
                x.f32s_mut()[row as usize * width..][..width].copy_from_slice(y);
            }
        }
        Device::Cuda(gpu) => {
            x.fill_zero();
            let args = kernel_args![y.pointer(), rows.pointer(), x.pointer(), width as i32];
            gpu.launch("scatter_rows", Launch::new(rows.len(), 256), args);
        }
    }
}

/// Copies rows `from..from + count` of `x` to rows `to..` of `y`; both [·, N] of one format.
pub fn copy_rows(device: &Device, x: &Tensor, from: usize, y: &mut Tensor, to: usize, count: usize) {
    let width = x.cols();
    assert_eq!(width, y.cols(), "widths of copy_rows");
    assert!(from + count <= x.rows() && to + count <= y.rows(), "rows of copy_rows");
    match device {
        Device::Cpu(_) => {
            y.f32s_mut()[to * width..][..count * width].copy_from_slice(&x.f32s()[from * width..][..count * width]);
        }
        Device::Cuda(gpu) => {
            let row_bytes = width * x.dtype().num_bytes();
            let (from, to) = (x.pointer() + (from * row_bytes) as u64, y.pointer() + (to * row_bytes) as u64);
            gpu.copy(from, to, count * row_bytes);
        }
    }
}

/// `out += Σ` over the rows of `partials` [count, N], in order: the second stage of sums without atomics.
pub(super) fn add_partials(gpu: &Gpu, partials: &Tensor, out: &mut Tensor) {
    let (count, width) = (partials.rows() as i32, partials.cols());
    let args = kernel_args![partials.pointer(), out.pointer(), count, width as i32];
    gpu.launch("add_partials", Launch::elements(width, 1), args);
}

fn launch_add(gpu: &Gpu, x: &Tensor, y: &Tensor, z: &Tensor) {
    let args = kernel_args![x.pointer(), y.pointer(), z.pointer(), z.len() as i64];
    gpu.launch("add", Launch::elements(z.len(), 8), args);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};

    #[test]
    fn scatter_undoes_gather_and_zeroes_the_rest() {
        let device = cpu(1);
        let x = Values::new(2).tensor(&device, &[4, 3]);
        let rows = device.indices(MemoryCategory::Metadata, vec![1, 3]);
        let mut y = device.empty(MemoryCategory::Workspace, &[2, 3]);
        gather_rows(&device, &x, &rows, &mut y);
        let mut back = device.empty(MemoryCategory::Workspace, &[4, 3]);
        scatter_rows(&device, &y, &rows, &mut back);
        let want: Vec<f32> = (0..12).map(|i| if i / 3 % 2 == 1 { x.f32s()[i] } else { 0.0 }).collect();
        assert_eq!(back.f32s(), want);
    }

    #[test]
    fn biases_broadcast_and_sum() {
        let device = cpu(1);
        let bias = device.tensor(MemoryCategory::Workspace, &[2], vec![1.0, -2.0]);
        let mut y = device.empty(MemoryCategory::Workspace, &[3, 2]);
        broadcast_rows(&device, &bias, &mut y);
        let mut sum = device.tensor(MemoryCategory::Workspace, &[2], vec![10.0, 0.0]);
        sum_rows(&device, &y, &mut sum);
        assert_eq!(sum.f32s(), [13.0, -6.0], "gradients of parameters accumulate");
    }
}
