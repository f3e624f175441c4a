//! What the tests of operations share: seeded values, closeness by norm, finite differences.

use crate::tensor::{Device, MemoryCategory, Precision, Tensor};

/// The CPU in f32 with so many threads.
pub(crate) fn cpu(threads: usize) -> Device {
    Device::cpu(threads, Precision::F32).unwrap()
}

/// Seeded values, uniform in [−1, 1).
pub(crate) struct Values(u64);

impl Values {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> f32 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub(crate) fn tensor(&mut self, device: &Device, shape: &[usize]) -> Tensor {
        let data = self.vec(shape.iter().product());
        device.tensor(MemoryCategory::Workspace, shape, data)
    }
}

/// `‖a − b‖ / ‖b‖`.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let distance: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    if norm == 0.0 { distance.sqrt() } else { (distance / norm).sqrt() }
}

/// Fails unless `a` is within `bound` of `b` by norm.
pub(crate) fn assert_close(what: &str, a: &[f32], b: &[f32], bound: f64) {
    let error = relative_error(a, b);
    assert!(error <= bound, "{what}: relative error {error:.3e} above {bound:.1e}");
}

/// Fails unless `gradient` agrees with central differences of `f` at `x`. `f` is a scalar function.
pub(crate) fn assert_gradient(what: &str, x: &[f32], gradient: &[f32], mut f: impl FnMut(&[f32]) -> f64) {
    assert_eq!(x.len(), gradient.len());
    let mut moved = x.to_vec();
    let numeric: Vec<f32> = (0..x.len())
        .map(|i| {
            let h = 1e-2f32;
            moved[i] = x[i] + h;
            let up = f(&moved);
            moved[i] = x[i] - h;
            let down = f(&moved);
            moved[i] = x[i];
            ((up - down) / (2.0 * f64::from(h))) as f32
        })
        .collect();
    // f32 forward passes and a curvature of order 1: central differences are good to a few 1e-3.
    assert_close(what, gradient, &numeric, 6e-3);
}

/// `Σ weight·y` in f64: a scalar whose gradient by `y` is `weight`.
pub(crate) fn dot(weight: &[f32], y: &[f32]) -> f64 {
    weight.iter().zip(y).map(|(&w, &y)| f64::from(w) * f64::from(y)).sum()
}
