//! AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101), in the order of `torch.optim.AdamW`.

use rayon::prelude::*;

use super::norm::ClipState;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Tensor};

/// Values that one task handles at least.
const MIN_VALUES_PER_TASK: usize = 16_384;

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

/// Factor on the gradient: what clipping found.
#[derive(Debug, Clone, Copy)]
pub enum GradScale<'a> {
    /// Known to the host.
    Host(f32),
    /// On the device, where a gradient that is not finite also forbids the update.
    Device(&'a ClipState),
}

/// Updates `param`, and the moments `m` and `v`, from `grad`; all of one shape, f32. `working`, if given, becomes the new value in the format
/// that products read.
///
/// `p ← p·(1 − lr·wd)`; `m ← m + (g − m)·(1 − β1)`; `v ← β2·v + (1 − β2)·g²`; `p ← p − lr/(1 − β1^t) · m / (√v/√(1 − β2^t) + eps)`.
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
pub fn update(
    device: &Device,
    p: &AdamWParams,
    scale: GradScale<'_>,
    param: &mut Tensor,
    working: Option<&mut Tensor>,
    grad: &Tensor,
    m: &mut Tensor,
    v: &mut Tensor,
) {
    assert_eq!((param.len(), m.len(), v.len()), (grad.len(), grad.len(), grad.len()), "shapes of adamw");
    let grad_len = grad.len();
    let correction1 = 1.0 - p.beta1.powf(p.step as f64);
    let correction2 = (1.0 - p.beta2.powf(p.step as f64)).sqrt() as f32;
    let step_size = (p.lr / correction1) as f32;
    let decay = (1.0 - p.lr * p.weight_decay) as f32;
    let (beta1, beta2, eps) = ((1.0 - p.beta1) as f32, p.beta2 as f32, p.eps as f32);
    let grow2 = (1.0 - p.beta2) as f32;
    match (device, scale) {
        (Device::Cpu(cpu), GradScale::Host(grad_scale)) => {
            let moments = m.f32s_mut().par_iter_mut().zip(v.f32s_mut().par_iter_mut());
            let values = param.f32s_mut().par_iter_mut().zip(grad.f32s()).zip(moments);
            values.with_min_len(MIN_VALUES_PER_TASK).for_each(|((w, g), (m, v))| {
                let g = g * grad_scale;
                *w *= decay;
                *m += (g - *m) * beta1;
                *v = *v * beta2 + g * g * grow2;
                *w -= step_size * (*m / (v.sqrt() / correction2 + eps));
            });
            if let Some(working) = working {
                let precision = cpu.precision();
                let values = working.f32s_mut().par_iter_mut().zip(param.f32s()).with_min_len(MIN_VALUES_PER_TASK);
                values.for_each(|(working, &w)| *working = precision.round(w));
            }
        }
        (Device::Cuda(gpu), GradScale::Device(state)) => {
            let working = working.map_or(0, |working| working.pointer());
            let (param, grad, m, v) = (param.pointer(), grad.pointer(), m.pointer(), v.pointer());
            let n = grad_len as i64;
            let args = kernel_args![
                param,
                working,
                grad,
                m,
                v,
                state.pointer(),
                n,
                step_size,
                decay,
                beta1,
                beta2,
                grow2,
                correction2,
                eps
            ];
            gpu.launch("adamw", Launch::elements(grad_len, 1), args);
        }
        _ => unreachable!("the clip factor lives where the gradients do"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn three_updates_agree_with_the_formula_in_f64() {
        let device = cpu(2);
        let tensor = |v: Vec<f32>| device.tensor(MemoryCategory::Optimizer, &[v.len()], v);
        let mut w = tensor(vec![0.5, -1.0, 2.0]);
        let (mut m, mut v) = (tensor(vec![0.0; 3]), tensor(vec![0.0; 3]));
        let mut want = [(0.5f64, 0.0f64, 0.0f64), (-1.0, 0.0, 0.0), (2.0, 0.0, 0.0)];
        for step in 1..=3u64 {
            let g = [0.1 * step as f32, -0.2, 1e-4];
            let p = AdamWParams { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step };
            let grad = tensor(g.to_vec());
            update(&device, &p, GradScale::Host(0.5), &mut w, None, &grad, &mut m, &mut v);
            for ((w, m, v), g) in want.iter_mut().zip(g) {
                let g = f64::from(g) * 0.5;
                *w *= 1.0 - 1e-2 * 0.1;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.99 * *v + 0.01 * g * g;
                let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(step as i32)), *v / (1.0 - 0.99f64.powi(step as i32)));
                *w -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        assert_close("weights", w.f32s(), &want.map(|w| w.0 as f32), 1e-6);
    }
}
