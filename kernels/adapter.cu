//! Gradients of adapters: CUDA form of src/ops/adapter.rs.
//!
//! A block has TI columns of y and walks down its share of the rows, TT at a time, two tiles in flight. Yᵀ·Z stays in registers to the end; Y·B leaves
//! a partial sum for every tile and half of its columns. A second kernel adds the partial sums in their order.

#include "adapter.cuh"

using namespace tandem;

/// Layers whose outputs lie beside each other in y.
constexpr int MAX_LAYERS = 3;

/// `AdapterParams` of src/ops/adapter.rs.
struct AdapterParams {
    const bf16* y;
    const bf16* z;
    const bf16* b;
    bf16* dz;
    /// f32 [2·column blocks, rows, R].
    float* row_partials;
    /// f32 [row blocks, columns·R].
    float* column_partials;
    float* gradients[MAX_LAYERS];
    int64_t y_stride, z_stride, b_stride, dz_stride;
    /// First column of each layer, and one past the last of all; first block of each, and the number of all.
    int first_column[MAX_LAYERS + 1], first_block[MAX_LAYERS + 1];
    int rows, r, layers, rows_per_block, row_blocks;
    /// The gradient is [r, columns], not [columns, r].
    int across;
    float scale;
    int unused;
};
static_assert(sizeof(AdapterParams) == 9 * 8 + 4 * 8 + 16 * 4, "size of AdapterParams");

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP, TT = 64;

__device__ __forceinline__ int layer_of(const AdapterParams& p, int block) {
    int layer = 0;
#pragma unroll
    for (int i = 1; i < MAX_LAYERS; ++i) layer += i < p.layers && block >= p.first_block[i];
    return layer;
}

/// WITH_B: also Y·B, for dz.
template <int R, int TI, bool WITH_B>
__device__ __forceinline__ void products(const AdapterParams& p) {
    // Rows of odd multiples of 16 bytes: eight that ldmatrix reads together lie in different banks.
    constexpr int PITCH = TI + 8, Z_PITCH = R + 8, VECTORS = TI / 8, Z_VECTORS = TT * R / 8;
    constexpr int WARP_COLUMNS = TI / WARPS, MT = WARP_COLUMNS / 16, NT = R / 8;
    static_assert(MT * 16 == WARP_COLUMNS && R % 16 == 0 && WARPS == 2 * (TT / 16), "whole pieces");
    extern __shared__ __align__(16) unsigned char shared_memory[];
    bf16(*const tiles)[TT * PITCH] = reinterpret_cast<bf16(*)[TT * PITCH]>(shared_memory);
    bf16(*const zs)[TT * Z_PITCH] = reinterpret_cast<bf16(*)[TT * Z_PITCH]>(tiles + 2);
    bf16* const weights = reinterpret_cast<bf16*>(zs + 2);

    const int layer = layer_of(p, blockIdx.x);
    const int first_column = p.first_column[layer] + (blockIdx.x - p.first_block[layer]) * TI, end = p.first_column[layer + 1];
    const int first_row = blockIdx.y * p.rows_per_block, last_row = min(first_row + p.rows_per_block, p.rows);
    const int warp = threadIdx.x / WARP;

    const auto load = [&](int stage, int row) {
#pragma unroll
        for (int i = threadIdx.x; i < TT * VECTORS; i += THREADS) {
            const int t = i / VECTORS, column = i % VECTORS * 8;
            const bool there = row + t < last_row && first_column + column < end;
            const bf16* from = there ? p.y + (row + t) * p.y_stride + first_column + column : p.y;
            cp_async_16(&tiles[stage][t * PITCH + column], from, there);
        }
#pragma unroll
        for (int i = threadIdx.x; i < Z_VECTORS; i += THREADS) {
            const int t = i / (R / 8), n = i % (R / 8) * 8;
            const bool there = row + t < last_row && n < p.r;
            const bf16* from = there ? p.z + (row + t) * p.z_stride + layer * p.r + n : p.z;
            cp_async_16(&zs[stage][t * Z_PITCH + n], from, there);
        }
        cp_async_commit();
    };
    load(0, first_row);
    if constexpr (WITH_B) {
        // B of the layer transposed: [R, TI], zeros where there is none.
        for (int i = threadIdx.x; i < R * TI; i += THREADS) {
            const int n = i % R, column = first_column + i / R;
            const bool there = n < p.r && column < end;
            weights[n * PITCH + i / R] = there ? p.b[column * p.b_stride + layer * p.r + n] : bf16();
        }
    }

    float sums[MT][NT][4] = {};
    int stage = 0;
    for (int row = first_row; row < last_row; row += TT, stage ^= 1) {
        if (row + TT < last_row) {
            load(stage ^ 1, row + TT);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        add_over_rows<TT, PITCH, Z_PITCH>(sums, &tiles[stage][warp * WARP_COLUMNS], zs[stage]);
        if constexpr (WITH_B) {
            // A warp for sixteen rows and half of the columns.
            const int half = warp % 2, first = warp / 2 * 16;
            float sum[NT][4] = {};
            add_over_columns<TI / 2, PITCH>(sum, &tiles[stage][first * PITCH + half * (TI / 2)], &weights[half * (TI / 2)]);
            store_row_sums<R>(p.row_partials + (int64_t(blockIdx.x) * 2 + half) * p.rows * R, sum, row + first, last_row);
        }
        __syncthreads();
    }
    const int columns = p.first_column[p.layers];
    store_column_sums<R>(p.column_partials + int64_t(blockIdx.y) * columns * R, sums, first_column + warp * WARP_COLUMNS, end, columns,
                         p.across != 0);
}

/// Adds partial sums in their order: one thread a value of the gradients, then, with B, of dz.
template <int R>
__device__ __forceinline__ void finish(const AdapterParams& p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, columns = p.first_column[p.layers], of_columns = columns * R;
    const uint32_t r = p.r, rows = p.rows;
    if (i < of_columns) {
        const uint32_t column = p.across ? i % columns : i / R, n = p.across ? i / columns : i % R;
        if (n >= r) return;
        float sum = 0.0f;
        for (int block = 0; block < p.row_blocks; ++block) sum += p.column_partials[int64_t(block) * of_columns + i];
        int layer = 0;
        while (column >= uint32_t(p.first_column[layer + 1])) ++layer;
        const uint32_t within = column - p.first_column[layer];
        p.gradients[layer][p.across ? int64_t(n) * columns + column : int64_t(within) * r + n] += sum;
    } else if (p.b != nullptr && i - of_columns < uint32_t(p.layers) * rows * R) {
        const uint32_t at = i - of_columns, layer = at / (rows * R), within = at % (rows * R), row = within / R, n = within % R;
        if (n >= r) return;
        float sum = 0.0f;
        for (int block = 2 * p.first_block[layer]; block < 2 * p.first_block[layer + 1]; ++block)
            sum += p.row_partials[int64_t(block) * rows * R + within];
        p.dz[row * p.dz_stride + layer * r + n] = to_bf16(p.scale * sum);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_r16(AdapterParams p) { products<16, 256, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_r32(AdapterParams p) { products<32, 256, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_r48(AdapterParams p) { products<48, 256, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_r96(AdapterParams p) { products<96, 128, false>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_b_r16(AdapterParams p) { products<16, 256, true>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) adapter_b_r32(AdapterParams p) { products<32, 128, true>(p); }
extern "C" __global__ void __launch_bounds__(256) adapter_finish_r16(AdapterParams p) { finish<16>(p); }
extern "C" __global__ void __launch_bounds__(256) adapter_finish_r32(AdapterParams p) { finish<32>(p); }
extern "C" __global__ void __launch_bounds__(256) adapter_finish_r48(AdapterParams p) { finish<48>(p); }
extern "C" __global__ void __launch_bounds__(256) adapter_finish_r96(AdapterParams p) { finish<96>(p); }
