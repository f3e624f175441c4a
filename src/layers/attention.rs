//! Grouped-query attention over packed documents: projections, optional norms of q and k, rotary embedding, attention, output.

use super::norm::RmsNorm;
use super::parameter::{Grads, ParamId};
use super::projection::Projection;
use super::{Context, Keep};
use crate::ops::attention::{self, AttentionShape, Qkv, TileList};
use crate::ops::qk_norm::{self, Heads, QkNorm};
use crate::ops::rope::{self, RopeTable};
use crate::tensor::{Indices, Tensor};

/// What attention needs to know about the documents of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// Work lists for this layer's window.
    pub tiles: &'a TileList,
    /// Cosines and sines by position.
    pub rope: &'a RopeTable,
    /// Position of every token in its document.
    pub position_ids: &'a Indices,
}

/// The attention of one block.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Query, key and value projection.
    pub qkv_proj: Projection,
    /// Output projection.
    pub o_proj: Projection,
    /// Norms of each query and key head (Qwen3).
    pub qk_norm: Option<QkNorms>,
    /// A score a head that has no value, f32 [heads] (gpt-oss).
    pub sinks: Option<ParamId>,
    /// Heads and scale.
    pub shape: AttentionShape,
}

/// Norms of query and key heads, with one epsilon.
#[derive(Debug, Clone, Copy)]
pub struct QkNorms {
    /// Norm of each query head.
    pub q_norm: RmsNorm,
    /// Norm of each key head.
    pub k_norm: RmsNorm,
}

/// What [`Attention::forward`] keeps.
#[derive(Debug)]
pub struct AttentionSaved {
    /// Queries, keys and values beside each other as the projection made them; without norms, queries and keys are turned in place.
    qkv: Tensor,
    /// Whether [`Attention::backward`] gives them back.
    qkv_is_lent: bool,
    /// With norms: queries and keys after norm and rotation.
    qk: Option<Tensor>,
    /// Output of the heads, with z of the output projection behind it.
    o: Tensor,
    softmax_lse: Tensor,
    /// Input of the first projection with its z, where the backward pass follows at once.
    h: Option<Tensor>,
    /// z of the first projection, where its input is not kept.
    z: Option<Tensor>,
}

impl AttentionSaved {
    /// Queries, keys and values, for [`Attention::forward`] to begin with.
    pub fn into_qkv(self) -> Tensor {
        self.qkv
    }

    /// Lets [`Attention::backward`] drop queries, keys and values as early as it can, where nobody waits for them.
    pub fn own_qkv(&mut self) {
        self.qkv_is_lent = false;
    }
}

impl Attention {
    /// `h` [T, hidden] with room for adapters ([`Projection::input_shape`]) → what is kept, and `residual + attention` [T, hidden]. `qkv` is what an
    /// earlier pass made of the same input ([`AttentionSaved::into_qkv`]), where that was kept: it is not computed again, and [`Self::backward`] gives it
    /// back. Without a residual its sum with attention is there already, and is not computed again.
    pub fn forward(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        mut h: Tensor,
        qkv: Option<Tensor>,
        residual: Option<&Tensor>,
        keep: Keep,
    ) -> (AttentionSaved, Option<Tensor>) {
        let Sequences { tiles, rope: table, position_ids } = sequences;
        let (device, shape, rows) = (ctx.device, &self.shape, h.rows());
        let qk_width = shape.q_width() + shape.kv_width();
        let qkv_is_lent = qkv.is_some();
        let mut qkv = match qkv {
            Some(qkv) => {
                self.qkv_proj.fill_z(ctx, &mut h);
                qkv
            }
            None => {
                let mut qkv = ctx.saved(&[rows, shape.qkv_width()]);
                self.qkv_proj.forward(ctx, &mut h, None, &mut qkv);
                qkv
            }
        };
        let z = if keep == Keep::Longest { self.qkv_proj.saved_z(ctx, &h) } else { None };
        let h = (keep == Keep::Inputs).then_some(h);
        let qk = match self.norms(ctx) {
            None => {
                if !qkv_is_lent {
                    rope::forward(device, qkv.first_columns_mut(qk_width), table, position_ids);
                }
                None
            }
            Some(norms) => {
                let mut qk = ctx.saved(&[rows, qk_width]);
                qk_norm::forward(device, &norms, table, position_ids, qkv.first_columns(qk_width), &mut qk);
                Some(qk)
            }
        };
        let mut o = ctx.saved(&self.o_proj.input_shape(device, rows));
        let mut softmax_lse = ctx.saved_f32(&[rows, shape.num_heads]);
        let operands = Qkv::of(shape, qkv.view(), qk.as_ref().map(Tensor::view));
        attention::forward(
            device,
            shape,
            tiles,
            operands,
            self.sinks(ctx),
            o.first_columns_mut(shape.q_width()),
            &mut softmax_lse,
        );
        let y = match residual {
            None => {
                self.o_proj.fill_z(ctx, &mut o);
                None
            }
            Some(residual) => {
                let mut y = ctx.saved(residual.shape());
                self.o_proj.forward(ctx, &mut o, Some(residual.view()), &mut y);
                Some(y)
            }
        };
        (AttentionSaved { qkv, qkv_is_lent, qk, o, softmax_lse, h, z }, y)
    }

    /// Backward of [`Attention::forward`] but for the residual: from `dy` [T, hidden] with room for adapters ([`Projection::output_shape`]), the
    /// gradient of its input [T, hidden] if `need_dh`, and queries, keys and values where they were lent. `h` makes that input [T, ≥hidden] again,
    /// where it was not kept: it is asked last, when what attention itself needs is done with.
    ///
    /// Held at most, besides `dy`: q, k and v with their gradients, attention's output and its gradient, and, with norms of q and k, these once more;
    /// for Llama 3 8B's sizes 2·1.5 + 2 = 5 (with norms 6.25) times T×hidden values. Statistics of rows in f32 add 12 bytes a head and row.
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        sequences: Sequences<'_>,
        saved: AttentionSaved,
        h: impl FnOnce() -> Tensor,
        dy: &mut Tensor,
        need_dh: bool,
    ) -> (Option<Tensor>, Option<Tensor>) {
        let Sequences { tiles, rope: table, position_ids } = sequences;
        let (device, shape) = (ctx.device, &self.shape);
        let AttentionSaved { qkv, qkv_is_lent, qk, o, softmax_lse, h: kept, z } = saved;
        let (rows, q_width) = (o.rows(), shape.q_width());
        let qk_width = q_width + shape.kv_width();
        let mut d_o = ctx.scratch(&[rows, q_width]);
        let out = o.first_columns(q_width);
        self.o_proj.backward(ctx, grads, out, self.o_proj.z(&o), dy.view_mut(), Some(d_o.view_mut()));
        let mut dqkv = ctx.scratch(&self.qkv_proj.output_shape(device, rows));
        let operands = attention::Saved {
            qkv: Qkv::of(shape, qkv.view(), qk.as_ref().map(Tensor::view)),
            sinks: self.sinks(ctx),
            o: out,
            softmax_lse: &softmax_lse,
        };
        let d_sinks = self.sinks.and_then(|sinks| grads.get_mut(sinks));
        attention::backward(device, shape, tiles, &operands, &d_o, dqkv.first_columns_mut(shape.qkv_width()), d_sinks);
        drop((d_o, o, softmax_lse, qk));
        match self.norms(ctx) {
            None => rope::backward(device, dqkv.first_columns_mut(qk_width), table, position_ids),
            Some(norms) => {
                let x = qkv.first_columns(qk_width);
                for (heads, norm) in
                    self.qk_norm.iter().flat_map(|n| [(Heads::Query, n.q_norm), (Heads::Key, n.k_norm)])
                {
                    if let Some(dweight) = grads.get_mut(norm.weight) {
                        let dy = dqkv.first_columns(qk_width);
                        qk_norm::backward_weight(device, &norms, table, position_ids, heads, x, dy, dweight);
                    }
                }
                qk_norm::backward_in_place(device, &norms, table, position_ids, x, dqkv.first_columns_mut(qk_width));
            }
        }
        let lent = qkv_is_lent.then_some(qkv);
        let h = kept.unwrap_or_else(h);
        let z = z.as_ref().map(Tensor::view).or_else(|| self.qkv_proj.z(&h));
        let x = h.first_columns(self.qkv_proj.in_features);
        let mut dh = need_dh.then(|| ctx.scratch(&[rows, self.qkv_proj.in_features]));
        self.qkv_proj.backward(ctx, grads, x, z, dqkv.view_mut(), dh.as_mut().map(Tensor::view_mut));
        (dh, lent)
    }

    fn sinks<'a>(&self, ctx: &Context<'a>) -> Option<&'a Tensor> {
        self.sinks.map(|sinks| ctx.params.operand(sinks))
    }

    fn norms<'a>(&self, ctx: &Context<'a>) -> Option<QkNorm<'a>> {
        let QkNorms { q_norm, k_norm } = self.qk_norm?;
        Some(QkNorm {
            q_weight: ctx.params.operand(q_norm.weight),
            k_weight: ctx.params.operand(k_norm.weight),
            eps: q_norm.eps,
            num_heads: self.shape.num_heads,
            num_kv_heads: self.shape.num_kv_heads,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::parameter::{Params, Part};
    use crate::layers::projection::Linear;
    use crate::ops::testing::{Values, assert_gradient, cpu, dot};
    use crate::tensor::{Device, MemoryCategory};

    const HIDDEN: usize = 6;
    const ROWS: usize = 9;
    const SHAPE: AttentionShape = AttentionShape { num_heads: 4, num_kv_heads: 2, head_dim: 4, scale: 0.5 };

    /// A projection with biases, its values drawn.
    fn projection(params: &mut Params, values: &mut Values, input: usize, outputs: &[usize]) -> Projection {
        let out_features = outputs.iter().sum();
        let matrix = params.push_matrix(out_features, input);
        let mut first = 0;
        let linears = outputs.iter().map(|&rows| {
            let weight = params.push_part("weight", Part { matrix, row: first, col: 0, rows, cols: input });
            params.set(weight, &values.vec(rows * input));
            let bias = params.push("bias", values.tensor(&cpu(1), &[rows]));
            let linear = Linear { weight, bias: Some(bias), lora: None, first, out_features: rows };
            first += rows;
            linear
        });
        let linears = linears.collect();
        Projection { linears, matrix, in_features: input, out_features, adapter_columns: 0 }
    }

    /// An attention as that of gpt-oss, whose sinks train.
    fn layer(device: &Device, sinks: &[f32]) -> (Params, Attention) {
        let (mut params, mut values) = (Params::new(device), Values::new(4));
        let (q, kv) = (SHAPE.q_width(), SHAPE.kv_width());
        let qkv_proj = projection(&mut params, &mut values, HIDDEN, &[q, kv, kv]);
        let o_proj = projection(&mut params, &mut values, q, &[HIDDEN]);
        let id = params.push_f32("sinks", &[SHAPE.num_heads]);
        params.set(id, sinks);
        params.train(id);
        let bias = qkv_proj.linears[1].bias.unwrap();
        params.train(bias);
        (params, Attention { qkv_proj, o_proj, qk_norm: None, sinks: Some(id), shape: SHAPE })
    }

    #[test]
    fn gradients_with_sinks_agree_with_finite_differences_on_both_paths() {
        let device = cpu(2);
        let mut values = Values::new(9);
        let [h, residual, dy] = [(); 3].map(|()| values.tensor(&device, &[ROWS, HIDDEN]));
        let sinks = values.vec(SHAPE.num_heads);
        let table = RopeTable::scaled(&device, &[1.0, 0.3], 1.25, 8);
        let position_ids = device.indices(MemoryCategory::Metadata, vec![0, 1, 2, 3, 4, 5, 0, 1, 2]);
        for (window, masked) in [(None, false), (Some(3), false), (Some(3), true)] {
            let tiles = match masked {
                false => TileList::new(&[0, 6, 9], window),
                true => TileList::masked(&device, &[0, 6, 9], window),
            };
            let sequences = Sequences { tiles: &tiles, rope: &table, position_ids: &position_ids };
            let forward = |(params, attention): &(Params, Attention), h: &[f32]| {
                let h = device.tensor(MemoryCategory::Workspace, &[ROWS, HIDDEN], h.to_vec());
                let ctx = Context::new(&device, params, None);
                let (saved, y) = attention.forward(&ctx, sequences, h, None, Some(&residual), Keep::Inputs);
                (saved, y.unwrap())
            };
            let made = layer(&device, &sinks);
            let (saved, _) = forward(&made, h.f32s());
            let (params, attention) = &made;
            let (ctx, mut grads) = (Context::new(&device, params, None), Grads::new(params));
            let mut upstream = device.tensor(MemoryCategory::Workspace, &[ROWS, HIDDEN], dy.to_vec());
            let (dh, lent) =
                attention.backward(&ctx, &mut grads, sequences, saved, || unreachable!(), &mut upstream, true);
            assert!(lent.is_none());
            let loss = |layer: &(Params, Attention), h: &[f32]| dot(dy.f32s(), forward(layer, h).1.f32s());
            assert_gradient("dh", h.f32s(), dh.unwrap().f32s(), |h| loss(&made, h));
            let dsinks = grads.get(attention.sinks.unwrap()).unwrap().to_vec();
            assert_gradient("dsinks", &sinks, &dsinks, |sinks| loss(&layer(&device, sinks), h.f32s()));
        }
    }
}
