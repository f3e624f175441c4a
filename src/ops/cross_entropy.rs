//! Cross-entropy of rows of logits, with the gradient in place of the logits.
//!
//! `loss[r] = logsumexp(z[r]) − z[r, target]`; `dz = (softmax(z) − onehot(target))·weight`. The head calls this on chunks of supervised rows,
//! so that [tokens, vocabulary] is never held at once (as in Liger-Kernel, arXiv 2410.10989).

use rayon::prelude::*;

use super::vector;
use crate::tensor::{Device, Tensor};

/// `logits` [C, V] and `targets` [C] → `losses` [C] in nats. With `weight`, `logits` become their gradient times `weight`.
pub fn forward_backward_in_place(
    device: &Device,
    logits: &mut Tensor,
    targets: &[i32],
    weight: Option<f32>,
    losses: &mut [f32],
) {
    let vocab = logits.cols();
    assert_eq!((logits.rows(), losses.len()), (targets.len(), targets.len()), "shapes of cross_entropy");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let rows = logits.f32s_mut().par_chunks_exact_mut(vocab).zip(targets).zip(losses);
            rows.for_each(|((z, &target), loss)| {
                let (max, target, target_logit) = (vector::max(z), target as usize, z[target as usize]);
                let sum = match weight {
                    None => vector::sum_exp(z, max),
                    Some(weight) => {
                        let sum = vector::exp_in_place(z, max);
                        let scale = weight / sum;
                        z.iter_mut().for_each(|z| *z *= scale);
                        z[target] -= weight;
                        precision.round_slice(z);
                        sum
                    }
                };
                *loss = max + sum.ln() - target_logit;
            });
        }
        Device::Cuda(cuda) => match *cuda {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_gradient, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn gradient_agrees_with_finite_differences() {
        let device = cpu(2);
        let (rows, vocab, targets) = (3, 19, [4, 0, 18]);
        let z0 = Values::new(4).vec(rows * vocab);
        let run = |z: &[f32], weight| {
            let mut z = device.tensor(MemoryCategory::Workspace, &[rows, vocab], z.to_vec());
            let mut losses = [0.0; 3];
            forward_backward_in_place(&device, &mut z, &targets, weight, &mut losses);
            (losses.iter().map(|&l| f64::from(l)).sum::<f64>(), z)
        };
        let (_, dz) = run(&z0, Some(0.25));
        assert_gradient("dz", &z0, dz.f32s(), |z| 0.25 * run(z, None).0);
        assert_eq!(run(&z0, None).1.f32s(), z0, "without a weight the logits stay");
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let device = cpu(1);
        let mut z = device.tensor(MemoryCategory::Workspace, &[1, 3], vec![1e4, -1e4, 0.0]);
        let mut losses = [0.0];
        forward_backward_in_place(&device, &mut z, &[0], Some(1.0), &mut losses);
        assert_eq!(losses, [0.0]);
        assert!(z.f32s().iter().all(|x| x.is_finite()));
    }
}
