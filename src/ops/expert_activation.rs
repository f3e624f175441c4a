//! The activation between an expert's two products, and its gradient together with that of the expert's weight.
//!
//! - [`Gating::Silu`]: `h = silu(e)·g`, as in [`super::swiglu`].
//! - [`Gating::Clamped`] (gpt-oss): `e = min(gate, limit)`, `g = clamp(up, ±limit)`, `h = (g + 1)·e·σ(alpha·e)`.
//!
//! Saved: gate and up. Where Transformers casts (`GptOssExperts` computes each of `alpha·e`, `σ`, `e·σ` and `g + 1` in the format of its tensors),
//! values are rounded to the storage format; gradients are rounded once, at the end. Gradients of activations assign.

use std::mem::offset_of;

use rayon::prelude::*;

use super::min_rows;
use super::vector::{self, exp, vectorized};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, Precision, Tensor, View, ViewMut};

/// Threads of a block of the backward pass at most.
const MAX_THREADS: usize = 256;

/// How gate and up make the activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// `silu(gate)·up`.
    Silu,
    /// `(clamp(up) + 1)·clamp(gate)·σ(alpha·clamp(gate))`.
    Clamped {
        /// Steepness of the sigmoid: 1.702 in gpt-oss.
        alpha: f32,
        /// Greatest gate, and greatest magnitude of up: 7 in gpt-oss.
        limit: f32,
    },
}

impl Gating {
    /// That of gpt-oss.
    pub const GPT_OSS: Self = Self::Clamped { alpha: 1.702, limit: 7.0 };

    /// `alpha` and `limit` for a kernel; a limit of 0 stands for silu.
    fn arguments(self) -> (f32, f32) {
        match self {
            Self::Silu => (1.0, 0.0),
            Self::Clamped { alpha, limit } => (alpha, limit),
        }
    }
}

/// An expert's activation, and how its gate and up lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertActivation {
    /// What is computed.
    pub kind: Gating,
    /// Whether columns of gate and up take turns, gate first (gpt-oss); else gate is the first half of the columns and up the second.
    pub interleaved: bool,
}

impl ExpertActivation {
    /// Gate and up of a row, one behind the other.
    fn halves<'a>(self, row: &'a [f32], scratch: &'a mut [f32]) -> (&'a [f32], &'a [f32]) {
        let width = row.len() / 2;
        if !self.interleaved {
            return row.split_at(width);
        }
        let (gate, up) = scratch.split_at_mut(width);
        for ((pair, gate), up) in row.as_chunks::<2>().0.iter().zip(&mut *gate).zip(&mut *up) {
            [*gate, *up] = *pair;
        }
        (gate, up)
    }

    /// Puts gate and up back into their row.
    fn put(self, gate: &[f32], up: &[f32], row: &mut [f32]) {
        if self.interleaved {
            let pairs = row.as_chunks_mut::<2>().0.iter_mut();
            pairs.zip(gate).zip(up).for_each(|((pair, gate), up)| *pair = [*gate, *up]);
        } else {
            let (to_gate, to_up) = row.split_at_mut(gate.len());
            to_gate.copy_from_slice(gate);
            to_up.copy_from_slice(up);
        }
    }
}

/// The smaller; NaN stays.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// The greater; NaN stays.
#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

vectorized! {
    /// The activation of a row, rounded as it is stored.
    fn activate(kind: Gating, precision: Precision, gate: &[f32], up: &[f32], h: &mut [f32]) {
        let values = h.iter_mut().zip(gate).zip(up);
        match kind {
            Gating::Silu => {
                for ((h, &e), &g) in values {
                    *h = precision.round(precision.round(e * sigmoid(e)) * g);
                }
            }
            Gating::Clamped { alpha, limit } => {
                for ((h, &e), &g) in values {
                    let (e, g) = (at_most(e, limit), at_least(at_most(g, limit), -limit));
                    let glu = precision.round(e * precision.round(sigmoid(precision.round(alpha * e))));
                    *h = precision.round(precision.round(g + 1.0) * glu);
                }
            }
        }
    }
}

vectorized! {
    /// In place: `gate` and `up` of a row become their gradients, from `dh`.
    fn gradients(kind: Gating, dh: &[f32], gate: &mut [f32], up: &mut [f32]) {
        let values = gate.iter_mut().zip(up).zip(dh);
        match kind {
            Gating::Silu => {
                for ((gate, up), &dh) in values {
                    let (e, g) = (*gate, *up);
                    let s = sigmoid(e);
                    *gate = dh * g * s * (1.0 + e * (1.0 - s));
                    *up = dh * e * s;
                }
            }
            Gating::Clamped { alpha, limit } => {
                for ((gate, up), &dh) in values {
                    let (e, g) = (at_most(*gate, limit), at_least(at_most(*up, limit), -limit));
                    let s = sigmoid(alpha * e);
                    let (d_gate, d_up) = (dh * (g + 1.0) * s * (1.0 + alpha * e * (1.0 - s)), dh * e * s);
                    *gate = if *gate > limit { 0.0 } else { d_gate };
                    *up = if up.abs() > limit { 0.0 } else { d_up };
                }
            }
        }
    }
}

/// `gate_up` [R, 2·I] → `h` [R, I].
pub fn forward<'x, 'h>(
    device: &Device,
    act: ExpertActivation,
    gate_up: impl Into<View<'x>>,
    h: impl Into<ViewMut<'h>>,
) {
    let (gate_up, mut h) = (gate_up.into(), h.into());
    let width = h.cols();
    assert_eq!((gate_up.rows(), gate_up.cols()), (h.rows(), 2 * width), "shapes of an expert's activation");
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), h.stride());
            let rows = h.f32s_mut().par_chunks_mut(stride).zip(gate_up.f32s().par_chunks(gate_up.stride()));
            let rows = rows.with_min_len(min_rows(width));
            rows.for_each_init(
                || vec![0.0; 2 * width],
                |scratch, (h, gate_up)| {
                    let (gate, up) = act.halves(&gate_up[..2 * width], scratch);
                    activate(act.kind, precision, gate, up, &mut h[..width]);
                },
            );
        }
        Device::Cuda(gpu) => {
            assert!(in_vectors(width, &[gate_up.stride(), h.stride()]), "experts of a width in vectors of eight");
            let (rows, (alpha, limit)) = (h.rows(), act.kind.arguments());
            let args = kernel_args![
                gate_up.pointer(),
                h.pointer(),
                rows as i64,
                width as i32,
                gate_up.stride() as i64,
                h.stride() as i64,
                i32::from(act.interleaved),
                alpha,
                limit,
            ];
            gpu.launch("expert_activation", Launch::elements(rows * (width / 8), 1), args);
        }
    }
}

/// Backward of [`forward`] and of the weighting behind it, in one pass. `u` [R, I] is the gradient of h before it was weighted (`W_dᵀ·dy`). For a
/// sorted row p with pair q = `source[p]`, and h made again of gate and up:
/// - `dweights[q] = ⟨u[p], h[p]⟩`, f32 [T, k], assigned;
/// - `gate_up[p]` becomes its gradient, from `weights[q]·u[p]`;
/// - where wanted, `h[p]` [R, I] becomes `weights[q]·h[p]`, rounded: what the gradients of the down projection are made of.
#[allow(clippy::too_many_arguments)]
pub fn backward_in_place<'u, 'x>(
    device: &Device,
    act: ExpertActivation,
    u: impl Into<View<'u>>,
    source: &Indices,
    weights: &Tensor,
    gate_up: impl Into<ViewMut<'x>>,
    dweights: &mut Tensor,
    h: Option<ViewMut<'_>>,
) {
    let (u, mut gate_up) = (u.into(), gate_up.into());
    let (rows, width) = (u.rows(), u.cols());
    assert!(
        (gate_up.rows(), gate_up.cols()) == (rows, 2 * width)
            && source.len() == rows
            && weights.len() == rows
            && dweights.len() == rows
            && h.as_ref().is_none_or(|h| (h.rows(), h.cols()) == (rows, width)),
        "shapes of an expert's activation backward"
    );
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let (stride, h_stride) = (gate_up.stride(), h.as_ref().map_or(1, ViewMut::stride));
            let one_row = |scratch: &mut Vec<f32>, p: usize, gate_up: &mut [f32], h: Option<&mut [f32]>| {
                let (u, weight) = (u.row(p), weights.f32s()[source.i32s()[p] as usize]);
                let (halves, rest) = scratch.split_at_mut(2 * width);
                let (value, dh) = rest.split_at_mut(width);
                {
                    let (gate, up) = act.halves(&gate_up[..2 * width], halves);
                    activate(act.kind, precision, gate, up, value);
                }
                if !act.interleaved {
                    halves.copy_from_slice(&gate_up[..2 * width]);
                }
                dh.iter_mut().zip(u).for_each(|(dh, u)| *dh = weight * u);
                let (gate, up) = halves.split_at_mut(width);
                gradients(act.kind, dh, gate, up);
                precision.round_slice(gate);
                precision.round_slice(up);
                act.put(gate, up, &mut gate_up[..2 * width]);
                if let Some(h) = h {
                    h.iter_mut().zip(&*value).for_each(|(h, value)| *h = precision.round(weight * value));
                }
                vector::dot(u, value)
            };
            let scratch = || vec![0.0; 4 * width];
            let lines = gate_up.f32s_mut().par_chunks_mut(stride).enumerate().with_min_len(min_rows(width));
            let dots: Vec<f32> = match h {
                Some(mut h) => {
                    let h = h.f32s_mut().par_chunks_mut(h_stride);
                    lines
                        .zip(h)
                        .map_init(scratch, |scratch, ((p, gate_up), h)| {
                            one_row(scratch, p, gate_up, Some(&mut h[..width]))
                        })
                        .collect()
                }
                None => lines.map_init(scratch, |scratch, (p, gate_up)| one_row(scratch, p, gate_up, None)).collect(),
            };
            let dweights = dweights.f32s_mut();
            dots.iter().zip(source.i32s()).for_each(|(dot, pair)| dweights[*pair as usize] = *dot);
        }
        Device::Cuda(gpu) => {
            let (h, h_stride) = h.map_or((0, 0), |h| (h.pointer(), h.stride()));
            assert!(
                in_vectors(width, &[u.stride(), gate_up.stride(), h_stride]),
                "experts of a width in vectors of eight"
            );
            let (alpha, limit) = act.kind.arguments();
            let params = BackwardParams {
                u: u.pointer(),
                source: source.pointer(),
                weights: weights.pointer(),
                gate_up: gate_up.pointer(),
                dweights: dweights.pointer(),
                h,
                u_stride: u.stride() as i64,
                gate_up_stride: gate_up.stride() as i64,
                h_stride: h_stride as i64,
                width: width as i32,
                interleaved: i32::from(act.interleaved),
                alpha,
                limit,
            };
            // A block a row, whose threads have equally many runs of eight values.
            let runs = (width / 8).max(1);
            let threads = runs.div_ceil(runs.div_ceil(MAX_THREADS)).next_multiple_of(32);
            gpu.launch_struct("expert_activation_backward", Launch::new(rows, threads as u32), &params);
        }
    }
}

/// The arguments of the backward pass, laid out as in `kernels/expert_activation.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BackwardParams {
    u: u64,
    source: u64,
    weights: u64,
    gate_up: u64,
    dweights: u64,
    h: u64,
    u_stride: i64,
    gate_up_stride: i64,
    h_stride: i64,
    width: i32,
    interleaved: i32,
    alpha: f32,
    limit: f32,
}

const _: () = assert!(size_of::<BackwardParams>() == 88 && offset_of!(BackwardParams, width) == 72);

/// Whether rows can be read and written eight values at a time.
fn in_vectors(width: usize, strides: &[usize]) -> bool {
    width.is_multiple_of(8) && strides.iter().all(|stride| stride.is_multiple_of(8))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
    use crate::tensor::MemoryCategory;

    const SCRATCH: MemoryCategory = MemoryCategory::Workspace;
    const ACTS: [ExpertActivation; 4] = [
        ExpertActivation { kind: Gating::Silu, interleaved: false },
        ExpertActivation { kind: Gating::Silu, interleaved: true },
        // A limit that values of order 1 reach, too.
        ExpertActivation { kind: Gating::Clamped { alpha: 1.702, limit: 0.75 }, interleaved: true },
        ExpertActivation { kind: Gating::GPT_OSS, interleaved: false },
    ];

    /// Values that are not so near to a limit that finite differences cross it.
    fn off_limits(v: &mut Values, len: usize) -> Vec<f32> {
        v.vec(len).into_iter().map(|x| if (x.abs() - 0.75).abs() < 0.02 { x * 0.9 } else { x }).collect()
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        let device = cpu(2);
        let mut v = Values::new(31);
        for act in ACTS {
            for (tokens, k, width) in [(1, 1, 1), (3, 2, 7), (5, 2, 16)] {
                let rows = tokens * k;
                // Any order of the pairs.
                let source: Vec<i32> = (0..rows as i32).rev().collect();
                let source = device.indices(SCRATCH, source);
                let start = off_limits(&mut v, rows * 2 * width);
                let (weights, u) = (v.vec(rows), v.tensor(&device, &[rows, width]));
                let loss = |gate_up: &[f32], weights: &[f32]| {
                    let gate_up = device.tensor(SCRATCH, &[rows, 2 * width], gate_up.to_vec());
                    let mut h = device.empty(SCRATCH, &[rows, width + 1]);
                    forward(&device, act, &gate_up, h.first_columns_mut(width));
                    let row = |p: usize| {
                        let weight = weights[source.i32s()[p] as usize];
                        f64::from(weight) * dot(u.view().row(p), h.first_columns(width).row(p))
                    };
                    (0..rows).map(row).sum::<f64>()
                };
                // Rows with room behind them.
                let mut gate_up = device.zeros(SCRATCH, &[rows, 2 * width + 3]);
                gate_up.first_columns_mut(2 * width).set(&start);
                let at = device.tensor_f32(SCRATCH, &[tokens, k], weights.clone());
                let mut dweights = device.empty_f32(SCRATCH, &[tokens, k]);
                let mut h = device.zeros(SCRATCH, &[rows, width + 2]);
                let weighted = Some(h.first_columns_mut(width));
                let into = gate_up.first_columns_mut(2 * width);
                backward_in_place(&device, act, &u, &source, &at, into, &mut dweights, weighted);
                let d_gate_up = gate_up.first_columns(2 * width).to_vec();
                assert_gradient("gate and up", &start, &d_gate_up, |x| loss(x, &weights));
                assert_gradient("weights", &weights, dweights.f32s(), |w| loss(&start, w));
                assert!(gate_up.f32s().chunks(2 * width + 3).all(|row| row[2 * width..] == [0.0; 3]));

                // The same without h, and h is the activation times the weight.
                let mut again = device.tensor(SCRATCH, &[rows, 2 * width], start.clone());
                let mut activation = device.empty(SCRATCH, &[rows, width]);
                forward(&device, act, &again, &mut activation);
                for p in 0..rows {
                    let weight = weights[source.i32s()[p] as usize];
                    let want: Vec<f32> = activation.view().row(p).iter().map(|x| weight * x).collect();
                    assert_eq!(h.first_columns(width).row(p), want);
                }
                let mut dweights_again = device.empty_f32(SCRATCH, &[tokens, k]);
                backward_in_place(&device, act, &u, &source, &at, &mut again, &mut dweights_again, None);
                assert_eq!((again.f32s(), dweights_again.f32s()), (d_gate_up.as_slice(), dweights.f32s()));
            }
        }
    }

    #[test]
    fn what_is_beyond_the_limit_has_no_gradient() {
        let device = cpu(1);
        let act = ExpertActivation { kind: Gating::GPT_OSS, interleaved: true };
        let mut gate_up = device.tensor(SCRATCH, &[3, 2], vec![9.0, 1.0, -9.0, 8.0, 1.0, -7.5]);
        let mut h = device.empty(SCRATCH, &[3, 1]);
        forward(&device, act, &gate_up, &mut h);
        let sigma = |x: f32| 1.0 / (1.0 + (-1.702 * x).exp());
        assert_close("h", h.f32s(), &[2.0 * 7.0 * sigma(7.0), 8.0 * -9.0 * sigma(-9.0), -6.0 * sigma(1.0)], 1e-6);
        let u = device.tensor(SCRATCH, &[3, 1], vec![1.0; 3]);
        let source = device.indices(SCRATCH, vec![0, 1, 2]);
        let weights = device.tensor_f32(SCRATCH, &[3, 1], vec![1.0; 3]);
        let mut dweights = device.empty_f32(SCRATCH, &[3, 1]);
        backward_in_place(&device, act, &u, &source, &weights, &mut gate_up, &mut dweights, None);
        let is_zero: Vec<bool> = gate_up.f32s().iter().map(|x| *x == 0.0).collect();
        assert_eq!(is_zero, [true, false, false, true, false, true]);
    }

    #[test]
    fn each_step_of_the_clamped_form_is_rounded() {
        let (device, round) = (Device::cpu(1, Precision::Bf16).unwrap(), |x: f32| Precision::Bf16.round(x));
        let values: Vec<f32> = Values::new(9).vec(64).iter().map(|x| round(9.0 * x)).collect();
        let gate_up = device.tensor(SCRATCH, &[2, 32], values.clone());
        let mut h = device.empty(SCRATCH, &[2, 16]);
        forward(&device, ExpertActivation { kind: Gating::GPT_OSS, interleaved: true }, &gate_up, &mut h);
        for (pair, h) in values.chunks(2).zip(h.f32s()) {
            let (gate, up) = (pair[0].min(7.0), pair[1].clamp(-7.0, 7.0));
            let sigma = round(1.0 / (1.0 + (-round(1.702 * gate)).exp()));
            assert_eq!(*h, round(round(up + 1.0) * round(gate * sigma)), "{pair:?}");
        }
    }

    #[test]
    fn halves_and_turns_are_one_activation() {
        let device = Device::cpu(1, Precision::Bf16).unwrap();
        let mut v = Values::new(5);
        let (rows, width) = (4, 6);
        let halves: Vec<f32> = v.vec(rows * 2 * width).iter().map(|x| Precision::Bf16.round(9.0 * x)).collect();
        let turns: Vec<f32> =
            halves.chunks(2 * width).flat_map(|row| (0..width).flat_map(|i| [row[i], row[width + i]])).collect();
        for kind in [Gating::Silu, Gating::GPT_OSS] {
            let h = [(false, &halves), (true, &turns)].map(|(interleaved, values)| {
                let gate_up = device.tensor(SCRATCH, &[rows, 2 * width], values.clone());
                let mut h = device.empty(SCRATCH, &[rows, width]);
                forward(&device, ExpertActivation { kind, interleaved }, &gate_up, &mut h);
                h.to_vec()
            });
            assert_eq!(h[0], h[1]);
            assert!(h[0].iter().all(|x| Precision::Bf16.round(*x) == *x), "rounded as it is stored");
        }
        // The first form is that of a dense layer.
        let gate_up = device.tensor(SCRATCH, &[rows, 2 * width], halves.clone());
        let [mut ours, mut dense] = [(); 2].map(|()| device.empty(SCRATCH, &[rows, width]));
        forward(&device, ExpertActivation { kind: Gating::Silu, interleaved: false }, &gate_up, &mut ours);
        crate::ops::swiglu::forward(&device, &gate_up, &mut dense);
        assert_eq!(ours.f32s(), dense.f32s());
    }
}
