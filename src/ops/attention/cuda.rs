//! Launchers of packed attention on a GPU: the tiled kernels where they take the head size, the plain ones elsewhere.

use super::kernels::{Kernel, KernelSet, Path, key_parts};
use super::params::{BackwardParams, ForwardParams};
use super::work_list::Side;
use super::{AttentionShape, Qkv, Saved, TileList};
use crate::kernel_args;
use crate::tensor::cuda::{CudaBuffer, Launch};
use crate::tensor::memory::Charge;
use crate::tensor::{Gpu, MemoryCategory, Tensor, View};

/// Dynamic shared memory that a kernel may have without asking, in bytes: 48 KiB less what kernels hold statically.
const FREE_SHARED_BYTES: u32 = 40 << 10;

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

/// The tiled kernels for this layer, if they take its head size.
fn tiled(gpu: &Gpu, shape: &AttentionShape, tiles: &TileList) -> Option<KernelSet> {
    let path = if tiles.mask().is_some() { Path::Masked } else { Path::Varlen };
    KernelSet::choose(path, shape.head_dim, shape.group(), gpu.facts().max_shared_bytes)
}

/// Address of the dense mask and its words a row; zeros where there is none.
fn mask(tiles: &TileList) -> (u64, i32) {
    tiles.mask().map_or((0, 0), |mask| (mask.pointer(), mask.stride() as i32))
}

/// `kernel` over the greatest `grid` that it can need, so that a recorded graph serves any batch of as many rows: blocks past the last tile return.
/// The second size is at most 65,535: tiles for 2 M rows.
fn tiled_launch(gpu: &Gpu, kernel: &Kernel, [x, y]: [usize; 2]) -> Launch {
    if kernel.shared_bytes > FREE_SHARED_BYTES {
        gpu.allow_shared_bytes(kernel.name, kernel.shared_bytes);
    }
    Launch { grid: [x as u32, y as u32, 1], block: kernel.threads, shared_bytes: kernel.shared_bytes }
}

#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
fn forward_tiled(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    set: &KernelSet,
    Qkv { q, k, v }: Qkv<'_>,
    sinks: Option<&Tensor>,
    o: View<'_>,
    softmax_lse: &Tensor,
) {
    let (query_tiles, num_query_tiles, capacity) = tiles.work_of(Side::Query, set.forward.rows);
    let (mask, mask_stride) = mask(tiles);
    let params = ForwardParams {
        q: q.pointer(),
        k: k.pointer(),
        v: v.pointer(),
        o: o.pointer(),
        softmax_lse: softmax_lse.pointer(),
        sinks: sinks.map_or(0, Tensor::pointer),
        query_tiles,
        num_query_tiles,
        first_key: tiles.work_pointer(),
        mask,
        q_stride: q.stride() as i32,
        k_stride: k.stride() as i32,
        v_stride: v.stride() as i32,
        o_stride: o.stride() as i32,
        num_heads: shape.num_heads as i32,
        num_kv_heads: shape.num_kv_heads as i32,
        head_dim: shape.head_dim as i32,
        scale: shape.scale,
        mask_stride,
    };
    let launch = tiled_launch(gpu, &set.forward, [capacity * (shape.num_heads / set.forward.heads), 1]);
    gpu.launch_struct(set.forward.name, launch, &params);
}

/// Memory for `values` f32 that kernels hand to each other.
fn scratch(gpu: &Gpu, values: usize) -> (CudaBuffer, Charge) {
    let bytes = values * size_of::<f32>();
    let charge = gpu.ledger().charge(MemoryCategory::Workspace, bytes as u64);
    (gpu.alloc(MemoryCategory::Workspace, bytes), charge)
}

#[expect(clippy::too_many_arguments, reason = "the operands of one formula")]
fn backward_tiled(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    set: &KernelSet,
    saved: &Saved<'_>,
    d_o: View<'_>,
    dqkv: View<'_>,
    d_sinks: Option<&mut Tensor>,
) {
    let Qkv { q, k, v } = saved.qkv;
    let Qkv { q: dq, k: dk, v: dv } = Qkv::of(shape, dqkv, None);
    let (query_tiles, num_query_tiles, query_room) = tiles.work_of(Side::Query, set.query.rows);
    let (key_tiles, num_key_tiles, key_room) = tiles.work_of(Side::Key, set.key.rows);
    let (mask, mask_stride) = mask(tiles);
    // (lse, D) in f32 for every head and row.
    let (row_stats, _charge) = scratch(gpu, 2 * shape.num_heads * tiles.total_tokens());
    let sink_partials = d_sinks.as_ref().map(|_| scratch(gpu, query_room * shape.num_heads));
    let key_parts = key_parts(shape.group(), key_room * shape.num_kv_heads, gpu.facts().num_sms as usize);
    let key_partials = (key_parts > 1).then(|| scratch(gpu, key_parts * tiles.total_tokens() * 2 * shape.kv_width()));
    let params = BackwardParams {
        q: q.pointer(),
        k: k.pointer(),
        v: v.pointer(),
        o: saved.o.pointer(),
        d_o: d_o.pointer(),
        softmax_lse: saved.softmax_lse.pointer(),
        row_stats: row_stats.pointer(),
        dq: dq.pointer(),
        dk: dk.pointer(),
        dv: dv.pointer(),
        sinks: saved.sinks.map_or(0, Tensor::pointer),
        sink_partials: sink_partials.as_ref().map_or(0, |(buffer, _)| buffer.pointer()),
        d_sinks: d_sinks.map_or(0, |gradient| gradient.pointer()),
        query_tiles,
        num_query_tiles,
        key_tiles,
        num_key_tiles,
        first_key: tiles.work_pointer(),
        mask,
        key_partials: key_partials.as_ref().map_or(0, |(buffer, _)| buffer.pointer()),
        q_stride: q.stride() as i32,
        k_stride: k.stride() as i32,
        v_stride: v.stride() as i32,
        o_stride: saved.o.stride() as i32,
        do_stride: d_o.stride() as i32,
        dq_stride: dq.stride() as i32,
        dk_stride: dk.stride() as i32,
        dv_stride: dv.stride() as i32,
        num_heads: shape.num_heads as i32,
        num_kv_heads: shape.num_kv_heads as i32,
        head_dim: shape.head_dim as i32,
        scale: shape.scale,
        num_tokens: tiles.total_tokens() as i32,
        mask_stride,
        key_parts: key_parts as i32,
    };
    let launch = tiled_launch(gpu, &set.query, [query_room * (shape.num_heads / set.query.heads), 1]);
    gpu.launch_struct(set.query.name, launch, &params);
    let launch = tiled_launch(gpu, &set.key, [shape.num_kv_heads * key_parts, key_room]);
    gpu.launch_struct(set.key.name, launch, &params);
    if key_partials.is_some() {
        gpu.launch_struct("attention_backward_key_finish", Launch::new(tiles.total_tokens(), 128), &params);
    }
    if sink_partials.is_some() {
        gpu.launch_struct("attention_backward_sinks", Launch::new(shape.num_heads, 128), &params);
    }
}

pub(super) fn forward(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    qkv: Qkv<'_>,
    sinks: Option<&Tensor>,
    o: View<'_>,
    softmax_lse: &Tensor,
) {
    if let Some(set) = tiled(gpu, shape, tiles) {
        return forward_tiled(gpu, shape, tiles, &set, qkv, sinks, o, softmax_lse);
    }
    let p = PlainShape::new(shape, tiles);
    let (mask, mask_stride) = mask(tiles);
    let Qkv { q, k, v } = qkv;
    let args = kernel_args![
        q.pointer(),
        k.pointer(),
        v.pointer(),
        o.pointer(),
        softmax_lse.pointer(),
        sinks.map_or(0, Tensor::pointer),
        tiles.bounds_pointer(),
        mask,
        mask_stride,
        p.tokens,
        p.heads,
        p.kv_heads,
        p.head_dim,
        shape.scale,
        p.window,
        q.stride() as i64,
        k.stride() as i64,
        v.stride() as i64,
        o.stride() as i64
    ];
    gpu.launch("attention_plain_forward", p.launch(shape.num_heads), args);
}

pub(super) fn backward(
    gpu: &Gpu,
    shape: &AttentionShape,
    tiles: &TileList,
    saved: &Saved<'_>,
    d_o: View<'_>,
    dqkv: View<'_>,
    d_sinks: Option<&mut Tensor>,
) {
    if let Some(set) = tiled(gpu, shape, tiles) {
        return backward_tiled(gpu, shape, tiles, &set, saved, d_o, dqkv, d_sinks);
    }
    let p = PlainShape::new(shape, tiles);
    let (mask, mask_stride) = mask(tiles);
    let Qkv { q, k, v } = saved.qkv;
    let Qkv { q: dq, k: dk, v: dv } = Qkv::of(shape, dqkv, None);
    let args = kernel_args![
        q.pointer(),
        k.pointer(),
        v.pointer(),
        saved.o.pointer(),
        saved.softmax_lse.pointer(),
        d_o.pointer(),
        dq.pointer(),
        dk.pointer(),
        dv.pointer(),
        tiles.bounds_pointer(),
        mask,
        mask_stride,
        p.tokens,
        p.heads,
        p.kv_heads,
        p.head_dim,
        shape.scale,
        p.window,
        q.stride() as i64,
        k.stride() as i64,
        v.stride() as i64,
        saved.o.stride() as i64,
        d_o.stride() as i64,
        dqkv.stride() as i64
    ];
    gpu.launch("attention_plain_dq", p.launch(shape.num_heads), args);
    gpu.launch("attention_plain_dkv", p.launch(shape.num_kv_heads), args);
    if let (Some(d_sinks), Some(sinks)) = (d_sinks, saved.sinks) {
        let args = kernel_args![
            saved.o.pointer(),
            saved.softmax_lse.pointer(),
            d_o.pointer(),
            sinks.pointer(),
            d_sinks.pointer(),
            p.tokens,
            p.heads,
            p.head_dim,
            saved.o.stride() as i64,
            d_o.stride() as i64
        ];
        gpu.launch("attention_plain_sinks", Launch::new(shape.num_heads, 256), args);
    }
}
