//! Grouped-query attention over packed documents: projections, optional norms of q and k, rotary embedding, attention, output.

use super::Context;
use super::linear::{Linear, LinearSaved};
use super::norm::RmsNorm;
use super::parameter::Grads;
use crate::ops::attention::{self, AttentionShape, Saved, TileList};
use crate::ops::rope::{self, RopeTable};
use crate::tensor::{Indices, Tensor};

/// What attention needs to know about the documents of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// Work lists for this layer's window.
    pub tiles: &'a TileList,
    /// Cosines and sines by position.
    pub rope: &'a RopeTable,
    /// Position of every token in its document.
    pub position_ids: &'a Indices,
}

/// The attention of one block.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    /// Query projection.
    pub q_proj: Linear,
    /// Key projection.
    pub k_proj: Linear,
    /// Value projection.
    pub v_proj: Linear,
    /// Output projection.
    pub o_proj: Linear,
    /// Norm of each query head (Qwen3).
    pub q_norm: Option<RmsNorm>,
    /// Norm of each key head (Qwen3).
    pub k_norm: Option<RmsNorm>,
    /// Heads and scale.
    pub shape: AttentionShape,
}

/// Input of a head norm, with its `rstd`.
#[derive(Debug)]
struct NormSaved {
    input: Tensor,
    rstd: Tensor,
}

/// What [`Attention::forward`] keeps.
#[derive(Debug)]
pub struct AttentionSaved {
    /// After norm and rotation.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    softmax_lse: Tensor,
    q_norm: Option<NormSaved>,
    k_norm: Option<NormSaved>,
    q_proj: LinearSaved,
    k_proj: LinearSaved,
    v_proj: LinearSaved,
    o_proj: LinearSaved,
}

impl Attention {
    /// `h` [T, hidden] → `y` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, sequences: Sequences<'_>, h: &Tensor, y: &mut Tensor) -> AttentionSaved {
        let project = |linear: &Linear| {
            let mut out = ctx.saved(&[h.rows(), linear.out_features]);
            let saved = linear.forward(ctx, h, &mut out);
            (out, saved)
        };
        let (q, q_proj) = project(&self.q_proj);
        let (k, k_proj) = project(&self.k_proj);
        let (v, v_proj) = project(&self.v_proj);
        let (q, q_norm) = norm_and_rotate(ctx, sequences, self.q_norm, q);
        let (k, k_norm) = norm_and_rotate(ctx, sequences, self.k_norm, k);
        let mut o = ctx.saved(q.shape());
        let mut softmax_lse = ctx.saved_f32(&[h.rows(), self.shape.num_heads]);
        attention::forward(ctx.device, &self.shape, sequences.tiles, &q, &k, &v, &mut o, &mut softmax_lse);
        let o_proj = self.o_proj.forward(ctx, &o, y);
        AttentionSaved { q, k, v, o, softmax_lse, q_norm, k_norm, q_proj, k_proj, v_proj, o_proj }
    }

    /// Backward of [`Attention::forward`]: from `dy` [T, hidden], assigns `dh` [T, hidden] if given.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        sequences: Sequences<'_>,
        saved: AttentionSaved,
        h: &Tensor,
        dy: &Tensor,
        mut dh: Option<&mut Tensor>,
    ) {
        let AttentionSaved { q, k, v, o, softmax_lse, q_norm, k_norm, q_proj, k_proj, v_proj, o_proj } = saved;
        let mut d_o = ctx.scratch(o.shape());
        self.o_proj.backward(ctx, grads, &o_proj, &o, dy, Some(&mut d_o), false);
        let [mut dq, mut dk, mut dv] = [ctx.scratch(q.shape()), ctx.scratch(k.shape()), ctx.scratch(v.shape())];
        let qkv = Saved { q: &q, k: &k, v: &v, o: &o, softmax_lse: &softmax_lse };
        attention::backward(ctx.device, &self.shape, sequences.tiles, &qkv, &d_o, &mut dq, &mut dk, &mut dv);
        let dq = unrotate_and_unnorm(ctx, grads, sequences, self.q_norm.zip(q_norm), dq);
        let dk = unrotate_and_unnorm(ctx, grads, sequences, self.k_norm.zip(k_norm), dk);
        self.q_proj.backward(ctx, grads, &q_proj, h, &dq, dh.as_deref_mut(), false);
        self.k_proj.backward(ctx, grads, &k_proj, h, &dk, dh.as_deref_mut(), true);
        self.v_proj.backward(ctx, grads, &v_proj, h, &dv, dh, true);
    }
}

fn norm_and_rotate(
    ctx: &Context<'_>,
    sequences: Sequences<'_>,
    norm: Option<RmsNorm>,
    x: Tensor,
) -> (Tensor, Option<NormSaved>) {
    let (mut x, saved) = match norm {
        None => (x, None),
        Some(norm) => {
            let mut y = ctx.saved(x.shape());
            let rstd = norm.forward(ctx, &x, &mut y);
            (y, Some(NormSaved { input: x, rstd }))
        }
    };
    rope::forward(ctx.device, &mut x, sequences.rope, sequences.position_ids);
    (x, saved)
}

fn unrotate_and_unnorm(
    ctx: &Context<'_>,
    grads: &mut Grads,
    sequences: Sequences<'_>,
    norm: Option<(RmsNorm, NormSaved)>,
    mut dy: Tensor,
) -> Tensor {
    rope::backward(ctx.device, &mut dy, sequences.rope, sequences.position_ids);
    match norm {
        None => dy,
        Some((norm, NormSaved { input, rstd })) => {
            let mut dx = ctx.scratch(dy.shape());
            norm.backward(ctx, grads, &input, &rstd, &dy, false, &mut dx);
            dx
        }
    }
}
