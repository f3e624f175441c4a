//! Element by element: residual sums, biases, rounding, gathering and scattering of rows.

use rayon::prelude::*;

use super::{MIN_ROWS_PER_TASK, min_rows};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{DType, Device, Gpu, Indices, MemoryCategory, Precision, Tensor, View, ViewMut};

/// `x += y`, rounded to the storage format.
pub fn add_assign<'x, 'y>(device: &Device, x: impl Into<ViewMut<'x>>, y: impl Into<View<'y>>) {
    let (mut x, y) = (x.into(), y.into());
    let width = x.cols();
    assert_eq!((x.rows(), width), (y.rows(), y.cols()), "shapes of add_assign");
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), x.stride());
            let rows = x.f32s_mut().par_chunks_mut(stride).zip(y.f32s().par_chunks(y.stride()));
            rows.with_min_len(min_rows(width)).for_each(|(x, y)| {
                x.iter_mut().zip(y).take(width).for_each(|(x, y)| *x = precision.round(*x + y));
            });
        }
        Device::Cuda(gpu) => launch_block(gpu, "add_assign", x.as_view(), y),
    }
}

/// `y = x`, for matrices of equal shape and any strides.
pub fn copy<'x, 'y>(device: &Device, x: impl Into<View<'x>>, y: impl Into<ViewMut<'y>>) {
    let (x, mut y) = (x.into(), y.into());
    let width = x.cols();
    assert_eq!((x.rows(), width, x.dtype()), (y.rows(), y.cols(), y.dtype()), "shapes of copy");
    match device {
        Device::Cpu(_) => {
            let stride = y.stride();
            let rows = y.f32s_mut().par_chunks_mut(stride).zip(x.f32s().par_chunks(x.stride()));
            rows.with_min_len(min_rows(width)).for_each(|(y, x)| y[..width].copy_from_slice(&x[..width]));
        }
        Device::Cuda(gpu) => {
            let bytes = x.dtype().num_bytes();
            if x.rows() <= 1 || (x.stride(), y.stride()) == (width, width) {
                return gpu.copy(x.pointer(), y.pointer(), x.rows() * width * bytes);
            }
            assert_eq!(x.dtype(), DType::Bf16, "rows with gaps are copied in bf16 only");
            launch_block(gpu, "copy_block", x, y.as_view());
        }
    }
}

/// Queues a kernel over two matrices of equal shape, eight values of a row a thread. It writes one of them, which the caller holds mutably.
fn launch_block(gpu: &Gpu, kernel: &str, x: View<'_>, y: View<'_>) {
    let (rows, width) = (x.rows(), x.cols());
    let args = kernel_args![x.pointer(), y.pointer(), rows as i64, width as i32, x.stride() as i64, y.stride() as i64];
    gpu.launch(kernel, Launch::elements(rows * width.div_ceil(8), 1), args);
}

/// Sets every row of `y` [T, N] to `bias` [N].
pub fn broadcast_rows<'y>(device: &Device, bias: &Tensor, y: impl Into<ViewMut<'y>>) {
    let mut y = y.into();
    let width = y.cols();
    assert_eq!(bias.len(), width, "shapes of broadcast_rows");
    match device {
        Device::Cpu(_) => {
            let stride = y.stride();
            let rows = y.f32s_mut().par_chunks_mut(stride).with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each(|y| y[..width].copy_from_slice(bias.f32s()));
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![bias.pointer(), y.pointer(), y.rows() as i64, width as i32, y.stride() as i64];
            gpu.launch("broadcast_rows", Launch::elements(y.rows() * width, 1), args);
        }
    }
}

/// `dbias [N] += Σ_rows dy [T, N]`.
pub fn sum_rows<'a>(device: &Device, dy: impl Into<View<'a>>, dbias: &mut Tensor) {
    let dy = dy.into();
    let width = dy.cols();
    assert_eq!(dbias.len(), width, "shapes of sum_rows");
    match device {
        Device::Cpu(_) => {
            for row in dy.f32s().chunks(dy.stride()) {
                for (sum, value) in dbias.f32s_mut().iter_mut().zip(row) {
                    *sum += value;
                }
            }
        }
        Device::Cuda(gpu) => {
            let runs = dy.rows().div_ceil(64);
            let partials = device.empty_f32(MemoryCategory::Workspace, &[runs, width]);
            let grid = Launch { grid: [runs as u32, width.div_ceil(256) as u32, 1], ..Launch::new(1, 256) };
            let args =
                kernel_args![dy.pointer(), partials.pointer(), dy.rows() as i64, width as i32, dy.stride() as i64];
            gpu.launch("sum_rows_partials", grid, args);
            add_partials(gpu, &partials, dbias);
        }
    }
}

/// Rounds every value to the storage format.
pub fn round<'x>(device: &Device, x: impl Into<ViewMut<'x>>) {
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            if precision != Precision::F32 {
                let mut x = x.into();
                let (width, stride) = (x.cols(), x.stride());
                let rows = x.f32s_mut().par_chunks_mut(stride).with_min_len(min_rows(width));
                rows.for_each(|x| precision.round_slice(&mut x[..width]));
            }
        }
        // A GPU's activations are stored in bf16: every kernel has rounded already.
        Device::Cuda(_) => {}
    }
}

/// `y [R, H] = x[rows[first + r], :]`: a run of `rows` from number `first` on.
pub fn gather_rows(device: &Device, x: &Tensor, rows: &Indices, first: usize, y: &mut Tensor) {
    let width = x.cols();
    assert!(y.cols() == width && first + y.rows() <= rows.len(), "shapes of gather_rows");
    match device {
        Device::Cpu(_) => {
            for (y, &row) in y.f32s_mut().chunks_exact_mut(width).zip(&rows.i32s()[first..]) {
                y.copy_from_slice(&x.f32s()[row as usize * width..][..width]);
            }
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![x.pointer(), rows.pointer() + 4 * first as u64, y.pointer(), width as i32];
            gpu.launch("gather_rows", Launch::new(y.rows(), 256), args);
        }
    }
}

/// `x[rows[first + r], ..H] = y [R, H]`, the others stay; `x` may have more than H columns. `rows` names no row twice.
pub fn scatter_rows(device: &Device, y: &Tensor, rows: &Indices, first: usize, x: &mut Tensor) {
    let (width, stride) = (y.cols(), x.cols());
    assert!(first + y.rows() <= rows.len() && width <= stride, "shapes of scatter_rows");
    match device {
        Device::Cpu(_) => {
            for (y, &row) in y.f32s().chunks_exact(width).zip(&rows.i32s()[first..]) {
                x.f32s_mut()[row as usize * stride..][..width].copy_from_slice(y);
            }
        }
        Device::Cuda(gpu) => {
            let rows = rows.pointer() + 4 * first as u64;
            let args = kernel_args![y.pointer(), rows, x.pointer(), width as i32, stride as i64];
            gpu.launch("scatter_rows", Launch::new(y.rows(), 256), args);
        }
    }
}

/// `out += Σ` over the rows of `partials` [count, N], in order: the second stage of sums without atomics.
pub(super) fn add_partials(gpu: &Gpu, partials: &Tensor, out: &mut Tensor) {
    let (count, width) = (partials.rows() as i32, partials.cols());
    let args = kernel_args![partials.pointer(), out.pointer(), count, width as i32];
    gpu.launch("add_partials", Launch::elements(width, 1), args);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};

    #[test]
    fn scatter_undoes_gather_and_leaves_the_rest() {
        let device = cpu(1);
        let x = Values::new(2).tensor(&device, &[4, 3]);
        let rows = device.indices(MemoryCategory::Metadata, vec![2, 1, 3]);
        let mut y = device.empty(MemoryCategory::Workspace, &[2, 3]);
        gather_rows(&device, &x, &rows, 1, &mut y);
        let mut back = device.zeros(MemoryCategory::Workspace, &[4, 3]);
        scatter_rows(&device, &y, &rows, 1, &mut back);
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
