//! The head: final norm, output projection and cross-entropy, over supervised rows only and in chunks.
//!
//! Gradients are made in the forward pass: a chunk's logits turn into their own gradient in place, so [tokens, vocabulary] is never held.

use super::Context;
use super::norm::RmsNorm;
use super::parameter::{Grads, ParamId};
use crate::ops::{cross_entropy, elementwise, matmul};
use crate::tensor::{Device, Indices, MemoryCategory, Tensor, View};

/// Rows of logits held at one time: on the CPU as many as 64 MiB take, on a GPU what a large product needs to run at its rate.
fn chunk_rows(device: &Device, vocab: usize) -> usize {
    match device {
        Device::Cpu(_) => ((16 << 20) / vocab).max(1),
        Device::Cuda(_) => 1024,
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

impl Head {
    /// Loss of each supervised row [R] in nats, f32, without gradients.
    pub fn losses(&self, ctx: &Context<'_>, x: &Tensor, supervised: Supervised<'_>) -> Tensor {
        let x = gather(ctx, x, supervised.rows);
        let mut h = ctx.scratch(x.shape());
        self.norm.forward(ctx, &x, &mut h);
        let mut losses = ctx.device.empty_f32(MemoryCategory::Workspace, &[supervised.targets.len()]);
        self.for_each_chunk(ctx, &h, |first, _, mut logits| {
            self.cross_entropy(ctx, &mut logits, supervised, first, None, &mut losses);
        });
        losses
    }

    /// Losses of the supervised rows [R], and the gradient of their sum times `weight`: the first columns of `dx` [T, ≥hidden] are assigned,
    /// parameters accumulate.
    pub fn forward_backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        x: &Tensor,
        supervised: Supervised<'_>,
        weight: f32,
        dx: &mut Tensor,
    ) -> Tensor {
        let x = gather(ctx, x, supervised.rows);
        let mut h = ctx.scratch(x.shape());
        let rstd = self.norm.forward(ctx, &x, &mut h);
        let mut dh = ctx.scratch(x.shape());
        let mut losses = ctx.device.empty_f32(MemoryCategory::Workspace, &[supervised.targets.len()]);
        let table = ctx.params.operand(self.weight);
        self.for_each_chunk(ctx, &h, |first, h_chunk, mut logits| {
            self.cross_entropy(ctx, &mut logits, supervised, first, Some(weight), &mut losses);
            let d_logits = logits.first_columns(table.rows());
            let mut dh_chunk = dh.view_mut().row_range(first, h_chunk.rows());
            matmul::nn(ctx.device, 1.0, d_logits, table, 0.0, dh_chunk.reborrow());
            elementwise::round(ctx.device, dh_chunk);
            if let Some(dweight) = grads.get_mut(self.weight) {
                matmul::tn(ctx.device, 1.0, d_logits, h_chunk, 1.0, dweight);
            }
        });
        let mut dx_rows = ctx.scratch(x.shape());
        self.norm.backward(ctx, grads, &x, &rstd, &dh, false, &mut dx_rows);
        elementwise::scatter_rows(ctx.device, &dx_rows, supervised.rows, dx);
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
        let x = gather(ctx, x, rows);
        let mut h = ctx.scratch(x.shape());
        self.norm.forward(ctx, &x, &mut h);
        let weight = ctx.params.operand(self.weight);
        let mut logits = ctx.device.empty(MemoryCategory::Workspace, &[h.rows(), weight.rows()]);
        matmul::nt(ctx.device, 1.0, &h, weight, 0.0, &mut logits);
        elementwise::round(ctx.device, &mut logits);
        logits
    }

    /// Calls `f(first row, rows of h, their logits)` for runs of rows of `h` [R, hidden].
    fn for_each_chunk(&self, ctx: &Context<'_>, h: &Tensor, mut f: impl FnMut(usize, View<'_>, Tensor)) {
        let weight = ctx.params.operand(self.weight);
        let vocab = weight.rows();
        let chunk_rows = chunk_rows(ctx.device, vocab);
        for first in (0..h.rows()).step_by(chunk_rows) {
            let rows = chunk_rows.min(h.rows() - first);
            let h_chunk = h.view().row_range(first, rows);
            let mut logits = ctx.scratch(&[rows, ctx.device.padded(vocab)]);
            matmul::nt(ctx.device, 1.0, h_chunk, weight, 0.0, logits.first_columns_mut(vocab));
            elementwise::round(ctx.device, &mut logits);
            f(first, h_chunk, logits);
        }
    }
}

fn gather(ctx: &Context<'_>, x: &Tensor, rows: &Indices) -> Tensor {
    let mut y = ctx.scratch(&[rows.len(), x.cols()]);
    elementwise::gather_rows(ctx.device, x, rows, &mut y);
    y
}
