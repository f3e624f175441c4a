//! Token embedding as a layer.

use super::Context;
use super::parameter::{Grads, ParamId};
use crate::ops::embedding;
use crate::tensor::{Indices, Tensor, View};

/// Token embedding.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// Table [vocabulary, hidden].
    pub weight: ParamId,
}

impl Embedding {
    /// `input_ids` [T] → `x` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, input_ids: &Indices) -> Tensor {
        let table = ctx.params.operand(self.weight);
        let mut x = ctx.saved(&[input_ids.len(), table.cols()]);
        embedding::forward(ctx.device, table, input_ids, &mut x);
        x
    }

    /// Adds the gradient of the table, if it trains, from `dx` [T, hidden].
    pub fn backward(&self, ctx: &Context<'_>, grads: &mut Grads, input_ids: &Indices, dx: View<'_>) {
        if let Some(dtable) = grads.get_mut(self.weight) {
            embedding::backward(ctx.device, dx, input_ids, dtable);
        }
    }
}
