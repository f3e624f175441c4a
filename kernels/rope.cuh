//! Heads of queries and keys, several in a warp: what the rotary embedding and the norms of heads share.
#pragma once

#include "common.cuh"

namespace tandem {

/// Heads of a row that a lane works on at once.
constexpr int HEADS_A_LANE = 4;
/// Rows of a block, a warp each.
constexpr int ROWS_A_BLOCK = 8;

/// What a lane has of one head in f32: pairs (i, i + half) for four neighbouring i.
struct Pairs {
    float low[4], high[4];
};

/// The same as it lies in memory.
struct alignas(8) PackedPairs {
    bf162 low[2], high[2];

    __device__ __forceinline__ Pairs unpack() const {
        Pairs pairs;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 low_pair = __bfloat1622float2(low[j]), high_pair = __bfloat1622float2(high[j]);
            pairs.low[2 * j] = low_pair.x, pairs.low[2 * j + 1] = low_pair.y;
            pairs.high[2 * j] = high_pair.x, pairs.high[2 * j + 1] = high_pair.y;
        }
        return pairs;
    }

    __device__ __forceinline__ explicit PackedPairs(const Pairs& pairs) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            low[j] = __floats2bfloat162_rn(pairs.low[2 * j], pairs.low[2 * j + 1]);
            high[j] = __floats2bfloat162_rn(pairs.high[2 * j], pairs.high[2 * j + 1]);
        }
    }
    PackedPairs() = default;
};

/// How a warp shares the heads of its row: `half` / 4 lanes a head, rounded up to a power of two (lanes beyond are idle), so that several heads lie
/// beside each other. A lane has HEADS_A_LANE heads, `slots` apart; the next heads are the next block's (`blockIdx.y`). `half` is a multiple of 4, at
/// most 128.
struct HeadLanes {
    int64_t row;
    int group, pair, slots, first;
    bool active;

    __device__ __forceinline__ explicit HeadLanes(int half) {
        const int lane = threadIdx.x % WARP, lanes = half / 4;
        group = lanes <= 1 ? 1 : 1 << (32 - __clz(lanes - 1));
        slots = WARP / group;
        pair = lane % group * 4;
        active = pair < half;
        row = int64_t(blockIdx.x) * ROWS_A_BLOCK + threadIdx.x / WARP;
        first = blockIdx.y * slots * HEADS_A_LANE + lane / group;
    }

    /// The i-th head of this lane.
    __device__ __forceinline__ int head(int i) const { return first + i * slots; }

    /// This lane's pairs of a head that starts at `from`; zeros unless `there`.
    __device__ __forceinline__ PackedPairs load(const bf16* from, int half, bool there) const {
        uint2 low = {}, high = {};
        if (there && active) {
            low = *reinterpret_cast<const uint2*>(from + pair);
            high = *reinterpret_cast<const uint2*>(from + half + pair);
        }
        PackedPairs pairs;
        *reinterpret_cast<uint2*>(pairs.low) = low;
        *reinterpret_cast<uint2*>(pairs.high) = high;
        return pairs;
    }

    __device__ __forceinline__ void store(bf16* to, int half, const PackedPairs& pairs, bool there) const {
        if (!there || !active) return;
        *reinterpret_cast<uint2*>(to + pair) = *reinterpret_cast<const uint2*>(pairs.low);
        *reinterpret_cast<uint2*>(to + half + pair) = *reinterpret_cast<const uint2*>(pairs.high);
    }

    /// Sum over the lanes of a head; every lane of the warp must come here.
    __device__ __forceinline__ float sum(float x) const {
        for (int offset = group / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
        return x;
    }
};

/// Cosines and sines of this lane's pairs at the position of its row: the tables hold bf16 values.
struct Angles {
    bf162 cos[2], sin[2];

    __device__ __forceinline__ Angles(const HeadLanes& lanes, const float* cos_table, const float* sin_table, int position, int half) {
        float4 c = {}, s = {};
        if (lanes.active) {
            const int64_t at = int64_t(position) * half + lanes.pair;
            c = *reinterpret_cast<const float4*>(cos_table + at);
            s = *reinterpret_cast<const float4*>(sin_table + at);
        }
        cos[0] = __floats2bfloat162_rn(c.x, c.y), cos[1] = __floats2bfloat162_rn(c.z, c.w);
        sin[0] = __floats2bfloat162_rn(s.x, s.y), sin[1] = __floats2bfloat162_rn(s.z, s.w);
    }
};

/// Turns every pair by its angle, or back. Each product is rounded before the sum, as bf16 arithmetic in Transformers does: none of these
/// operations may be contracted.
template <bool BACK>
__device__ __forceinline__ void rotate(PackedPairs& x, const Angles& angles) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const bf162 low_cos = __hmul2_rn(x.low[j], angles.cos[j]), low_sin = __hmul2_rn(x.low[j], angles.sin[j]);
        const bf162 high_cos = __hmul2_rn(x.high[j], angles.cos[j]), high_sin = __hmul2_rn(x.high[j], angles.sin[j]);
        x.low[j] = BACK ? __hadd2_rn(low_cos, high_sin) : __hsub2_rn(low_cos, high_sin);
        x.high[j] = BACK ? __hsub2_rn(high_cos, low_sin) : __hadd2_rn(high_cos, low_sin);
    }
}

}  // namespace tandem
