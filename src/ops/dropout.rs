//! Dropout whose mask is a function of its key and the element's number: regenerated in the backward pass, never stored.

use rayon::prelude::*;

use super::elementwise;
use crate::base::rng::Philox;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, Tensor, View, ViewMut};

/// Values that one task handles; a multiple of the four that one generator block gives.
const VALUES_PER_TASK: usize = 4096;

/// What a dropout mask depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// Number that differs between steps, micro-batches and layers.
    pub stream: u64,
}

/// `y = mask ⊙ x / (1 − p)` with `0 ≤ p < 1`; each value is dropped with probability `p`. The mask goes by the number of a value in `y`.
pub fn forward<'x>(device: &Device, key: DropoutKey, p: f32, x: impl Into<View<'x>>, y: &mut Tensor) {
    let x = x.into();
    assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()), "shapes of dropout");
    match device {
        Device::Cpu(_) if x.is_contiguous() => for_each_kept(key, p, y.f32s_mut(), x.f32s(), |y, value| *y = value),
        Device::Cpu(_) => for_each_kept(key, p, y.f32s_mut(), &x.to_vec(), |y, value| *y = value),
        Device::Cuda(gpu) if x.is_contiguous() => launch(gpu, key, p, x.pointer(), y.view(), false),
        Device::Cuda(gpu) => {
            elementwise::copy(device, x, &mut *y);
            launch(gpu, key, p, y.pointer(), y.view(), false);
        }
    }
}

/// `dx += mask ⊙ dy / (1 − p)` with the mask of [`forward`].
pub fn backward_accumulate<'x>(device: &Device, key: DropoutKey, p: f32, dy: &Tensor, dx: impl Into<ViewMut<'x>>) {
    let mut dx = dx.into();
    assert!(dx.as_view().is_contiguous() && (dx.rows(), dx.cols()) == (dy.rows(), dy.cols()), "shapes of dropout");
    match device {
        Device::Cpu(_) => for_each_kept(key, p, dx.f32s_mut(), dy.f32s(), |dx, value| *dx += value),
        Device::Cuda(gpu) => launch(gpu, key, p, dy.pointer(), dx.as_view(), true),
    }
}

/// A value is dropped when its 32 random bits lie below this: p·2³².
fn threshold(p: f32) -> u32 {
    (f64::from(p) * 4_294_967_296.0) as u32
}

fn launch(gpu: &Gpu, key: DropoutKey, p: f32, from: u64, to: View<'_>, accumulate: bool) {
    let len = to.rows() * to.cols();
    let (n, keep) = (len as i64, 1.0 / (1.0 - p));
    let args = kernel_args![from, to.pointer(), n, key.seed, key.stream, threshold(p), keep, i32::from(accumulate)];
    gpu.launch("dropout", Launch::elements(len, 4), args);
}

fn for_each_kept(key: DropoutKey, p: f32, out: &mut [f32], input: &[f32], write: impl Fn(&mut f32, f32) + Sync) {
    let generator = Philox::new(key.seed, key.stream);
    let keep = 1.0 / (1.0 - p);
    let threshold = threshold(p);
    let tasks = out.par_chunks_mut(VALUES_PER_TASK).zip(input.par_chunks(VALUES_PER_TASK)).enumerate();
    tasks.for_each(|(task, (out, input))| {
        let first_block = (task * VALUES_PER_TASK / 4) as u64;
        for (i, (out, input)) in out.chunks_mut(4).zip(input.chunks(4)).enumerate() {
            let bits = generator.block(first_block + i as u64);
            for ((out, x), bits) in out.iter_mut().zip(input).zip(bits) {
                write(out, if bits < threshold { 0.0 } else { x * keep });
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;
    use crate::tensor::MemoryCategory;

    #[test]
    fn the_mask_has_the_rate_and_comes_again_in_backward() {
        let device = cpu(3);
        let (len, p) = (100_000, 0.3);
        let x = device.tensor(MemoryCategory::Workspace, &[len], vec![1.0; len]);
        let mut y = device.empty(MemoryCategory::Workspace, &[len]);
        let key = DropoutKey { seed: 1, stream: 2 };
        device.run(|| forward(&device, key, p, &x, &mut y));
        let dropped = y.f32s().iter().filter(|&&y| y == 0.0).count() as f32 / len as f32;
        assert!((dropped - p).abs() < 0.01, "{dropped}");
        let mut dx = device.zeros(MemoryCategory::Workspace, &[len]);
        backward_accumulate(&device, key, p, &x, &mut dx);
        assert_eq!(dx.f32s(), y.f32s());
        let mut other = device.empty(MemoryCategory::Workspace, &[len]);
        forward(&device, DropoutKey { seed: 1, stream: 3 }, p, &x, &mut other);
        assert_ne!(other.f32s(), y.f32s(), "another stream, another mask");
    }
}
