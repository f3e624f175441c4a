//! Packed attention, backward: one kernel over query tiles (D, dq, the sinks' parts), one over key tiles (dk, dv).
//!
//! `P = exp(S − lse)`, `dS = P⊙(do·vᵀ − D)`, `dq = σ·dS·k`, `dk = σ·dSᵀ·q`, `dv = Pᵀ·do`. Each warp owns rows of the result, so P
//! and dS go from accumulators to operands without leaving registers. Each value has one writer: reruns are bit-equal. Where key tiles are
//! few, several blocks share one, each with a part of the query heads; their sums are added by a third kernel.
#pragma once

#include "attention.cuh"

namespace tandem {

/// Sizes of the query kernel: BM query rows, of HEADS heads that share a key head; BN key rows a step, taken in chunks of CHUNK,
/// STAGES steps in flight; q and do in registers or not; by a dense mask or not. Each warp's rows belong to one head.
template <int HD_, int BM_, int HEADS_, int BN_, int CHUNK_, int STAGES_, int WARPS_, bool REGISTERS_, bool MASKED_ = false>
struct QueryShape {
    static constexpr int HD = HD_, BM = BM_, HEADS = HEADS_, BN = BN_, CHUNK = CHUNK_, STAGES = STAGES_, THREADS = WARPS_ * WARP;
    static constexpr int MT = BM_ / (16 * WARPS_);  // fragments of 16 rows a warp
    static constexpr int HEAD_WARPS = WARPS_ / HEADS, ROWS = BM / HEADS;  // ROWS is the height of a tile in the work list
    static constexpr bool REGISTERS = REGISTERS_, MASKED = MASKED_;
    static constexpr int STREAM = 2 * STAGES * BN * PITCH<HD>;  // stages of K and V, in values
    static constexpr int OWN = 2 * BM * PITCH<HD>;     // q and do
    static constexpr int SHARED_BYTES = 2 * (REGISTERS ? (STREAM > OWN ? STREAM : OWN) : STREAM + OWN);
    static_assert(BM == MT * 16 * WARPS_ && MT > 0 && CHUNK % 16 == 0 && BN % CHUNK == 0 && HD % 32 == 0, "whole fragments");
    static_assert(!MASKED || (MASK_KEYS % BN == 0 && (STAGES - 1) * BN <= MASK_KEYS), "two places for the mask are enough");
};

/// Sizes of the key kernel: BM key rows, BN query rows a step, taken in chunks of CHUNK, STAGES steps in flight; k and v in registers or not; by
/// a dense mask or not.
template <int HD_, int BM_, int BN_, int CHUNK_, int STAGES_, int WARPS_, bool K_REGISTERS_, bool V_REGISTERS_, bool MASKED_ = false>
struct KeyShape {
    static constexpr int HD = HD_, BM = BM_, BN = BN_, CHUNK = CHUNK_, STAGES = STAGES_, THREADS = WARPS_ * WARP;
    static constexpr int MT = BM_ / (16 * WARPS_);  // fragments of 16 rows a warp
    static constexpr bool K_REGISTERS = K_REGISTERS_, V_REGISTERS = V_REGISTERS_, MASKED = MASKED_;
    static constexpr int TILE = BM * PITCH<HD>;
    static constexpr int STREAM = 2 * STAGES * BN * PITCH<HD>;  // stages of q and do, in values
    static constexpr int SEEN = MASKED ? BM / 32 : 1;  // words a query row: the mask of the tile's keys, or first_key
    static constexpr int STATS = STAGES * (2 + SEEN) * BN;  // stages of (lse, D) and those words, in units of 4 bytes
    // A tile that moves to registers borrows the stream's place.
    static constexpr int KEPT = (K_REGISTERS ? 0 : 1) + (V_REGISTERS ? 0 : 1);
    static constexpr int BORROWED = (2 - KEPT) * TILE;
    static constexpr int SHARED_BYTES = 2 * (KEPT * TILE + (STREAM > BORROWED ? STREAM : BORROWED)) + 4 * STATS;
    static_assert(BM == MT * 16 * WARPS_ && MT > 0 && CHUNK % 16 == 0 && BN % CHUNK == 0 && HD % 32 == 0, "whole fragments");
};

/// D of the rows of a warp. `load` starts the reads of o; `finish` multiplies with do in shared memory and writes D to
/// `shared[row].y`, 0 past the end.
template <int ROWS, int HD>
struct RowDots {
    static constexpr int LANES = HD == 64 ? 8 : 16, ROWS_AT_ONCE = WARP / LANES;
    Bf16x8 o[ROWS / ROWS_AT_ONCE];

    __device__ __forceinline__ void load(const bf16* o_head, int stride, int row, int row_end, int d) {
        const int lane = threadIdx.x % WARP, column = lane % LANES * 8;
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_AT_ONCE; ++i) {
            const int q = row + i * ROWS_AT_ONCE + lane / LANES;
            o[i] = q < row_end && column < d
                       ? *reinterpret_cast<const Bf16x8*>(o_head + static_cast<int64_t>(q) * stride + column)
                       : Bf16x8{};
        }
    }

    __device__ __forceinline__ void finish(const bf16* do_rows, float2* shared) const {
        const int lane = threadIdx.x % WARP, column = lane % LANES * 8;
#pragma unroll
        for (int i = 0; i < ROWS / ROWS_AT_ONCE; ++i) {
            const int r = i * ROWS_AT_ONCE + lane / LANES;
            float sum = 0.0f;
            if (column < HD) {
                const Bf16x8 d_o = *reinterpret_cast<const Bf16x8*>(do_rows + swizzled<HD>(r, column));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 a = unpack_bf16(o[i].pair[j]), b = unpack_bf16(d_o.pair[j]);
                    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
                }
            }
#pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            if (lane % LANES == 0) shared[r].y = sum;
        }
    }
};

template <class Shape>
__device__ __forceinline__ void attention_backward_query(const BackwardParams& p) {
    constexpr int HD = Shape::HD, BM = Shape::BM, BN = Shape::BN, CHUNK = Shape::CHUNK, THREADS = Shape::THREADS;
    constexpr int MT = Shape::MT, NT = CHUNK / 8, STAGE = 2 * BN * PITCH<HD>, ROWS = MT * 16;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    __shared__ float2 row_stats[BM];  // lse in base 2 (+∞ past the end gives P = 0), D
    bf16* const stream = reinterpret_cast<bf16*>(shared_memory);
    bf16* const q_tile = Shape::REGISTERS ? stream : stream + Shape::STREAM;
    bf16* const do_tile = q_tile + BM * PITCH<HD>;

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
    const int row = tile.start + warp % Shape::HEAD_WARPS * ROWS, last_row = min(row + ROWS, tile.end) - 1;
    const bool active = row < tile.end;
    load_heads<Shape>(q_tile, p.q, p.q_stride, first_head, tile, d);
    load_heads<Shape>(do_tile, p.d_o, p.do_stride, first_head, tile, d);
    cp_async_commit();
    const auto start_stream = [&] {
#pragma unroll
        for (int i = 0; i < Shape::STAGES - 1; ++i) {
            if (i == 0 || tile.other_start + i * BN < tile.other_end) load_keys(i, tile.other_start + i * BN);
            cp_async_commit();
        }
    };
    if constexpr (!Shape::REGISTERS) start_stream();
    RowDots<ROWS, HD> dots;
    dots.load(p.o + static_cast<int64_t>(head) * d, p.o_stride, row, tile.end, d);
    const int from = !Shape::MASKED && active ? p.first_key[row] : 0, from_last = !Shape::MASKED && active ? p.first_key[last_row] : 0;
    float lse[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int q = row + m * 16 + half * 8 + lane / 4;
            lse[m][half] = q < tile.end ? p.lse[static_cast<int64_t>(q) * p.num_heads + head] * LOG2_E : INFINITY;
        }

    cp_async_wait<Shape::REGISTERS ? 0 : Shape::STAGES - 1>();  // q and do are there
    __syncthreads();
    float2* const warp_stats = row_stats + warp * ROWS;
    dots.finish(do_tile + warp * ROWS * PITCH<HD>, warp_stats);
    if (lane % 4 == 0) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) warp_stats[m * 16 + half * 8 + lane / 4].x = lse[m][half];
    }
    __syncwarp();
    for (int r = lane; r < ROWS && row + r < tile.end; r += WARP)
        p.row_stats[static_cast<int64_t>(head) * p.num_tokens + row + r] = warp_stats[r];
    // One fragment of rows keeps its statistics in registers; two read them again in every chunk, for want of registers.
    float2 kept[MT][2];
    const auto read_stats = [&](float2(&to)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) to[m][half] = warp_stats[m * 16 + half * 8 + lane / 4];
    };
    if constexpr (MT == 1) read_stats(kept);
    Operand<Shape::REGISTERS, MT, HD> q_operand, do_operand;
    q_operand.take(q_tile + warp * ROWS * PITCH<HD>);
    do_operand.take(do_tile + warp * ROWS * PITCH<HD>);
    if constexpr (Shape::REGISTERS) {
        __syncthreads();
        start_stream();
    }

    if (p.d_sinks != nullptr) {
        // dsink = −Σ exp(sink − lse)·D: this tile's part, rows, then warps added in a fixed order.
        float part = 0.0f;
        for (int r = lane; r < ROWS && row + r < tile.end; r += WARP) {
            const float row_lse = p.lse[static_cast<int64_t>(row + r) * p.num_heads + head];
            part += expf(p.sinks[head] - row_lse) * warp_stats[r].y;
        }
        __shared__ float parts[THREADS / WARP];
        part = warp_sum(part);
        if (lane == 0) parts[warp] = part;
        __syncthreads();
        if (threadIdx.x < Shape::HEADS) {
            float sum = 0.0f;
            for (int i = 0; i < Shape::HEAD_WARPS; ++i) sum += parts[threadIdx.x * Shape::HEAD_WARPS + i];
            p.sink_partials[static_cast<int64_t>(tile_index) * p.num_heads + first_head + threadIdx.x] = sum;
        }
    }

    const float scale = p.scale * LOG2_E;
    float dq[MT][HD / 8][4];
    clear(dq);
    int stage = 0;
    for (int step = tile.other_start; step < tile.other_end; step += BN) {
        cp_async_wait<Shape::STAGES - 2>();
        __syncthreads();
        constexpr int AHEAD = (Shape::STAGES - 1) * BN;
        if (step + AHEAD < tile.other_end) load_keys(stage == 0 ? Shape::STAGES - 1 : stage - 1, step + AHEAD);
        cp_async_commit();
        const bf16* const k_tile = stream + stage * STAGE;
        const bf16* const v_tile = k_tile + BN * PITCH<HD>;
        stage = stage + 1 == Shape::STAGES ? 0 : stage + 1;
#pragma unroll
        for (int chunk = 0; chunk < BN; chunk += CHUNK) {
            const int key = step + chunk;
            if (!active || (!Shape::MASKED && (key > last_row || key + CHUNK <= from))) continue;
            if constexpr (Shape::MASKED) {
                if (hides_all<MT, NT>(mask_rows[key / MASK_KEYS % 2] + (row - tile.start), key)) continue;
            }
            float scores[MT][NT][4], d_scores[MT][NT][4];
            clear(scores);
            float2 stats[MT][2];
            if constexpr (MT == 1) {
                stats[0][0] = kept[0][0];
                stats[0][1] = kept[0][1];
            } else {
                read_stats(stats);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d_scores[m][n][i] = -stats[m][i / 2].y;
            multiply_nt<HD>(scores, q_operand, k_tile + chunk * PITCH<HD>);
            multiply_nt<HD>(d_scores, do_operand, v_tile + chunk * PITCH<HD>);
            if constexpr (MT > 1) read_stats(stats);
            if constexpr (Shape::MASKED) {
                apply_mask(scores, mask_rows[key / MASK_KEYS % 2] + (row - tile.start), key);
            } else if (key + CHUNK - 1 > row || key < from_last) {
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
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        d_scores[m][n][i] *= exp2_fast(fmaf(scores[m][n][i], scale, -stats[m][i / 2].x));
            uint32_t packed[MT][NT / 2][4];
            pack_operand(packed, d_scores);
            multiply_nn<HD, MT, NT>(dq, packed, k_tile + chunk * PITCH<HD>);
        }
    }
    if (!active) return;
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m) factor[m][0] = factor[m][1] = p.scale;
    store_rows<HD, MT>(p.dq + static_cast<int64_t>(head) * d, p.dq_stride, row, tile.end, d, dq, factor);
}

/// Stores a warp's accumulators [MT·16, HD] as f32 rows from `row` on, the columns before `d`.
template <int HD, int MT>
__device__ __forceinline__ void store_partials(float* to, int stride, int row, int row_end, int d, const float (&acc)[MT][HD / 8][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + m * 16 + half * 8 + lane / 4;
            if (r >= row_end) continue;
            float* const at = to + static_cast<int64_t>(r) * stride + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < HD / 8; ++n)
                if (n * 8 < d) *reinterpret_cast<float2*>(at + n * 8) = make_float2(acc[m][n][half * 2], acc[m][n][half * 2 + 1]);
        }
}

template <class Shape>
__device__ __forceinline__ void attention_backward_key(const BackwardParams& p) {
    constexpr int HD = Shape::HD, BM = Shape::BM, BN = Shape::BN, CHUNK = Shape::CHUNK, THREADS = Shape::THREADS;
    constexpr int MT = Shape::MT, NT = CHUNK / 8, STAGE = 2 * BN * PITCH<HD>, ROWS = MT * 16;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    bf16* const kept = reinterpret_cast<bf16*>(shared_memory);
    bf16* const stream = kept + Shape::KEPT * Shape::TILE;
    float2* const stats = reinterpret_cast<float2*>(shared_memory + Shape::SHARED_BYTES - 4 * Shape::STATS);
    int* const seen_of = reinterpret_cast<int*>(stats + Shape::STAGES * BN);
    bf16* const k_tile = Shape::K_REGISTERS ? stream : kept;
    bf16* const v_tile = Shape::V_REGISTERS ? stream + (Shape::K_REGISTERS ? Shape::TILE : 0)
                                            : kept + (Shape::K_REGISTERS ? 0 : Shape::TILE);

    // The grid is two-dimensional for want of registers. Blocks start in the order of x, then y: first all those of the longest tile.
    if (static_cast<int>(blockIdx.y) >= *p.num_key_tiles) return;
    const Tile tile = p.key_tiles[blockIdx.y];
    // Of a tile's blocks, each has the next few query heads: every `key_parts` of them make a group.
    const int block = blockIdx.x, heads = p.num_heads / static_cast<int>(gridDim.x), d = p.head_dim;
    const int kv_column = block / p.key_parts * d;

    const auto load_queries = [&](int stage, int head, int row) {
        bf16* const to = stream + stage * STAGE;
        const int64_t head_offset = static_cast<int64_t>(head) * d;
        load_rows<BN, HD, THREADS>(to, p.q + head_offset, p.q_stride, row, tile.other_end, d);
        load_rows<BN, HD, THREADS>(to + BN * PITCH<HD>, p.d_o + head_offset, p.do_stride, row, tile.other_end, d);
        // Zeros past the end give P = 1 there, but do, D and q are zero as well: such rows add nothing.
        const float2* const row_stats = p.row_stats + static_cast<int64_t>(head) * p.num_tokens;
        for (int i = threadIdx.x; i < BN; i += THREADS) {
            cp_async_short<8>(stats + stage * BN + i, row_stats + row + i, row + i < tile.other_end);
            int* const seen = seen_of + (stage * BN + i) * Shape::SEEN;
            if constexpr (Shape::MASKED) {
                const uint32_t* const words = p.mask + static_cast<int64_t>(row + i) * p.mask_stride + tile.start / 32;
                if constexpr (Shape::SEEN == 4) cp_async_16(seen, words, row + i < tile.other_end);
                else cp_async_short<4 * Shape::SEEN>(seen, words, row + i < tile.other_end);
            } else {
                cp_async_short<4>(seen, p.first_key + row + i, row + i < tile.other_end);
            }
        }
    };

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = tile.start + warp * ROWS, last_row = min(row + ROWS, tile.end) - 1;
    const bool active = row < tile.end;
    load_rows<BM, HD, THREADS>(k_tile, p.k + kv_column, p.k_stride, tile.start, tile.end, d);
    load_rows<BM, HD, THREADS>(v_tile, p.v + kv_column, p.v_stride, tile.start, tile.end, d);
    constexpr bool BORROWS = Shape::KEPT < 2;
    Operand<Shape::K_REGISTERS, MT, HD> k_operand;
    Operand<Shape::V_REGISTERS, MT, HD> v_operand;
    if constexpr (BORROWS) {
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
    k_operand.take(k_tile + warp * ROWS * PITCH<HD>);
    v_operand.take(v_tile + warp * ROWS * PITCH<HD>);
    if constexpr (BORROWS) __syncthreads();
    // The stream walks the block's heads and, inside, the query rows; it runs STAGES - 1 steps ahead of the products.
    int left = heads * ((tile.other_end - tile.other_start + BN - 1) / BN);
    int next_head = block * heads, next_query = tile.other_start;
    const auto load_next = [&](int stage, bool more) {
        if (more) load_queries(stage, next_head, next_query);
        cp_async_commit();
        next_query += BN;
        if (next_query >= tile.other_end) {
            next_query = tile.other_start;
            ++next_head;
        }
    };
#pragma unroll
    for (int i = 0; i < Shape::STAGES - 1; ++i) load_next(i, left > i);

    const float scale = p.scale * LOG2_E;
    float dk[MT][HD / 8][4], dv[MT][HD / 8][4];
    clear(dk);
    clear(dv);
    int stage = 0, step = tile.other_start;
    for (; left > 0; --left) {
        cp_async_wait<Shape::STAGES - 2>();
        __syncthreads();
        load_next(stage == 0 ? Shape::STAGES - 1 : stage - 1, left >= Shape::STAGES);
        const bf16* const q_tile = stream + stage * STAGE;
        const bf16* const do_tile = q_tile + BN * PITCH<HD>;
        const float2* const step_stats = stats + stage * BN;
        const int* const seen = seen_of + stage * BN * Shape::SEEN;
        stage = stage + 1 == Shape::STAGES ? 0 : stage + 1;
#pragma unroll
        for (int chunk = 0; chunk < BN; chunk += CHUNK) {
            const int query = step + chunk;
            if (!active || query >= tile.other_end || (!Shape::MASKED && (query + CHUNK <= row || seen[chunk] > last_row))) continue;
            if constexpr (Shape::MASKED) {
                // Of each query's words, the one with the warp's keys; a lane has one query.
                static_assert(CHUNK == WARP && (ROWS == 16 || ROWS == 32), "a word holds the warp's keys");
                const uint32_t bits = static_cast<uint32_t>(seen[(chunk + lane) * Shape::SEEN + warp * ROWS / 32]) >> warp * ROWS % 32;
                if (!__any_sync(0xffffffffu, (ROWS == 32 ? bits : bits & 0xffffu) != 0)) continue;
            }
            const int final_query = min(CHUNK, tile.other_end - query) - 1;
            float scores[MT][NT][4], d_scores[MT][NT][4];
            clear(scores);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float4 pair = *reinterpret_cast<const float4*>(step_stats + chunk + n * 8 + lane % 4 * 2);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    d_scores[m][n][0] = d_scores[m][n][2] = -pair.y;
                    d_scores[m][n][1] = d_scores[m][n][3] = -pair.w;
                }
            }
            multiply_nt<HD>(scores, k_operand, q_tile + chunk * PITCH<HD>);
            multiply_nt<HD>(d_scores, v_operand, do_tile + chunk * PITCH<HD>);
            if constexpr (Shape::MASKED) {
                // Of each query's words, the one with the warp's keys.
                const int first = warp * ROWS + lane / 4;
                const int* const words = seen + chunk * Shape::SEEN + first / 32;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int column = n * 8 + lane % 4 * 2 + i;
                        const uint32_t bits = static_cast<uint32_t>(words[column * Shape::SEEN]) >> first % 32;
#pragma unroll
                        for (int m = 0; m < MT; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                if (!(bits >> (m * 16 + half * 8) & 1)) scores[m][n][half * 2 + i] = -INFINITY;
                    }
            } else if (query < row + ROWS - 1 || seen[chunk + final_query] > row) {
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int column = n * 8 + lane % 4 * 2 + i, q = query + column, first = seen[chunk + column];
#pragma unroll
                        for (int m = 0; m < MT; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int k = row + m * 16 + half * 8 + lane / 4;
                                if (k > q || k < first) scores[m][n][half * 2 + i] = -INFINITY;
                            }
                    }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float4 pair = *reinterpret_cast<const float4*>(step_stats + chunk + n * 8 + lane % 4 * 2);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        scores[m][n][i] = exp2_fast(fmaf(scores[m][n][i], scale, i % 2 == 0 ? -pair.x : -pair.z));
            }
            uint32_t packed[MT][NT / 2][4];
            pack_operand(packed, scores);
            multiply_nn<HD, MT, NT>(dv, packed, do_tile + chunk * PITCH<HD>);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) d_scores[m][n][i] *= scores[m][n][i];
            pack_operand(packed, d_scores);
            multiply_nn<HD, MT, NT>(dk, packed, q_tile + chunk * PITCH<HD>);
        }
        step = step + BN < tile.other_end ? step + BN : tile.other_start;
    }
    if (!active) return;
    if (p.key_parts > 1) {
        const int width = p.num_kv_heads * d;
        float* const part = p.key_partials + static_cast<int64_t>(block % p.key_parts) * p.num_tokens * (2 * width) + kv_column;
        store_partials<HD, MT>(part, 2 * width, row, tile.end, d, dk);
        store_partials<HD, MT>(part + width, 2 * width, row, tile.end, d, dv);
        return;
    }
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m) factor[m][0] = factor[m][1] = p.scale;
    store_rows<HD, MT>(p.dk + kv_column, p.dk_stride, row, tile.end, d, dk, factor);
#pragma unroll
    for (int m = 0; m < MT; ++m) factor[m][0] = factor[m][1] = 1.0f;
    store_rows<HD, MT>(p.dv + kv_column, p.dv_stride, row, tile.end, d, dv, factor);
}

/// Writes dk and dv of one row (a block): the sums of their parts, always in the same order.
__device__ __forceinline__ void attention_backward_key_finish(const BackwardParams& p) {
    const int row = blockIdx.x, width = p.num_kv_heads * p.head_dim;
    const int64_t part_size = static_cast<int64_t>(p.num_tokens) * (2 * width);
    for (int column = threadIdx.x * 4; column < 2 * width; column += blockDim.x * 4) {
        const float* from = p.key_partials + static_cast<int64_t>(row) * (2 * width) + column;
        float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 4
        for (int part = 1; part < p.key_parts; ++part) {
            from += part_size;
            const float4 x = *reinterpret_cast<const float4*>(from);
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        }
        const bool key = column < width;
        const float factor = key ? p.scale : 1.0f;
        bf16* const to = key ? p.dk + static_cast<int64_t>(row) * p.dk_stride + column
                             : p.dv + static_cast<int64_t>(row) * p.dv_stride + (column - width);
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(sum.x * factor, sum.y * factor), pack_bf16(sum.z * factor, sum.w * factor));
    }
}

/// Adds dsink of one head (a block): minus the sum of its tiles' parts, always in the same order.
__device__ __forceinline__ void attention_backward_sinks(const BackwardParams& p) {
    __shared__ float sums[WARP];
    const int head = blockIdx.x, tiles = *p.num_query_tiles;
    float sum = 0.0f;
    for (int tile = threadIdx.x; tile < tiles; tile += blockDim.x)
        sum += p.sink_partials[static_cast<int64_t>(tile) * p.num_heads + head];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) p.d_sinks[head] -= sum;
}

}  // namespace tandem
