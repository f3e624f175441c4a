//! SwiGLU: `h = silu(e)·g`, `silu(e) = e·σ(e)`.
//!
//! Saved: `e` and `g`. Backward: `de = dh·g·σ(e)·(1 + e·(1 − σ(e)))`, `dg = dh·silu(e)`.

use rayon::prelude::*;

use super::vector::{exp, vectorized};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Tensor};

/// Values that one task handles.
const VALUES_PER_TASK: usize = 16_384;

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `gate` (e) and `up` (g) [T, I] → `h` [T, I]. `silu(e)` is rounded to the storage format before the product.
pub fn forward(device: &Device, gate: &Tensor, up: &Tensor, h: &mut Tensor) {
    assert_eq!((gate.len(), up.len()), (h.len(), h.len()), "shapes of swiglu");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let tasks = h.f32s_mut().par_chunks_mut(VALUES_PER_TASK);
            let tasks = tasks.zip(gate.f32s().par_chunks(VALUES_PER_TASK)).zip(up.f32s().par_chunks(VALUES_PER_TASK));
            tasks.for_each(|((h, gate), up)| {
                silu(gate, h);
                precision.round_slice(h);
                h.iter_mut().zip(up).for_each(|(h, g)| *h *= g);
                precision.round_slice(h);
            });
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![gate.pointer(), up.pointer(), h.pointer(), h.len() as i64];
            gpu.launch("swiglu_forward", Launch::elements(h.len(), 8), args);
        }
    }
}

/// Backward of [`forward`], in place: `gate` becomes `de` and `up` becomes `dg`.
pub fn backward_in_place(device: &Device, dh: &Tensor, gate: &mut Tensor, up: &mut Tensor) {
    assert_eq!((gate.len(), up.len()), (dh.len(), dh.len()), "shapes of swiglu backward");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let tasks = gate.f32s_mut().par_chunks_mut(VALUES_PER_TASK);
            let tasks = tasks.zip(up.f32s_mut().par_chunks_mut(VALUES_PER_TASK));
            tasks.zip(dh.f32s().par_chunks(VALUES_PER_TASK)).for_each(|((gate, up), dh)| {
                backward_values(dh, gate, up);
                precision.round_slice(gate);
                precision.round_slice(up);
            });
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![dh.pointer(), gate.pointer(), up.pointer(), dh.len() as i64];
            gpu.launch("swiglu_backward", Launch::elements(dh.len(), 8), args);
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
        let shape = [3, 7];
        let (mut e, mut g, dh) = (v.tensor(&device, &shape), v.tensor(&device, &shape), v.tensor(&device, &shape));
        let (e0, g0) = (e.f32s().to_vec(), g.f32s().to_vec());
        let run = |e: &[f32], g: &[f32]| {
            let (e, g) =
                (device.tensor(dh.category(), &shape, e.to_vec()), device.tensor(dh.category(), &shape, g.to_vec()));
            let mut h = device.empty(dh.category(), &shape);
            forward(&device, &e, &g, &mut h);
            dot(dh.f32s(), h.f32s())
        };
        backward_in_place(&device, &dh, &mut e, &mut g);
        assert_gradient("de", &e0, e.f32s(), |e| run(e, &g0));
        assert_gradient("dg", &g0, g.f32s(), |g| run(&e0, g));
    }
}
