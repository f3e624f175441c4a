//! One transformer block: `x + attention(norm(x))`, then `+ mlp(norm(·))`.

use std::cell::OnceCell;

use crate::layers::attention::{Attention, AttentionSaved, Sequences};
use crate::layers::matrix::Hold;
use crate::layers::mlp::{Mlp, MlpSaved, Output};
use crate::layers::norm::RmsNorm;
use crate::layers::parameter::Grads;
use crate::layers::projection::Projection;
use crate::layers::{Context, Keep};
use crate::tensor::Tensor;
use crate::tensor::phase::{Pass, Phase};

/// The linear layers of a block: those on one input are one projection.
pub const PROJECTIONS: [&[&str]; 4] = [
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    &["self_attn.o_proj"],
    &["mlp.gate_proj", "mlp.up_proj"],
    &["mlp.down_proj"],
];

/// A block of a dense transformer.
#[derive(Debug, Clone)]
pub struct Block {
    /// Number of the block, from 0.
    pub index: u32,
    /// Norm before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// Norm before the MLP.
    pub post_attention_layernorm: RmsNorm,
    /// MLP.
    pub mlp: Mlp,
    /// Window of the attention; `None` is full.
    pub window: Option<usize>,
}

/// What [`Block::forward`] keeps besides its input.
#[derive(Debug)]
pub struct BlockSaved {
    attn: AttentionSaved,
    /// Residual stream between attention and MLP.
    middle: Tensor,
    mlp: MlpSaved,
    /// Where the backward pass follows at once, what the projections of attention and MLP read.
    inputs: Option<(Normed, Normed)>,
}

/// A normalized input, with room for adapters, and its `rstd`.
#[derive(Debug)]
struct Normed {
    h: Tensor,
    rstd: Tensor,
}

impl Block {
    /// `x` [T, hidden] → the block's output [T, hidden], and, with `keep`, what the backward pass needs besides `x`.
    pub fn forward(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        x: &Tensor,
        keep: bool,
    ) -> (Tensor, Option<BlockSaved>) {
        let mut out = ctx.saved(x.shape());
        let wanted = if keep { Keep::Longest } else { Keep::Nothing };
        let saved = self.run(ctx, sequences, x, Some(&mut out), wanted);
        (out, keep.then_some(saved))
    }

    /// What [`Block::forward`] keeps, computed again. The last product of the MLP feeds only the output, so it is left out. The backward pass
    /// follows at once, so what it would have to make again may be kept ([`Keep::Inputs`]), which takes two activations more.
    pub fn recompute(&self, ctx: &Context<'_>, sequences: Sequences<'_>, x: &Tensor, keep: Keep) -> BlockSaved {
        self.run(ctx, sequences, x, None, keep)
    }

    fn run(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        x: &Tensor,
        out: Option<&mut Tensor>,
        keep: Keep,
    ) -> BlockSaved {
        let clock = ctx.device.clock();
        let phase = clock.enter(Phase::Attention, Pass::Forward, Some(self.index));
        let mut attn_in = normed(ctx, &self.input_layernorm, &self.self_attn.qkv_proj, x);
        let mut middle = ctx.saved(x.shape());
        let attn = self.self_attn.forward(ctx, sequences, &mut attn_in.h, x, &mut middle, keep);
        let attn_in = (keep == Keep::Inputs).then_some(attn_in);
        drop(phase);

        let _phase = clock.enter(Phase::Mlp, Pass::Forward, Some(self.index));
        let mut mlp_in = normed(ctx, &self.post_attention_layernorm, &self.mlp.gate_up_proj, &middle);
        let output = out.map_or(Output::Skip, |y| Output::Write { residual: &middle, y });
        let mlp = self.mlp.forward(ctx, &mut mlp_in.h, output, keep);
        BlockSaved { attn, middle, mlp, inputs: attn_in.map(|attn_in| (attn_in, mlp_in)) }
    }

    /// Keeps the matrices that both [`Self::recompute`] and [`Self::backward`] read while the holds live, where they are made of weights in 4 bits.
    pub fn hold<'a>(&self, ctx: &Context<'a>) -> [Hold<'a>; 3] {
        let (attention, mlp) = (&self.self_attn, &self.mlp);
        [&attention.qkv_proj, &attention.o_proj, &mlp.gate_up_proj].map(|projection| projection.hold(ctx))
    }

    /// Columns that the gradient of the residual stream needs: those of the hidden size, and room for adapters of what reads it.
    pub fn gradient_columns(&self, ctx: &Context<'_>) -> usize {
        let columns = |projection: &Projection| projection.output_shape(ctx.device, 0)[1];
        columns(&self.self_attn.o_proj).max(columns(&self.mlp.down_proj))
    }

    /// Backward of [`Block::forward`]: turns the gradient of the output into that of `x`, in the first columns of `dx`
    /// [T, ≥ [`Self::gradient_columns`]]. Without `need_dx` the result is not that gradient, and the work for it is not done: nothing before
    /// this block trains.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        sequences: Sequences<'_>,
        x: &Tensor,
        saved: BlockSaved,
        dx: &mut Tensor,
        need_dx: bool,
    ) {
        let clock = ctx.device.clock();
        let hidden = x.cols();
        let BlockSaved { attn, middle, mlp, inputs } = saved;
        let (attn_in, mlp_in) = inputs.unzip();
        let phase = clock.enter(Phase::Mlp, Pass::Backward, Some(self.index));
        // What the projections read is not kept in a long run: a norm is one pass over memory to make again.
        let norm = &self.post_attention_layernorm;
        let kept = mlp_in.map_or_else(OnceCell::new, OnceCell::from);
        let mlp_in = || kept.get_or_init(|| normed(ctx, norm, &self.mlp.gate_up_proj, &middle));
        let mut dh = self.mlp.backward(ctx, grads, mlp, &|| &mlp_in().h, dx);
        norm.backward(ctx, grads, &middle, &mlp_in().rstd, &dh, true, dx.first_columns_mut(hidden));
        drop((kept, middle, phase));

        let _phase = clock.enter(Phase::Attention, Pass::Backward, Some(self.index));
        let norm = &self.input_layernorm;
        let attn_in = attn_in.unwrap_or_else(|| normed(ctx, norm, &self.self_attn.qkv_proj, x));
        let need_dh = need_dx || ctx.params.is_trainable(norm.weight);
        self.self_attn.backward(ctx, grads, sequences, attn, &attn_in.h, dx, need_dh.then(|| dh.view_mut()));
        if need_dh {
            norm.backward(ctx, grads, x, &attn_in.rstd, &dh, true, dx.first_columns_mut(hidden));
        }
    }

    /// The block's projections in the order of [`PROJECTIONS`].
    pub fn projections(&self) -> [&Projection; PROJECTIONS.len()] {
        let (Attention { qkv_proj, o_proj, .. }, Mlp { gate_up_proj, down_proj }) = (&self.self_attn, &self.mlp);
        [qkv_proj, o_proj, gate_up_proj, down_proj]
    }

    /// As [`Self::projections`], to change.
    pub fn projections_mut(&mut self) -> [&mut Projection; PROJECTIONS.len()] {
        let (Attention { qkv_proj, o_proj, .. }, Mlp { gate_up_proj, down_proj }) =
            (&mut self.self_attn, &mut self.mlp);
        [qkv_proj, o_proj, gate_up_proj, down_proj]
    }
}

/// The input of a projection: `x` [T, hidden] normalized, with room for the projection's adapters.
fn normed(ctx: &Context<'_>, norm: &RmsNorm, projection: &Projection, x: &Tensor) -> Normed {
    let mut h = ctx.scratch(&projection.input_shape(ctx.device, x.rows()));
    let rstd = norm.forward(ctx, x, h.first_columns_mut(x.cols()));
    Normed { h, rstd }
}
