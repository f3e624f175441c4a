//! The gated MLP: `y = down(silu(gate(h)) ⊙ up(h))`.

use super::parameter::Grads;
use super::projection::Projection;
use super::{Context, Keep};
use crate::ops::swiglu;
use crate::tensor::{Tensor, ViewMut};

/// The gated MLP of one block.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// Gate and up projection.
    pub gate_up_proj: Projection,
    /// Down projection.
    pub down_proj: Projection,
}

/// What [`Mlp::forward`] leaves for the backward pass.
#[derive(Debug)]
pub struct MlpSaved {
    /// Gate and up beside each other, with room for the gradient's adapter columns.
    gate_up: Tensor,
    /// Input of the down projection with its z.
    act: Option<Tensor>,
    /// z of the projections, where their inputs are not kept.
    z: [Option<Tensor>; 2],
}

/// How a forward pass ends.
#[derive(Debug)]
pub enum Output<'a> {
    /// The sum of the residual stream and the MLP's output is written.
    Write {
        /// Residual stream [T, hidden].
        residual: &'a Tensor,
        /// The sum.
        y: &'a mut Tensor,
    },
    /// Nobody reads it: a recomputation needs only what is kept.
    Skip,
}

impl Mlp {
    /// `h` [T, hidden] with room for adapters ([`Projection::input_shape`]) → `residual + y` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, h: &mut Tensor, output: Output<'_>, keep: Keep) -> MlpSaved {
        let (rows, inner) = (h.rows(), self.down_proj.in_features);
        let mut gate_up = ctx.saved(&self.gate_up_proj.output_shape(ctx.device, rows));
        self.gate_up_proj.forward(ctx, h, None, gate_up.first_columns_mut(2 * inner));
        let mut act = ctx.scratch(&self.down_proj.input_shape(ctx.device, rows));
        swiglu::forward(ctx.device, gate_up.first_columns(2 * inner), act.first_columns_mut(inner));
        match output {
            Output::Write { residual, y } => self.down_proj.forward(ctx, &mut act, Some(residual.view()), y),
            Output::Skip => self.down_proj.fill_z(ctx, &mut act),
        }
        let z = match keep {
            Keep::Longest => [self.gate_up_proj.saved_z(ctx, h), self.down_proj.saved_z(ctx, &act)],
            Keep::Nothing | Keep::Inputs => [None, None],
        };
        MlpSaved { gate_up, act: (keep == Keep::Inputs).then_some(act), z }
    }

    /// Backward of [`Mlp::forward`]: assigns `dh` [T, hidden] from `dy` [T, hidden], which has room for adapters
    /// ([`Projection::output_shape`]). `h` is [T, ≥hidden], with z behind it where it was kept.
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: MlpSaved,
        h: &Tensor,
        dy: &mut Tensor,
        dh: ViewMut<'_>,
    ) {
        let MlpSaved { mut gate_up, act, z: [z_gate_up, z_down] } = saved;
        let inner = self.down_proj.in_features;
        let act = act.unwrap_or_else(|| {
            // The input of the down projection is a third of what a block would keep, and one pass over memory to make again.
            let mut act = ctx.scratch(&self.down_proj.input_shape(ctx.device, gate_up.rows()));
            swiglu::forward(ctx.device, gate_up.first_columns(2 * inner), act.first_columns_mut(inner));
            act
        });
        let mut d_act = ctx.scratch(&[gate_up.rows(), inner]);
        let z = z_down.as_ref().map(Tensor::view).or_else(|| self.down_proj.z(&act));
        self.down_proj.backward(ctx, grads, act.first_columns(inner), z, dy, Some(d_act.view_mut()));
        drop(act);
        swiglu::backward_in_place(ctx.device, &d_act, gate_up.first_columns_mut(2 * inner));
        drop(d_act);
        let z = z_gate_up.as_ref().map(Tensor::view).or_else(|| self.gate_up_proj.z(h));
        let x = h.first_columns(self.gate_up_proj.in_features);
        self.gate_up_proj.backward(ctx, grads, x, z, &mut gate_up, Some(dh));
    }
}
