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
        // Bias and adapter come first, so that the large product, which has time to spare for memory, reads what they wrote.
        let mut beta = match self.bias {
            Some(bias) => {
                elementwise::broadcast_rows(device, params.operand(bias), y);
                1.0
            }
            None => 0.0,
        };
        let saved = self.saved_only(ctx, x);
        if let (Some(lora), Some(z)) = (self.lora, &saved.z) {
            matmul::nt(device, lora.scale, z, params.operand(lora.b), beta, y);
            beta = 1.0;
        }
        matmul::nt(device, 1.0, x, params.operand(self.weight), beta, y);
        elementwise::round(device, y);
        saved
    }

    /// What [`Linear::forward`] keeps, without its output: for a recomputation whose output nobody reads.
    pub fn saved_only(&self, ctx: &Context<'_>, x: &Tensor) -> LinearSaved {
        let z = self.lora.map(|lora| {
            let dropped = drop_input(ctx, &lora, x);
            let a = ctx.params.operand(lora.a);
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
            let (a, b) = (params.operand(lora.a), params.operand(lora.b));
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
        let mut beta = if accumulate { 1.0 } else { 0.0 };
        let dropped = ctx.dropout.filter(|_| self.lora.is_some_and(|lora| lora.dropout > 0.0));
        if let (Some((lora, dz)), None) = (&dz, dropped) {
            matmul::nn(device, 1.0, dz, params.operand(lora.a), beta, dx);
            beta = 1.0;
        }
        matmul::nn(device, 1.0, dy, params.operand(self.weight), beta, dx);
        if let (Some((lora, dz)), Some(state)) = (&dz, dropped) {
            let mut through = ctx.scratch(&[dy.rows(), self.in_features]);
            matmul::nn(device, 1.0, dz, params.operand(lora.a), 0.0, &mut through);
            dropout::backward_accumulate(device, state.key(lora.index), lora.dropout, &through, dx);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::DropoutState;
    use crate::layers::parameter::{Parameter, Params};
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
    use crate::tensor::{Device, MemoryCategory};

    const ROWS: usize = 5;
    const IN: usize = 12;
    const OUT: usize = 7;
    const R: usize = 3;

    /// A layer with bias and adapter, all of it trainable.
    fn layer(device: &Device, dropout: f32) -> (Params, Linear) {
        let mut values = Values::new(4);
        let mut params = Params::default();
        let mut push = |name: &str, shape: &[usize]| {
            let value = values.tensor(device, shape);
            params.push(Parameter { name: name.into(), value, working: None, trainable: true })
        };
        let (weight, bias) = (push("weight", &[OUT, IN]), push("bias", &[OUT]));
        let (a, b) = (push("lora_A", &[R, IN]), push("lora_B", &[OUT, R]));
        let lora = Some(Lora { a, b, scale: 1.5, dropout, index: 9 });
        (params, Linear { weight, bias: Some(bias), lora, in_features: IN, out_features: OUT })
    }

    fn state(step: u64) -> DropoutState {
        DropoutState { seed: 3, step, micro_batch: 0 }
    }

    fn forward(ctx: &Context<'_>, linear: &Linear, x: &Tensor) -> (Tensor, LinearSaved) {
        let mut y = ctx.scratch(&[x.rows(), OUT]);
        let saved = linear.forward(ctx, x, &mut y);
        (y, saved)
    }

    #[test]
    fn gradients_agree_with_finite_differences_with_and_without_dropout() {
        let device = cpu(2);
        for dropout in [None, Some(state(1))] {
            let (mut params, linear) = layer(&device, 0.4);
            let mut values = Values::new(6);
            let (x, dy) = (values.tensor(&device, &[ROWS, IN]), values.tensor(&device, &[ROWS, OUT]));
            let mut dx = device.empty(MemoryCategory::Workspace, &[ROWS, IN]);
            let mut grads = Grads::new(&device, &params);
            {
                let ctx = Context { device: &device, params: &params, dropout };
                let (_, saved) = forward(&ctx, &linear, &x);
                linear.backward(&ctx, &mut grads, &saved, &x, &dy, Some(&mut dx), false);
            }
            let by_x = |x: &[f32]| {
                let ctx = Context { device: &device, params: &params, dropout };
                let x = device.tensor(MemoryCategory::Workspace, &[ROWS, IN], x.to_vec());
                dot(dy.f32s(), forward(&ctx, &linear, &x).0.f32s())
            };
            assert_gradient("dx", x.f32s(), dx.f32s(), by_x);
            let ids: Vec<ParamId> = params.iter().map(|(id, _)| id).collect();
            for id in ids {
                let start = params.operand(id).to_vec();
                assert_gradient("parameter", &start, grads.get(id).unwrap().f32s(), |value| {
                    params.get_mut(id).set(value);
                    let ctx = Context { device: &device, params: &params, dropout };
                    dot(dy.f32s(), forward(&ctx, &linear, &x).0.f32s())
                });
                params.get_mut(id).set(&start);
            }
        }
    }

    #[test]
    fn dropout_keeps_the_mean_and_touches_the_adapter_alone() {
        let device = cpu(2);
        let (mut params, linear) = layer(&device, 0.25);
        let x = Values::new(8).tensor(&device, &[ROWS, IN]);
        let run = |params: &Params, dropout| {
            forward(&Context { device: &device, params, dropout }, &linear, &x).0.f32s().to_vec()
        };
        let plain = run(&params, None);
        let mut mean = vec![0.0f32; plain.len()];
        let steps = 3000;
        for step in 1..=steps {
            let y = run(&params, Some(state(step)));
            mean.iter_mut().zip(y).for_each(|(mean, y)| *mean += y / steps as f32);
        }
        assert_ne!(run(&params, Some(state(1))), plain);
        assert_close("mean", &mean, &plain, 0.02);
        let b = linear.lora.unwrap().b;
        params.get_mut(b).value.fill_zero();
        assert_eq!(run(&params, Some(state(1))), run(&params, None));
    }
}
