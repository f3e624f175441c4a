//! Parameters of the tiled attention kernels, laid out as in `kernels/attention.cuh` (which asserts the same sizes).
//!
//! Addresses are device addresses. Strides count values from one row to the next and are multiples of 8; bf16 addresses are multiples of
//! 16 bytes. T is the rows of the batch, Hq and Hkv the query and key heads, d the values a head.

use std::mem::offset_of;

/// Parameters of `attention_forward_*`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ForwardParams {
    /// bf16 [T, Hq·d].
    pub q: u64,
    /// bf16 [T, Hkv·d].
    pub k: u64,
    /// bf16 [T, Hkv·d].
    pub v: u64,
    /// bf16 [T, Hq·d], written.
    pub o: u64,
    /// f32 [T, Hq], written: natural logarithm of the softmax's denominator, sink included.
    pub softmax_lse: u64,
    /// f32 [Hq] sink logits, or 0.
    pub sinks: u64,
    /// Query tiles of the kernel's height, longest first.
    pub query_tiles: u64,
    /// i32, how many they are.
    pub num_query_tiles: u64,
    /// i32 [T], first key that each row sees.
    pub first_key: u64,
    /// u32 [T, mask_stride], the dense mask of masked kernels; 0 for the others.
    pub mask: u64,
    pub q_stride: i32,
    pub k_stride: i32,
    pub v_stride: i32,
    pub o_stride: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim: i32,
    /// σ.
    pub scale: f32,
    /// Words, a multiple of 4.
    pub mask_stride: i32,
}

const _: () = assert!(size_of::<ForwardParams>() == 120);
const _: () = assert!(offset_of!(ForwardParams, q_stride) == 80 && offset_of!(ForwardParams, mask_stride) == 112);

/// Parameters of `attention_backward_*`. The query kernel runs first, then the key kernel, then (with several key parts) the kernel that adds
/// them, then (with `d_sinks`) the kernel that adds the sinks' parts.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct BackwardParams {
    /// bf16 [T, Hq·d].
    pub q: u64,
    /// bf16 [T, Hkv·d].
    pub k: u64,
    /// bf16 [T, Hkv·d].
    pub v: u64,
    /// bf16 [T, Hq·d], the forward pass's output.
    pub o: u64,
    /// bf16 [T, Hq·d], gradient of `o`.
    pub d_o: u64,
    /// f32 [T, Hq].
    pub softmax_lse: u64,
    /// f32 [Hq, T, 2] scratch: lse in base 2 and D, from the query to the key kernel.
    pub row_stats: u64,
    /// bf16 [T, Hq·d], written by the query kernel.
    pub dq: u64,
    /// bf16 [T, Hkv·d], written by the key kernel or from its parts.
    pub dk: u64,
    /// bf16 [T, Hkv·d], written by the key kernel or from its parts.
    pub dv: u64,
    /// f32 [Hq] sink logits, or 0.
    pub sinks: u64,
    /// f32 [query tiles, Hq] scratch, unused without `d_sinks`.
    pub sink_partials: u64,
    /// f32 [Hq], added to by the sinks' kernel; 0 when no such gradient is wanted.
    pub d_sinks: u64,
    /// Query tiles of the query kernel's height, longest first.
    pub query_tiles: u64,
    /// i32, how many they are.
    pub num_query_tiles: u64,
    /// Key tiles of the key kernel's height, longest first.
    pub key_tiles: u64,
    /// i32, how many they are.
    pub num_key_tiles: u64,
    /// i32 [T], first key that each row sees.
    pub first_key: u64,
    /// u32 [T, mask_stride], the dense mask of masked kernels; 0 for the others.
    pub mask: u64,
    /// f32 [key_parts, T, 2·Hkv·d] scratch: each part's dk and dv beside each other; unused with one part.
    pub key_partials: u64,
    pub q_stride: i32,
    pub k_stride: i32,
    pub v_stride: i32,
    pub o_stride: i32,
    pub do_stride: i32,
    pub dq_stride: i32,
    pub dk_stride: i32,
    pub dv_stride: i32,
    pub num_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim: i32,
    /// σ.
    pub scale: f32,
    /// T.
    pub num_tokens: i32,
    /// Words, a multiple of 4.
    pub mask_stride: i32,
    /// Blocks that share the query heads of a key head in the key kernel, a divisor of Hq / Hkv.
    pub key_parts: i32,
}

const _: () = assert!(size_of::<BackwardParams>() == 224);
const _: () = assert!(offset_of!(BackwardParams, q_stride) == 160 && offset_of!(BackwardParams, key_parts) == 216);
