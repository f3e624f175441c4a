//! Linear projections of one input, with optional low-rank adapters: `y = x·Wᵀ + b + z·Bᵀ`, `z = s·drop(x)·Aᵀ` (LoRA, arXiv 2106.09685).
//!
//! Projections that read the same input (q, k and v; gate and up) are one product, and so are a base weight and its adapter: weights and
//! adapters lie in one matrix
//!
//! ```text
//!            in      R            N  = rows of all weights, one below the other
//!      N  [  W    |  B  ]         R  = columns of all adapters; B has a block for each, zeros elsewhere
//!      R  [  A    |  ·  ]         `·` is never read
//! ```
//!
//! so that with z behind the columns of x, and dz behind those of dy,
//! `y = [x z]·[W B]ᵀ`, `dz = s·dy·B`, `dx = [dy dz]·[W; A]`, and sums of base and adapter are made in f32.
//! Saved: z, and x, which the caller keeps. Backward besides: `dW += dyᵀ·x`, `dB += dyᵀ·z`, `dA += dzᵀ·drop(x)`.
//! With dropout the adapters' part of `dx` passes the mask by itself.

use super::Context;
use super::parameter::{Grads, MatrixId, ParamId};
use crate::ops::{dropout, elementwise, matmul};
use crate::tensor::{Device, Tensor, View, ViewMut};

/// A low-rank adapter.
#[derive(Debug, Clone, Copy)]
pub struct Lora {
    /// `lora_A` [r, in].
    pub a: ParamId,
    /// `lora_B` [out, r].
    pub b: ParamId,
    /// Rank.
    pub r: usize,
    /// First of its columns among those of the projection's adapters.
    pub first: usize,
    /// `lora_alpha / r`, or `lora_alpha / √r` (rsLoRA). One number for all adapters of a projection.
    pub scale: f32,
    /// Probability of dropping an input of the adapter.
    pub dropout: f32,
    /// Number of the adapter in its model: the part of the dropout key that is its own.
    pub index: u32,
}

/// One linear layer of a projection.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Weight [out, in].
    pub weight: ParamId,
    /// Bias [out].
    pub bias: Option<ParamId>,
    /// Adapter.
    pub lora: Option<Lora>,
    /// First of its columns in the projection's output.
    pub first: usize,
    /// Width of the output.
    pub out_features: usize,
}

/// Linear layers on one input, computed at once.
#[derive(Debug, Clone)]
pub struct Projection {
    /// The layers; their outputs lie beside each other in this order.
    pub linears: Vec<Linear>,
    /// Weights and adapters.
    pub matrix: MatrixId,
    /// Width of the input.
    pub in_features: usize,
    /// Width of all outputs (N).
    pub out_features: usize,
    /// Columns of all adapters (R), those that only align them included.
    pub adapter_columns: usize,
}

/// What [`Projection::forward`] keeps.
#[derive(Debug)]
pub struct ProjectionSaved {
    /// `z` [T, R].
    z: Option<Tensor>,
}

impl Projection {
    /// Shape of an input of so many rows, with room for z.
    pub fn input_shape(&self, device: &Device, rows: usize) -> [usize; 2] {
        [rows, device.stride(self.in_features + self.adapter_columns)]
    }

    /// Shape of an output of so many rows, with room for dz.
    pub fn output_shape(&self, device: &Device, rows: usize) -> [usize; 2] {
        [rows, device.stride(self.out_features + self.adapter_columns)]
    }

    /// The first linear layer's adapter, which speaks for all: they have one scale and one dropout.
    fn lora(&self) -> Option<&Lora> {
        self.linears.iter().find_map(|linear| linear.lora.as_ref())
    }

    /// `x` [T, ≥in + R] (`Self::input_shape`; the columns behind `in` are overwritten) → `y` [T, N], assigned, plus `residual` [T, N] if given.
    pub fn forward<'y>(
        &self,
        ctx: &Context<'_>,
        x: &mut Tensor,
        residual: Option<View<'_>>,
        y: impl Into<ViewMut<'y>>,
    ) -> ProjectionSaved {
        let (device, params, mut y) = (ctx.device, ctx.params, y.into());
        let saved = self.saved_only(ctx, x.first_columns(self.in_features));
        let mut inner = self.in_features;
        if let Some(z) = &saved.z {
            elementwise::copy(device, z, x.view_mut().columns(inner, self.adapter_columns));
            inner += self.adapter_columns;
        }
        let x = x.first_columns(inner);
        let weight = params.matrix(self.matrix).view().row_range(0, self.out_features).columns(0, inner);
        let mut beta = 0.0;
        for linear in &self.linears {
            if let Some(bias) = linear.bias {
                let columns = y.reborrow().columns(linear.first, linear.out_features);
                elementwise::broadcast_rows(device, params.operand(bias), columns);
                beta = 1.0;
            }
        }
        match residual {
            Some(residual) if beta == 0.0 => matmul::nt_add(device, x, weight, residual, y),
            _ => {
                // Layers of one projection have all a bias or none: a product that adds to what it finds adds to biases alone.
                debug_assert!(beta == 0.0 || self.linears.iter().all(|linear| linear.bias.is_some()));
                matmul::nt(device, 1.0, x, weight, beta, y.reborrow());
                elementwise::round(device, y.reborrow());
                if let Some(residual) = residual {
                    elementwise::add_assign(device, y, residual);
                }
            }
        }
        saved
    }

    /// What [`Projection::forward`] keeps, without its output: for a recomputation whose output nobody reads.
    pub fn saved_only(&self, ctx: &Context<'_>, x: View<'_>) -> ProjectionSaved {
        let z = self.lora().map(|lora| {
            let mut z = ctx.saved(&[x.rows(), self.adapter_columns]);
            if ctx.dropout.is_none() || lora.dropout == 0.0 {
                let a = self.adapters(ctx, 0, self.adapter_columns);
                matmul::nt(ctx.device, lora.scale, x, a, 0.0, &mut z);
            } else {
                z.fill_zero();
                for lora in self.linears.iter().filter_map(|linear| linear.lora) {
                    let dropped = drop_input(ctx, &lora, x);
                    let (a, z) = (self.adapters(ctx, lora.first, lora.r), z.view_mut().columns(lora.first, lora.r));
                    match &dropped {
                        Some(dropped) => matmul::nt(ctx.device, lora.scale, dropped, a, 0.0, z),
                        None => matmul::nt(ctx.device, lora.scale, x, a, 0.0, z),
                    }
                }
            }
            elementwise::round(ctx.device, &mut z);
            z
        });
        ProjectionSaved { z }
    }

    /// Backward of [`Projection::forward`]: `dx` [T, in], if given, is assigned; parameters accumulate. `x` is [T, in]; `dy` [T, ≥N + R]
    /// (`Self::output_shape`) holds the gradient in its first N columns, and those behind them are overwritten.
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: &ProjectionSaved,
        x: View<'_>,
        dy: &mut Tensor,
        dx: Option<ViewMut<'_>>,
    ) {
        let (device, matrix) = (ctx.device, ctx.params.matrix(self.matrix).view());
        for linear in &self.linears {
            let dy = dy.view().columns(linear.first, linear.out_features);
            if let Some(dweight) = grads.get_mut(linear.weight) {
                matmul::tn(device, 1.0, dy, x, 1.0, dweight);
            }
            if let Some(dbias) = linear.bias.and_then(|bias| grads.get_mut(bias)) {
                elementwise::sum_rows(device, dy, dbias);
            }
            if let (Some(lora), Some(z)) = (linear.lora, &saved.z)
                && let Some(db) = grads.get_mut(lora.b)
            {
                matmul::tn(device, 1.0, dy, z.view().columns(lora.first, lora.r), 1.0, db);
            }
        }
        let dropping = ctx.dropout.is_some() && self.lora().is_some_and(|lora| lora.dropout > 0.0);
        let (n, r) = (self.out_features, self.adapter_columns);
        if let Some(lora) = self.lora() {
            matmul::extend_nn(device, lora.scale, dy, matrix.row_range(0, n).columns(self.in_features, r));
            elementwise::round(device, dy.view_mut().columns(n, r));
            if let Some(da) = grads.stacked_mut(self.matrix) {
                if dropping {
                    for lora in self.linears.iter().filter_map(|linear| linear.lora) {
                        let dropped = drop_input(ctx, &lora, x);
                        let (dz, da) = (dy.view().columns(n + lora.first, lora.r), da.view_mut());
                        let x = dropped.as_ref().map_or(x, Tensor::view);
                        matmul::tn(device, 1.0, dz, x, 1.0, da.row_range(lora.first, lora.r));
                    }
                } else {
                    matmul::tn(device, 1.0, dy.view().columns(n, r).columns(0, da.rows()), x, 1.0, da);
                }
            }
        }
        let Some(mut dx) = dx else { return };
        let inner = if dropping { n } else { n + r };
        let weight = matrix.row_range(0, inner).columns(0, self.in_features);
        matmul::nn(device, 1.0, dy.first_columns(inner), weight, 0.0, dx.reborrow());
        if let Some(state) = ctx.dropout.filter(|_| dropping) {
            let mut through = ctx.scratch(&[x.rows(), self.in_features]);
            for lora in self.linears.iter().filter_map(|linear| linear.lora) {
                let dz = dy.view().columns(n + lora.first, lora.r);
                matmul::nn(device, 1.0, dz, self.adapters(ctx, lora.first, lora.r), 0.0, &mut through);
                dropout::backward_accumulate(device, state.key(lora.index), lora.dropout, &through, dx.reborrow());
            }
        }
        elementwise::round(device, dx);
    }

    /// Rows of the adapters' A: [count, in].
    fn adapters<'a>(&self, ctx: &Context<'a>, first: usize, count: usize) -> View<'a> {
        ctx.params.matrix(self.matrix).view().row_range(self.out_features + first, count).columns(0, self.in_features)
    }
}

/// The adapter's input after dropout; `None` when nothing is dropped.
fn drop_input(ctx: &Context<'_>, lora: &Lora, x: View<'_>) -> Option<Tensor> {
    let state = ctx.dropout.filter(|_| lora.dropout > 0.0)?;
    let mut dropped = ctx.scratch(&[x.rows(), x.cols()]);
    dropout::forward(ctx.device, state.key(lora.index), lora.dropout, x, &mut dropped);
    Some(dropped)
}

#[cfg(test)]
#[path = "projection_tests.rs"]
mod tests;
