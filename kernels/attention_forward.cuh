//! Packed attention, forward: one block a query tile and head, online softmax over key tiles (Dao 2022, 2023).
#pragma once

#include "attention.cuh"

namespace tandem {

/// Sizes of a forward kernel: BM query rows, of HEADS heads that share a key head; BN key rows a step, STAGES steps in
/// flight; Q in registers (then its shared memory is used again for keys and values) or in shared memory; by a dense mask or not. Each
/// warp's rows belong to one head.
template <int HD_, int BM_, int HEADS_, int BN_, int STAGES_, int WARPS_, bool Q_REGISTERS_, bool MASKED_ = false>
struct ForwardShape {
    static constexpr int HD = HD_, BM = BM_, HEADS = HEADS_, BN = BN_, STAGES = STAGES_, THREADS = WARPS_ * WARP;
    static constexpr int MT = BM_ / (16 * WARPS_);  // fragments of 16 rows a warp
    static constexpr int HEAD_WARPS = WARPS_ / HEADS, ROWS = BM / HEADS;  // ROWS is the height of a tile in the work list
    static constexpr bool Q_REGISTERS = Q_REGISTERS_, MASKED = MASKED_;
    static constexpr int STREAM = 2 * STAGES * BN * PITCH<HD>;  // stages of K and V, in values
    static constexpr int Q_TILE = BM * PITCH<HD>;
    static constexpr int SHARED_BYTES = 2 * (Q_REGISTERS ? (STREAM > Q_TILE ? STREAM : Q_TILE) : STREAM + Q_TILE);
    static_assert(BM == MT * 16 * WARPS_ && MT > 0 && BN % 16 == 0 && HD % 32 == 0 && WARPS_ % HEADS == 0, "whole fragments");
    static_assert(!MASKED || (MASK_KEYS % BN == 0 && (STAGES - 1) * BN <= MASK_KEYS), "two places for the mask are enough");
};

/// The running softmax of a warp's rows and what it has summed so far.
template <int MT, int HD>
struct SoftmaxState {
    float maximum[MT][2];  // of the unscaled scores
    float sum[MT][2];      // this lane's part of the row
    float o[MT][HD / 8][4];
};

/// How far, in powers of two, a row's scores may pass the maximum that its sums are relative to before these are scaled anew.
constexpr float SLACK = 8.0f;

/// Takes the scores of one key tile: updates the state and leaves P in `scores`. `scale` includes log2(e). `maximum` follows
/// the true maximum only when that has grown by more than `SLACK`, so most steps scale nothing; the result is the same.
template <int MT, int NT, int HD>
__device__ __forceinline__ void softmax_step(SoftmaxState<MT, HD>& state, float (&scores)[MT][NT][4], float scale) {
    float top[MT][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x = scores[m][0][half * 2];
#pragma unroll
            for (int n = 0; n < NT; ++n) x = fmaxf(x, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            top[m][half] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            grown |= top[m][half] * scale > state.maximum[m][half] * scale + SLACK;
        }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float old = state.maximum[m][half], now = fmaxf(old, top[m][half]);
                // A row that has seen no key yet keeps −∞ and sums of 0.
                const float correction = old == now ? 1.0f : exp2_fast((old - now) * scale);
                state.maximum[m][half] = now;
                state.sum[m][half] *= correction;
#pragma unroll
                for (int n = 0; n < HD / 8; ++n) {
                    state.o[m][n][half * 2] *= correction;
                    state.o[m][n][half * 2 + 1] *= correction;
                }
            }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float maximum = state.maximum[m][half], shift = maximum == -INFINITY ? 0.0f : maximum * scale;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) {
                    scores[m][n][i] = exp2_fast(fmaf(scores[m][n][i], scale, -shift));
                    state.sum[m][half] += scores[m][n][i];
                }
        }
}

template <class Shape>
__device__ __forceinline__ void attention_forward(const ForwardParams& p) {
    constexpr int HD = Shape::HD, BN = Shape::BN, THREADS = Shape::THREADS, MT = Shape::MT, NT = BN / 8;
    constexpr int STAGE = 2 * BN * PITCH<HD>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    bf16* const stream = reinterpret_cast<bf16*>(shared_memory);
    bf16* const q_tile = Shape::Q_REGISTERS ? stream : stream + Shape::STREAM;

    const int tile_heads = p.num_heads / Shape::HEADS, first_head = static_cast<int>(blockIdx.x) % tile_heads * Shape::HEADS;
    const int tile_index = static_cast<int>(blockIdx.x) / tile_heads;
    if (tile_index >= *p.num_query_tiles) return;
    const Tile tile = p.query_tiles[tile_index];
    const int kv_head = first_head / (p.num_heads / p.num_kv_heads), d = p.head_dim;
    const bf16* const k_head = p.k + static_cast<int64_t>(kv_head) * d;
    const bf16* const v_head = p.v + static_cast<int64_t>(kv_head) * d;

    // The mask of the tile's rows comes with the keys: these 128 and, from some step on, the next 128.
    __shared__ uint4 mask_rows[2][Shape::MASKED ? Shape::ROWS : 1];
    const auto load_keys = [&](int stage, int row) {
        bf16* const to = stream + stage * STAGE;
        if (Shape::MASKED && row % MASK_KEYS == 0)
            load_mask<Shape::ROWS, THREADS>(mask_rows[row / MASK_KEYS % 2], p.mask, p.mask_stride, tile, row);
        load_rows<BN, HD, THREADS>(to, k_head, p.k_stride, row, tile.other_end, d);
        load_rows<BN, HD, THREADS>(to + BN * PITCH<HD>, v_head, p.v_stride, row, tile.other_end, d);
    };

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = first_head + warp / Shape::HEAD_WARPS;
    load_heads<Shape>(q_tile, p.q, p.q_stride, first_head, tile, d);
    Operand<Shape::Q_REGISTERS, MT, HD> q_operand;
    if constexpr (Shape::Q_REGISTERS) {
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
    q_operand.take(q_tile + warp * MT * 16 * PITCH<HD>);
    if constexpr (Shape::Q_REGISTERS) __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::STAGES - 1; ++i) {
        if (i == 0 || tile.other_start + i * BN < tile.other_end) load_keys(i, tile.other_start + i * BN);
        cp_async_commit();
    }

    // The warp's rows, and the keys that its first and its last row see first.
    const int row = tile.start + warp % Shape::HEAD_WARPS * MT * 16, last_row = min(row + MT * 16, tile.end) - 1;
    const bool active = row < tile.end;
    const int from = !Shape::MASKED && active ? p.first_key[row] : 0, from_last = !Shape::MASKED && active ? p.first_key[last_row] : 0;

    const float scale = p.scale * LOG2_E;
    SoftmaxState<MT, HD> state;
    clear(state.o);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state.maximum[m][half] = -INFINITY;
            state.sum[m][half] = 0.0f;
        }

    int stage = 0;
    for (int key = tile.other_start; key < tile.other_end; key += BN) {
        cp_async_wait<Shape::STAGES - 2>();
        __syncthreads();
        constexpr int AHEAD = (Shape::STAGES - 1) * BN;
        if (key + AHEAD < tile.other_end) load_keys(stage == 0 ? Shape::STAGES - 1 : stage - 1, key + AHEAD);
        cp_async_commit();
        const bf16* const k_tile = stream + stage * STAGE;
        stage = stage + 1 == Shape::STAGES ? 0 : stage + 1;
        if (!active || (!Shape::MASKED && (key > last_row || key + BN <= from))) continue;
        if constexpr (Shape::MASKED) {
            if (hides_all<MT, NT>(mask_rows[key / MASK_KEYS % 2] + (row - tile.start), key)) continue;
        }

        float scores[MT][NT][4];
        clear(scores);
        multiply_nt<HD>(scores, q_operand, k_tile);
        if constexpr (Shape::MASKED) {
            apply_mask(scores, mask_rows[key / MASK_KEYS % 2] + (row - tile.start), key);
        } else if (key + BN - 1 > row || key < from_last) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int q = row + m * 16 + half * 8 + lane / 4, first = p.first_key[min(q, tile.end - 1)];
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int k = key + n * 8 + lane % 4 * 2 + i;
                            if (k > q || k < first) scores[m][n][half * 2 + i] = -INFINITY;
                        }
                }
        }
        softmax_step(state, scores, scale);
        uint32_t probabilities[MT][NT / 2][4];
        pack_operand(probabilities, scores);
        multiply_nn<HD, MT, NT>(state.o, probabilities, k_tile + BN * PITCH<HD>);
    }
    if (!active) return;

#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float top = state.maximum[m][half] * scale, factor = 1.0f;
            if (p.sinks != nullptr) {
                // The sink is one more score, with no value. It joins last, so that P of a row's greatest key is 1 exactly.
                const float sink = p.sinks[head] * LOG2_E, old = top;
                top = fmaxf(top, sink);
                factor = exp2_fast(old - top);
                sum = sum * factor + exp2_fast(sink - top);
            }
            const int q = row + m * 16 + half * 8 + lane / 4;
            if (q < tile.end && lane % 4 == 0)
                p.lse[static_cast<int64_t>(q) * p.num_heads + head] = top * LN_2 + logf(sum);
            state.sum[m][half] = factor / sum;
        }
    store_rows<HD, MT>(
        p.o + static_cast<int64_t>(head) * d, p.o_stride, row, tile.end, d, state.o, state.sum);
}

}  // namespace tandem
