//! Global gradient norm and scaling.

use rayon::prelude::*;

use crate::tensor::{Device, Tensor};

/// Values whose squares are added up before they meet the others: fixed, so that the sum does not depend on threads.
const VALUES_PER_PARTIAL: usize = 1 << 16;

/// `Σ x²` in f64. Not finite iff some value is not finite (squares of f32 do not overflow f64).
pub fn sum_of_squares(device: &Device, x: &Tensor) -> f64 {
    match device {
        Device::Cpu(_) => {
            let square = |x: &f32| f64::from(*x) * f64::from(*x);
            let partials = x.f32s().par_chunks(VALUES_PER_PARTIAL).map(|x| x.iter().map(square).sum::<f64>());
            partials.collect::<Vec<f64>>().into_iter().sum()
        }
        Device::Cuda(cuda) => match *cuda {},
    }
}

/// The first value that is NaN or infinite.
pub fn first_non_finite(device: &Device, x: &Tensor) -> Option<f32> {
    match device {
        Device::Cpu(_) => x.f32s().iter().copied().find(|x| !x.is_finite()),
        Device::Cuda(cuda) => match *cuda {},
    }
}

/// Factor that brings a gradient of norm `norm` to at most `max_norm`: `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`.
/// `max_norm` 0 means no clipping.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f32 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) as f32 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::cpu;
    use crate::tensor::MemoryCategory;

    #[test]
    fn squares_add_up_and_non_finite_values_show() {
        let device = cpu(2);
        let mut x = device.tensor(MemoryCategory::Gradients, &[200_000], vec![2.0; 200_000]);
        assert_eq!(sum_of_squares(&device, &x), 800_000.0);
        x.f32s_mut()[123_456] = f32::INFINITY;
        assert!(!sum_of_squares(&device, &x).is_finite());
        assert_eq!(first_non_finite(&device, &x), Some(f32::INFINITY));
    }

    #[test]
    fn clipping_never_enlarges() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(10.0, 0.0), 1.0);
        assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
