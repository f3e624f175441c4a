//! Heads of queries and keys, several in a warp: what the rotary embedding and the norms of heads share.
#pragma once

#include "common.cuh"

namespace tandem {

/// Heads of a row that a lane works on at once.
constexpr int HEADS_A_LANE = 4;
/// Rows of a block, a warp each.
constexpr int ROWS_A_BLOCK = 8;

/// What a lane has of one head: pairs (i, i + half) for four neighbouring i.
struct Pairs {
    float low[4], high[4];
};

/// As it lies in memory.
struct PackedPairs {
    uint2 low, high;

    __device__ __forceinline__ Pairs unpack() const {
        const float2 a = unpack_bf16(low.x), b = unpack_bf16(low.y), c = unpack_bf16(high.x), d = unpack_bf16(high.y);
        return {{a.x, a.y, b.x, b.y}, {c.x, c.y, d.x, d.y}};
    }
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
        PackedPairs pairs = {};
        if (there && active) {
            pairs.low = *reinterpret_cast<const uint2*>(from + pair);
            pairs.high = *reinterpret_cast<const uint2*>(from + half + pair);
        }
        return pairs;
    }

    __device__ __forceinline__ void store(bf16* to, int half, const Pairs& x, bool there) const {
        if (!there || !active) return;
        *reinterpret_cast<uint2*>(to + pair) = make_uint2(pack_bf16(x.low[0], x.low[1]), pack_bf16(x.low[2], x.low[3]));
        *reinterpret_cast<uint2*>(to + half + pair) = make_uint2(pack_bf16(x.high[0], x.high[1]), pack_bf16(x.high[2], x.high[3]));
    }

    /// Sum over the lanes of a head; every lane of the warp must come here.
    __device__ __forceinline__ float sum(float x) const {
        for (int offset = group / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
        return x;
    }
};

/// Cosines and sines of this lane's pairs at the position of its row.
struct Angles {
    float cos[4], sin[4];

    __device__ __forceinline__ Angles(const HeadLanes& lanes, const float* cos_table, const float* sin_table, int position, int half) {
        float4 c = {}, s = {};
        if (lanes.active) {
            const int64_t at = int64_t(position) * half + lanes.pair;
            c = *reinterpret_cast<const float4*>(cos_table + at);
            s = *reinterpret_cast<const float4*>(sin_table + at);
        }
        cos[0] = c.x, cos[1] = c.y, cos[2] = c.z, cos[3] = c.w;
        sin[0] = s.x, sin[1] = s.y, sin[2] = s.z, sin[3] = s.w;
    }
};

__device__ __forceinline__ float rounded(float x) { return to_float(to_bf16(x)); }

/// Turns every pair by its angle (sign 1) or back (sign −1). Each product is rounded before the sum, as bf16 arithmetic in Transformers does.
__device__ __forceinline__ void rotate(Pairs& x, const Angles& angles, float sign) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float c = angles.cos[j], s = sign * angles.sin[j], a = x.low[j], b = x.high[j];
        x.low[j] = rounded(rounded(a * c) - rounded(b * s));
        x.high[j] = rounded(rounded(b * c) + rounded(a * s));
    }
}

}  // namespace tandem
