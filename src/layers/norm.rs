//! RMSNorm as a layer.

use super::Context;
use super::parameter::{Grads, ParamId};
use crate::ops::rms_norm::{self, NormRounding};
use crate::tensor::{Tensor, View, ViewMut};

/// RMSNorm over `width` values.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm {
    /// Weight [width].
    pub weight: ParamId,
    /// Added to the mean square.
    pub eps: f32,
    /// When its output is rounded.
    pub rounding: NormRounding,
    /// Values a norm runs over: the hidden size, or the head size for the norms of q and k.
    pub width: usize,
}

impl RmsNorm {
    /// `x` [R, width] → `y`, same shape, and `rstd` [R] for the backward pass.
    pub fn forward<'x, 'y>(&self, ctx: &Context<'_>, x: impl Into<View<'x>>, y: impl Into<ViewMut<'y>>) -> Tensor {
        let x = x.into();
        let mut rstd = ctx.saved_f32(&[x.rows()]);
        let weight = ctx.params.operand(self.weight);
        rms_norm::forward(ctx.device, x, weight, (self.eps, self.rounding), y, &mut rstd);
        rstd
    }

    /// Backward of [`RmsNorm::forward`]: `dx` assigned, or added to with `accumulate`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward<'x, 'd>(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        x: impl Into<View<'x>>,
        rstd: &Tensor,
        dy: &Tensor,
        accumulate: bool,
        dx: impl Into<ViewMut<'d>>,
    ) {
        let (weight, dweight) = (ctx.params.operand(self.weight), grads.get_mut(self.weight));
        rms_norm::backward(ctx.device, dy, x, weight, rstd, accumulate, dx, dweight);
    }
}
