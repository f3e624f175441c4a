//! Launchers of packed attention on a GPU.

use super::{AttentionShape, Saved, TileList};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Gpu, Tensor};

/// Warps a block of the plain kernels: each has a head.
const WARPS: usize = 4;

struct PlainShape {
    tokens: i32,
    heads: i32,
    kv_heads: i32,
    head_dim: i32,
    window: i32,
}

impl PlainShape {
    fn new(shape: &AttentionShape, tiles: &TileList) -> Self {
        Self {
            tokens: tiles.total_tokens() as i32,
            heads: shape.num_heads as i32,
            kv_heads: shape.num_kv_heads as i32,
            head_dim: shape.head_dim as i32,
            window: i32::try_from(tiles.window).unwrap_or(i32::MAX),
        }
    }

    /// A block for each token and each run of heads.
    fn launch(&self, heads: usize) -> Launch {
        Launch { grid: [self.tokens as u32, heads.div_ceil(WARPS) as u32, 1], ..Launch::new(1, 32 * WARPS as u32) }
    }
}

pub(super) fn forward(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    [q, k, v]: [&Tensor; 3],
    o: &Tensor,
    softmax_lse: &Tensor,
) {
    let p = PlainShape::new(shape, tiles);
    let args = kernel_args![
        q.pointer(),
        k.pointer(),
        v.pointer(),
        o.pointer(),
        softmax_lse.pointer(),
        tiles.bounds_pointer(),
        p.tokens,
        p.heads,
        p.kv_heads,
        p.head_dim,
        shape.scale,
        p.window
    ];
    gpu.launch("attention_plain_forward", p.launch(shape.num_heads), args);
}

pub(super) fn backward(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    saved: &Saved<'_>,
    d_o: &Tensor,
    [dq, dk, dv]: [&Tensor; 3],
) {
    let p = PlainShape::new(shape, tiles);
    let [q, k, v, o, lse] = [saved.q, saved.k, saved.v, saved.o, saved.softmax_lse].map(Tensor::pointer);
    let args = kernel_args![
        q,
        k,
        v,
        o,
        lse,
        d_o.pointer(),
        dq.pointer(),
        tiles.bounds_pointer(),
        p.tokens,
        p.heads,
        p.kv_heads,
        p.head_dim,
        shape.scale,
        p.window
    ];
    gpu.launch("attention_plain_dq", p.launch(shape.num_heads), args);
    let args = kernel_args![
        q,
        k,
        v,
        o,
        lse,
        d_o.pointer(),
        dk.pointer(),
        dv.pointer(),
        tiles.bounds_pointer(),
        p.tokens,
        p.heads,
        p.kv_heads,
        p.head_dim,
        shape.scale,
        p.window
    ];
    gpu.launch("attention_plain_dkv", p.launch(shape.num_kv_heads), args);
}
