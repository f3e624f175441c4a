//! The gated MLP: `y = down(silu(gate(h)) ⊙ up(h))`.

use super::Context;
use super::linear::{Linear, LinearSaved};
use super::parameter::Grads;
use crate::ops::swiglu;
use crate::tensor::Tensor;

/// The gated MLP of one block.
#[derive(Debug, Clone, Copy)]
pub struct Mlp {
    /// Gate projection.
    pub gate_proj: Linear,
    /// Up projection.
    pub up_proj: Linear,
    /// Down projection.
    pub down_proj: Linear,
}

/// What [`Mlp::forward`] keeps.
#[derive(Debug)]
pub struct MlpSaved {
    gate: Tensor,
    up: Tensor,
    gate_proj: LinearSaved,
    up_proj: LinearSaved,
    down_proj: LinearSaved,
}

impl Mlp {
    /// `h` [T, hidden] → `y` [T, hidden]. Without `y` the last product is left out: a recomputation needs only what is kept.
    pub fn forward(&self, ctx: &Context<'_>, h: &Tensor, y: Option<&mut Tensor>) -> MlpSaved {
        let shape = [h.rows(), self.gate_proj.out_features];
        let [mut gate, mut up, mut act] = [ctx.saved(&shape), ctx.saved(&shape), ctx.scratch(&shape)];
        let gate_proj = self.gate_proj.forward(ctx, h, &mut gate);
        let up_proj = self.up_proj.forward(ctx, h, &mut up);
        swiglu::forward(ctx.device, &gate, &up, &mut act);
        let down_proj = match y {
            Some(y) => self.down_proj.forward(ctx, &act, y),
            None => self.down_proj.saved_only(ctx, &act),
        };
        MlpSaved { gate, up, gate_proj, up_proj, down_proj }
    }

    /// Backward of [`Mlp::forward`]: assigns `dh` [T, hidden] from `dy` [T, hidden].
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: MlpSaved,
        h: &Tensor,
        dy: &Tensor,
        dh: &mut Tensor,
    ) {
        let MlpSaved { mut gate, mut up, gate_proj, up_proj, down_proj } = saved;
        // The input of `down_proj` is a third of what a block would keep, and one pass over memory to make again.
        let mut act = ctx.scratch(gate.shape());
        swiglu::forward(ctx.device, &gate, &up, &mut act);
        let mut d_act = ctx.scratch(act.shape());
        self.down_proj.backward(ctx, grads, &down_proj, &act, dy, Some(&mut d_act), false);
        drop(act);
        swiglu::backward_in_place(ctx.device, &d_act, &mut gate, &mut up);
        self.gate_proj.backward(ctx, grads, &gate_proj, h, &gate, Some(dh), false);
        self.up_proj.backward(ctx, grads, &up_proj, h, &up, Some(dh), true);
    }
}
