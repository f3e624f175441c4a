//! One transformer block: `x + attention(norm(x))`, then `+ mlp(norm(·))`.

use super::batch::{DeviceBatch, SequenceMetadata};
use crate::layers::Context;
use crate::layers::attention::{Attention, AttentionSaved, Sequences};
use crate::layers::mlp::{Mlp, MlpSaved};
use crate::layers::norm::RmsNorm;
use crate::layers::parameter::Grads;
use crate::ops::elementwise;
use crate::tensor::Tensor;
use crate::tensor::phase::{Pass, Phase};

/// A block of a dense transformer.
#[derive(Debug, Clone, Copy)]
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
}

impl Block {
    /// `x` [T, hidden] → the block's output [T, hidden], and what the backward pass needs besides `x`.
    pub fn forward(
        &self,
        ctx: &Context<'_>,
        batch: &DeviceBatch,
        metadata: &SequenceMetadata,
        x: &Tensor,
    ) -> (Tensor, BlockSaved) {
        let mut out = ctx.saved(x.shape());
        let saved = self.run(ctx, batch, metadata, x, &mut out, true);
        (out, saved)
    }

    /// What [`Block::forward`] keeps, computed again. The last product of the MLP feeds only the output, so it is left out.
    pub fn recompute(
        &self,
        ctx: &Context<'_>,
        batch: &DeviceBatch,
        metadata: &SequenceMetadata,
        x: &Tensor,
    ) -> BlockSaved {
        let mut attention_out = ctx.scratch(x.shape());
        self.run(ctx, batch, metadata, x, &mut attention_out, false)
    }

    /// The forward pass. `out` holds the attention's output on the way; with `need_output` it ends as the block's output.
    fn run(
        &self,
        ctx: &Context<'_>,
        batch: &DeviceBatch,
        metadata: &SequenceMetadata,
        x: &Tensor,
        out: &mut Tensor,
        need_output: bool,
    ) -> BlockSaved {
        let clock = ctx.device.clock();
        let sequences = self.sequences(batch, metadata);
        let phase = clock.enter(Phase::Attention, Pass::Forward, Some(self.index));
        let mut attn_in = ctx.scratch(x.shape());
        self.input_layernorm.forward(ctx, x, &mut attn_in);
        let attn = self.self_attn.forward(ctx, sequences, &attn_in, out);
        let mut middle = ctx.saved(x.shape());
        elementwise::add(ctx.device, x, out, &mut middle);
        drop(phase);

        let _phase = clock.enter(Phase::Mlp, Pass::Forward, Some(self.index));
        let mut mlp_in = ctx.scratch(x.shape());
        self.post_attention_layernorm.forward(ctx, &middle, &mut mlp_in);
        let mlp = self.mlp.forward(ctx, &mlp_in, need_output.then_some(&mut *out));
        if need_output {
            elementwise::add_assign(ctx.device, out, &middle);
        }
        BlockSaved { attn, middle, mlp }
    }

    /// Backward of [`Block::forward`]: turns the gradient of the output into that of `x`. Without `need_dx` the result is not
    /// that gradient, and the work for it is not done: nothing before this block trains.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        batch: &DeviceBatch,
        metadata: &SequenceMetadata,
        x: &Tensor,
        saved: BlockSaved,
        mut dx: Tensor,
        need_dx: bool,
    ) -> Tensor {
        let clock = ctx.device.clock();
        let sequences = self.sequences(batch, metadata);
        let BlockSaved { attn, middle, mlp } = saved;
        let phase = clock.enter(Phase::Mlp, Pass::Backward, Some(self.index));
        // What the projections read is not kept: a norm is one pass over memory to make again.
        let mut mlp_in = ctx.scratch(x.shape());
        let mlp_rstd = self.post_attention_layernorm.forward(ctx, &middle, &mut mlp_in);
        let mut dh = ctx.scratch(x.shape());
        self.mlp.backward(ctx, grads, mlp, &mlp_in, &dx, &mut dh);
        self.post_attention_layernorm.backward(ctx, grads, &middle, &mlp_rstd, &dh, true, &mut dx);
        drop((mlp_in, middle, phase));

        let _phase = clock.enter(Phase::Attention, Pass::Backward, Some(self.index));
        let mut attn_in = ctx.scratch(x.shape());
        let attn_rstd = self.input_layernorm.forward(ctx, x, &mut attn_in);
        let need_dh = need_dx || ctx.params.is_trainable(self.input_layernorm.weight);
        self.self_attn.backward(ctx, grads, sequences, attn, &attn_in, &dx, need_dh.then_some(&mut dh));
        if need_dh {
            self.input_layernorm.backward(ctx, grads, x, &attn_rstd, &dh, true, &mut dx);
        }
        dx
    }

    fn sequences<'a>(&self, batch: &'a DeviceBatch, metadata: &'a SequenceMetadata) -> Sequences<'a> {
        Sequences { tiles: metadata.tiles(self.window), rope: metadata.rope(), position_ids: &batch.position_ids }
    }

    /// The block's linear projections with their names, in checkpoint order.
    pub fn linears_mut(&mut self) -> [(&'static str, &mut crate::layers::linear::Linear); 7] {
        let Attention { q_proj, k_proj, v_proj, o_proj, .. } = &mut self.self_attn;
        let Mlp { gate_proj, up_proj, down_proj } = &mut self.mlp;
        [
            ("self_attn.q_proj", q_proj),
            ("self_attn.k_proj", k_proj),
            ("self_attn.v_proj", v_proj),
            ("self_attn.o_proj", o_proj),
            ("mlp.gate_proj", gate_proj),
            ("mlp.up_proj", up_proj),
            ("mlp.down_proj", down_proj),
        ]
    }
}
