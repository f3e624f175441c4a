//! Matrix products by group on tensor cores of every card: bf16 operands, f32 sums. CUDA form of src/ops/grouped_matmul.rs.
//!
//! A block computes one tile, as in kernels/matmul.cu. The host knows how many tiles there are at most; a block whose number no tile has ends
//! at once. Which kernel serves a shape is decided in src/ops/grouped_matmul_plan.rs.

#include "grouped.cuh"
#include "matmul.cuh"

using namespace tandem;

namespace {

/// What all groups' products have in common.
__device__ __forceinline__ MatmulParams common(const GroupedParams& g) {
    MatmulParams p = {};
    p.lda = g.lda, p.ldb = g.ldb, p.ldc = p.ld_source = g.ldc;
    p.m = g.m, p.n = g.n, p.k = g.k;
    p.flags = g.flags, p.alpha = g.alpha, p.beta = g.beta;
    return p;
}

/// `c[r] = alpha·a[r]·b[e] + bias[e] + beta·c[r]`: tiles of rows of one group.
template <Form FORM, int BM, int BN, int DEPTH, int WM, int WN, int STAGES, bool EARLY = false>
__device__ __forceinline__ void rows_of_groups(const GroupedParams& g) {
    GroupTile tile;
    if (!GroupTiles<BM, BN>(g.offsets, g.groups, g.n, g.raster_rows).find(blockIdx.x, tile)) return;
    MatmulParams p = common(g);
    p.m = tile.end - tile.begin;
    p.a = g.a + tile.begin * g.lda;
    p.b = g.b + int64_t(tile.group) * (FORM == Form::Nt ? g.n : g.k) * g.ldb;
    bf16* c = static_cast<bf16*>(g.c) + tile.begin * g.ldc;
    p.c = c, p.source = c;
    const bf16* bias = g.bias ? g.bias + int64_t(tile.group) * g.n : nullptr;
    product_tile<FORM, BM, BN, DEPTH, WM, WN, STAGES, EARLY>(p, tile.row, tile.column, 0, g.k, bias);
}

/// `c[e] += alpha·Σ a[r]ᵀ·b[r]`, f32: every group has the same tiles, and sums over its rows.
template <int BM, int BN, int DEPTH, int WM, int WN, int STAGES>
__device__ __forceinline__ void sums_over_groups(const GroupedParams& g) {
    const int tile_rows = (g.m + BM - 1) / BM, tile_columns = (g.n + BN - 1) / BN;
    const int group = blockIdx.x / (tile_rows * tile_columns), within = blockIdx.x % (tile_rows * tile_columns);
    const int begin = g.offsets[group], rows = g.offsets[group + 1] - begin;
    if (rows == 0) return;
    MatmulParams p = common(g);
    p.k = rows;
    p.a = g.a + begin * g.lda;
    p.b = g.b + begin * g.ldb;
    float* c = static_cast<float*>(g.c) + int64_t(group) * g.m * g.ldc;
    p.c = c, p.source = c;
    product_tile<Form::Tn, BM, BN, DEPTH, WM, WN, STAGES, false>(p, within % tile_rows * BM, within / tile_rows * BN, 0, rows, nullptr);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 2) grouped_nt_128x128x64(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 128, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) grouped_nn_128x128x64(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 128, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) grouped_tn_128x128x64(const __grid_constant__ GroupedParams p) { sums_over_groups<128, 128, 64, 64, 64, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 2) grouped_nt_128x128x32(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 128, 128, 32, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) grouped_nn_128x128x32(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 128, 128, 32, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) grouped_tn_128x128x32(const __grid_constant__ GroupedParams p) { sums_over_groups<128, 128, 32, 64, 64, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) grouped_nt_64x64(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 64, 64, 64, 32, 32, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_nn_64x64(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 64, 64, 64, 32, 32, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_tn_64x64(const __grid_constant__ GroupedParams p) { sums_over_groups<64, 64, 64, 32, 32, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) grouped_nt_64x64_thin(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 64, 64, 32, 32, 32, 2, true>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_nn_64x64_thin(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 64, 64, 32, 32, 32, 2, true>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) grouped_nt_64x32(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 64, 32, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_nn_64x32(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 64, 32, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_tn_64x32(const __grid_constant__ GroupedParams p) { sums_over_groups<64, 32, 64, 16, 32, 4>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) grouped_nt_64x16(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nt, 64, 16, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_nn_64x16(const __grid_constant__ GroupedParams p) { rows_of_groups<Form::Nn, 64, 16, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_tn_64x16(const __grid_constant__ GroupedParams p) { sums_over_groups<64, 16, 64, 16, 16, 6>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) grouped_tn_32x64(const __grid_constant__ GroupedParams p) { sums_over_groups<32, 64, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) grouped_tn_16x64(const __grid_constant__ GroupedParams p) { sums_over_groups<16, 64, 64, 16, 16, 6>(p); }
