//! Linear projection with an optional low-rank adapter: `y = x·Wᵀ + b + s·z·Bᵀ`, `z = drop(x)·Aᵀ` (LoRA, arXiv 2106.09685).
//!
//! Saved: `z`, and `x`, which the caller keeps. Backward: `dW += dyᵀ·x`, `dB += s·dyᵀ·z`, `dz = s·dy·B`, `dA += dzᵀ·drop(x)`,
//! `dx = dy·W + drop'(dz·A)`.

use super::Context;
use super::parameter::{Grads, ParamId};
use crate::ops::{dropout, elementwise, matmul};
use crate::tensor::Tensor;

/// A low-rank adapter.
#[derive(Debug, Clone, Copy)]
pub struct Lora {
    /// `lora_A` [r, in].
    pub a: ParamId,
    /// `lora_B` [out, r].
    pub b: ParamId,
    /// `lora_alpha / r`, or `lora_alpha / √r` (rsLoRA).
    pub scale: f32,
    /// Probability of dropping an input of the adapter.
    pub dropout: f32,
    /// Number of the adapter in its model: the part of the dropout key that is its own.
    pub index: u32,
}

/// A linear projection.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Weight [out, in].
    pub weight: ParamId,
    /// Bias [out].
    pub bias: Option<ParamId>,
    /// Adapter.
    pub lora: Option<Lora>,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output.
    pub out_features: usize,
}

/// What [`Linear::forward`] keeps.
#[derive(Debug)]
pub struct LinearSaved {
    /// `z` [T, r] of the adapter.
    z: Option<Tensor>,
}

impl Linear {
    /// `x` [T, in] → `y` [T, out], assigned.
    pub fn forward(&self, ctx: &Context<'_>, x: &Tensor, y: &mut Tensor) -> LinearSaved {
        let Context { device, params, .. } = *ctx;
        let beta = match self.bias {
            Some(bias) => {
                elementwise::broadcast_rows(device, params.value(bias), y);
                1.0
            }
            None => 0.0,
        };
        matmul::nt(device, 1.0, x, params.value(self.weight), beta, y);
        let saved = self.saved_only(ctx, x);
        if let (Some(lora), Some(z)) = (self.lora, &saved.z) {
            matmul::nt(device, lora.scale, z, params.value(lora.b), 1.0, y);
        }
        elementwise::round(device, y);
        saved
    }

    /// What [`Linear::forward`] keeps, without its output: for a recomputation whose output nobody reads.
    pub fn saved_only(&self, ctx: &Context<'_>, x: &Tensor) -> LinearSaved {
        let z = self.lora.map(|lora| {
            let dropped = drop_input(ctx, &lora, x);
            let a = ctx.params.value(lora.a);
            let mut z = ctx.saved(&[x.rows(), a.rows()]);
            matmul::nt(ctx.device, 1.0, dropped.as_ref().unwrap_or(x), a, 0.0, &mut z);
            z
        });
        LinearSaved { z }
    }

    /// Backward of [`Linear::forward`]. `dx` [T, in], if given, is assigned, or added to with `accumulate`; parameters accumulate.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: &LinearSaved,
        x: &Tensor,
        dy: &Tensor,
        dx: Option<&mut Tensor>,
        accumulate: bool,
    ) {
        let Context { device, params, .. } = *ctx;
        if let Some(dweight) = grads.get_mut(self.weight) {
            matmul::tn(device, 1.0, dy, x, 1.0, dweight);
        }
        if let Some(dbias) = self.bias.and_then(|bias| grads.get_mut(bias)) {
            elementwise::sum_rows(device, dy, dbias);
        }
        let dz = self.lora.zip(saved.z.as_ref()).map(|(lora, z)| {
            let (a, b) = (params.value(lora.a), params.value(lora.b));
            if let Some(db) = grads.get_mut(lora.b) {
                matmul::tn(device, lora.scale, dy, z, 1.0, db);
            }
            let mut dz = ctx.scratch(&[dy.rows(), a.rows()]);
            matmul::nn(device, lora.scale, dy, b, 0.0, &mut dz);
            if let Some(da) = grads.get_mut(lora.a) {
                let dropped = drop_input(ctx, &lora, x);
                matmul::tn(device, 1.0, &dz, dropped.as_ref().unwrap_or(x), 1.0, da);
            }
            (lora, dz)
        });
        let Some(dx) = dx else { return };
        matmul::nn(device, 1.0, dy, params.value(self.weight), if accumulate { 1.0 } else { 0.0 }, dx);
        if let Some((lora, dz)) = dz {
            match ctx.dropout.filter(|_| lora.dropout > 0.0) {
                None => matmul::nn(device, 1.0, &dz, params.value(lora.a), 1.0, dx),
                Some(state) => {
                    let mut through = ctx.scratch(&[dy.rows(), self.in_features]);
                    matmul::nn(device, 1.0, &dz, params.value(lora.a), 0.0, &mut through);
                    dropout::backward_accumulate(device, state.key(lora.index), lora.dropout, &through, dx);
                }
            }
        }
        elementwise::round(device, dx);
    }
}

/// The adapter's input after dropout; `None` when nothing is dropped.
fn drop_input(ctx: &Context<'_>, lora: &Lora, x: &Tensor) -> Option<Tensor> {
    let state = ctx.dropout.filter(|_| lora.dropout > 0.0)?;
    let mut dropped = ctx.scratch(x.shape());
    dropout::forward(ctx.device, state.key(lora.index), lora.dropout, x, &mut dropped);
    Some(dropped)
}
