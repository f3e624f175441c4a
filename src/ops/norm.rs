//! Global gradient norm and scaling.

use rayon::prelude::*;

/// Values whose squares are added up before they meet the others: fixed, so that the sum does not depend on threads.
const VALUES_PER_PARTIAL: usize = 1 << 16;

/// `Σ x²` in f64, on the CPU. Not finite iff some value is not finite (squares of f32 do not overflow f64).
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let partials = x.par_chunks(VALUES_PER_PARTIAL).map(|x| x.iter().map(square).sum::<f64>());
    partials.collect::<Vec<f64>>().into_iter().sum()
}

/// The first value that is NaN or infinite.
pub fn first_non_finite(values: &[f32]) -> Option<f32> {
    values.iter().copied().find(|x| !x.is_finite())
}

/// What clipping found, and the loss that was summed beside it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClipValues {
    /// Global norm of the gradients.
    pub norm: f64,
    /// Factor on the gradient.
    pub scale: f32,
    /// Whether norm and loss are finite.
    pub finite: bool,
    /// Sum of the losses of the step.
    pub loss_sum: f64,
}

/// Factor that brings a gradient of norm `norm` to at most `max_norm`: `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_`.
/// `max_norm` 0 means no clipping.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f32 {
    if max_norm > 0.0 { (max_norm / (norm + 1e-6)).min(1.0) as f32 } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_add_up_and_non_finite_values_show() {
        let mut x = vec![2.0; 200_000];
        assert_eq!(sum_of_squares(&x), 800_000.0);
        x[123_456] = f32::INFINITY;
        assert!(!sum_of_squares(&x).is_finite());
    }

    #[test]
    fn clipping_never_enlarges() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(10.0, 0.0), 1.0);
        assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
