//! The head: final norm, output projection and cross-entropy, over supervised rows only and in chunks.
//!
//! Gradients are made in the forward pass: a chunk's logits turn into their own gradient in place, so [tokens, vocabulary] is never held. A chunk goes
//! all the way from the output of the last block to its gradient, so nothing else is held for all rows either.

use super::Context;
use super::norm::RmsNorm;
use super::parameter::{Grads, ParamId};
use crate::ops::{cross_entropy, elementwise, matmul};
use crate::tensor::{Device, Indices, MemoryCategory, Tensor};

/// Bytes of logits held at one time on a GPU, where a large product does not need more.
const LOGITS_BYTES: usize = 256 << 20;
/// Rows that a large product needs on a GPU to run at its rate, and what their number is a multiple of.
const LEAST_ROWS: usize = 1024;
const ALIGNMENT: usize = 256;

/// Rows of logits held at one time: as many as 64 MiB take on the CPU, and [`LOGITS_BYTES`] on a GPU.
fn chunk_rows(device: &Device, vocab: usize) -> usize {
    match device {
        Device::Cpu(_) => ((16 << 20) / vocab).max(1),
        Device::Cuda(_) => {
            let rows = LOGITS_BYTES / (device.padded(vocab) * device.dtype().num_bytes());
            (rows / ALIGNMENT * ALIGNMENT).max(LEAST_ROWS)
        }
    }
}

/// Final norm and output projection.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// Final norm.
    pub norm: RmsNorm,
    /// Output projection [vocabulary, hidden]; the embedding's table when they are tied.
    pub weight: ParamId,
}

/// Rows that have a target.
#[derive(Debug, Clone, Copy)]
pub struct Supervised<'a> {
    /// Their numbers in the batch [R].
    pub rows: &'a Indices,
    /// Their targets [R].
    pub targets: &'a Indices,
}

/// A run of supervised rows on its way through the head.
struct Chunk {
    /// Number of the first of them among all supervised rows.
    first: usize,
    /// Output of the last block [rows, hidden], and the same normalized.
    x: Tensor,
    h: Tensor,
    rstd: Tensor,
    /// [rows, ≥vocabulary].
    logits: Tensor,
}

impl Head {
    /// Loss of each supervised row [R] in nats, f32, without gradients. Held besides are the logits of a chunk of rows, and two times as many rows of
    /// hidden values.
    pub fn losses(&self, ctx: &Context<'_>, x: &Tensor, supervised: Supervised<'_>) -> Tensor {
        self.losses_by(ctx, x, supervised, self.chunk_rows(ctx))
    }

    fn losses_by(&self, ctx: &Context<'_>, x: &Tensor, supervised: Supervised<'_>, chunk_rows: usize) -> Tensor {
        let mut losses = ctx.device.empty_f32(MemoryCategory::Workspace, &[supervised.targets.len()]);
        self.for_each_chunk(ctx, x, supervised.rows, chunk_rows, |Chunk { first, mut logits, .. }| {
            self.cross_entropy(ctx, &mut logits, supervised, first, None, &mut losses);
        });
        losses
    }

    /// Losses of the supervised rows [R], and the gradient of their sum times `weight`: the first columns of `dx` [T, ≥hidden] are assigned,
    /// parameters accumulate. Held besides are the logits of a chunk of rows, and four times as many rows of hidden values.
    pub fn forward_backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        x: &Tensor,
        supervised: Supervised<'_>,
        weight: f32,
        dx: &mut Tensor,
    ) -> Tensor {
        self.forward_backward_by(ctx, grads, x, supervised, weight, dx, self.chunk_rows(ctx))
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    fn forward_backward_by(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        x: &Tensor,
        supervised: Supervised<'_>,
        weight: f32,
        dx: &mut Tensor,
        chunk_rows: usize,
    ) -> Tensor {
        let mut losses = ctx.device.empty_f32(MemoryCategory::Workspace, &[supervised.targets.len()]);
        let table = ctx.params.operand(self.weight);
        dx.fill_zero();
        self.for_each_chunk(ctx, x, supervised.rows, chunk_rows, |Chunk { first, x, h, rstd, mut logits }| {
            self.cross_entropy(ctx, &mut logits, supervised, first, Some(weight), &mut losses);
            let d_logits = logits.first_columns(table.rows());
            let mut dh = ctx.scratch(h.shape());
            matmul::nn(ctx.device, 1.0, d_logits, table, 0.0, &mut dh);
            elementwise::round(ctx.device, &mut dh);
            if let Some(dweight) = grads.get_mut(self.weight) {
                matmul::tn(ctx.device, 1.0, d_logits, &h, 1.0, dweight);
            }
            drop((logits, h));
            let mut dx_rows = ctx.scratch(x.shape());
            self.norm.backward(ctx, grads, &x, &rstd, &dh, false, &mut dx_rows);
            elementwise::scatter_rows(ctx.device, &dx_rows, supervised.rows, first, dx);
        });
        losses
    }

    fn cross_entropy(
        &self,
        ctx: &Context<'_>,
        logits: &mut Tensor,
        supervised: Supervised<'_>,
        first: usize,
        weight: Option<f32>,
        losses: &mut Tensor,
    ) {
        let vocab = ctx.params.operand(self.weight).rows();
        let targets = supervised.targets;
        cross_entropy::forward_backward_in_place(ctx.device, logits, vocab, targets, first, weight, losses);
    }

    /// Logits [R, vocabulary] of the given rows of `x`.
    pub fn logits(&self, ctx: &Context<'_>, x: &Tensor, rows: &Indices) -> Tensor {
        let x = gather(ctx, x, rows, 0, rows.len());
        let mut h = ctx.scratch(x.shape());
        self.norm.forward(ctx, &x, &mut h);
        let weight = ctx.params.operand(self.weight);
        let mut logits = ctx.device.empty(MemoryCategory::Workspace, &[h.rows(), weight.rows()]);
        matmul::nt(ctx.device, 1.0, &h, weight, 0.0, &mut logits);
        elementwise::round(ctx.device, &mut logits);
        logits
    }

    fn chunk_rows(&self, ctx: &Context<'_>) -> usize {
        chunk_rows(ctx.device, ctx.params.operand(self.weight).rows())
    }

    /// Calls `f` for runs of at most `chunk_rows` of the rows of `x` [T, hidden] that `rows` names.
    fn for_each_chunk(
        &self,
        ctx: &Context<'_>,
        x: &Tensor,
        rows: &Indices,
        chunk_rows: usize,
        mut f: impl FnMut(Chunk),
    ) {
        let weight = ctx.params.operand(self.weight);
        let vocab = weight.rows();
        for first in (0..rows.len()).step_by(chunk_rows) {
            let count = chunk_rows.min(rows.len() - first);
            let x = gather(ctx, x, rows, first, count);
            let mut h = ctx.scratch(x.shape());
            let rstd = self.norm.forward(ctx, &x, &mut h);
            let mut logits = ctx.scratch(&[count, ctx.device.padded(vocab)]);
            matmul::nt(ctx.device, 1.0, &h, weight, 0.0, logits.first_columns_mut(vocab));
            elementwise::round(ctx.device, &mut logits);
            f(Chunk { first, x, h, rstd, logits });
        }
    }
}

/// The `count` rows of `x` that `rows` names from its number `first` on.
fn gather(ctx: &Context<'_>, x: &Tensor, rows: &Indices, first: usize, count: usize) -> Tensor {
    let mut y = ctx.scratch(&[count, x.cols()]);
    elementwise::gather_rows(ctx.device, x, rows, first, &mut y);
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::parameter::Params;
    use crate::ops::rms_norm::NormRounding;
    use crate::ops::testing::{Values, assert_close, cpu};

    const VOCAB: usize = 19;
    const HIDDEN: usize = 6;

    #[test]
    fn chunks_of_any_size_give_the_same() {
        let device = cpu(2);
        let mut values = Values::new(12);
        let mut params = Params::new(&device);
        let norm = params.push("norm", values.tensor(&device, &[HIDDEN]));
        let weight = params.push("head", values.tensor(&device, &[VOCAB, HIDDEN]));
        let head = Head {
            norm: RmsNorm { weight: norm, eps: 1e-5, rounding: NormRounding::default(), width: HIDDEN },
            weight,
        };
        params.train(norm);
        params.train(weight);
        let ctx = Context::new(&device, &params, None);
        let x = values.tensor(&device, &[9, HIDDEN]);
        let [rows, targets] = [vec![0, 1, 2, 4, 5, 6, 8], vec![3, 18, 0, 7, 7, 1, 12]]
            .map(|ids| device.indices(MemoryCategory::Metadata, ids));
        let supervised = Supervised { rows: &rows, targets: &targets };
        let run = |chunk_rows| {
            let mut grads = Grads::new(&params);
            // What lies there before is not read, and rows without a target get no gradient.
            let mut dx = device.tensor(MemoryCategory::Workspace, &[9, HIDDEN + 1], vec![7.0; 9 * (HIDDEN + 1)]);
            let losses = device.run(|| {
                let alone = head.losses_by(&ctx, &x, supervised, chunk_rows);
                let losses = head.forward_backward_by(&ctx, &mut grads, &x, supervised, 0.5, &mut dx, chunk_rows);
                assert_eq!(alone.f32s(), losses.f32s(), "with and without gradients");
                losses
            });
            let gradients = [norm, weight].map(|id| grads.get(id).unwrap().to_vec());
            (losses.to_vec(), dx.first_columns(HIDDEN).to_vec(), gradients)
        };
        let (losses, dx, gradients) = run(100);
        assert!([3, 7].iter().all(|&row| dx[row * HIDDEN..][..HIDDEN].iter().all(|&x| x == 0.0)));
        for chunk_rows in [1, 3, 7] {
            let (chunked_losses, chunked_dx, chunked) = run(chunk_rows);
            assert_close("losses", &chunked_losses, &losses, 1e-6);
            assert_close("dx", &chunked_dx, &dx, 1e-6);
            for (chunked, whole) in chunked.iter().zip(&gradients) {
                assert_close("gradients of parameters", chunked, whole, 1e-6);
            }
        }
    }
}
