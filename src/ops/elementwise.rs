//! Element by element: residual sums, biases, rounding, gathering and scattering of rows.

use rayon::prelude::*;

use super::MIN_ROWS_PER_TASK;
use crate::tensor::{Device, Indices, Precision, Tensor};

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
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
    }
}

/// `y = x`.
pub fn copy(device: &Device, x: &Tensor, y: &mut Tensor) {
    assert_eq!(x.len(), y.len(), "shapes of copy");
    match device {
        Device::Cpu(_) => y.f32s_mut().copy_from_slice(x.f32s()),
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
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
        Device::Cuda(cuda) => match *cuda {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};
    use crate::tensor::MemoryCategory;

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
