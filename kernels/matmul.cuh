//! One tile of a matrix product on tensor cores: bf16 operands, f32 sums. What dense products and products by group share.
//!
//! Tiles of `a` and `b` stream through a ring of shared-memory stages (cp.async), rows XOR-swizzled in chunks of 16 bytes so that neither the
//! copies nor ldmatrix meet a bank conflict; a warp keeps two sets of fragments, so that it loads one while the tensor cores work on the other.
#pragma once

#include "common.cuh"

namespace tandem {

/// `MatmulParams` of src/ops/matmul_plan.rs.
struct MatmulParams {
    const bf16* a;
    const bf16* b;
    void* c;
    /// What is added, scaled by beta, in the format of `c`: `c` itself when it accumulates.
    const void* source;
    /// Sums of the slices of a product that is split over k: f32 [slices, m, n]; null when it is not split.
    float* partials;
    /// Values between rows.
    int64_t lda, ldb, ldc, ld_source;
    int m, n, k;
    /// Length of the sums of one slice (`blockIdx.z`).
    int k_slice;
    /// Tile rows that are walked together, so that their operands stay in the L2 cache.
    int raster_rows;
    uint32_t flags;
    float alpha, beta;
};
// Fields of 8 bytes, then fields of 4: with this size there is no padding, so their order fixes every offset.
static_assert(sizeof(MatmulParams) == 9 * 8 + 8 * 4, "size of MatmulParams");

/// `c` and `source` are f32, not bf16.
constexpr uint32_t OUT_F32 = 1;
/// Rows of the operand start at multiples of 16 bytes.
constexpr uint32_t A_VECTOR = 2, B_VECTOR = 4, C_VECTOR = 8, SOURCE_VECTOR = 16;

enum class Form { Nt, Nn, Tn };

/// If `wanted`, starts copying 16 bytes to shared memory; zeros when `valid` is false.
__device__ __forceinline__ void copy_chunk(uint32_t shared, const void* global, bool wanted, bool valid) {
    asm volatile(
        "{\n.reg .pred ignore, wanted;\nsetp.ne.b32 wanted, %2, 0;\nsetp.eq.b32 ignore, %3, 0;\n"
        "@wanted cp.async.cg.shared.global [%0], [%1], 16, ignore;\n}\n" ::"r"(shared),
        "l"(global), "r"(int(wanted)), "r"(int(valid))
        : "memory");
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared));
    }
}

/// One operand's tile: ROWS rows (or columns) of the product by DEPTH of the sums, as it lies in memory: with the sums along the lines
/// (`ALONG`), or across them.
template <bool IS_A, int ROWS, int DEPTH, bool ALONG, int THREADS>
struct Operand {
    static constexpr int WIDTH = ALONG ? DEPTH : ROWS, LINES = ALONG ? ROWS : DEPTH;
    static constexpr int LINE_BYTES = WIDTH * 2, BYTES = LINES * LINE_BYTES, CHUNKS = WIDTH / 8;
    /// Lines between two chunks that a thread copies, and how many it copies.
    static constexpr int STEP = THREADS / CHUNKS, PASSES = LINES / STEP;
    static_assert(STEP % 8 == 0 && LINES % STEP == 0, "the swizzle must be the same in all passes");

    const char* source;
    int64_t pass_bytes, tile_bytes;
    uint32_t target;
    /// Lines that exist from this thread's first one on, and values that exist from its first one on.
    int lines_left, values_left;
    bool vector;
    uint32_t fragment;

    /// What a line's chunk numbers are XORed with: eight lines that ldmatrix reads together lie in eight different bank groups.
    static __device__ __forceinline__ int swizzle(int line) {
        return CHUNKS >= 8 ? line % 8 : line / (8 / CHUNKS) % CHUNKS;
    }

    /// `first_row`: first row of the tile of `rows`; `warp_row`: first row of this warp inside the tile.
    __device__ __forceinline__ Operand(const bf16* data, int64_t ld, int first_row, int rows, int k_begin, int k_end, int warp_row,
                                       bool aligned)
        : vector(aligned) {
        const int chunk = threadIdx.x % CHUNKS, line = threadIdx.x / CHUNKS;
        const int first_line = ALONG ? first_row : k_begin, first_value = ALONG ? k_begin : first_row;
        source = reinterpret_cast<const char*>(data + (first_line + line) * ld + first_value + chunk * 8);
        pass_bytes = ld * (STEP * 2);
        tile_bytes = ALONG ? DEPTH * 2 : ld * (DEPTH * 2);
        target = line * LINE_BYTES + (chunk ^ swizzle(line)) * 16;
        lines_left = (ALONG ? rows : k_end) - first_line - line;
        values_left = (ALONG ? k_end : rows) - first_value - chunk * 8;

        const int lane = threadIdx.x % WARP;
        // The matrices of a fragment: first by 8 rows, then by 8 of the sums for `a`; the other way around for `b`.
        const bool lines_first = IS_A == ALONG;
        const int within = lines_first ? lane % 16 : lane % 8 + lane / 16 * 8, half = lines_first ? lane / 16 : lane / 8 % 2;
        const int read_line = ALONG ? warp_row + within : within, read_chunk = ALONG ? half : warp_row / 8 + half;
        fragment = read_line * LINE_BYTES + (read_chunk ^ swizzle(read_line)) * 16;
    }

    /// This thread's chunks cannot be copied as they are: rows are not aligned, or the chunk sticks out of the matrix.
    __device__ __forceinline__ bool ragged() const { return !vector | (unsigned(values_left - 1) < 7u); }

    /// If `wanted`, starts copying the current tile to the stage at address `stage`, ragged chunks excepted. Without a branch, so that the
    /// copies mix with the arithmetic around them.
    __device__ __forceinline__ void copy(uint32_t stage, bool wanted) const {
        wanted = wanted & !ragged();
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            copy_chunk(stage + target + pass * (STEP * LINE_BYTES), source + pass * pass_bytes, wanted,
                       (values_left > 0) & (pass * STEP < lines_left));
        }
    }

    /// Copies the ragged chunks of the current tile, value by value.
    __device__ __forceinline__ void copy_ragged(uint32_t stage) const {
        if (!ragged()) return;
#pragma unroll 1
        for (int pass = 0; pass < PASSES; ++pass) {
            const auto* from = reinterpret_cast<const unsigned short*>(source + pass * pass_bytes);
            uint32_t pair[4] = {};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t value = i < values_left && pass * STEP < lines_left ? from[i] : 0;
                pair[i / 2] |= value << (i % 2 * 16);
            }
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(stage + target + pass * (STEP * LINE_BYTES)), "r"(pair[0]),
                         "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                         : "memory");
        }
    }

    /// Moves on to the next tile along the sums.
    __device__ __forceinline__ void advance() {
        source += tile_bytes;
        (ALONG ? values_left : lines_left) -= DEPTH;
    }

    /// The fragment of 16 rows from the warp's row 16·`group` on, by 16 of the sums from 16·`step` on.
    __device__ __forceinline__ void load(uint32_t (&r)[4], uint32_t stage, int group, int step) const {
        const int along_chunks = ALONG ? step : group, along_lines = ALONG ? group : step;
        load_matrices<!ALONG>(r, stage + (fragment ^ (along_chunks * 32)) + along_lines * (16 * LINE_BYTES));
    }
};

/// Exchanges registers inside each group of four lanes: lane i's register j becomes lane j's register i.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
        if (odd) v[i] = got;
        else v[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
        if (high) v[i] = got;
        else v[i + 2] = got;
    }
}

/// Eight bf16 of a row of which the first `count` exist. The slow path is a short loop that shifts values through the registers.
__device__ __forceinline__ void load_eight(uint32_t (&v)[4], const bf16* from, int count, bool vector) {
    if (vector && count >= 8) {
        const uint4 got = *reinterpret_cast<const uint4*>(from);
        v[0] = got.x, v[1] = got.y, v[2] = got.z, v[3] = got.w;
        return;
    }
#pragma unroll 1
    for (int i = 7; i >= 0; --i) {
        const uint32_t value = i < count ? reinterpret_cast<const unsigned short*>(from)[i] : 0;
        v[3] = __funnelshift_l(v[2], v[3], 16);
        v[2] = __funnelshift_l(v[1], v[2], 16);
        v[1] = __funnelshift_l(v[0], v[1], 16);
        v[0] = v[0] << 16 | value;
    }
}

__device__ __forceinline__ void store_eight(bf16* to, uint32_t (&v)[4], int count, bool vector) {
    if (vector && count >= 8) {
        *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < min(count, 8); ++i) {
        reinterpret_cast<unsigned short*>(to)[i] = static_cast<unsigned short>(v[0]);
        v[0] = __funnelshift_r(v[0], v[1], 16);
        v[1] = __funnelshift_r(v[1], v[2], 16);
        v[2] = __funnelshift_r(v[2], v[3], 16);
        v[3] >>= 16;
    }
}

/// Values `column` and `column + 1` of a row of `n`, which may end before them, packed.
__device__ __forceinline__ uint32_t load_pair(const bf16* row, int column, int n) {
    const auto* from = reinterpret_cast<const unsigned short*>(row) + column;
    const uint32_t low = column < n ? from[0] : 0, high = column + 1 < n ? from[1] : 0;
    return high << 16 | low;
}

/// Writes a warp's sums, rows from `row` and columns from `column` on, as f32: `c = alpha · sums + beta · source`. What 16 rows of `source` hold
/// is read before the first row of `c` is written, so that the reads overlap.
template <int MI, int NI>
__device__ __forceinline__ void store_f32(const float (&sums)[MI][NI][4], float* c, int64_t ld, bool vector, const float* source,
                                          int64_t source_ld, bool source_vector, int row, int column, int m, int n, float alpha, float beta) {
    const int lane = threadIdx.x % WARP;
    row += lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < MI; ++i) {
        float2 before[2][NI] = {};
        if (beta != 0.0f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int y = row + i * 16 + half * 8;
#pragma unroll
                for (int j = 0; j < NI; ++j) {
                    const int count = y < m ? n - column - j * 8 : 0;
                    const float* from = source + y * source_ld + column + j * 8;
                    if (source_vector && count >= 2) {
                        before[half][j] = *reinterpret_cast<const float2*>(from);
                    } else {
                        if (count >= 1) before[half][j].x = from[0];
                        if (count >= 2) before[half][j].y = from[1];
                    }
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int y = row + i * 16 + half * 8;
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                const int count = y < m ? n - column - j * 8 : 0;
                float* to = c + y * ld + column + j * 8;
                float2 v = make_float2(alpha * sums[i][j][2 * half], alpha * sums[i][j][2 * half + 1]);
                v = make_float2(fmaf(beta, before[half][j].x, v.x), fmaf(beta, before[half][j].y, v.y));
                if (vector && count >= 2) {
                    *reinterpret_cast<float2*>(to) = v;
                } else {
                    if (count >= 1) to[0] = v.x;
                    if (count >= 2) to[1] = v.y;
                }
            }
        }
    }
}

/// A warp's part of a bf16 `c` and of its source, eight values of a row a register group, spread over the lanes as memory has it: lane 4·y + g has the g-th
/// eight columns of each 32 in row y.
template <int MI, int NI>
struct WarpTile {
    static constexpr int GROUPS = (NI + 3) / 4;
    static_assert(NI <= 4 || NI % 4 == 0, "columns of a warp");
    bf16* c;
    const bf16* source;
    int64_t ld, source_ld;
    int row, column, m, n;
    bool vector, source_vector;

    __device__ __forceinline__ int lane() const { return threadIdx.x % WARP; }
    __device__ __forceinline__ int y(int i, int half) const { return row + i * 16 + half * 8 + lane() / 4; }
    __device__ __forceinline__ int x(int group) const { return column + (group * 4 + lane() % 4) * 8; }
    /// How many of the eight values exist; with fewer than 32 columns in all, some lanes have none.
    __device__ __forceinline__ int count(int i, int half, int group) const {
        return y(i, half) < m && group * 4 + lane() % 4 < NI ? n - x(group) : 0;
    }
    __device__ __forceinline__ void load(uint32_t (&v)[4], int i, int half, int group) const {
        load_eight(v, source + y(i, half) * source_ld + x(group), count(i, half, group), source_vector);
    }
    __device__ __forceinline__ void store(uint32_t (&v)[4], int i, int half, int group) const {
        store_eight(c + y(i, half) * ld + x(group), v, count(i, half, group), vector);
    }
};

/// As `store_f32`, rounded to bf16 once. Four lanes exchange their pairs, so that each reads and writes 16 bytes of a row. `early` holds the
/// source, where `EARLY` says so. `bias`, unless it is null, is added to every row.
template <bool EARLY, int MI, int NI, int GROUPS>
__device__ __forceinline__ void store_bf16(const float (&sums)[MI][NI][4], const WarpTile<MI, NI>& tile, uint32_t (&early)[MI][2][GROUPS][4],
                                           float alpha, float beta, const bf16* bias) {
    uint32_t bias_pairs[NI] = {};
    if (bias) {
#pragma unroll
        for (int j = 0; j < NI; ++j) bias_pairs[j] = load_pair(bias, tile.column + j * 8 + tile.lane() % 4 * 2, tile.n);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i) {
        // All that 16 rows of the source hold is read before the first row is written, so that the reads overlap.
        uint32_t values[2][GROUPS][4] = {};
        if (beta != 0.0f) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    if constexpr (EARLY) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) values[half][group][e] = early[i][half][group][e];
                    } else {
                        tile.load(values[half][group], i, half, group);
                    }
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                uint32_t(&v)[4] = values[half][group];
                if (beta != 0.0f) transpose_quad(v);
#pragma unroll
                for (int g = 0; g < 4 && group * 4 + g < NI; ++g) {
                    const float(&sum)[4] = sums[i][group * 4 + g];
                    const float2 before = unpack_bf16(v[g]);
                    float low = alpha * sum[2 * half], high = alpha * sum[2 * half + 1];
                    if (bias) {
                        const float2 added = unpack_bf16(bias_pairs[group * 4 + g]);
                        low += added.x, high += added.y;
                    }
                    low = fmaf(beta, before.x, low), high = fmaf(beta, before.y, high);
                    v[g] = pack_bf16(low, high);
                }
                transpose_quad(v);
                tile.store(v, i, half, group);
            }
        }
    }
}

/// One tile of BM×BN, DEPTH of the sums a stage, WM×WN a warp. With `EARLY` a bf16 source is read before the sums are made: for short sums,
/// where reading the source and writing `c` is most of the work.
/// The tile begins at `row` and `column` of `c`; its sums go from `k_begin` to `k_end`. `bias` holds a value for each column of `c`, or is null.
template <Form FORM, int BM, int BN, int DEPTH, int WM, int WN, int STAGES, bool EARLY>
__device__ __forceinline__ void product_tile(const MatmulParams& p, int row, int column, int k_begin, int k_end, const bf16* bias) {
    constexpr int THREADS = (BM / WM) * (BN / WN) * WARP, MI = WM / 16, NI = WN / 8, STEPS = DEPTH / 16;
    using A = Operand<true, BM, DEPTH, FORM != Form::Tn, THREADS>;
    using B = Operand<false, BN, DEPTH, FORM == Form::Nt, THREADS>;
    constexpr uint32_t STAGE_BYTES = A::BYTES + B::BYTES;
    static_assert(STEPS % 2 == 0 && STAGES >= 2, "two sets of fragments");
    extern __shared__ __align__(128) unsigned char shared[];

    const int warp = threadIdx.x / WARP, warp_row = warp % (BM / WM) * WM, warp_column = warp / (BM / WM) * WN;

    A a(p.a, p.lda, row, p.m, k_begin, k_end, warp_row, p.flags & A_VECTOR);
    B b(p.b, p.ldb, column, p.n, k_begin, k_end, warp_column, p.flags & B_VECTOR);
    const uint32_t first_stage = shared_address(shared), last_stage = first_stage + (STAGES - 1) * STAGE_BYTES;
    const int tiles = (k_end - k_begin + DEPTH - 1) / DEPTH;

    const bool partial = p.partials;
    const WarpTile<MI, NI> out{static_cast<bf16*>(p.c), static_cast<const bf16*>(p.source), p.ldc, p.ld_source, row + warp_row,
                               column + warp_column, p.m, p.n, bool(p.flags & C_VECTOR), bool(p.flags & SOURCE_VECTOR)};
    uint32_t early[MI][2][decltype(out)::GROUPS][4];
    const auto load_early = [&] {
        if (!EARLY || p.beta == 0.0f || partial || p.flags & OUT_F32) return;
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int group = 0; group < out.GROUPS; ++group) out.load(early[i][half][group], i, half, group);
            }
        }
    };

#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < tiles) {
            const uint32_t target = first_stage + stage * STAGE_BYTES;
            a.copy(target, true);
            b.copy(target + A::BYTES, true);
            a.copy_ragged(target);
            b.copy_ragged(target + A::BYTES);
            a.advance();
            b.advance();
        }
        cp_async_commit();
    }

    load_early();
    float sums[MI][NI][4] = {};
    // Two sets; the second starts as zeros, which the first round multiplies in place of a step before the first. Short sums need the
    // registers for the source, and make do with one set.
    constexpr int SETS = EARLY ? 1 : 2;
    uint32_t a_fragments[SETS][MI][4] = {}, b_fragments[SETS][NI / 2][4] = {};
    const auto load_fragments = [&](int set, uint32_t stage, int step) {
#pragma unroll
        for (int i = 0; i < MI; ++i) a.load(a_fragments[set][i], stage, i, step);
#pragma unroll
        for (int j = 0; j < NI / 2; ++j) b.load(b_fragments[set][j], stage + A::BYTES, j, step);
    };
    const auto multiply = [&](int set) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int j = 0; j < NI; ++j) {
                // There and back again: neighbours in time share a fragment.
                const int column = i % 2 ? NI - 1 - j : j;
                const uint32_t(&pair)[4] = b_fragments[set][column / 2];
                mma_16816(sums[i][column], a_fragments[set][i], pair[column % 2 * 2], pair[column % 2 * 2 + 1]);
            }
        }
    };

    cp_async_wait<STAGES - 2>();
    __syncthreads();
    uint32_t read = first_stage, write = last_stage;
    for (int tile = 0; tile < tiles; ++tile) {
        const bool more = tile + STAGES - 1 < tiles;
        // A step's fragments load while the step before is multiplied. The last step of a tile waits for the next round, so that right behind
        // the barrier, where all warps load at once, there is work that needs no load.
        load_fragments(0, read, 0);
        // This rare branch also keeps the compiler from moving the loads above down to their first use.
        if (more && (a.ragged() || b.ragged())) {
            a.copy_ragged(write);
            b.copy_ragged(write + A::BYTES);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step > 0) load_fragments(step % SETS, read, step);
            if (step == 0) a.copy(write, more);
            if (step == 1) b.copy(write + A::BYTES, more);
            multiply((step + SETS - 1) % SETS);
        }
        a.advance();
        b.advance();
        cp_async_commit();
        read = read == last_stage ? first_stage : read + STAGE_BYTES;
        write = write == last_stage ? first_stage : write + STAGE_BYTES;
        // The next tile has arrived for all threads, and nobody reads the stage that will be filled next.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    }
    if (SETS == 2) multiply(1);

    if (partial || p.flags & OUT_F32) {
        float* c = partial ? p.partials + int64_t(blockIdx.z) * p.m * p.n : static_cast<float*>(p.c);
        store_f32<MI, NI>(sums, c, partial ? p.n : p.ldc, partial ? p.n % 2 == 0 : p.flags & C_VECTOR,
                          static_cast<const float*>(p.source), p.ld_source, p.flags & SOURCE_VECTOR, out.row, out.column, p.m, p.n,
                          partial ? 1.0f : p.alpha, partial ? 0.0f : p.beta);
    } else {
        store_bf16<EARLY>(sums, out, early, p.alpha, p.beta, bias);
    }
}

/// The tile of a dense product, or of a slice of its sums, that falls to this block.
template <Form FORM, int BM, int BN, int DEPTH, int WM, int WN, int STAGES, bool EARLY = false>
__device__ __forceinline__ void product(const MatmulParams& p) {
    // Tiles are walked in bands of `raster_rows` tile rows, down each band's columns.
    const int tiles_m = (p.m + BM - 1) / BM, tiles_n = (p.n + BN - 1) / BN;
    const int band = blockIdx.x / (p.raster_rows * tiles_n), within = blockIdx.x % (p.raster_rows * tiles_n);
    const int band_rows = min(p.raster_rows, tiles_m - band * p.raster_rows);
    const int row = (band * p.raster_rows + within % band_rows) * BM, column = within / band_rows * BN;
    const int k_begin = blockIdx.z * p.k_slice, k_end = min(p.k, k_begin + p.k_slice);
    product_tile<FORM, BM, BN, DEPTH, WM, WN, STAGES, EARLY>(p, row, column, k_begin, k_end, nullptr);
}

}  // namespace tandem
