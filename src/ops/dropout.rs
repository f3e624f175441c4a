//! Dropout whose mask is a function of its key and the element's number: regenerated in the backward pass, never stored.

use rayon::prelude::*;

use super::elementwise;
use crate::base::rng::Philox;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, Tensor, View, ViewMut};

/// Values that one task handles.
const VALUES_PER_TASK: usize = 4096;

/// What a dropout mask depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// Number that differs between steps, micro-batches and layers.
    pub stream: u64,
    /// Number of the first value: what comes in tiles drops what it would drop as a whole.
    pub first: u64,
}

/// `y = mask ⊙ x / (1 − p)` with `0 ≤ p < 1`; each value is dropped with probability `p`. The mask goes by the number of a value: in `y`, from
/// that of the key on.
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
    let DropoutKey { seed, stream, first } = key;
    let args = kernel_args![from, to.pointer(), n, seed, stream, first, threshold(p), keep, i32::from(accumulate)];
    // A thread has the values of one block of random words; the first block may begin before the first value.
    gpu.launch("dropout", Launch::elements((first % 4) as usize + len, 4), args);
}

fn for_each_kept(key: DropoutKey, p: f32, out: &mut [f32], input: &[f32], write: impl Fn(&mut f32, f32) + Sync) {
    let generator = Philox::new(key.seed, key.stream);
    let keep = 1.0 / (1.0 - p);
    let threshold = threshold(p);
    let tasks = out.par_chunks_mut(VALUES_PER_TASK).zip(input.par_chunks(VALUES_PER_TASK)).enumerate();
    tasks.for_each(|(task, (out, input))| {
        let first = key.first + (task * VALUES_PER_TASK) as u64;
        let mut words = generator.block(first / 4);
        for ((number, out), x) in (first..).zip(out).zip(input) {
            if number % 4 == 0 {
                words = generator.block(number / 4);
            }
            let bits = words[(number % 4) as usize];
            write(out, if bits < threshold { 0.0 } else { x * keep });
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
        let key = DropoutKey { seed: 1, stream: 2, first: 0 };
        device.run(|| forward(&device, key, p, &x, &mut y));
        let dropped = y.f32s().iter().filter(|&&y| y == 0.0).count() as f32 / len as f32;
        assert!((dropped - p).abs() < 0.01, "{dropped}");
        let mut dx = device.zeros(MemoryCategory::Workspace, &[len]);
        backward_accumulate(&device, key, p, &x, &mut dx);
        assert_eq!(dx.f32s(), y.f32s());
        let mut other = device.empty(MemoryCategory::Workspace, &[len]);
        forward(&device, DropoutKey { stream: 3, ..key }, p, &x, &mut other);
        assert_ne!(other.f32s(), y.f32s(), "another stream, another mask");
    }

    #[test]
    fn tiles_drop_what_the_whole_drops() {
        let device = cpu(2);
        let (rows, width, p) = (700, 27, 0.4);
        let x = device.tensor(MemoryCategory::Workspace, &[rows, width], vec![1.0; rows * width]);
        let key = DropoutKey { seed: 4, stream: 9, first: 0 };
        let mut whole = device.empty(MemoryCategory::Workspace, &[rows, width]);
        device.run(|| forward(&device, key, p, &x, &mut whole));
        for first in [1, 3, 4, 190] {
            let rows = rows - first;
            let key = DropoutKey { first: (first * width) as u64, ..key };
            let mut tile = device.empty(MemoryCategory::Workspace, &[rows, width]);
            let mut dx = device.zeros(MemoryCategory::Workspace, &[rows, width]);
            device.run(|| {
                forward(&device, key, p, x.view().row_range(first, rows), &mut tile);
                backward_accumulate(&device, key, p, &tile, &mut dx);
            });
            assert_eq!(tile.f32s(), &whole.f32s()[first * width..], "from row {first}");
            let again: Vec<f32> = tile.f32s().iter().map(|y| y * (1.0 / (1.0 - p))).collect();
            assert_eq!(dx.f32s(), again, "from row {first}");
        }
    }
}
