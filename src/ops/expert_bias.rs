//! Biases of the router and of experts.
//!
//! Contract: [`add`] adds to what is there; [`gradient`] accumulates, as gradients of parameters do.

use rayon::prelude::*;

use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, Tensor, View};

/// `logits[t] += bias` for every row of `logits` f32 [T, E], `bias` [E] in the device's format.
pub fn add(device: &Device, bias: &Tensor, logits: &mut Tensor) {
    let width = logits.cols();
    assert_eq!(bias.len(), width, "a bias of another width");
    match device {
        Device::Cpu(_) => {
            for row in logits.f32s_mut().chunks_exact_mut(width) {
                row.iter_mut().zip(bias.f32s()).for_each(|(logit, bias)| *logit += bias);
            }
        }
        Device::Cuda(gpu) => {
            let args = kernel_args![bias.pointer(), logits.pointer(), logits.len() as i64, width as i32];
            gpu.launch("expert_bias_add", Launch::elements(logits.len(), 1), args);
        }
    }
}

/// `dbias[e] += Σ dy[p]` over the rows p of each expert, `dy` [R, N], `dbias` f32 [E, N]. With `weights` (which pair each row is, and f32 weights of
/// pairs) rows are weighted: `weights[source[p]]·dy[p]`.
pub fn gradient(
    device: &Device,
    dy: View<'_>,
    offsets: &Indices,
    weights: Option<(&Indices, &Tensor)>,
    dbias: &mut Tensor,
) {
    let (width, experts) = (dy.cols(), offsets.len() - 1);
    assert_eq!(dbias.len(), experts * width, "shapes of the gradient of expert biases");
    assert!(weights.is_none_or(|(source, _)| source.len() == dy.rows()), "a weight a row");
    match device {
        Device::Cpu(_) => {
            let weights = weights.map(|(source, weights)| (source.i32s(), weights.f32s()));
            dbias.f32s_mut().par_chunks_mut(width).zip(offsets.i32s().par_windows(2)).for_each(|(sums, rows)| {
                for p in rows[0] as usize..rows[1] as usize {
                    let weight = weights.map_or(1.0, |(source, weights)| weights[source[p] as usize]);
                    sums.iter_mut().zip(dy.row(p)).for_each(|(sum, x)| *sum += weight * x);
                }
            });
        }
        Device::Cuda(gpu) => {
            let (source, weights) = weights.map_or((0, 0), |(source, weights)| (source.pointer(), weights.pointer()));
            let grid = [width.div_ceil(256) as u32, experts as u32, 1];
            let args = kernel_args![
                dy.pointer(),
                offsets.pointer(),
                source,
                weights,
                dbias.pointer(),
                width as i32,
                dy.stride() as i64
            ];
            gpu.launch("expert_bias_gradient", Launch { grid, ..Launch::new(1, 256) }, args);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_close, cpu};
    use crate::tensor::MemoryCategory;

    #[test]
    fn rows_are_summed_by_expert_with_their_weights() {
        let device = cpu(2);
        let mut values = Values::new(3);
        let (dy, weights) = (values.tensor(&device, &[5, 3]), values.tensor(&device, &[5]));
        let indices = |data: &[i32]| device.indices(MemoryCategory::Metadata, data.to_vec());
        // The second expert has no row.
        let (offsets, source) = (indices(&[0, 2, 2, 5]), indices(&[4, 0, 3, 1, 2]));
        for weighted in [false, true] {
            let mut sums = values.tensor(&device, &[3, 3]);
            let mut want = sums.f32s().to_vec();
            for (p, &expert) in [0, 0, 2, 2, 2].iter().enumerate() {
                let weight = if weighted { weights.f32s()[source.i32s()[p] as usize] } else { 1.0 };
                (0..3).for_each(|i| want[3 * expert + i] += weight * dy.f32s()[3 * p + i]);
            }
            gradient(&device, dy.view(), &offsets, weighted.then_some((&source, &weights)), &mut sums);
            assert_close("bias gradients", sums.f32s(), &want, 1e-6);
        }
        let mut logits = device.zeros(MemoryCategory::Workspace, &[2, 3]);
        let bias = values.tensor(&device, &[3]);
        add(&device, &bias, &mut logits);
        assert_eq!(logits.f32s(), [bias.f32s(), bias.f32s()].concat());
    }
}
