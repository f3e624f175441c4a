//! AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), in the order of `torch.optim.AdamW`.

use rayon::prelude::*;

use super::{MIN_VALUES_PER_TASK, min_rows};
use crate::tensor::{Precision, Tensor, ViewMut};

/// Numbers of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWParams {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub step: u64,
}

/// What the formula needs of [`AdamWParams`], in the arithmetic of the update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Constants {
    pub(super) step_size: f32,
    pub(super) decay: f32,
    pub(super) beta1: f32,
    pub(super) one_minus_beta1: f32,
    pub(super) beta2: f32,
    pub(super) one_minus_beta2: f32,
    pub(super) root_correction2: f32,
    pub(super) eps: f32,
}

impl AdamWParams {
    pub(super) fn constants(&self) -> Constants {
        let correction1 = 1.0 - self.beta1.powf(self.step as f64);
        Constants {
            step_size: (self.lr / correction1) as f32,
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            root_correction2: (1.0 - self.beta2.powf(self.step as f64)).sqrt() as f32,
            eps: self.eps as f32,
        }
    }
}

/// Updates `param`, and the moments `m` and `v`, from `grad·grad_scale`; all of one shape, f32, on the CPU. On a GPU `multi_tensor` does the same
/// for all tensors at once, and [`copy_rounded`] with it.
///
/// `p ← p·(1 − lr·wd)`; `m ← m + (g − m)·(1 − β1)`; `v ← β2·v + (1 − β2)·g²`; `p ← p − lr/(1 − β1^t) · m / (√v/√(1 − β2^t) + eps)`.
pub fn update(p: &AdamWParams, grad_scale: f32, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    assert_eq!((param.len(), m.len(), v.len()), (grad.len(), grad.len(), grad.len()), "shapes of adamw");
    let c = p.constants();
    let moments = m.par_iter_mut().zip(v.par_iter_mut());
    let values = param.par_iter_mut().zip(grad).zip(moments);
    values.with_min_len(MIN_VALUES_PER_TASK).for_each(|((w, g), (m, v))| {
        let g = g * grad_scale;
        *w *= c.decay;
        *m += (g - *m) * c.one_minus_beta1;
        *v = *v * c.beta2 + g * g * c.one_minus_beta2;
        *w -= c.step_size * (*m / (v.sqrt() / c.root_correction2 + c.eps));
    });
}

/// `working` [rows, cols], the copy that products read, becomes `value` rounded to `precision`, on the CPU.
pub fn copy_rounded(precision: Precision, value: &Tensor, mut working: ViewMut<'_>) {
    let (cols, stride) = (working.cols(), working.stride());
    assert_eq!(value.len(), working.rows() * cols, "shapes of a working copy");
    let rows = working.f32s_mut().par_chunks_mut(stride).zip(value.f32s().par_chunks_exact(cols));
    rows.with_min_len(min_rows(cols)).for_each(|(working, value)| {
        working.iter_mut().zip(value).for_each(|(working, &w)| *working = precision.round(w));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn three_updates_agree_with_the_formula_in_f64() {
        let (mut w, mut m, mut v) = ([0.5, -1.0, 2.0], [0.0; 3], [0.0; 3]);
        let mut want = [(0.5f64, 0.0f64, 0.0f64), (-1.0, 0.0, 0.0), (2.0, 0.0, 0.0)];
        for step in 1..=3u64 {
            let g = [0.1 * step as f32, -0.2, 1e-4];
            let p = AdamWParams { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step };
            update(&p, 0.5, &mut w, &g, &mut m, &mut v);
            for ((w, m, v), g) in want.iter_mut().zip(g) {
                let g = f64::from(g) * 0.5;
                *w *= 1.0 - 1e-2 * 0.1;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.99 * *v + 0.01 * g * g;
                let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(step as i32)), *v / (1.0 - 0.99f64.powi(step as i32)));
                *w -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        assert_close("weights", &w, &want.map(|w| w.0 as f32), 1e-6);
    }

    #[test]
    fn a_working_copy_is_rounded_and_leaves_its_surroundings_alone() {
        let device = cpu(1);
        let value = device.tensor(MemoryCategory::Adapters, &[2, 2], vec![1.001, -2.003, 3.0, 0.1]);
        let mut matrix = device.tensor(MemoryCategory::Weights, &[2, 3], vec![9.0; 6]);
        copy_rounded(Precision::Bf16, &value, matrix.view_mut().columns(1, 2));
        let round = |x| Precision::Bf16.round(x);
        assert_eq!(matrix.f32s(), [9.0, round(1.001), round(-2.003), 9.0, 3.0, round(0.1)]);
    }
}
