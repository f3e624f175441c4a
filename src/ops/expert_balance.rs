//! The auxiliary loss that balances experts: `E·Σ_e f_e·P_e`, with `f_e` how often an expert was chosen and `P_e` its mean probability, over the rows
//! of all layers (Switch Transformer, arXiv 2101.03961, as in Transformers' `load_balancing_loss_func`).
//!
//! Contract: [`balance`] assigns. How often an expert is chosen has no gradient, so that of each row's probability is `E·f_e / rows`.

use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Tensor};

/// From `probabilities` f32 [E], summed over `rows` rows, and `counts` f32 [E] of choices there: `gradient` f32 [E] of `weight` times the loss with respect
/// to each row's probabilities, and `loss` f32 [1], `loss_weight` times the loss.
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
pub fn balance(
    device: &Device,
    probabilities: &Tensor,
    counts: &Tensor,
    rows: usize,
    weight: f32,
    loss_weight: f32,
    gradient: &mut Tensor,
    loss: &mut Tensor,
) {
    let experts = counts.len();
    assert!(probabilities.len() == experts && gradient.len() == experts && loss.len() == 1, "shapes of a balance");
    // E / rows², in f64: rows of all layers are many.
    let factor = experts as f64 / (rows as f64).powi(2);
    let (weight, loss_weight) = ((f64::from(weight) * factor) as f32, (f64::from(loss_weight) * factor) as f32);
    match device {
        Device::Cpu(_) => {
            let pairs = || probabilities.f32s().iter().zip(counts.f32s());
            let sum: f64 = pairs().map(|(&p, &count)| f64::from(p) * f64::from(count)).sum();
            loss.f32s_mut()[0] = (f64::from(loss_weight) * sum) as f32;
            gradient.f32s_mut().iter_mut().zip(counts.f32s()).for_each(|(g, count)| *g = weight * count);
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![
                probabilities.pointer(),
                counts.pointer(),
                gradient.pointer(),
                loss.pointer(),
                experts as i32,
                weight,
                loss_weight
            ];
            gpu.launch("expert_balance", Launch::new(1, 256), args);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_gradient, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let device = cpu(1);
        let f32s = |data: &[f32]| device.tensor_f32(MemoryCategory::Workspace, &[data.len()], data.to_vec());
        let (counts, rows) = (f32s(&[3.0, 0.0, 5.0]), 4);
        let run = |p: &[f32]| {
            let (mut gradient, mut loss) = (f32s(&[0.0; 3]), f32s(&[9.0]));
            balance(&device, &f32s(p), &counts, rows, 0.5, 0.5, &mut gradient, &mut loss);
            (gradient.f32s().to_vec(), f64::from(loss.f32s()[0]))
        };
        let start = [1.5, 0.5, 2.0];
        // 0.5 · 3 · (3/4 · 1.5/4 + 5/4 · 2/4)
        assert!((run(&start).1 - 1.359_375).abs() < 1e-6);
        assert_gradient("probabilities", &start, &run(&start).0, |p| run(p).1);
    }
}
