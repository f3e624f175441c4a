//! Causal attention over packed documents, on two paths that give the same up to the order of sums. `varlen` ([`TileList::on_device`]): no T×T
//! matrix, no key of another document. `masked` ([`TileList::masked`]): every pair of the batch, and a dense mask decides which count, as where
//! documents are packed without kernels that know of them.
//!
//! With q [T, Hq·d], k and v [T, Hkv·d], query head h reads key head h / (Hq / Hkv). Per document and head:
//! `S = σ·q·kᵀ` where key ≤ query and query − key < window, `P = softmax(S)`, `o = P·v`.
//! Saved: q, k, v, o and `softmax_lse` [T, Hq], the logarithm of the softmax's denominator.
//! Backward, by tiles as in FlashAttention (Dao 2022, appendix B): `D = rowsum(do⊙o)`, `P = exp(S − lse)`, `dv = Pᵀ·do`,
//! `dS = P⊙(do·vᵀ − D)`, `dq = σ·dS·k`, `dk = σ·dSᵀ·q`. One pass over key tiles writes dk and dv, one over query tiles writes dq:
//! each value has one writer, so there are no atomics and reruns are bit-equal.
//!
//! With sinks (f32 [Hq], gpt-oss) every row's softmax has one more score, `sink[h]`: not multiplied by σ, and with no value, so that it only takes
//! weight from the others. `softmax_lse` includes it. D stays as it is, because the sink's value is 0, and `dsink += −Σ_rows exp(sink − lse)·D`.

mod cpu;
mod cuda;
mod kernels;
mod mask;
mod params;
mod tiles;
mod work_list;

pub use mask::DenseMask;
pub use tiles::{Tile, TileList};

use crate::tensor::{DType, Device, Tensor, View, ViewMut};

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

    /// Columns of the queries: Hq·d.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Columns of the keys, and of the values: Hkv·d.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Columns of queries, keys and values beside each other.
    pub fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}

/// Queries [T, Hq·d], keys and values [T, Hkv·d].
#[derive(Debug, Clone, Copy)]
pub struct Qkv<'a> {
    /// Queries.
    pub q: View<'a>,
    /// Keys.
    pub k: View<'a>,
    /// Values.
    pub v: View<'a>,
}

impl<'a> Qkv<'a> {
    /// The columns of `qkv` [T, (Hq + 2·Hkv)·d]: queries, then keys, then values. With `turned` [T, ≥(Hq + Hkv)·d], queries and keys are taken
    /// from there.
    pub fn of(shape: &AttentionShape, qkv: View<'a>, turned: Option<View<'a>>) -> Self {
        let (q, kv) = (shape.q_width(), shape.kv_width());
        let turned = turned.unwrap_or(qkv);
        Self { q: turned.columns(0, q), k: turned.columns(q, kv), v: qkv.columns(q + kv, kv) }
    }
}

/// Forward: writes `o` [T, Hq·d] and `softmax_lse` [T, Hq]. `sinks` are f32 [Hq].
pub fn forward<'o>(
    device: &Device,
    shape: &AttentionShape,
    tiles: &TileList,
    qkv: Qkv<'_>,
    sinks: Option<&Tensor>,
    o: impl Into<ViewMut<'o>>,
    softmax_lse: &mut Tensor,
) {
    let o = o.into();
    check(shape, tiles, qkv, sinks);
    assert_eq!((o.rows(), o.cols()), (qkv.q.rows(), qkv.q.cols()), "shapes of attention");
    assert_eq!(softmax_lse.len(), qkv.q.rows() * shape.num_heads, "shapes of attention");
    match device {
        Device::Cpu(cpu) => cpu::forward(cpu.precision(), shape, tiles, qkv, sinks, o, softmax_lse.f32s_mut()),
        Device::Cuda(gpu) => cuda::forward(gpu, shape, tiles, qkv, sinks, o.as_view(), softmax_lse),
    }
}

/// What [`forward`] saves for [`backward`].
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Operands.
    pub qkv: Qkv<'a>,
    /// Sinks [Hq], where the forward pass had them.
    pub sinks: Option<&'a Tensor>,
    /// Output [T, Hq·d].
    pub o: View<'a>,
    /// Logarithm of the softmax's denominator [T, Hq].
    pub softmax_lse: &'a Tensor,
}

/// Backward: assigns `dqkv` [T, (Hq + 2·Hkv)·d]: the gradients of q, then of k, then of v. Adds to `d_sinks`, f32 [Hq], if given; then there are
/// sinks.
pub fn backward<'a, 'd>(
    device: &Device,
    shape: &AttentionShape,
    tiles: &TileList,
    saved: &Saved<'_>,
    d_o: impl Into<View<'a>>,
    dqkv: impl Into<ViewMut<'d>>,
    d_sinks: Option<&mut Tensor>,
) {
    let (d_o, dqkv) = (d_o.into(), dqkv.into());
    check(shape, tiles, saved.qkv, saved.sinks);
    if let Some(gradient) = &d_sinks {
        assert!(saved.sinks.is_some(), "a gradient of sinks that the forward pass had not");
        assert_eq!((gradient.len(), gradient.dtype()), (shape.num_heads, DType::F32), "gradient of sinks");
    }
    let rows = saved.qkv.q.rows();
    assert_eq!((d_o.rows(), d_o.cols()), (rows, saved.qkv.q.cols()), "shapes of attention backward");
    assert_eq!((dqkv.rows(), dqkv.cols()), (rows, shape.qkv_width()), "shapes of attention backward");
    match device {
        Device::Cpu(cpu) => cpu::backward(cpu.precision(), shape, tiles, saved, d_o, dqkv, d_sinks),
        Device::Cuda(gpu) => cuda::backward(gpu, shape, tiles, saved, d_o, dqkv.as_view(), d_sinks),
    }
}

fn check(shape: &AttentionShape, tiles: &TileList, Qkv { q, k, v }: Qkv<'_>, sinks: Option<&Tensor>) {
    let kv_width = shape.kv_width();
    assert_eq!(shape.num_heads % shape.num_kv_heads, 0, "query heads must be a multiple of key heads");
    assert_eq!((q.cols(), k.cols(), v.cols()), (shape.q_width(), kv_width, kv_width), "widths of attention");
    let total = tiles.total_tokens();
    assert_eq!((q.rows(), k.rows(), v.rows()), (total, total, total), "rows of attention");
    if let Some(sinks) = sinks {
        assert_eq!((sinks.len(), sinks.dtype()), (shape.num_heads, DType::F32), "sinks of attention");
    }
}

#[cfg(test)]
mod tests;
