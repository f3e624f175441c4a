//! Routing of a mixture of experts: which experts a token goes to and with what weights, the rows that each expert gets, and their sum.
//!
//! T tokens, E experts, k experts a token: R = T·k pairs. Pair t·k + j is slot j of token t. Router logits and weights are f32 on every device.
//!
//! Saved: logits, experts and weights, and the [`Grouping`]. Gradients of activations assign; [`count`] accumulates. Nothing here reads the host:
//! offsets stay where they were made. No sum depends on the order in which blocks run.

mod grouping;
mod rows;

pub use grouping::{Grouping, find, group};
pub use rows::{combine, gather};

use std::mem::offset_of;

use rayon::prelude::*;

use super::{MIN_ROWS_PER_TASK, vector};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, MemoryCategory, Tensor, ViewMut};

/// Experts that the GPU's kernels take at most: a warp has a token's logits in registers.
pub const MAX_EXPERTS: usize = 256;
/// Experts a token that they take at most: each is a lane's.
pub const MAX_EXPERTS_PER_TOKEN: usize = 32;
/// Warps of a block, each with one token at a time.
const WARPS: usize = 8;
/// Blocks that count at most: their sums are then added one after another.
const MAX_COUNTING_BLOCKS: usize = 256;

/// What a chosen expert's weight is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterWeights {
    /// Softmax over the chosen experts' logits. It equals softmax over all, renormalized: gpt-oss, Mixtral, Qwen3-MoE with `norm_topk_prob`.
    Chosen,
    /// Softmax over all experts, not renormalized.
    All,
}

/// How many rows are tokens; those behind them are padding.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// So many, in every pass that a recording of this one does.
    Host(usize),
    /// As many as `[1]` holds when the device comes to it.
    Device(&'a Indices),
}

impl From<usize> for Rows<'_> {
    fn from(rows: usize) -> Self {
        Self::Host(rows)
    }
}

impl<'a> From<&'a Indices> for Rows<'a> {
    fn from(rows: &'a Indices) -> Self {
        Self::Device(rows)
    }
}

impl Rows<'_> {
    /// The number on the CPU, of `rows` at most.
    fn on_host(self, rows: usize) -> usize {
        match self {
            Self::Host(number) => number.min(rows),
            Self::Device(number) => (number.i32s()[0].max(0) as usize).min(rows),
        }
    }

    /// A number and an address for a kernel: where the address is not 0, the number lies there.
    fn arguments(self, rows: usize) -> (i32, u64) {
        match self {
            Self::Host(number) => (number.min(rows) as i32, 0),
            Self::Device(number) => (rows as i32, number.pointer()),
        }
    }
}

/// What an auxiliary loss adds to the gradient of the logits.
#[derive(Debug, Clone, Copy)]
pub struct Balance<'a> {
    /// Gradient of the loss by the probability of each expert, f32 [E]: the same for every row.
    pub gradient: &'a Tensor,
    /// The rows that count.
    pub rows: Rows<'a>,
}

/// T, E and k of a router's tensors.
fn shape(device: &Device, logits: &Tensor, experts: &Indices, k: usize) -> (usize, usize) {
    let (tokens, num_experts) = (logits.rows(), logits.cols());
    assert!(experts.len() == tokens * k && (1..=num_experts).contains(&k), "shapes of a router");
    if matches!(device, Device::Cuda(_)) {
        assert!(num_experts <= MAX_EXPERTS && k <= MAX_EXPERTS_PER_TOKEN, "a router that the kernels take");
    }
    (tokens, num_experts)
}

/// Orders logits as numbers: −0 as 0, NaN below all, so that there are always k different experts.
fn order(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        0
    } else if bits << 1 == 0 {
        1 << 31
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// The `experts.len()` greatest of `logits`, greatest first, of equal ones that with the lowest number first.
fn choose_row(logits: &[f32], experts: &mut [i32]) {
    let mut before = u64::MAX;
    for expert in experts {
        let ranks = logits.iter().zip(0u32..).map(|(&z, e)| u64::from(order(z)) << 32 | u64::from(u32::MAX - e));
        before = ranks.filter(|rank| *rank < before).max().unwrap_or_default();
        *expert = (u32::MAX - before as u32).cast_signed();
    }
}

/// `logits` f32 [T, E] → `experts` [T·k] by falling logit, of equal ones the lowest number first, and `weights` f32 [T, k]. With `given`, experts
/// are read instead of chosen: choices of another run are replayed.
pub fn choose(
    device: &Device,
    logits: &Tensor,
    how: RouterWeights,
    given: bool,
    experts: &mut Indices,
    weights: &mut Tensor,
) {
    let k = weights.cols();
    let (tokens, num_experts) = shape(device, logits, experts, k);
    assert_eq!(weights.rows(), tokens, "shapes of a router's weights");
    match device {
        Device::Cpu(_) => {
            let rows = weights.f32s_mut().par_chunks_exact_mut(k).zip(experts.i32s_mut().par_chunks_exact_mut(k));
            let rows = rows.zip(logits.f32s().par_chunks_exact(num_experts)).with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each(|((weights, experts), logits)| {
                if !given {
                    choose_row(logits, experts);
                }
                weights.iter_mut().zip(experts.iter()).for_each(|(w, e)| *w = logits[*e as usize]);
                let of = match how {
                    RouterWeights::Chosen => &*weights,
                    RouterWeights::All => logits,
                };
                let max = vector::max(of);
                let sum = vector::sum_exp(of, max);
                weights.iter_mut().for_each(|w| *w = vector::exp(*w - max) / sum);
            });
        }
        Device::Cuda(gpu) => {
            let (all, given) = (i32::from(how == RouterWeights::All), i32::from(given));
            let pointers = (logits.pointer(), experts.pointer(), weights.pointer());
            let args = kernel_args![
                pointers.0,
                pointers.1,
                pointers.2,
                tokens as i32,
                num_experts as i32,
                k as i32,
                all,
                given
            ];
            gpu.launch(&sized("router_choose", num_experts), a_warp_a_row(tokens), args);
        }
    }
}

/// Backward of [`choose`]: `dweights` f32 [T, k] → `dlogits` [T, ≥E], assigned, rounded to the storage format; columns from E on become 0.
///
/// `bias_dots` f32 [T, E], ⟨down bias of the expert, dy⟩, is added to the gradient of a weight at the column of its expert. `balance` adds
/// an auxiliary loss. With `d` the gradients of the weights:
/// - [`RouterWeights::Chosen`]: `dz_i = w_i·(d_i − Σ_j w_j·d_j)` for the chosen, 0 for the others;
/// - [`RouterWeights::All`]: `dz_i = p_i·(d_i − Σ_j p_j·d_j)` for all, `d` of the others 0;
/// - `balance`: `dz_i += p_i·(g_i − Σ p·g)` in rows that count.
#[allow(clippy::too_many_arguments)]
pub fn backward<'d>(
    device: &Device,
    logits: &Tensor,
    how: RouterWeights,
    experts: &Indices,
    weights: &Tensor,
    dweights: &Tensor,
    bias_dots: Option<&Tensor>,
    balance: Option<Balance<'_>>,
    dlogits: impl Into<ViewMut<'d>>,
) {
    let (k, mut dlogits) = (weights.cols(), dlogits.into());
    let (tokens, num_experts) = shape(device, logits, experts, k);
    let columns = dlogits.cols();
    assert!(
        weights.rows() == tokens
            && dweights.len() == weights.len()
            && dlogits.rows() == tokens
            && columns >= num_experts
            && bias_dots.is_none_or(|dots| (dots.rows(), dots.cols()) == (tokens, num_experts))
            && balance.is_none_or(|balance| balance.gradient.len() == num_experts),
        "shapes of a router's backward pass"
    );
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), dlogits.stride());
            let counted = balance.map_or(0, |balance| balance.rows.on_host(tokens));
            let rows = dlogits.f32s_mut().par_chunks_mut(stride).enumerate().with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each(|(t, dlogits)| {
                let (dlogits, padding) = dlogits[..columns].split_at_mut(num_experts);
                padding.fill(0.0);
                let logits = &logits.f32s()[t * num_experts..][..num_experts];
                let (experts, weights) = (&experts.i32s()[t * k..][..k], &weights.f32s()[t * k..][..k]);
                let d = |j: usize| {
                    let bias = bias_dots.map_or(0.0, |dots| dots.f32s()[t * num_experts + experts[j] as usize]);
                    dweights.f32s()[t * k + j] + bias
                };
                let sum: f32 = (0..k).map(|j| weights[j] * d(j)).sum();
                let balance = balance.filter(|_| t < counted);
                if balance.is_some() || how == RouterWeights::All {
                    // The probabilities lie in the result until they are used.
                    dlogits.copy_from_slice(logits);
                    let scale = 1.0 / vector::exp_in_place(dlogits, vector::max(logits));
                    dlogits.iter_mut().for_each(|p| *p *= scale);
                }
                let (gradient, mean) = match balance {
                    Some(balance) => (balance.gradient.f32s(), vector::dot(dlogits, balance.gradient.f32s())),
                    None => (&[][..], 0.0),
                };
                for (e, dz) in dlogits.iter_mut().enumerate() {
                    let p = *dz;
                    let of_weights = match (experts.iter().position(|chosen| *chosen as usize == e), how) {
                        (Some(j), _) => weights[j] * (d(j) - sum),
                        (None, RouterWeights::All) => -p * sum,
                        (None, RouterWeights::Chosen) => 0.0,
                    };
                    *dz = precision.round(of_weights + gradient.get(e).map_or(0.0, |g| p * (g - mean)));
                }
            });
        }
        Device::Cuda(gpu) => {
            let (counted, counted_at) = balance.map_or((0, 0), |balance| balance.rows.arguments(tokens));
            let params = BackwardParams {
                logits: logits.pointer(),
                experts: experts.pointer(),
                weights: weights.pointer(),
                dweights: dweights.pointer(),
                bias_dots: bias_dots.map_or(0, Tensor::pointer),
                balance: balance.map_or(0, |balance| balance.gradient.pointer()),
                counted_at,
                dlogits: dlogits.pointer(),
                stride: dlogits.stride() as i64,
                tokens: tokens as i32,
                num_experts: num_experts as i32,
                k: k as i32,
                columns: columns as i32,
                counted,
                all: i32::from(how == RouterWeights::All),
            };
            gpu.launch_struct(&sized("router_backward", num_experts), a_warp_a_row(tokens), &params);
        }
    }
}

/// The arguments of the backward pass, laid out as in `kernels/routing.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BackwardParams {
    logits: u64,
    experts: u64,
    weights: u64,
    dweights: u64,
    bias_dots: u64,
    balance: u64,
    counted_at: u64,
    dlogits: u64,
    stride: i64,
    tokens: i32,
    num_experts: i32,
    k: i32,
    columns: i32,
    counted: i32,
    all: i32,
}

const _: () = assert!(size_of::<BackwardParams>() == 96 && offset_of!(BackwardParams, tokens) == 72);

/// Adds over the first `rows` rows: to `counts` f32 [E] how often each expert was chosen, and to `probabilities` f32 [E] the softmax over all experts
/// of `logits` f32 [T, E]. They are what an auxiliary loss and measures are made of.
pub fn count<'r>(
    device: &Device,
    logits: &Tensor,
    experts: &Indices,
    rows: impl Into<Rows<'r>>,
    probabilities: Option<&mut Tensor>,
    mut counts: ViewMut<'_>,
) {
    let rows = rows.into();
    let k = experts.len() / logits.rows().max(1);
    if logits.rows() == 0 {
        return;
    }
    let (tokens, num_experts) = shape(device, logits, experts, k);
    assert!(
        (counts.rows(), counts.cols()) == (1, num_experts)
            && probabilities.as_ref().is_none_or(|sums| sums.len() == num_experts),
        "shapes of a router's counts"
    );
    match device {
        Device::Cpu(_) => {
            let rows = rows.on_host(tokens);
            let counts = &mut counts.f32s_mut()[..num_experts];
            experts.i32s()[..rows * k].iter().for_each(|e| counts[*e as usize] += 1.0);
            if let Some(sums) = probabilities {
                // In f64: the order of so many rows should not be seen in the sum.
                let mut of_rows = vec![0.0f64; num_experts];
                let mut row = vec![0.0f32; num_experts];
                for logits in logits.f32s().chunks_exact(num_experts).take(rows) {
                    row.copy_from_slice(logits);
                    let scale = 1.0 / vector::exp_in_place(&mut row, vector::max(logits));
                    of_rows.iter_mut().zip(&row).for_each(|(sum, p)| *sum += f64::from(p * scale));
                }
                sums.f32s_mut().iter_mut().zip(of_rows).for_each(|(sum, of_rows)| *sum += of_rows as f32);
            }
        }
        Device::Cuda(gpu) => {
            let (number, at) = rows.arguments(tokens);
            let blocks = tokens.div_ceil(8 * WARPS).min(MAX_COUNTING_BLOCKS);
            let partials = device.empty_f32(MemoryCategory::Workspace, &[blocks, 2 * num_experts]);
            let (width, k) = (num_experts as i32, k as i32);
            let wanted = i32::from(probabilities.is_some());
            let args =
                kernel_args![logits.pointer(), experts.pointer(), at, partials.pointer(), number, width, k, wanted];
            gpu.launch(&sized("router_count", num_experts), Launch::new(blocks, 32 * WARPS as u32), args);
            let sums = probabilities.map_or(0, |sums| sums.pointer());
            let args = kernel_args![partials.pointer(), sums, counts.pointer(), blocks as i32, width];
            gpu.launch("router_add_counts", Launch::new(num_experts, 64), args);
        }
    }
}

/// The form of a kernel for so many experts: a lane has one, four or eight of a row.
fn sized(kernel: &str, num_experts: usize) -> String {
    let size = [32, 128].into_iter().find(|size| num_experts <= *size).unwrap_or(MAX_EXPERTS);
    format!("{kernel}_{size}")
}

fn a_warp_a_row(rows: usize) -> Launch {
    Launch::new(rows.div_ceil(WARPS), 32 * WARPS as u32)
}

#[cfg(test)]
mod tests;
