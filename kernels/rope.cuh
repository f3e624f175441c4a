//! Heads of queries and keys, a warp each: what the rotary embedding and the norms of heads share.
#pragma once

#include "common.cuh"

namespace tandem {

/// Two runs of pairs a lane: heads of up to 256 values.
constexpr int PAIR_RUNS = 2;

/// One head in the registers of a warp. Lane l has pairs (i, i + half) for i = 2l, 2l + 1 and i + 64: `half` is even.
struct Head {
    float low[PAIR_RUNS][2];
    float high[PAIR_RUNS][2];
};

/// Calls f(run, first pair) for each run of pairs that this lane has.
template <class F>
__device__ __forceinline__ void for_each_pair(int half, F f) {
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
        const int pair = 2 * (threadIdx.x % WARP) + run * 2 * WARP;
        if (pair < half) f(run, pair);
    }
}

__device__ __forceinline__ void load_head(Head& head, const bf16* from, int half) {
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
        head.low[run][0] = head.low[run][1] = head.high[run][0] = head.high[run][1] = 0.0f;
    }
    for_each_pair(half, [&](int run, int pair) {
        const float2 low = unpack_bf16(*reinterpret_cast<const uint32_t*>(from + pair));
        const float2 high = unpack_bf16(*reinterpret_cast<const uint32_t*>(from + half + pair));
        head.low[run][0] = low.x;
        head.low[run][1] = low.y;
        head.high[run][0] = high.x;
        head.high[run][1] = high.y;
    });
}

__device__ __forceinline__ void store_head(bf16* to, const Head& head, int half) {
    for_each_pair(half, [&](int run, int pair) {
        *reinterpret_cast<uint32_t*>(to + pair) = pack_bf16(head.low[run][0], head.low[run][1]);
        *reinterpret_cast<uint32_t*>(to + half + pair) = pack_bf16(head.high[run][0], head.high[run][1]);
    });
}

__device__ __forceinline__ float rounded(float x) { return to_float(to_bf16(x)); }

/// Turns every pair by its angle (sign 1) or back (sign −1); `cos` and `sin` [half] are those of the head's position. Each product is rounded
/// before the sum, as bf16 arithmetic in Transformers does.
__device__ __forceinline__ void rotate(Head& head, const float* cos, const float* sin, int half, float sign) {
    for_each_pair(half, [&](int run, int pair) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float c = cos[pair + j], s = sign * sin[pair + j];
            const float a = head.low[run][j], b = head.high[run][j];
            head.low[run][j] = rounded(rounded(a * c) - rounded(b * s));
            head.high[run][j] = rounded(rounded(b * c) + rounded(a * s));
        }
    });
}

}  // namespace tandem
