//! One transformer block: `x + attention(norm(x))`, then `+ mlp(norm(·))`.

use std::cell::OnceCell;

use super::offload::ActivationPart;
use super::policy::KeptParts;
use crate::layers::attention::{Attention, AttentionSaved, Sequences};
use crate::layers::feed_forward::{FeedForward, FeedForwardSaved};
use crate::layers::held::Hold;
use crate::layers::mlp::{Mlp, Output};
use crate::layers::moe::Experts;
use crate::layers::norm::RmsNorm;
use crate::layers::parameter::{Grads, ParamId};
use crate::layers::projection::Projection;
use crate::layers::{Context, Keep};
use crate::tensor::clock::PhaseGuard;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Tensor, View, ViewMut};

/// The linear layers of a block: those on one input are one projection.
pub const PROJECTIONS: [&[&str]; 4] = [
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    &["self_attn.o_proj"],
    &["mlp.gate_proj", "mlp.up_proj"],
    &["mlp.down_proj"],
];

/// A block of a transformer.
#[derive(Debug, Clone)]
pub struct Block {
    /// Number of the block, from 0.
    pub index: u32,
    /// Norm before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// Norm before the MLP.
    pub post_attention_layernorm: RmsNorm,
    /// MLP or experts.
    pub mlp: FeedForward,
    /// Window of the attention; `None` is full.
    pub window: Option<usize>,
}

/// What [`Block::forward`] keeps besides its input.
#[derive(Debug)]
pub struct BlockSaved {
    attn: AttentionSaved,
    /// `rstd` of the norm before attention, where what that norm made is kept as well.
    rstd: Option<Tensor>,
    /// Residual stream between attention and MLP.
    middle: Tensor,
    /// Whether [`Block::backward`] gives that back: it was kept, and may lie in a buffer that others wait for.
    middle_is_lent: bool,
    mlp: SavedOrAgain,
}

/// The activations of [`KeptParts`].
#[derive(Debug)]
pub struct Beside<T = Tensor> {
    /// [T, hidden].
    pub middle: Option<T>,
    /// [T, q, k and v].
    pub qkv: Option<T>,
}

impl<T> Default for Beside<T> {
    fn default() -> Self {
        Self { middle: None, qkv: None }
    }
}

impl<T> Beside<T> {
    /// Each of them turned into something else, in the order in which they stand here.
    pub(super) fn map<U>(self, mut turn: impl FnMut(ActivationPart, T) -> U) -> Beside<U> {
        Beside {
            middle: self.middle.map(|middle| turn(ActivationPart::Middle, middle)),
            qkv: self.qkv.map(|qkv| turn(ActivationPart::Qkv, qkv)),
        }
    }
}

/// What a forward pass shall leave of a block for its backward pass, besides its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// These, or nothing.
    Beside(KeptParts),
    /// Everything.
    Everything,
}

/// What a forward pass has left: as [`Leave`] says.
#[derive(Debug)]
pub enum Left {
    /// What was asked for.
    Beside(Beside),
    /// Everything.
    Everything(Box<BlockSaved>),
}

/// What the backward pass of the MLP begins with.
#[derive(Debug)]
enum SavedOrAgain {
    Saved(Box<FeedForwardSaved>),
    /// The residual stream before it: the rest is computed again, tile by tile.
    Again(Keep),
}

/// A normalized input, with room for adapters, and its `rstd`.
#[derive(Debug)]
struct Normed {
    h: Tensor,
    rstd: Tensor,
}

/// Rows that the MLP takes at one time.
///
/// Where its activations are kept there is one tile. Elsewhere tiles are of nearly equal height, so that the last one is no remainder that costs a pass
/// over the weights: what the MLP works with then is held for one tile only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    rows: usize,
    tile: usize,
}

/// Rows of a tile are a multiple of this, where as many were asked for: what products work in.
const TILE_ALIGNMENT: usize = 64;

impl Tiling {
    /// `rows` rows in tiles of at most `mlp_rows`; 0 means one tile.
    pub fn new(rows: usize, mlp_rows: usize) -> Self {
        let tile = match rows.div_ceil(if mlp_rows == 0 { rows.max(1) } else { mlp_rows }) {
            0 | 1 => rows,
            tiles => {
                let even = rows.div_ceil(tiles);
                Some(even.next_multiple_of(TILE_ALIGNMENT)).filter(|aligned| *aligned <= mlp_rows).unwrap_or(even)
            }
        };
        Self { rows, tile }
    }

    /// First row and number of rows of each tile.
    pub fn tiles(self) -> impl Iterator<Item = (usize, usize)> {
        let Self { rows, tile } = self;
        (0..rows).step_by(tile.max(1)).map(move |first| (first, tile.min(rows - first)))
    }

    /// Whether there is more than one tile.
    pub fn is_split(self) -> bool {
        self.tile < self.rows
    }
}

impl Block {
    /// `x` [T, hidden] → the block's output [T, hidden], and what it shall leave for the backward pass. Unless that is everything, the MLP runs over
    /// tiles of at most `mlp_rows` rows (0: over all at once).
    ///
    /// With tiles of few rows, most is held while attention's output is projected: `x`, q, k and v, that output, and the residual stream behind it; with
    /// norms of q and k, these once more. For Llama 3 8B's sizes, where q, k and v take 1.5 T×hidden values, that is 4.5 (with norms 5.75) of them.
    pub fn forward(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        x: &Tensor,
        leave: Leave,
        mlp_rows: usize,
    ) -> (Tensor, Left) {
        let keep = leave == Leave::Everything;
        let wanted = if keep { Keep::Longest } else { Keep::Nothing };
        let (attn, rstd, middle) = self.attend(ctx, sequences, x, Beside::default(), wanted);
        let (mut beside, mut saved) = (Beside::default(), None);
        match leave {
            Leave::Everything => saved = Some(attn),
            Leave::Beside(KeptParts { qkv: true, .. }) => beside.qkv = Some(attn.into_qkv()),
            // Its memory is used again at once.
            Leave::Beside(_) => drop(attn),
        }
        let mut out = ctx.saved(x.shape());
        let _phase = self.mlp_phase(ctx, Pass::Forward);
        if let Some(attn) = saved {
            let output = Output::Write { residual: middle.view(), y: out.view_mut() };
            let mlp = Box::new(self.mlp_forward(ctx, middle.view(), output, wanted).1);
            let mlp = SavedOrAgain::Saved(mlp);
            return (out, Left::Everything(Box::new(BlockSaved { attn, rstd, middle, middle_is_lent: false, mlp })));
        }
        let tiling = Tiling::new(x.rows(), mlp_rows);
        // Made once for all tiles, where they are made of weights in 4 bits.
        let _held = tiling.is_split().then(|| [self.mlp.hold_gate_up(ctx), self.mlp.hold_down(ctx)]);
        for (first, rows) in tiling.tiles() {
            let residual = middle.view().row_range(first, rows);
            let output = Output::Write { residual, y: out.view_mut().row_range(first, rows) };
            self.mlp_forward(&ctx.tile(first), residual, output, wanted);
        }
        if matches!(leave, Leave::Beside(KeptParts { middle: true, .. })) {
            beside.middle = Some(middle);
        }
        (out, Left::Beside(beside))
    }

    /// What [`Block::forward`] keeps, computed again up to the residual stream before the MLP: the backward pass makes the rest again as it goes. It
    /// follows at once, so what it would have to make again may be kept ([`Keep::Inputs`]), which takes two activations more. `beside` is what
    /// [`Leave::Beside`] left; where it `is_lent`, [`Self::backward`] gives it back.
    pub fn recompute(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        x: &Tensor,
        beside: Beside,
        is_lent: bool,
        keep: Keep,
    ) -> BlockSaved {
        let middle_is_lent = is_lent && beside.middle.is_some();
        let (mut attn, rstd, middle) = self.attend(ctx, sequences, x, beside, keep);
        if !is_lent {
            attn.own_qkv();
        }
        BlockSaved { attn, rstd, middle, middle_is_lent, mlp: SavedOrAgain::Again(keep) }
    }

    /// The attention's part: what it keeps, `rstd` of its norm where that goes with it, and the residual stream behind it. What is there `beside` is
    /// not computed.
    fn attend(
        &self,
        ctx: &Context<'_>,
        sequences: Sequences<'_>,
        x: &Tensor,
        Beside { middle, qkv }: Beside,
        keep: Keep,
    ) -> (AttentionSaved, Option<Tensor>, Tensor) {
        let _phase = ctx.device.clock().enter(Phase::Attention, Pass::Forward, Some(self.index));
        let Normed { h, rstd } = normed(ctx, &self.input_layernorm, self.attention_input(ctx, x.rows()), x.view());
        let (attn, made) = self.self_attn.forward(ctx, sequences, h, qkv, middle.is_none().then_some(x), keep);
        let Some(middle) = made.or(middle) else { unreachable!("what was not there was made") };
        (attn, (keep == Keep::Inputs).then_some(rstd), middle)
    }

    /// The MLP's part over the rows of `middle` [rows, hidden].
    fn mlp_forward(
        &self,
        ctx: &Context<'_>,
        middle: View<'_>,
        output: Output<'_>,
        keep: Keep,
    ) -> (Normed, FeedForwardSaved) {
        let mut input = {
            let _phase = self.norm_phase(ctx, Pass::Forward);
            normed(ctx, &self.post_attention_layernorm, self.mlp.input_shape(ctx, middle.rows()), middle)
        };
        let saved = self.mlp.forward(ctx, &mut input.h, output, keep);
        (input, saved)
    }

    /// Keeps the matrices of attention that both [`Self::recompute`] and [`Self::backward`] read while the holds live, where they are made of weights
    /// in 4 bits. Those of the MLP are read in its backward pass alone, which holds them.
    pub fn hold<'a>(&self, ctx: &Context<'a>) -> [Hold<'a>; 2] {
        [&self.self_attn.qkv_proj, &self.self_attn.o_proj].map(|projection| projection.hold(ctx))
    }

    /// Columns that the gradient of the residual stream needs: those of the hidden size, and room for adapters of what reads it.
    pub fn gradient_columns(&self, ctx: &Context<'_>) -> usize {
        let columns = |projection: &Projection| projection.output_shape(ctx.device, 0)[1];
        columns(&self.self_attn.o_proj).max(self.mlp.gradient_columns(ctx))
    }

    /// Backward of [`Block::forward`]: turns the gradient of the output into that of `x`, in the first columns of `dx`
    /// [T, ≥ [`Self::gradient_columns`]]. Without `need_dx` the result is not that gradient, and the work for it is not done: nothing before
    /// this block trains. After [`Self::recompute`] the MLP runs over tiles of at most `mlp_rows` rows (0: over all at once), forward and backward, and
    /// what was lent to that comes back.
    ///
    /// With tiles of few rows and [`Keep::Longest`], most is held in the backward pass of attention itself: `x` and `dx` besides what
    /// [`Attention::backward`] counts, for Llama 3 8B's sizes 7 (with norms of q and k 8.25) T×hidden values; what comes back from the host into a second
    /// buffer takes one more, or as many as are kept of a block. The MLP's tiles run beside `x`, `dx`, the residual stream before them and what attention
    /// saved: 5.5 (6.75).
    #[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
    pub fn backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        sequences: Sequences<'_>,
        x: &Tensor,
        saved: BlockSaved,
        dx: &mut Tensor,
        need_dx: bool,
        mlp_rows: usize,
    ) -> Beside {
        let BlockSaved { attn, rstd, middle, middle_is_lent, mlp } = saved;
        match mlp {
            SavedOrAgain::Saved(mlp) => self.mlp_backward(ctx, grads, middle.view(), None, *mlp, dx.view_mut()),
            SavedOrAgain::Again(keep) => {
                let tiling = Tiling::new(x.rows(), mlp_rows);
                // Gate and up are read in both passes of every tile, down in the backward pass alone.
                let _gate_up = self.mlp.hold_gate_up(ctx);
                let _down = tiling.is_split().then(|| self.mlp.hold_down(ctx));
                // The normed input of a tile is little.
                let keep = if tiling.is_split() { Keep::Inputs } else { keep };
                for (first, rows) in tiling.tiles() {
                    let ctx = &ctx.tile(first);
                    let middle = middle.view().row_range(first, rows);
                    let (input, saved) = {
                        let _phase = ctx.device.clock().enter(Phase::Recompute, Pass::Backward, Some(self.index));
                        self.mlp_forward(ctx, middle, Output::Skip, keep)
                    };
                    let input = (keep == Keep::Inputs).then_some(input);
                    self.mlp_backward(ctx, grads, middle, input, saved, dx.view_mut().row_range(first, rows));
                }
            }
        }
        let middle = middle_is_lent.then_some(middle);

        let _phase = ctx.device.clock().enter(Phase::Attention, Pass::Backward, Some(self.index));
        let norm = &self.input_layernorm;
        let made_again = OnceCell::new();
        let h = || {
            let Normed { h, rstd } = normed(ctx, norm, self.attention_input(ctx, x.rows()), x.view());
            made_again.get_or_init(|| rstd);
            h
        };
        let need_dh = need_dx || ctx.params.is_trainable(norm.weight);
        let (dh, qkv) = self.self_attn.backward(ctx, grads, sequences, attn, h, dx, need_dh);
        if let Some((dh, rstd)) = dh.zip(rstd.or_else(|| made_again.into_inner())) {
            norm.backward(ctx, grads, x, &rstd, &dh, true, dx.first_columns_mut(x.cols()));
        }
        Beside { middle, qkv }
    }

    /// Backward of the MLP's part over the rows of `middle` [rows, hidden]: the gradient of its output in `dx` [rows, ≥hidden] becomes that of `middle`.
    /// Its normed input, where that was not kept, is made again when it is needed: a norm is one pass over memory.
    fn mlp_backward(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        middle: View<'_>,
        input: Option<Normed>,
        saved: FeedForwardSaved,
        mut dx: ViewMut<'_>,
    ) {
        let _phase = self.mlp_phase(ctx, Pass::Backward);
        let norm = &self.post_attention_layernorm;
        let kept = input.map_or_else(OnceCell::new, OnceCell::from);
        let input = || kept.get_or_init(|| normed(ctx, norm, self.mlp.input_shape(ctx, middle.rows()), middle));
        let dh = self.mlp.backward(ctx, grads, saved, &|| &input().h, dx.reborrow());
        let _phase = self.norm_phase(ctx, Pass::Backward);
        norm.backward(ctx, grads, middle, &input().rstd, &dh, true, dx.columns(0, middle.cols()));
    }

    /// The block's projections in the order of [`PROJECTIONS`], with the names of their linear layers; experts are none.
    pub fn projections(&self) -> impl Iterator<Item = (&'static [&'static str], &Projection)> {
        let attention = [&self.self_attn.qkv_proj, &self.self_attn.o_proj];
        PROJECTIONS.into_iter().zip(attention.into_iter().chain(self.mlp.projections()))
    }

    /// As [`Self::projections`], to change.
    pub fn projections_mut(&mut self) -> impl Iterator<Item = (&'static [&'static str], &mut Projection)> {
        let Attention { qkv_proj, o_proj, .. } = &mut self.self_attn;
        let mlp = match &mut self.mlp {
            FeedForward::Mlp(Mlp { gate_up_proj, down_proj }) => vec![gate_up_proj, down_proj],
            FeedForward::Moe(_) => Vec::new(),
        };
        PROJECTIONS.into_iter().zip([qkv_proj, o_proj].into_iter().chain(mlp))
    }

    /// The linear layers of all experts, where it has some: gate and up, and down.
    pub fn experts(&self) -> Option<[&Experts; 2]> {
        match &self.mlp {
            FeedForward::Mlp(_) => None,
            FeedForward::Moe(moe) => Some([&moe.gate_up, &moe.down]),
        }
    }

    /// The adapter matrices on it.
    pub fn adapters(&self) -> impl Iterator<Item = [ParamId; 2]> {
        let dense = self.projections().flat_map(|(_, projection)| &projection.linears).filter_map(|linear| linear.lora);
        let experts = self.experts().into_iter().flatten().filter_map(|experts| experts.lora);
        dense.map(|lora| [lora.a, lora.b]).chain(experts.map(|lora| [lora.a, lora.b]))
    }

    /// Times the second half of the block; experts time their parts themselves.
    fn mlp_phase<'a>(&self, ctx: &Context<'a>, pass: Pass) -> Option<PhaseGuard<'a>> {
        matches!(self.mlp, FeedForward::Mlp(_)).then(|| self.norm_phase(ctx, pass))
    }

    /// Times its norm.
    fn norm_phase<'a>(&self, ctx: &Context<'a>, pass: Pass) -> PhaseGuard<'a> {
        ctx.device.clock().enter(self.mlp.phase(), pass, Some(self.index))
    }

    fn attention_input(&self, ctx: &Context<'_>, rows: usize) -> [usize; 2] {
        self.self_attn.qkv_proj.input_shape(ctx.device, rows)
    }
}

/// `x` [T, hidden] normalized, in room of that shape: what reads it may need columns for its adapters.
fn normed(ctx: &Context<'_>, norm: &RmsNorm, shape: [usize; 2], x: View<'_>) -> Normed {
    let mut h = ctx.scratch(&shape);
    let rstd = norm.forward(ctx, x, h.first_columns_mut(x.cols()));
    Normed { h, rstd }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_row_once_and_are_of_nearly_equal_height() {
        let tiles = |rows, mlp_rows| Tiling::new(rows, mlp_rows).tiles().collect::<Vec<_>>();
        assert_eq!(tiles(43, 0), [(0, 43)]);
        assert_eq!(tiles(43, 43), [(0, 43)]);
        assert_eq!(tiles(0, 7), []);
        assert_eq!(tiles(16, 7), [(0, 6), (6, 6), (12, 4)]);
        assert_eq!(tiles(8200, 4096), [(0, 2752), (2752, 2752), (5504, 2696)], "not 4096, 4096 and 8");
        assert_eq!(tiles(8192, 4096), [(0, 4096), (4096, 4096)]);
        for (rows, mlp_rows) in [(1, 1), (1000, 1), (80_000, 4096), (200_000, 3000), (129, 128), (65, 64), (130, 100)] {
            let mut next = 0;
            for (first, count) in tiles(rows, mlp_rows) {
                assert_eq!(first, next, "{rows} in {mlp_rows}");
                assert!(count > 0 && count <= mlp_rows, "{rows} in {mlp_rows}: {count}");
                next += count;
            }
            assert_eq!(next, rows);
            assert!(tiles(rows, mlp_rows).len() <= rows.div_ceil(mlp_rows), "{rows} in {mlp_rows}");
        }
    }
}
