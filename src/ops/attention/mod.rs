//! Causal attention over packed documents (the `varlen` path): no T×T matrix, no key of another document.
//!
//! With q [T, Hq·d], k and v [T, Hkv·d], query head h reads key head h / (Hq / Hkv). Per document and head:
//! `S = σ·q·kᵀ` where key ≤ query and query − key < window, `P = softmax(S)`, `o = P·v`.
//! Saved: q, k, v, o and `softmax_lse` [T, Hq], the logarithm of the softmax's denominator.
//! Backward, by tiles as in FlashAttention (Dao 2022, appendix B): `D = rowsum(do⊙o)`, `P = exp(S − lse)`, `dv = Pᵀ·do`,
//! `dS = P⊙(do·vᵀ − D)`, `dq = σ·dS·k`, `dk = σ·dSᵀ·q`. One pass over key tiles writes dk and dv, one over query tiles writes dq:
//! each value has one writer, so there are no atomics and reruns are bit-equal.

mod cpu;
mod cuda;
mod kernels;
mod params;
mod tiles;
mod work_list;

pub use tiles::{Tile, TileList};

use crate::tensor::{Device, Tensor};

/// Sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads (Hq).
    pub num_heads: usize,
    /// Key and value heads (Hkv), a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Values a head (d).
    pub head_dim: usize,
    /// Scale of the scores (σ), usually d^-1/2.
    pub scale: f32,
}

impl AttentionShape {
    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// Forward: writes `o` [T, Hq·d] and `softmax_lse` [T, Hq].
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn forward(
    device: &Device,
    shape: &AttentionShape,
    tiles: &TileList,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &mut Tensor,
    softmax_lse: &mut Tensor,
) {
    check(shape, tiles, q, k, v);
    assert_eq!((o.len(), softmax_lse.len()), (q.len(), q.rows() * shape.num_heads), "shapes of attention");
    match device {
        Device::Cpu(cpu) => cpu::forward(
            cpu.precision(),
            shape,
            tiles,
            [q.f32s(), k.f32s(), v.f32s()],
            o.f32s_mut(),
            softmax_lse.f32s_mut(),
        ),
        Device::Cuda(gpu) => cuda::forward(gpu, shape, tiles, [q, k, v], o, softmax_lse),
    }
}

/// What [`forward`] saves for [`backward`].
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Queries [T, Hq·d].
    pub q: &'a Tensor,
    /// Keys [T, Hkv·d].
    pub k: &'a Tensor,
    /// Values [T, Hkv·d].
    pub v: &'a Tensor,
    /// Output [T, Hq·d].
    pub o: &'a Tensor,
    /// Logarithm of the softmax's denominator [T, Hq].
    pub softmax_lse: &'a Tensor,
}

/// Backward: assigns `dq`, `dk`, `dv`, shaped like q, k, v.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn backward(
    device: &Device,
    shape: &AttentionShape,
    tiles: &TileList,
    saved: &Saved<'_>,
    d_o: &Tensor,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    check(shape, tiles, saved.q, saved.k, saved.v);
    assert_eq!(
        (d_o.len(), dq.len(), dk.len()),
        (saved.q.len(), saved.q.len(), dv.len()),
        "shapes of attention backward"
    );
    match device {
        Device::Cpu(cpu) => cpu::backward(
            cpu.precision(),
            shape,
            tiles,
            saved,
            d_o.f32s(),
            [dq.f32s_mut(), dk.f32s_mut(), dv.f32s_mut()],
        ),
        Device::Cuda(gpu) => cuda::backward(gpu, shape, tiles, saved, d_o, [dq, dk, dv]),
    }
}

fn check(shape: &AttentionShape, tiles: &TileList, q: &Tensor, k: &Tensor, v: &Tensor) {
    let kv_width = shape.num_kv_heads * shape.head_dim;
    assert_eq!(shape.num_heads % shape.num_kv_heads, 0, "query heads must be a multiple of key heads");
    assert_eq!(
        (q.cols(), k.cols(), v.cols()),
        (shape.num_heads * shape.head_dim, kv_width, kv_width),
        "widths of attention"
    );
    assert_eq!(
        (q.rows(), k.rows(), v.rows()),
        (tiles.total_tokens(), tiles.total_tokens(), tiles.total_tokens()),
        "rows of attention"
    );
}

#[cfg(test)]
mod tests;
