//! The gated MLP: `y = down(silu(gate(h)) ⊙ up(h))`.

use super::Context;
use super::parameter::Grads;
use super::projection::{Projection, ProjectionSaved};
use crate::ops::swiglu;
use crate::tensor::{Tensor, View, ViewMut};

/// The gated MLP of one block.
#[derive(Debug, Clone)]
pub struct Mlp {
    /// Gate and up projection.
    pub gate_up_proj: Projection,
    /// Down projection.
    pub down_proj: Projection,
}

/// What [`Mlp::forward`] keeps.
#[derive(Debug)]
pub struct MlpSaved {
    /// Gate and up beside each other, with room for the gradient's adapter columns.
    gate_up: Tensor,
    /// Input of the down projection, where the backward pass follows at once.
    act: Option<Tensor>,
    gate_up_proj: ProjectionSaved,
    down_proj: ProjectionSaved,
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
    /// Nobody reads it: a recomputation needs only what is kept, and its backward pass follows at once.
    Skip,
}

impl Mlp {
    /// `h` [T, hidden] with room for adapters ([`Projection::input_shape`]) → `residual + y` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, h: &mut Tensor, output: Output<'_>) -> MlpSaved {
        let (rows, inner) = (h.rows(), self.down_proj.in_features);
        let mut gate_up = ctx.saved(&self.gate_up_proj.output_shape(ctx.device, rows));
        let gate_up_proj = self.gate_up_proj.forward(ctx, h, None, gate_up.first_columns_mut(2 * inner));
        let mut act = ctx.scratch(&self.down_proj.input_shape(ctx.device, rows));
        swiglu::forward(ctx.device, gate_up.first_columns(2 * inner), act.first_columns_mut(inner));
        let (act, down_proj) = match output {
            Output::Write { residual, y } => {
                let saved = self.down_proj.forward(ctx, &mut act, Some(residual.view()), y);
                (None, saved)
            }
            Output::Skip => {
                let saved = self.down_proj.saved_only(ctx, act.first_columns(inner));
                (Some(act), saved)
            }
        };
        MlpSaved { gate_up, act, gate_up_proj, down_proj }
    }

    /// Backward of [`Mlp::forward`]: assigns `dh` [T, hidden] from `dy` [T, hidden], which has room for adapters
    /// ([`Projection::output_shape`]). `h` is [T, hidden].
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: MlpSaved,
        h: View<'_>,
        dy: &mut Tensor,
        dh: ViewMut<'_>,
    ) {
        let MlpSaved { mut gate_up, act, gate_up_proj, down_proj } = saved;
        let inner = self.down_proj.in_features;
        let act = act.unwrap_or_else(|| {
            // The input of the down projection is a third of what a block would keep, and one pass over memory to make again.
            let mut act = ctx.scratch(&[gate_up.rows(), inner]);
            swiglu::forward(ctx.device, gate_up.first_columns(2 * inner), &mut act);
            act
        });
        let mut d_act = ctx.scratch(&[gate_up.rows(), inner]);
        self.down_proj.backward(ctx, grads, &down_proj, act.first_columns(inner), dy, Some(d_act.view_mut()));
        drop(act);
        swiglu::backward_in_place(ctx.device, &d_act, gate_up.first_columns_mut(2 * inner));
        drop(d_act);
        self.gate_up_proj.backward(ctx, grads, &gate_up_proj, h, &mut gate_up, Some(dh));
    }
}
