//! Global gradient norm and scaling.

use rayon::prelude::*;

use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, MemoryCategory, Tensor};

/// Values whose squares are added up before they meet the others: fixed, so that the sum does not depend on threads.
const VALUES_PER_PARTIAL: usize = 1 << 16;

/// `Σ x²` in f64, on the CPU. Not finite iff some value is not finite (squares of f32 do not overflow f64).
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let square = |x: &f32| f64::from(*x) * f64::from(*x);
    let partials = x.par_chunks(VALUES_PER_PARTIAL).map(|x| x.iter().map(square).sum::<f64>());
    partials.collect::<Vec<f64>>().into_iter().sum()
}

/// The first value that is NaN or infinite. From a GPU this waits for the device: it serves to explain a failure.
pub fn first_non_finite(x: &Tensor) -> Option<f32> {
    x.to_vec().into_iter().find(|x| !x.is_finite())
}

/// What clipping found, in device memory: {norm, factor on the gradient, 1 if the update may happen, sum of losses}.
#[derive(Debug)]
pub struct ClipState(Tensor);

/// [`ClipState`] read by the host.
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

impl ClipState {
    /// Queues the norm of `grads`, the clip factor for `max_norm` (0: none) and the finite flag, which `loss_sum` [1] takes part in.
    pub fn new<'a>(
        device: &Device,
        gpu: &Gpu,
        grads: impl Iterator<Item = &'a Tensor> + Clone,
        loss_sum: &Tensor,
        max_norm: f64,
    ) -> Self {
        let runs = |grad: &Tensor| grad.len().div_ceil(VALUES_PER_PARTIAL);
        let total: usize = grads.clone().map(runs).sum();
        let partials = device.empty_f32(MemoryCategory::Workspace, &[total]);
        let mut first = 0;
        for grad in grads {
            let at = partials.pointer() + 4 * first as u64;
            let args = kernel_args![grad.pointer(), at, grad.len() as i64];
            gpu.launch("sum_of_squares_partials", Launch::new(runs(grad), 1024), args);
            first += runs(grad);
        }
        let state = device.empty_f32(MemoryCategory::Workspace, &[4]);
        let args = kernel_args![partials.pointer(), total as i32, loss_sum.pointer(), max_norm as f32, state.pointer()];
        gpu.launch("clip_state", Launch::new(1, 1024), args);
        Self(state)
    }

    /// Address of the four values.
    pub fn pointer(&self) -> u64 {
        self.0.pointer()
    }

    /// The values; this waits for the device.
    pub fn read(&self) -> ClipValues {
        let values = self.0.to_vec();
        ClipValues {
            norm: f64::from(values[0]),
            scale: values[1],
            finite: values[2] != 0.0,
            loss_sum: f64::from(values[3]),
        }
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
