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
//! A matrix whose weights are in 4 bits is made of them and of the adapters for each product, or for a block's pass ([`Projection::hold`]).
//!
//! The caller keeps x with z behind it, or z alone where x can be made again. Backward besides: `dW += dyᵀ·x`, `dB += dyᵀ·z`, `dA += dzᵀ·drop(x)`.
//! With dropout the adapters' part of `dx` passes the mask by itself.

use super::held::Hold;
use super::parameter::{Grads, MatrixId, ParamId, Part};
use super::{Context, DropoutState};
use crate::ops::dropout::DropoutKey;
use crate::ops::{adapter, dropout, elementwise, matmul};
use crate::tensor::{Device, MemoryCategory, Tensor, View, ViewMut};

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

impl Projection {
    /// Shape of an input of so many rows, with room for z.
    pub fn input_shape(&self, device: &Device, rows: usize) -> [usize; 2] {
        [rows, device.stride(self.in_features + self.adapter_columns)]
    }

    /// Shape of an output of so many rows, with room for dz.
    pub fn output_shape(&self, device: &Device, rows: usize) -> [usize; 2] {
        [rows, device.stride(self.out_features + self.adapter_columns)]
    }

    /// Keeps the matrix while the hold lives, where it has to be made of weights in 4 bits: several products of a pass read it.
    pub fn hold<'a>(&self, ctx: &Context<'a>) -> Hold<'a> {
        ctx.params.hold(self.matrix)
    }

    /// The first linear layer's adapter, which speaks for all: they have one scale and one dropout.
    fn lora(&self) -> Option<&Lora> {
        self.linears.iter().find_map(|linear| linear.lora.as_ref())
    }

    /// `x` [T, ≥in + R] ([`Self::input_shape`]) → `y` [T, N], assigned, plus `residual` [T, N] if given. z is written behind x.
    pub fn forward<'y>(
        &self,
        ctx: &Context<'_>,
        x: &mut Tensor,
        residual: Option<View<'_>>,
        y: impl Into<ViewMut<'y>>,
    ) {
        let (device, params, mut y) = (ctx.device, ctx.params, y.into());
        self.fill_z(ctx, x);
        let inner = self.in_features + self.adapter_columns;
        let x = x.first_columns(inner);
        let matrix = params.matrix(self.matrix);
        let weight = matrix.view().row_range(0, self.out_features).columns(0, inner);
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
    }

    /// Writes z behind the columns of `x` [T, ≥in + R]: all of [`Self::forward`] that a recomputation needs whose output nobody reads.
    pub fn fill_z(&self, ctx: &Context<'_>, x: &mut Tensor) {
        let Some(lora) = self.lora() else { return };
        let (device, columns) = (ctx.device, self.adapter_columns);
        match ctx.dropout.filter(|_| lora.dropout > 0.0) {
            None => matmul::extend_nt(device, lora.scale, &mut *x, self.a(ctx)),
            Some(_) => {
                // Columns that only align the others stay zero.
                let mut z = device.zeros(MemoryCategory::Workspace, &[x.rows(), columns]);
                for lora in self.linears.iter().filter_map(|linear| linear.lora) {
                    if let Some(dropped) = self.drop_input(ctx, &lora, x.first_columns(self.in_features)) {
                        let (a, z) = (self.adapters(ctx, lora.first, lora.r), z.view_mut().columns(lora.first, lora.r));
                        matmul::nt(device, lora.scale, &dropped, a, 0.0, z);
                    }
                }
                elementwise::copy(device, &z, x.view_mut().columns(self.in_features, columns));
            }
        }
        elementwise::round(device, x.view_mut().columns(self.in_features, columns));
    }

    /// z as it lies behind `x`; `None` without adapters.
    pub fn z<'x>(&self, x: &'x Tensor) -> Option<View<'x>> {
        self.lora().map(|_| x.view().columns(self.in_features, self.adapter_columns))
    }

    /// A copy of [`Self::z`] to keep where x is not kept.
    pub fn saved_z(&self, ctx: &Context<'_>, x: &Tensor) -> Option<Tensor> {
        self.z(x).map(|z| {
            let mut saved = ctx.saved(&[z.rows(), z.cols()]);
            elementwise::copy(ctx.device, z, &mut saved);
            saved
        })
    }

    /// Backward of [`Projection::forward`]: `dx` [T, in], if given, is assigned; parameters accumulate. `x` is [T, in], `z` [T, R]; `dy`
    /// [T, ≥N + R] ([`Self::output_shape`]) holds the gradient in its first N columns, and those behind them are overwritten.
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        x: View<'_>,
        z: Option<View<'_>>,
        mut dy: ViewMut<'_>,
        dx: Option<ViewMut<'_>>,
    ) {
        for linear in &self.linears {
            let dy = dy.as_view().columns(linear.first, linear.out_features);
            if let Some(dweight) = grads.get_mut(linear.weight) {
                matmul::tn(ctx.device, 1.0, dy, x, 1.0, dweight);
            }
            if let Some(dbias) = linear.bias.and_then(|bias| grads.get_mut(bias)) {
                elementwise::sum_rows(ctx.device, dy, dbias);
            }
        }
        match (z, self.rank_of_adapters_alone(ctx)) {
            (Some(z), Some(_)) => {
                let adapters = self.linears.iter().filter_map(|linear| linear.lora);
                let (ids, scale): (Vec<ParamId>, f32) = (adapters.map(|lora| lora.b).collect(), self.scale());
                let widths: Vec<usize> = self.linears.iter().map(|linear| linear.out_features).collect();
                let db = &mut grads.several_mut(&ids);
                adapter::b_gradients_and_dz(ctx.device, scale, dy.reborrow(), &widths, z, self.b(ctx), db);
            }
            (z, _) => {
                if let Some(z) = z {
                    self.b_gradients(ctx, grads, z, dy.as_view());
                }
                self.fill_dz(ctx, dy.reborrow());
            }
        }
        self.a_gradients(ctx, grads, x, dy.as_view());
        if let Some(dx) = dx {
            self.input_gradient(ctx, dy.as_view(), dx);
        }
    }

    /// `dB += dyᵀ·z` of every adapter, with `z` [T, R] and `dy` [T, ≥N].
    pub fn b_gradients(&self, ctx: &Context<'_>, grads: &mut Grads, z: View<'_>, dy: View<'_>) {
        for linear in &self.linears {
            if let Some(lora) = linear.lora
                && let Some(db) = grads.get_mut(lora.b)
            {
                let dy = dy.columns(linear.first, linear.out_features);
                adapter::b_gradient(ctx.device, dy, z.columns(lora.first, lora.r), db);
            }
        }
    }

    /// Writes dz behind the columns of `dy` [T, ≥N + R].
    pub fn fill_dz(&self, ctx: &Context<'_>, mut dy: ViewMut<'_>) {
        let Some(lora) = self.lora() else { return };
        matmul::extend_nn(ctx.device, lora.scale, dy.reborrow(), self.b(ctx));
        elementwise::round(ctx.device, dy.columns(self.out_features, self.adapter_columns));
    }

    /// `dA += dzᵀ·drop(x)` of all adapters, with `x` [T, in] and dz behind `dy` [T, ≥N + R].
    pub fn a_gradients(&self, ctx: &Context<'_>, grads: &mut Grads, x: View<'_>, dy: View<'_>) {
        if let Some(da) = grads.stacked_mut(self.matrix) {
            self.adapter_gradients(ctx, x, dy.columns(self.out_features, self.adapter_columns), da);
        }
    }

    /// Assigns `dx` [T, in] from `dy` [T, ≥N + R] with dz behind it.
    pub fn input_gradient(&self, ctx: &Context<'_>, dy: View<'_>, mut dx: ViewMut<'_>) {
        let (device, n, r) = (ctx.device, self.out_features, self.adapter_columns);
        let dropping = ctx.dropout.filter(|_| self.lora().is_some_and(|lora| lora.dropout > 0.0));
        let inner = if dropping.is_some() { n } else { n + r };
        let matrix = ctx.params.matrix(self.matrix);
        let weight = matrix.view().row_range(0, inner).columns(0, self.in_features);
        matmul::nn(device, 1.0, dy.columns(0, inner), weight, 0.0, dx.reborrow());
        if let Some(state) = dropping {
            let mut through = ctx.scratch(&[dx.rows(), self.in_features]);
            for lora in self.linears.iter().filter_map(|linear| linear.lora) {
                let dz = dy.columns(n + lora.first, lora.r);
                matmul::nn(device, 1.0, dz, self.adapters(ctx, lora.first, lora.r), 0.0, &mut through);
                let key = self.dropout_key(ctx, state, &lora);
                dropout::backward_accumulate(device, key, lora.dropout, &through, dx.reborrow());
            }
        }
        elementwise::round(device, dx);
    }

    /// The rank of the adapters, where every layer has one of that rank without columns that only align it, and nothing but them trains and
    /// nothing is dropped.
    pub fn rank_of_adapters_alone(&self, ctx: &Context<'_>) -> Option<usize> {
        let r = self.lora()?.r;
        let trains = |id| ctx.params.is_trainable(id);
        let alone = |linear: &Linear| {
            let adapted = |lora: Lora| {
                let drops = ctx.dropout.is_some() && lora.dropout > 0.0;
                lora.r == r && !drops && trains(lora.a) && trains(lora.b)
            };
            linear.lora.is_some_and(adapted) && !trains(linear.weight) && !linear.bias.is_some_and(trains)
        };
        (self.linears.iter().all(alone) && self.adapter_columns == r * self.linears.len()).then_some(r)
    }

    /// Scale of the adapters; 1 without any.
    pub fn scale(&self) -> f32 {
        self.lora().map_or(1.0, |lora| lora.scale)
    }

    /// B of all adapters: [N, R], a block for each and zeros elsewhere.
    pub fn b<'a>(&self, ctx: &Context<'a>) -> View<'a> {
        let (matrix, rows, cols) = (self.matrix, self.out_features, self.adapter_columns);
        ctx.params.part(&Part { matrix, row: 0, col: self.in_features, rows, cols })
    }

    /// A of all adapters: [R, in].
    pub fn a<'a>(&self, ctx: &Context<'a>) -> View<'a> {
        self.adapters(ctx, 0, self.adapter_columns)
    }

    /// `da` [≤R, in] `+= dzᵀ·drop(x)`, with `dz` [T, R].
    fn adapter_gradients(&self, ctx: &Context<'_>, x: View<'_>, dz: View<'_>, da: &mut Tensor) {
        let mut at_once = true;
        for lora in self.linears.iter().filter_map(|linear| linear.lora) {
            if let Some(dropped) = self.drop_input(ctx, &lora, x) {
                let da = da.view_mut().row_range(lora.first, lora.r);
                matmul::tn(ctx.device, 1.0, dz.columns(lora.first, lora.r), &dropped, 1.0, da);
                at_once = false;
            }
        }
        if at_once {
            adapter::a_gradient(ctx.device, dz.columns(0, da.rows()), x, da);
        }
    }

    /// Rows of the adapters' A: [count, in].
    fn adapters<'a>(&self, ctx: &Context<'a>, first: usize, count: usize) -> View<'a> {
        let (matrix, row, cols) = (self.matrix, self.out_features + first, self.in_features);
        ctx.params.part(&Part { matrix, row, col: 0, rows: count, cols })
    }

    /// The adapter's input after dropout; `None` when nothing is dropped.
    fn drop_input(&self, ctx: &Context<'_>, lora: &Lora, x: View<'_>) -> Option<Tensor> {
        let state = ctx.dropout.filter(|_| lora.dropout > 0.0)?;
        let mut dropped = ctx.scratch(&[x.rows(), x.cols()]);
        dropout::forward(ctx.device, self.dropout_key(ctx, state, lora), lora.dropout, x, &mut dropped);
        Some(dropped)
    }

    /// What the mask of an adapter's input depends on: it goes by the row of the pass, whichever tile the row is in.
    fn dropout_key(&self, ctx: &Context<'_>, state: DropoutState, lora: &Lora) -> DropoutKey {
        DropoutKey { first: (ctx.first_row * self.in_features) as u64, ..state.key(lora.index) }
    }
}

#[cfg(test)]
#[path = "projection_tests.rs"]
mod tests;
