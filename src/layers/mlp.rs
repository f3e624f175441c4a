//! The gated MLP: `y = down(silu(gate(h)) ⊙ up(h))`.

use super::parameter::{Grads, ParamId};
use super::projection::{Linear, Projection};
use super::{Context, Keep};
use crate::ops::swiglu;
use crate::ops::swiglu_lora::{self, Adapters, Gradients};
use crate::tensor::{Tensor, View, ViewMut};

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
    /// Input of the down projection with its z, where the backward pass wants it as it is.
    act: Option<Tensor>,
    /// z of the projections, where their inputs are not kept and not made again.
    z: [Option<Tensor>; 2],
}

/// How a forward pass ends.
#[derive(Debug)]
pub enum Output<'a> {
    /// The sum of the residual stream and the MLP's output is written.
    Write {
        /// Residual stream [T, hidden].
        residual: View<'a>,
        /// The sum [T, hidden].
        y: ViewMut<'a>,
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
        // Its backward pass makes act and its z again by the way.
        let at_once = self.adapters_at_once(ctx).is_some();
        let longest = keep == Keep::Longest;
        if at_once && matches!(output, Output::Skip) {
            let z = longest.then(|| self.gate_up_proj.saved_z(ctx, h)).flatten();
            return MlpSaved { gate_up, act: None, z: [z, None] };
        }
        let mut act = ctx.scratch(&self.down_proj.input_shape(ctx.device, rows));
        swiglu::forward(ctx.device, gate_up.first_columns(2 * inner), act.first_columns_mut(inner));
        match output {
            Output::Write { residual, y } => self.down_proj.forward(ctx, &mut act, Some(residual), y),
            Output::Skip => self.down_proj.fill_z(ctx, &mut act),
        }
        let z = [
            longest.then(|| self.gate_up_proj.saved_z(ctx, h)).flatten(),
            (longest && !at_once).then(|| self.down_proj.saved_z(ctx, &act)).flatten(),
        ];
        MlpSaved { gate_up, act: (keep == Keep::Inputs && !at_once).then_some(act), z }
    }

    /// Backward of [`Mlp::forward`]: the gradient of `h` [T, hidden] from `dy` [T, hidden], which has room for adapters
    /// ([`Projection::output_shape`]). `h` gives [T, ≥hidden], with z behind it where it was kept; it is asked as late as can be, when most of what
    /// this works with is done with.
    pub fn backward<'a>(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: MlpSaved,
        h: &dyn Fn() -> &'a Tensor,
        dy: ViewMut<'_>,
    ) -> Tensor {
        let MlpSaved { mut gate_up, act, z: [z_gate_up, z_down] } = saved;
        let rows = gate_up.rows();
        let x = || h().first_columns(self.gate_up_proj.in_features);
        let dh = || ctx.scratch(&[rows, self.gate_up_proj.in_features]);
        let z_gate_up = z_gate_up.as_ref().map(Tensor::view).or_else(|| self.gate_up_proj.z(h()));
        if let Some((b, z)) = self.adapters_at_once(ctx).zip(z_gate_up) {
            self.backward_at_once(ctx, grads, b, z, &mut gate_up, dy);
            self.gate_up_proj.a_gradients(ctx, grads, x(), gate_up.view());
            let mut dh = dh();
            self.gate_up_proj.input_gradient(ctx, gate_up.view(), dh.view_mut());
            return dh;
        }
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
        let mut dh = dh();
        self.gate_up_proj.backward(ctx, grads, x(), z_gate_up, gate_up.view_mut(), Some(dh.view_mut()));
        dh
    }

    /// The backward pass down to the gradient of gate and up, with dz behind it, in place of `gate_up`: all that reads as many values as gate and
    /// up have, in one pass over them. `b` are the adapters' B of gate and up.
    fn backward_at_once(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        b: [ParamId; 2],
        z: View<'_>,
        gate_up: &mut Tensor,
        mut dy: ViewMut<'_>,
    ) {
        let (down, rows) = (&self.down_proj, gate_up.rows());
        down.fill_dz(ctx, dy.reborrow());
        let dy = dy.as_view();
        let mut d_act = ctx.scratch(&[rows, down.in_features]);
        down.input_gradient(ctx, dy, d_act.view_mut());
        let mut z_down = ctx.scratch(&[rows, down.adapter_columns]);
        let Some((b, a_down)) = grads.pair_and_stack_mut(b, down.matrix) else {
            unreachable!("adapters that train have gradients")
        };
        let adapters = Adapters {
            a_down: down.a(ctx),
            b: self.gate_up_proj.b(ctx),
            dz_down: dy.columns(down.out_features, down.adapter_columns),
            z,
            scale_down: down.scale(),
            scale_gate_up: self.gate_up_proj.scale(),
        };
        swiglu_lora::backward(ctx.device, &adapters, &d_act, gate_up, &mut z_down, Gradients { a_down, b });
        down.b_gradients(ctx, grads, z_down.view(), dy);
    }

    /// The adapters' B of gate and up, where [`swiglu_lora`] takes the adapters of all three layers.
    fn adapters_at_once(&self, ctx: &Context<'_>) -> Option<[ParamId; 2]> {
        let r = self.gate_up_proj.rank_of_adapters_alone(ctx)?;
        let fits = self.down_proj.rank_of_adapters_alone(ctx) == Some(r) && swiglu_lora::takes(ctx.device, r);
        match self.gate_up_proj.linears[..] {
            [Linear { lora: Some(gate), .. }, Linear { lora: Some(up), .. }] if fits => Some([gate.b, up.b]),
            _ => None,
        }
    }
}
