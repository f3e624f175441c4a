//! What the packed attention kernels share: parameters, tile loads, products of tiles, row-wise stores.
//!
//! Query row `q` sees key row `k` iff `first_key[q] ≤ k ≤ q`; `first_key` (built on the host from the documents and the
//! window) never falls from row to row. So a tile may hold several short documents, and every mask is two comparisons.
//! Masked kernels (`MASKED` of a shape) read a dense mask of bits instead (`attention_mask.cu`), with the operands of every tile of the T×T square: no
//! document, window or diagonal lets them skip one. What the mask hides from all of a warp's rows is not multiplied. Every row sees itself, so no
//! softmax is empty.
//! Tiles lie in shared memory with an XOR swizzle of 16-byte units inside 128-byte lines (unit `c` of row `r` is stored at
//! `c ^ (r % 8)`): the eight rows that ldmatrix reads at once fall into different banks, and so do the eight units of a row
//! that cp.async writes at once. (Padding the rows serves ldmatrix only: cp.async then took 10 passes a warp instead of 4.)
#pragma once

#include "attention_ptx.cuh"

namespace tandem {

/// A run of rows with the rows of the other side that it meets: keys for a query tile, queries for a key tile.
struct alignas(16) Tile {
    int start, end, other_start, other_end;
};

/// Parameters of `attention_forward_*`. Strides count values from one row to the next and are multiples of 8; pointers of
/// bf16 are 16-byte aligned. Mirrored by `ForwardParams` in `src/ops/attention/params.rs`.
struct ForwardParams {
    const bf16* q;           // [T, Hq·d]
    const bf16* k;           // [T, Hkv·d]
    const bf16* v;           // [T, Hkv·d]
    bf16* o;                 // [T, Hq·d]
    float* lse;              // [T, Hq], natural logarithm
    const float* sinks;      // [Hq] or null
    const Tile* query_tiles; // longest first
    const int* num_query_tiles;
    const int* first_key;    // [T]
    const uint32_t* mask;    // [T, mask_stride], read by masked kernels alone, which do not read first_key
    int q_stride, k_stride, v_stride, o_stride;
    int num_heads, num_kv_heads, head_dim;
    float scale;
    int mask_stride;         // a multiple of 4: rows are read as 16 bytes
};
static_assert(sizeof(ForwardParams) == 120, "pointers, then 4-byte members without gaps, as on the host");

/// Parameters of the backward kernels; as `ForwardParams`. Mirrored by `BackwardParams` in `src/ops/attention/params.rs`.
struct BackwardParams {
    const bf16* q;
    const bf16* k;
    const bf16* v;
    const bf16* o;
    const bf16* d_o;
    const float* lse;
    float2* row_stats;       // [Hq, T] scratch: lse in base 2 and D = rowsum(do ⊙ o), from the query to the key kernel
    bf16* dq;
    bf16* dk;
    bf16* dv;
    const float* sinks;      // [Hq] or null
    float* sink_partials;    // [query tiles, Hq] scratch, unused when `d_sinks` is null
    float* d_sinks;          // [Hq], added to by the sinks' kernel; null when no such gradient is wanted
    const Tile* query_tiles;
    const int* num_query_tiles;
    const Tile* key_tiles;
    const int* num_key_tiles;
    const int* first_key;
    const uint32_t* mask;
    float* key_partials;     // [key_parts, T, 2·Hkv·d] scratch: each part's dk (not scaled) and dv; unused with one part
    int q_stride, k_stride, v_stride, o_stride, do_stride, dq_stride, dk_stride, dv_stride;
    int num_heads, num_kv_heads, head_dim;
    float scale;
    int num_tokens;          // T
    int mask_stride;
    int key_parts;           // blocks that share the query heads of a key head: a divisor of Hq / Hkv
};
static_assert(sizeof(BackwardParams) == 224, "pointers, then 4-byte members without gaps, as on the host");

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

/// Values from one row of a tile to the next in shared memory: whole 128-byte lines.
template <int HD>
constexpr int PITCH = HD <= 64 ? 64 : 128;

/// Where unit `column / 8` of a row is stored, in values from the start of the tile.
template <int HD>
__device__ __forceinline__ int swizzled(int row, int column) {
    return row * PITCH<HD> + (column ^ (row % 8 * 8));
}

/// Starts the copy of rows `row .. row + ROWS` of one head to a tile; rows from `row_end` on and columns from `d` on are zero.
template <int ROWS, int HD, int THREADS>
__device__ __forceinline__ void load_rows(bf16* tile, const bf16* head, int stride, int row, int row_end, int d) {
    // Each thread keeps its column and walks down the rows. A copy that is not valid does not read its address.
    constexpr int UNITS = PITCH<HD> / 8, STEP = THREADS / UNITS;
    static_assert(STEP % 8 == 0, "a thread's rows share their swizzle");
    const int r = static_cast<int>(threadIdx.x) / UNITS, column = static_cast<int>(threadIdx.x) % UNITS * 8;
    if (HD % PITCH<HD> != 0 && column >= HD) return;
    const int limit = column < d ? row_end - row - r : 0;
    const bf16* from = head + static_cast<int64_t>(row + r) * stride + column;
    bf16* const to = tile + swizzled<HD>(r, column);
#pragma unroll
    for (int step = 0; step < ROWS; step += STEP) {
        if (ROWS % STEP != 0 && step + r >= ROWS) break;
        cp_async_16(to + step * PITCH<HD>, from, step < limit);
        from += static_cast<int64_t>(STEP) * stride;
    }
}

/// Starts the copy of a query tile: the same rows of `Shape::HEADS` heads, one head below the other.
template <class Shape>
__device__ __forceinline__ void load_heads(bf16* to, const bf16* x, int stride, int first_head, const Tile& tile, int d) {
#pragma unroll
    for (int i = 0; i < Shape::HEADS; ++i)
        load_rows<Shape::ROWS, Shape::HD, Shape::THREADS>(
            to + i * Shape::ROWS * PITCH<Shape::HD>, x + static_cast<int64_t>(first_head + i) * d, stride, tile.start, tile.end, d);
}

/// Keys of a row whose bits are one 16-byte load.
constexpr int MASK_KEYS = 128;

/// Starts the copy of the mask of a query tile's rows, for the `MASK_KEYS` keys from `key` on. Rows past the end get zeros: they see nothing.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_mask(uint4* to, const uint32_t* mask, int stride, const Tile& tile, int key) {
    for (int r = threadIdx.x; r < ROWS; r += THREADS)
        cp_async_16(to + r, mask + static_cast<int64_t>(tile.start + r) * stride + key / 32, tile.start + r < tile.end);
}

/// Sets scores that the mask hides to −∞: those of a warp's MT·16 rows, whose words begin at `rows`, and NT·8 keys from `key` on.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask(float (&scores)[MT][NT][4], const uint4* rows, int key) {
    static_assert(NT % 4 == 0, "whole words");
    const int lane = threadIdx.x % WARP;
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(rows + lane / 4) + key % MASK_KEYS / 32;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < NT; n += 4) {
                const uint32_t bits = words[(m * 16 + half * 8) * 4 + n / 4] >> (lane % 4 * 2);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (!(bits >> (j * 8 + i) & 1)) scores[m][n + j][half * 2 + i] = -INFINITY;
            }
}

/// Whether the mask hides NT·8 keys from `key` on from all of a warp's MT·16 rows, whose words begin at `rows`: a whole warp asks.
template <int MT, int NT>
__device__ __forceinline__ bool hides_all(const uint4* rows, int key) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(rows) + key % MASK_KEYS / 32;
    uint32_t seen = 0;
    for (int r = threadIdx.x % WARP; r < MT * 16; r += WARP)
#pragma unroll
        for (int n = 0; n < NT / 4; ++n) seen |= words[r * 4 + n];
    return !__any_sync(0xffffffffu, seen != 0);
}

/// Where this lane points ldmatrix for an A operand [16 rows, first 16 columns] of a tile, and for a B operand whose rows are the
/// depth (transposed loads, two n8 tiles at once): a shared-memory address.
template <int HD>
__device__ __forceinline__ uint32_t place_a(const bf16* tile) {
    const int lane = threadIdx.x % WARP;
    return shared_address(tile) + 2 * swizzled<HD>(lane % 16, lane / 16 * 8);
}

/// As `place_a` for a B operand whose rows are the product's columns (two n8 tiles at once).
template <int HD>
__device__ __forceinline__ uint32_t place_b(const bf16* tile) {
    const int lane = threadIdx.x % WARP;
    return shared_address(tile) + 2 * swizzled<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}

/// The place `rows` (a multiple of 8) down and 16·`step` columns to the right. Tiles start at whole 128-byte lines, so the
/// swizzle of a step is one XOR of the address; the rest is a constant.
template <int HD>
__device__ __forceinline__ uint32_t moved(uint32_t place, int rows, int step) {
    return (place ^ (step % 4 * 32)) + step / 4 * 128 + rows * (2 * PITCH<HD>);
}

/// An A operand of MT·16 rows that stays in shared memory.
template <int MT, int HD>
struct SharedOperand {
    const bf16* tile;
    __device__ __forceinline__ void take(const bf16* rows) { tile = rows; }
    __device__ __forceinline__ void load(uint32_t (&a)[MT][4], int step) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix_x4_at(a[m], moved<HD>(place_a<HD>(tile), m * 16, step));
    }
};

/// An A operand of MT·16 rows held in registers.
template <int MT, int HD>
struct RegisterOperand {
    uint32_t value[HD / 16][MT][4];
    __device__ __forceinline__ void take(const bf16* rows) {
#pragma unroll
        for (int step = 0; step < HD / 16; ++step) SharedOperand<MT, HD>{rows}.load(value[step], step);
    }
    __device__ __forceinline__ void load(uint32_t (&a)[MT][4], int step) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = value[step][m][i];
    }
};

template <bool IN_REGISTERS, int MT, int HD>
struct OperandOf {
    using Type = SharedOperand<MT, HD>;
};
template <int MT, int HD>
struct OperandOf<true, MT, HD> {
    using Type = RegisterOperand<MT, HD>;
};
template <bool IN_REGISTERS, int MT, int HD>
using Operand = typename OperandOf<IN_REGISTERS, MT, HD>::Type;

/// acc [MT·16, NT·8] += A [MT·16, HD] · Bᵀ with B [NT·8, HD] a tile in shared memory.
template <int HD, int MT, int NT, class A>
__device__ __forceinline__ void multiply_nt(float (&acc)[MT][NT][4], const A& operand, const bf16* tile) {
    const uint32_t place = place_b<HD>(tile);
#pragma unroll
    for (int step = 0; step < HD / 16; ++step) {
        uint32_t a[MT][4];
        operand.load(a, step);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_at(b, moved<HD>(place, n * 8, step));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_16816(acc[m][n], a[m], b[0], b[1]);
                mma_16816(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/// acc [MT·16, HD] += A [MT·16, NT·8] · B with A packed from accumulators and B [NT·8, HD] a tile in shared memory.
template <int HD, int MT, int NT>
__device__ __forceinline__ void multiply_nn(
    float (&acc)[MT][HD / 8][4], const uint32_t (&a)[MT][NT / 2][4], const bf16* tile) {
    const uint32_t place = place_a<HD>(tile);
#pragma unroll
    for (int step = 0; step < NT / 2; ++step) {
#pragma unroll
        for (int n = 0; n < HD / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans_at(b, moved<HD>(place, step * 16, n / 2));
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_16816(acc[m][n], a[m][step], b[0], b[1]);
                mma_16816(acc[m][n + 1], a[m][step], b[2], b[3]);
            }
        }
    }
}

/// Turns accumulators [MT·16, NT·8] into the A operands of the next product.
template <int MT, int NT>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[MT][NT / 2][4], const float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            a[m][n / 2][n % 2 * 2] = pack_bf16(acc[m][n][0], acc[m][n][1]);
            a[m][n / 2][n % 2 * 2 + 1] = pack_bf16(acc[m][n][2], acc[m][n][3]);
        }
}

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

/// Stores a warp's accumulators [MT·16, HD] times `factor[m][half]` as bf16 rows from `row` on. The four lanes of a row swap
/// values so that each stores 16 bytes.
template <int HD, int MT>
__device__ __forceinline__ void store_rows(
    bf16* head, int stride, int row, int row_end, int d, const float (&acc)[MT][HD / 8][4], const float (&factor)[MT][2]) {
    const int lane = threadIdx.x % WARP, quad = lane % 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + m * 16 + half * 8 + lane / 4;
            const float f = factor[m][half];
#pragma unroll
            for (int n = 0; n < HD / 8; n += 4) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = pack_bf16(acc[m][n + i][half * 2] * f, acc[m][n + i][half * 2 + 1] * f);
                // A 4×4 transposition: first pairs of lanes swap single values, then halves of the quad swap pairs.
                const bool odd = quad & 1, high = quad & 2;
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
                    x[i] = odd ? other : x[i];
                    x[i + 1] = odd ? x[i + 1] : other;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
                    x[i] = high ? other : x[i];
                    x[i + 2] = high ? x[i + 2] : other;
                }
                const int column = (n + quad) * 8;
                if (r < row_end && column < d)
                    *reinterpret_cast<uint4*>(head + static_cast<int64_t>(r) * stride + column) =
                        make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
}

}  // namespace tandem
