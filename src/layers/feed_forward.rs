//! What follows attention in a block: the gated MLP, or routed experts.

use super::held::Hold;
use super::mlp::{Mlp, MlpSaved, Output};
use super::moe::{Moe, MoeSaved};
use super::parameter::Grads;
use super::projection::Projection;
use super::{Context, Keep};
use crate::tensor::phase::Phase;
use crate::tensor::{Tensor, ViewMut};

/// The second half of a block.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// One MLP for every token.
    Mlp(Mlp),
    /// Experts that a router chooses for each token.
    Moe(Moe),
}

/// What [`FeedForward::forward`] leaves for the backward pass.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is boxed where it is kept")]
pub enum FeedForwardSaved {
    /// Of an MLP.
    Mlp(MlpSaved),
    /// Of experts.
    Moe(MoeSaved),
}

impl FeedForward {
    /// The phase that its norm is timed as, and, of an MLP, all of it; experts time routing apart.
    pub fn phase(&self) -> Phase {
        match self {
            Self::Mlp(_) => Phase::Mlp,
            Self::Moe(_) => Phase::Moe,
        }
    }

    /// Its dense linear layers, in the order of computation; experts have none.
    pub fn projections(&self) -> Vec<&Projection> {
        match self {
            Self::Mlp(mlp) => vec![&mlp.gate_up_proj, &mlp.down_proj],
            Self::Moe(_) => Vec::new(),
        }
    }

    /// Shape of an input of so many rows, with room for adapters.
    pub fn input_shape(&self, ctx: &Context<'_>, rows: usize) -> [usize; 2] {
        match self {
            Self::Mlp(mlp) => mlp.gate_up_proj.input_shape(ctx.device, rows),
            Self::Moe(moe) => moe.input_shape(ctx, rows),
        }
    }

    /// Columns that the gradient of the output needs, those for adapters included.
    pub fn gradient_columns(&self, ctx: &Context<'_>) -> usize {
        match self {
            Self::Mlp(mlp) => mlp.down_proj.output_shape(ctx.device, 0)[1],
            Self::Moe(moe) => moe.down.out_features,
        }
    }

    /// Keeps the first layer's weights while the hold lives, where they are made of packed ones.
    pub fn hold_gate_up<'a>(&self, ctx: &Context<'a>) -> Hold<'a> {
        match self {
            Self::Mlp(mlp) => mlp.gate_up_proj.hold(ctx),
            Self::Moe(moe) => moe.gate_up.hold(ctx),
        }
    }

    /// As [`Self::hold_gate_up`], the second layer's.
    pub fn hold_down<'a>(&self, ctx: &Context<'a>) -> Hold<'a> {
        match self {
            Self::Mlp(mlp) => mlp.down_proj.hold(ctx),
            Self::Moe(moe) => moe.down.hold(ctx),
        }
    }

    /// `h` [T, hidden] in room as [`Self::input_shape`] says → what is kept, and, in `output`, `residual + y` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, h: &mut Tensor, output: Output<'_>, keep: Keep) -> FeedForwardSaved {
        match self {
            Self::Mlp(mlp) => FeedForwardSaved::Mlp(mlp.forward(ctx, h, output, keep)),
            Self::Moe(moe) => FeedForwardSaved::Moe(moe.forward(ctx, h, output)),
        }
    }

    /// Backward of [`Self::forward`] but for the residual: the gradient of `h` [T, hidden] from `dy` [T, ≥ [`Self::gradient_columns`]], which may be
    /// written behind its hidden columns. `h` gives the input again, where it is needed.
    pub fn backward<'a>(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: FeedForwardSaved,
        h: &dyn Fn() -> &'a Tensor,
        dy: ViewMut<'_>,
    ) -> Tensor {
        match (self, saved) {
            (Self::Mlp(mlp), FeedForwardSaved::Mlp(saved)) => mlp.backward(ctx, grads, saved, h, dy),
            (Self::Moe(moe), FeedForwardSaved::Moe(saved)) => {
                let hidden = moe.gate_up.in_features;
                moe.backward(ctx, grads, saved, h, dy.as_view().columns(0, hidden))
            }
            _ => unreachable!("what was saved is of the same layer"),
        }
    }
}
