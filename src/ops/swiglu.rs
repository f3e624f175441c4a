//! SwiGLU: `h = silu(e)·g`, `silu(e) = e·σ(e)`.
//!
//! Saved: `e` and `g`. Backward: `de = dh·g·σ(e)·(1 + e·(1 − σ(e)))`, `dg = dh·silu(e)`.

use rayon::prelude::*;

use super::min_rows;
use super::vector::{exp, vectorized};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, View, ViewMut};

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `gate_up` [T, 2·I], gate (e) in the first half of its columns and up (g) in the second → `h` [T, I]. `silu(e)` is rounded to the storage
/// format before the product.
pub fn forward<'x, 'h>(device: &Device, gate_up: impl Into<View<'x>>, h: impl Into<ViewMut<'h>>) {
    let (gate_up, mut h) = (gate_up.into(), h.into());
    let width = h.cols();
    assert_eq!((gate_up.rows(), gate_up.cols()), (h.rows(), 2 * width), "shapes of swiglu");
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), h.stride());
            let rows = h.f32s_mut().par_chunks_mut(stride).zip(gate_up.f32s().par_chunks(gate_up.stride()));
            rows.with_min_len(min_rows(width)).for_each(|(h, gate_up)| {
                let (h, (gate, up)) = (&mut h[..width], gate_up[..2 * width].split_at(width));
                silu(gate, h);
                precision.round_slice(h);
                h.iter_mut().zip(up).for_each(|(h, g)| *h *= g);
                precision.round_slice(h);
            });
        }
        Device::Cuda(gpu) => {
            let (rows, strides) = (h.rows(), (gate_up.stride() as i64, h.stride() as i64));
            let (gate_up, h) = (gate_up.pointer(), h.pointer());
            let args = kernel_args![gate_up, h, rows as i64, width as i32, strides.0, strides.1];
            gpu.launch("swiglu_forward", Launch::elements(rows * width.div_ceil(8), 1), args);
        }
    }
}

/// Backward of [`forward`] from `dh` [T, I], in place: the gate columns become `de` and the up columns `dg`.
pub fn backward_in_place<'d, 'x>(device: &Device, dh: impl Into<View<'d>>, gate_up: impl Into<ViewMut<'x>>) {
    let (dh, mut gate_up) = (dh.into(), gate_up.into());
    let width = dh.cols();
    assert_eq!((gate_up.rows(), gate_up.cols()), (dh.rows(), 2 * width), "shapes of swiglu backward");
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), gate_up.stride());
            let rows = gate_up.f32s_mut().par_chunks_mut(stride).zip(dh.f32s().par_chunks(dh.stride()));
            rows.with_min_len(min_rows(width)).for_each(|(gate_up, dh)| {
                let (gate, up) = gate_up[..2 * width].split_at_mut(width);
                backward_values(&dh[..width], gate, up);
                precision.round_slice(gate);
                precision.round_slice(up);
            });
        }
        Device::Cuda(gpu) => {
            let (rows, strides) = (dh.rows(), (dh.stride() as i64, gate_up.stride() as i64));
            let (dh, gate_up) = (dh.pointer(), gate_up.pointer());
            let args = kernel_args![dh, gate_up, rows as i64, width as i32, strides.0, strides.1];
            gpu.launch("swiglu_backward", Launch::elements(rows * width.div_ceil(8), 1), args);
        }
    }
}

vectorized! {
    fn silu(e: &[f32], y: &mut [f32]) {
        for (y, &e) in y.iter_mut().zip(e) {
            *y = e * sigmoid(e);
        }
    }
}

vectorized! {
    fn backward_values(dh: &[f32], gate: &mut [f32], up: &mut [f32]) {
        for ((gate, up), &dh) in gate.iter_mut().zip(up).zip(dh) {
            let (e, g) = (*gate, *up);
            let s = sigmoid(e);
            *gate = dh * g * s * (1.0 + e * (1.0 - s));
            *up = dh * e * s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_gradient, cpu, dot};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let device = cpu(1);
        let mut v = Values::new(11);
        let (rows, width) = (3, 7);
        // Rows with room behind them, as an MLP has them.
        let (mut gate_up, dh) = (v.tensor(&device, &[rows, 2 * width + 2]), v.tensor(&device, &[rows, width]));
        let start = gate_up.first_columns(2 * width).to_vec();
        let run = |gate_up: &[f32]| {
            let gate_up = device.tensor(dh.category(), &[rows, 2 * width], gate_up.to_vec());
            let mut h = device.empty(dh.category(), &[rows, width + 1]);
            forward(&device, &gate_up, h.first_columns_mut(width));
            dot(dh.f32s(), &h.first_columns(width).to_vec())
        };
        backward_in_place(&device, &dh, gate_up.first_columns_mut(2 * width));
        assert_gradient("gate and up", &start, &gate_up.first_columns(2 * width).to_vec(), run);
    }
}
