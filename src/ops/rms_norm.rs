//! RMSNorm over the last dimension: `y = w ⊙ x·rstd`, `rstd = (mean(x²) + eps)^-1/2`.
//!
//! `x·rstd` is rounded to the storage format before it is multiplied by `w` (as Llama, Mistral and Qwen do in Transformers), or the product
//! alone is rounded ([`NormRounding`]). The backward pass is in f32 up to its result, so it is the same for both. Saved for the backward pass: `x` and `rstd`. Backward: `dx = rstd·(w⊙dy) − x·rstd³/H·Σ(w⊙dy⊙x)`, `dw += Σ_rows dy⊙x·rstd`.

use rayon::prelude::*;

use super::vector::dot;
use super::{MIN_ROWS_PER_TASK, elementwise};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, MemoryCategory, Precision, Tensor, View, ViewMut};

/// Rows whose weight gradients are added up before they meet the others: fixed, so that the sum does not depend on threads.
const ROWS_PER_PARTIAL: usize = 64;

/// When a norm rounds to the storage format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NormRounding {
    /// `x·rstd`, and its product with the weight once more (Llama, Mistral, Qwen).
    #[default]
    BeforeWeight,
    /// The product with the weight only, which is made in f32 (gpt-oss).
    AfterWeight,
}

/// `x` [R, H] (rows without a gap), `weight` [H] → `y` [R, H], `rstd` [R].
pub fn forward<'x, 'y>(
    device: &Device,
    x: impl Into<View<'x>>,
    weight: &Tensor,
    (eps, rounding): (f32, NormRounding),
    y: impl Into<ViewMut<'y>>,
    rstd: &mut Tensor,
) {
    let (x, mut y, width) = (x.into(), y.into(), weight.len());
    assert!(x.is_contiguous(), "rms_norm reads rows that follow each other without a gap");
    assert_eq!((x.rows(), x.cols(), y.cols(), rstd.len()), (y.rows(), width, width, x.rows()), "shapes of rms_norm");
    match device {
        Device::Cpu(cpu) => {
            let (precision, weight, stride) = (cpu.precision(), weight.f32s(), y.stride());
            let rows = y.f32s_mut().par_chunks_mut(stride).zip(x.f32s().par_chunks_exact(width));
            rows.zip(rstd.f32s_mut().par_iter_mut()).with_min_len(MIN_ROWS_PER_TASK).for_each(|((y, x), rstd)| {
                *rstd = normalize((precision, rounding), x, weight, eps, &mut y[..width]);
            });
        }
        Device::Cuda(gpu) => {
            let rows = x.rows() as i64;
            let (kernel, launch) = forward_layout(rows, width);
            let (x, weight, y_stride) = (x.pointer(), weight.pointer(), y.stride() as i64);
            let after_weight = i32::from(rounding == NormRounding::AfterWeight);
            let args =
                kernel_args![x, weight, y.pointer(), rstd.pointer(), rows, width as i32, y_stride, eps, after_weight];
            gpu.launch(kernel, launch, args);
        }
    }
}

/// `rstd` of one row on the CPU.
pub(super) fn rstd(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// One row on the CPU; returns its `rstd`.
pub(super) fn normalize(
    (precision, rounding): (Precision, NormRounding),
    x: &[f32],
    weight: &[f32],
    eps: f32,
    y: &mut [f32],
) -> f32 {
    let rstd = rstd(x, eps);
    let first = if rounding == NormRounding::BeforeWeight { precision } else { Precision::F32 };
    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
        *y = precision.round(first.round(x * rstd) * w);
    }
    rstd
}

/// Backward of one row on the CPU: calls `write(number, value)` with the rounded gradient of each value; `wdy` is scratch.
pub(super) fn gradient(
    precision: Precision,
    dy: &[f32],
    x: &[f32],
    weight: &[f32],
    rstd: f32,
    wdy: &mut Vec<f32>,
    mut write: impl FnMut(usize, f32),
) {
    wdy.clear();
    wdy.extend(dy.iter().zip(weight).map(|(dy, w)| w * dy));
    let scale = dot(wdy, x) * rstd * rstd * rstd / x.len() as f32;
    for (i, (x, wdy)) in x.iter().zip(wdy.iter()).enumerate() {
        write(i, precision.round(rstd * wdy - x * scale));
    }
}

/// Backward of [`forward`]: `dx` assigned (or, with `accumulate`, added to what it holds); `dweight` [H], if given, accumulates.
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
pub fn backward<'x, 'd>(
    device: &Device,
    dy: &Tensor,
    x: impl Into<View<'x>>,
    weight: &Tensor,
    rstd: &Tensor,
    accumulate: bool,
    dx: impl Into<ViewMut<'d>>,
    dweight: Option<&mut Tensor>,
) {
    let (x, mut dx, width) = (x.into(), dx.into(), weight.len());
    assert!(x.is_contiguous(), "rms_norm reads rows that follow each other without a gap");
    let shape = (x.rows(), width);
    assert_eq!(((dx.rows(), dx.cols()), (dy.rows(), dy.cols())), (shape, shape), "shapes of rms_norm backward");
    assert_eq!((x.cols(), rstd.len()), (width, x.rows()), "shapes of rms_norm backward");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            if let Some(dweight) = dweight {
                weight_gradient(dy.f32s(), x.f32s(), rstd.f32s(), dweight.f32s_mut());
            }
            let (weight, rstd, stride) = (weight.f32s(), rstd.f32s(), dx.stride());
            let rows = dx.f32s_mut().par_chunks_mut(stride).zip(x.f32s().par_chunks_exact(width));
            let rows = rows.zip(dy.f32s().par_chunks_exact(width)).zip(rstd.par_iter());
            rows.with_min_len(MIN_ROWS_PER_TASK).for_each_init(Vec::new, |wdy, (((dx, x), dy), &rstd)| {
                gradient(precision, dy, x, weight, rstd, wdy, |i, value| {
                    dx[i] = if accumulate { precision.round(dx[i] + value) } else { value };
                });
            });
        }
        Device::Cuda(gpu) => {
            let rows = x.rows() as i64;
            if let Some(dweight) = dweight {
                let runs = (rows as usize).div_ceil(ROWS_PER_PARTIAL);
                let partials = device.empty_f32(MemoryCategory::Workspace, &[runs, width]);
                let grid = Launch { grid: [runs as u32, width.div_ceil(256) as u32, 1], ..Launch::new(1, 256) };
                let args =
                    kernel_args![dy.pointer(), x.pointer(), rstd.pointer(), partials.pointer(), rows, width as i32];
                gpu.launch("rms_norm_weight_partials", grid, args);
                elementwise::add_partials(gpu, &partials, dweight);
            }
            let (kernel, launch) = backward_layout(rows, width);
            let (dy, x, weight, rstd) = (dy.pointer(), x.pointer(), weight.pointer(), rstd.pointer());
            let (dx_stride, accumulate) = (dx.stride() as i64, i32::from(accumulate));
            let args = kernel_args![dy, x, weight, rstd, dx.pointer(), rows, width as i32, dx_stride, accumulate];
            gpu.launch(kernel, launch, args);
        }
    }
}

/// The forward kernel for rows of `width` values and its grid: up to 8,192 values some warps keep a row in their registers, beyond that a block has
/// a row.
fn forward_layout(rows: i64, width: usize) -> (&'static str, Launch) {
    let (kernel, rows_a_block) = match width {
        0..=1024 => ("rms_norm_forward_1024", 8),
        1025..=2048 => ("rms_norm_forward_2048", 8),
        2049..=4096 => ("rms_norm_forward_4096", 4),
        4097..=8192 => ("rms_norm_forward_8192", 2),
        _ => return ("rms_norm_forward_block", Launch::new(rows as usize, 512)),
    };
    (kernel, Launch::new((rows as usize).div_ceil(rows_a_block), 256))
}

/// As [`forward_layout`] for the backward pass: a warp a row up to 1,024 values, a block a row beyond.
fn backward_layout(rows: i64, width: usize) -> (&'static str, Launch) {
    if width <= 1024 {
        ("rms_norm_backward_warp", Launch::new((rows as usize).div_ceil(8), 256))
    } else {
        let threads = (width / 8).next_multiple_of(32).min(512);
        ("rms_norm_backward_block", Launch::new(rows as usize, threads as u32))
    }
}

pub(super) fn weight_gradient(dy: &[f32], x: &[f32], rstd: &[f32], dweight: &mut [f32]) {
    let width = dweight.len();
    let block = ROWS_PER_PARTIAL * width;
    let partials: Vec<Vec<f32>> = dy
        .par_chunks(block)
        .zip(x.par_chunks(block))
        .zip(rstd.par_chunks(ROWS_PER_PARTIAL))
        .map(|((dy, x), rstd)| {
            let mut partial = vec![0.0; width];
            for ((dy, x), rstd) in dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(rstd) {
                for ((p, dy), x) in partial.iter_mut().zip(dy).zip(x) {
                    *p += dy * x * rstd;
                }
            }
            partial
        })
        .collect();
    for partial in partials {
        for (dw, p) in dweight.iter_mut().zip(partial) {
            *dw += p;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{NormRounding, backward, forward};
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
    use crate::tensor::{Device, MemoryCategory, Precision};

    #[test]
    fn backward_agrees_with_finite_differences() {
        let device = cpu(2);
        let mut v = Values::new(3);
        let (rows, width) = (5, 12);
        let (x, w, dy) =
            (v.tensor(&device, &[rows, width]), v.tensor(&device, &[width]), v.tensor(&device, &[rows, width]));
        let run = |x: &[f32], w: &[f32]| {
            let (x, w) = (
                device.tensor(dy.category(), &[rows, width], x.to_vec()),
                device.tensor(dy.category(), &[width], w.to_vec()),
            );
            let mut y = device.empty(dy.category(), &[rows, width]);
            let mut rstd = device.empty(dy.category(), &[rows]);
            forward(&device, &x, &w, (1e-5, NormRounding::BeforeWeight), &mut y, &mut rstd);
            (y, rstd)
        };
        let (_, rstd) = run(x.f32s(), w.f32s());
        let mut dx = v.tensor(&device, &[rows, width]);
        let mut dw = v.tensor(&device, &[width]);
        let dw_before = dw.f32s().to_vec();
        backward(&device, &dy, &x, &w, &rstd, false, &mut dx, Some(&mut dw));
        assert_gradient("dx", x.f32s(), dx.f32s(), |x| dot(dy.f32s(), run(x, w.f32s()).0.f32s()));
        let added: Vec<f32> = dw.f32s().iter().zip(&dw_before).map(|(a, b)| a - b).collect();
        assert_gradient("dw", w.f32s(), &added, |w| dot(dy.f32s(), run(x.f32s(), w).0.f32s()));

        let assigned = dx.f32s().to_vec();
        backward(&device, &dy, &x, &w, &rstd, true, &mut dx, None);
        let doubled: Vec<f32> = assigned.iter().map(|x| 2.0 * x).collect();
        assert_close("accumulated dx", dx.f32s(), &doubled, 1e-6);
    }

    #[test]
    fn both_roundings_are_those_of_their_definitions() {
        let scratch = MemoryCategory::Workspace;
        let device = Device::cpu(1, Precision::Bf16).unwrap();
        let (rows, width) = (3, 40);
        let mut v = Values::new(8);
        let round = |x: f32| Precision::Bf16.round(x);
        let [x, w] = [rows * width, width].map(|len| v.vec(len).into_iter().map(round).collect::<Vec<f32>>());
        let run = |rounding| {
            let (x, w) =
                (device.tensor(scratch, &[rows, width], x.clone()), device.tensor(scratch, &[width], w.clone()));
            let mut y = device.empty(scratch, &[rows, width]);
            let mut rstd = device.empty(scratch, &[rows]);
            forward(&device, &x, &w, (1e-5, rounding), &mut y, &mut rstd);
            (y.to_vec(), rstd.to_vec())
        };
        let (before, rstd) = run(NormRounding::BeforeWeight);
        let (after, _) = run(NormRounding::AfterWeight);
        let each = |i: usize| (x[i] * rstd[i / width], w[i % width]);
        let want =
            |f: &dyn Fn(f32, f32) -> f32| (0..rows * width).map(|i| f(each(i).0, each(i).1)).collect::<Vec<f32>>();
        assert_eq!(before, want(&|x, w| round(round(x) * w)));
        assert_eq!(after, want(&|x, w| round(x * w)));
        assert_ne!(before, after);
    }
}
