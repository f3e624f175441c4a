//! Cross-entropy of rows of logits, with the gradient in place of the logits.
//!
//! `loss[r] = logsumexp(z[r]) − z[r, target]`; `dz = (softmax(z) − onehot(target))·weight`. The head calls this on chunks of supervised rows,
//! so that [tokens, vocabulary] is never held at once (as in Liger-Kernel, arXiv 2410.10989).

use rayon::prelude::*;

use super::vector;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, MemoryCategory, Tensor};

/// Eight bf16, which a thread of the GPU's kernel loads at once.
const VECTOR_BYTES: usize = 16;

/// More than the shared memory that the kernel declares itself: 32 floats.
const STATIC_SHARED_BYTES: usize = 1024;

/// `logits` [C, ≥V], of which the first `vocab` columns count, and targets `first..first + C` → `losses` of the same numbers, in nats.
/// With `weight`, `logits` become their gradient times `weight` (padding columns 0).
pub fn forward_backward_in_place(
    device: &Device,
    logits: &mut Tensor,
    vocab: usize,
    targets: &Indices,
    first: usize,
    weight: Option<f32>,
    losses: &mut Tensor,
) {
    let (rows, stride) = (logits.rows(), logits.cols());
    assert!(
        vocab <= stride && first + rows <= targets.len() && targets.len() == losses.len(),
        "shapes of cross_entropy"
    );
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let (targets, losses) = (&targets.i32s()[first..first + rows], &mut losses.f32s_mut()[first..first + rows]);
            let rows = logits.f32s_mut().par_chunks_exact_mut(stride).zip(targets).zip(losses);
            rows.for_each(|((z, &target), loss)| {
                let (z, padding) = z.split_at_mut(vocab);
                let (max, target, target_logit) = (vector::max(z), target as usize, z[target as usize]);
                let sum = match weight {
                    None => vector::sum_exp(z, max),
                    Some(weight) => {
                        let sum = vector::exp_in_place(z, max);
                        let scale = weight / sum;
                        z.iter_mut().for_each(|z| *z *= scale);
                        z[target] -= weight;
                        precision.round_slice(z);
                        padding.fill(0.0);
                        sum
                    }
                };
                *loss = max + sum.ln() - target_logit;
            });
        }
        Device::Cuda(gpu) => {
            let offset = 4 * first as u64;
            let (targets, losses) = (targets.pointer() + offset, losses.pointer() + offset);
            let weight = weight.unwrap_or(0.0);
            // A gradient is made in a second pass, over as much of the row as shared memory holds; the rest is read again.
            let room = gpu.facts().max_shared_bytes as usize - STATIC_SHARED_BYTES;
            let kept = if weight == 0.0 { 0 } else { (vocab / 8).min(room / VECTOR_BYTES) };
            let shared_bytes = (kept * VECTOR_BYTES) as u32;
            gpu.allow_shared_bytes("cross_entropy", shared_bytes);
            let args =
                kernel_args![logits.pointer(), targets, losses, vocab as i32, stride as i64, weight, kept as i32];
            gpu.launch("cross_entropy", Launch { shared_bytes, ..Launch::new(rows, 1024) }, args);
        }
    }
}

/// Sum of token losses over the micro-batches of a step: on the host for the CPU, in device memory for a GPU, so that nobody waits for it.
#[derive(Debug)]
pub enum LossSum {
    /// The sum, in f64.
    Host(f64),
    /// The sum, f32 [1].
    Device(Tensor),
}

impl LossSum {
    /// A sum of nothing.
    pub fn new(device: &Device) -> Self {
        match device {
            Device::Cpu(_) => Self::Host(0.0),
            Device::Cuda(_) => Self::Device(device.zeros_f32(MemoryCategory::Workspace, &[1])),
        }
    }

    /// Adds the losses of some rows.
    pub fn add(&mut self, device: &Device, losses: &Tensor) {
        match (self, device) {
            (Self::Host(sum), _) => *sum += losses.f32s().iter().map(|&loss| f64::from(loss)).sum::<f64>(),
            (Self::Device(sum), Device::Cuda(gpu)) => {
                let args = kernel_args![losses.pointer(), sum.pointer(), losses.len() as i32];
                gpu.launch("add_sum", Launch::new(1, 1024), args);
            }
            (Self::Device(_), Device::Cpu(_)) => unreachable!("a sum on a GPU with losses on the CPU"),
        }
    }

    /// The sum. From a GPU this waits for the device.
    pub fn read(&self) -> f64 {
        match self {
            Self::Host(sum) => *sum,
            Self::Device(sum) => f64::from(sum.to_vec()[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_gradient, cpu};

    #[test]
    fn gradient_agrees_with_finite_differences() {
        let device = cpu(2);
        let (rows, vocab, targets) = (3, 19, [4, 0, 18]);
        let z0 = Values::new(4).vec(rows * vocab);
        let run = |z: &[f32], weight| {
            let mut z = device.tensor(MemoryCategory::Workspace, &[rows, vocab], z.to_vec());
            let targets = device.indices(MemoryCategory::Metadata, targets.to_vec());
            let mut losses = device.empty_f32(MemoryCategory::Workspace, &[rows]);
            forward_backward_in_place(&device, &mut z, vocab, &targets, 0, weight, &mut losses);
            let mut sum = LossSum::new(&device);
            sum.add(&device, &losses);
            (sum.read(), z)
        };
        let (_, dz) = run(&z0, Some(0.25));
        assert_gradient("dz", &z0, dz.f32s(), |z| 0.25 * run(z, None).0);
        assert_eq!(run(&z0, None).1.f32s(), z0, "without a weight the logits stay");
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let device = cpu(1);
        let mut z = device.tensor(MemoryCategory::Workspace, &[1, 3], vec![1e4, -1e4, 0.0]);
        let mut losses = device.empty_f32(MemoryCategory::Workspace, &[1]);
        let targets = device.indices(MemoryCategory::Metadata, vec![0]);
        forward_backward_in_place(&device, &mut z, 3, &targets, 0, Some(1.0), &mut losses);
        assert_eq!(losses.f32s(), [0.0]);
        assert!(z.f32s().iter().all(|x| x.is_finite()));
    }
}
