//! RMSNorm of every query and key head followed by the rotary embedding, in one pass (Qwen3's QK-norm).
//!
//! `y = rope(w ⊙ x·rstd)` per head, `rstd = (mean(x²) + eps)^-1/2`, with the roundings of `rms_norm` and `rope` one after the other.
//! Saved for the backward pass: `x`; `rstd` is made again from it.

use rayon::prelude::*;

use super::rms_norm::{NormRounding, gradient, normalize, rstd, weight_gradient};
use super::rope::{RopeTable, head_launch};
use super::{MIN_ROWS_PER_TASK, elementwise};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, Indices, MemoryCategory, Tensor, View, ViewMut};

/// Rows whose weight gradients a block of the GPU's kernel adds up; the kernel has the same number.
const ROWS_PER_PARTIAL: usize = 64;

/// The norms of the heads of a layer. In `x` the query heads come first, then the key heads.
#[derive(Debug, Clone, Copy)]
pub struct QkNorm<'a> {
    /// Weight of the query heads [d].
    pub q_weight: &'a Tensor,
    /// Weight of the key heads [d].
    pub k_weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f32,
    /// Query heads.
    pub num_heads: usize,
    /// Key heads.
    pub num_kv_heads: usize,
}

/// Which heads a weight belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// The query heads.
    Query,
    /// The key heads.
    Key,
}

impl QkNorm<'_> {
    fn head_dim(&self) -> usize {
        self.q_weight.len()
    }

    fn all_heads(&self) -> usize {
        self.num_heads + self.num_kv_heads
    }

    fn weight(&self, head: usize) -> &Tensor {
        if head < self.num_heads { self.q_weight } else { self.k_weight }
    }

    fn check(&self, rows: usize, cols: usize, table: &RopeTable, position_ids: &Indices) {
        let d = self.head_dim();
        assert_eq!((cols, rows, 2 * table.half()), (self.all_heads() * d, position_ids.len(), d), "shapes of qk_norm");
        assert_eq!(self.k_weight.len(), d, "shapes of qk_norm");
    }
}

/// `x` [T, (Hq + Hkv)·d] → `y`, same shape, normalized and turned by the angles of `position_ids` [T].
pub fn forward<'x, 'y>(
    device: &Device,
    norm: &QkNorm<'_>,
    table: &RopeTable,
    position_ids: &Indices,
    x: impl Into<View<'x>>,
    y: impl Into<ViewMut<'y>>,
) {
    let (x, mut y) = (x.into(), y.into());
    norm.check(x.rows(), x.cols(), table, position_ids);
    assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()), "shapes of qk_norm");
    let d = norm.head_dim();
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), y.stride());
            let rows = y.f32s_mut().par_chunks_mut(stride).zip(x.f32s().par_chunks(x.stride()));
            let rows = rows.zip(position_ids.i32s().par_iter()).with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each(|((y, x), &position)| {
                for (head, (y, x)) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)).take(norm.all_heads()).enumerate() {
                    normalize((precision, NormRounding::BeforeWeight), x, norm.weight(head).f32s(), norm.eps, y);
                    table.rotate_head(precision, y, position, 1.0);
                }
            });
        }
        Device::Cuda(gpu) => launch(gpu, "qk_norm_forward", norm, table, position_ids, x, y),
    }
}

/// Backward of [`forward`], in place: `dy` [T, (Hq + Hkv)·d] becomes `dx`.
pub fn backward_in_place<'x, 'd>(
    device: &Device,
    norm: &QkNorm<'_>,
    table: &RopeTable,
    position_ids: &Indices,
    x: impl Into<View<'x>>,
    dy: impl Into<ViewMut<'d>>,
) {
    let (x, mut dy) = (x.into(), dy.into());
    norm.check(x.rows(), x.cols(), table, position_ids);
    assert_eq!((x.rows(), x.cols()), (dy.rows(), dy.cols()), "shapes of qk_norm backward");
    let d = norm.head_dim();
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), dy.stride());
            let rows = dy.f32s_mut().par_chunks_mut(stride).zip(x.f32s().par_chunks(x.stride()));
            let rows = rows.zip(position_ids.i32s().par_iter()).with_min_len(MIN_ROWS_PER_TASK);
            rows.for_each_init(Default::default, |(before, wdy): &mut (Vec<f32>, Vec<f32>), ((dy, x), &position)| {
                let heads = dy.chunks_exact_mut(d).zip(x.chunks_exact(d)).take(norm.all_heads());
                for (head, (dy, x)) in heads.enumerate() {
                    table.rotate_head(precision, dy, position, -1.0);
                    before.clear();
                    before.extend_from_slice(dy);
                    let weight = norm.weight(head).f32s();
                    gradient(precision, before, x, weight, rstd(x, norm.eps), wdy, |i, value| dy[i] = value);
                }
            });
        }
        Device::Cuda(gpu) => launch(gpu, "qk_norm_backward", norm, table, position_ids, x, dy),
    }
}

/// Queues [`forward`] or [`backward_in_place`] on the GPU: reads `x` and writes `y`, which the backward pass reads too.
fn launch(
    gpu: &Gpu,
    kernel: &str,
    norm: &QkNorm<'_>,
    table: &RopeTable,
    position_ids: &Indices,
    x: View<'_>,
    y: ViewMut<'_>,
) {
    let (cos, sin) = table.pointers();
    let args = kernel_args![
        x.pointer(),
        y.pointer(),
        norm.q_weight.pointer(),
        norm.k_weight.pointer(),
        cos,
        sin,
        position_ids.pointer(),
        x.rows() as i64,
        norm.num_heads as i32,
        norm.num_kv_heads as i32,
        table.half() as i32,
        x.stride() as i64,
        y.stride() as i64,
        norm.eps
    ];
    gpu.launch(kernel, head_launch(x.rows(), norm.all_heads(), table.half()), args);
}

/// Adds to `dweight` [d] the gradient of the weight of `heads`, from `x` and `dy` [T, (Hq + Hkv)·d] before [`backward_in_place`].
#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
pub fn backward_weight<'x, 'd>(
    device: &Device,
    norm: &QkNorm<'_>,
    table: &RopeTable,
    position_ids: &Indices,
    heads: Heads,
    x: impl Into<View<'x>>,
    dy: impl Into<View<'d>>,
    dweight: &mut Tensor,
) {
    let (x, dy, d) = (x.into(), dy.into(), norm.head_dim());
    norm.check(x.rows(), x.cols(), table, position_ids);
    let (first, count) = match heads {
        Heads::Query => (0, norm.num_heads),
        Heads::Key => (norm.num_heads, norm.num_kv_heads),
    };
    let (x, dy) = (x.columns(first * d, count * d), dy.columns(first * d, count * d));
    assert_eq!((dweight.len(), dy.rows()), (d, x.rows()), "shapes of qk_norm weights");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let (x, mut dy) = (x.to_vec(), dy.to_vec());
            for (row, &position) in dy.chunks_exact_mut(count * d).zip(position_ids.i32s()) {
                row.chunks_exact_mut(d).for_each(|head| table.rotate_head(precision, head, position, -1.0));
            }
            let rstd: Vec<f32> = x.chunks_exact(d).map(|x| rstd(x, norm.eps)).collect();
            weight_gradient(&dy, &x, &rstd, dweight.f32s_mut());
        }
        Device::Cuda(gpu) => {
            let runs = x.rows().div_ceil(ROWS_PER_PARTIAL);
            let partials = device.empty_f32(MemoryCategory::Workspace, &[runs, d]);
            let (cos, sin) = table.pointers();
            let args = kernel_args![
                x.pointer(),
                dy.pointer(),
                cos,
                sin,
                position_ids.pointer(),
                partials.pointer(),
                x.rows() as i64,
                count as i32,
                table.half() as i32,
                x.stride() as i64,
                dy.stride() as i64,
                norm.eps
            ];
            gpu.launch("qk_norm_weight_partials", Launch::new(runs, 256), args);
            elementwise::add_partials(gpu, &partials, dweight);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_gradient, cpu, dot};
    use crate::ops::{rms_norm, rope};

    const D: usize = 8;
    const ROWS: usize = 4;
    const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

    #[test]
    fn it_is_the_norm_followed_by_the_rotation_and_its_gradients_agree_with_finite_differences() {
        let device = cpu(2);
        let mut v = Values::new(5);
        let (q_weight, k_weight) = (v.tensor(&device, &[D]), v.tensor(&device, &[D]));
        let table = RopeTable::new(&device, &[1.0, 0.1, 0.01, 0.001], 10);
        let positions = device.indices(MemoryCategory::Metadata, vec![0, 1, 2, 9]);
        let width = 3 * D;
        // Two query heads and a key head, then room, as in the output of the projections.
        let x = v.tensor(&device, &[ROWS, width + 5]);
        let weights = |q: &[f32], k: &[f32]| [q, k].map(|w| device.tensor(SCRATCH, &[D], w.to_vec()));
        let run = |x: View<'_>, q: &[f32], k: &[f32]| {
            let [q_weight, k_weight] = weights(q, k);
            let norm = QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: 1e-6, num_heads: 2, num_kv_heads: 1 };
            let mut y = device.empty(SCRATCH, &[ROWS, width]);
            forward(&device, &norm, &table, &positions, x, &mut y);
            y
        };
        let y = run(x.first_columns(width), q_weight.f32s(), k_weight.f32s());

        let heads = device.tensor(SCRATCH, &[ROWS, D], x.view().columns(2 * D, D).to_vec());
        let mut want = device.empty(SCRATCH, &[ROWS, D]);
        let mut rstd = device.empty(SCRATCH, &[ROWS]);
        rms_norm::forward(&device, &heads, &k_weight, (1e-6, NormRounding::BeforeWeight), &mut want, &mut rstd);
        rope::forward(&device, &mut want, &table, &positions);
        assert_eq!(y.view().columns(2 * D, D).to_vec(), want.f32s());

        let dy = v.tensor(&device, &[ROWS, width]);
        let loss = |y: Tensor| dot(dy.f32s(), y.f32s());
        let norm = QkNorm { q_weight: &q_weight, k_weight: &k_weight, eps: 1e-6, num_heads: 2, num_kv_heads: 1 };
        for (heads, weight) in [(Heads::Query, &q_weight), (Heads::Key, &k_weight)] {
            let mut dweight = device.zeros(SCRATCH, &[D]);
            backward_weight(&device, &norm, &table, &positions, heads, x.first_columns(width), &dy, &mut dweight);
            assert_gradient("weight", weight.f32s(), dweight.f32s(), |w| match heads {
                Heads::Query => loss(run(x.first_columns(width), w, k_weight.f32s())),
                Heads::Key => loss(run(x.first_columns(width), q_weight.f32s(), w)),
            });
        }
        let mut dx = device.tensor(SCRATCH, &[ROWS, width], dy.to_vec());
        backward_in_place(&device, &norm, &table, &positions, x.first_columns(width), &mut dx);
        assert_gradient("dx", &x.first_columns(width).to_vec(), dx.f32s(), |x| {
            let x = device.tensor(SCRATCH, &[ROWS, width], x.to_vec());
            loss(run(x.view(), q_weight.f32s(), k_weight.f32s()))
        });
    }
}
