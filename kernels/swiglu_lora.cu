//! Backward of SwiGLU and of the adapters around it in one pass over memory: CUDA form of src/ops/swiglu_lora.rs.
//!
//! A block has TI columns and walks down its share of the rows, TT at a time, the next tile on its way while it works on one: it makes act and the
//! gradients of gate and up in the tile's place, writes the latter where gate and up were, and takes the six small products on tensor cores.
//! Products over rows (dA, dB) stay in registers to the end; those over columns (z, dz) leave a partial sum for every tile. A second kernel adds the
//! partial sums in their order.

#include "adapter.cuh"
#include "swiglu.cuh"

using namespace tandem;

/// `SwigluLoraParams` of src/ops/swiglu_lora.rs.
struct SwigluLoraParams {
    bf16* gate_up;
    const bf16* d_act;
    const bf16* dz_down;
    const bf16* z;
    const bf16* a_down;
    const bf16* b;
    /// f32 [column blocks, 3, rows, R]: z of the down projection, dz of gate, dz of up.
    float* row_partials;
    /// f32 [row blocks, 3, inner·R]: dA of the down projection [R, inner], dB of gate [inner, R], dB of up [inner, R].
    float* column_partials;
    bf16* z_down;
    bf16* dz;
    float* da_down;
    float* db_gate;
    float* db_up;
    int64_t gate_up_stride, d_act_stride, dz_down_stride, z_stride, a_stride, b_stride, z_down_stride, dz_stride;
    int rows, inner;
    uint32_t r;
    int rows_per_block, column_blocks, row_blocks;
    float scale_down, scale_gate_up;
};
static_assert(sizeof(SwigluLoraParams) == 13 * 8 + 8 * 8 + 8 * 4, "size of SwigluLoraParams");

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP, TT = 16;

template <int R, int TI>
__device__ __forceinline__ void backward(const SwigluLoraParams& p) {
    // Rows of odd multiples of 16 bytes: eight that ldmatrix reads together lie in different banks.
    constexpr int PITCH = TI + 8, Z_PITCH = R + 8;
    constexpr int VECTORS = TI / 8, Z_VECTORS = 3 * TT * R / 8;
    constexpr int WARP_COLUMNS = TI / WARPS, MT = WARP_COLUMNS / 16, NT = R / 8;
    static_assert(MT * 16 == WARP_COLUMNS && TT * VECTORS % THREADS == 0 && TT == 16 && R % 16 == 0, "whole pieces");
    extern __shared__ __align__(16) unsigned char shared_memory[];
    // d_act, gate, up; then act and the gradients of gate and up.
    bf16(*const tiles)[3][TT * PITCH] = reinterpret_cast<bf16(*)[3][TT * PITCH]>(shared_memory);
    bf16(*const zs)[3][TT * Z_PITCH] = reinterpret_cast<bf16(*)[3][TT * Z_PITCH]>(tiles + 2);
    bf16(*const weights)[R * PITCH] = reinterpret_cast<bf16(*)[R * PITCH]>(zs + 2);

    const int first_column = blockIdx.x * TI, first_row = blockIdx.y * p.rows_per_block;
    const int last_row = min(first_row + p.rows_per_block, p.rows);
    const int warp = threadIdx.x / WARP;

    const auto load = [&](int stage, int row) {
#pragma unroll
        for (int i = threadIdx.x; i < TT * VECTORS; i += THREADS) {
            const int t = i / VECTORS, column = i % VECTORS * 8, at = t * PITCH + column;
            const bool there = row + t < last_row && first_column + column < p.inner;
            const bf16* gate = there ? p.gate_up + (row + t) * p.gate_up_stride + first_column + column : p.gate_up;
            const bf16* d_act = there ? p.d_act + (row + t) * p.d_act_stride + first_column + column : p.d_act;
            cp_async_16(&tiles[stage][0][at], d_act, there);
            cp_async_16(&tiles[stage][1][at], gate, there);
            cp_async_16(&tiles[stage][2][at], there ? gate + p.inner : gate, there);
        }
        for (int i = threadIdx.x; i < Z_VECTORS; i += THREADS) {
            const int which = i / (TT * R / 8), t = i / (R / 8) % TT, n = i % (R / 8) * 8;
            const bool there = row + t < last_row && n < p.r;
            const bf16* from = which == 0 ? p.dz_down + (row + t) * p.dz_down_stride + n
                                          : p.z + (row + t) * p.z_stride + (which - 1) * p.r + n;
            cp_async_16(&zs[stage][which][t * Z_PITCH + n], there ? from : p.z, there);
        }
        cp_async_commit();
    };
    load(0, first_row);
    // A of the down projection, and B of gate and up transposed: [R, TI] each, zeros where there is none.
    for (int i = threadIdx.x; i < R * TI; i += THREADS) {
        const int n = i / TI, column = i % TI;
        const bool there = n < p.r && first_column + column < p.inner;
        weights[0][n * PITCH + column] = there ? p.a_down[n * p.a_stride + first_column + column] : bf16();
    }
    for (int i = threadIdx.x; i < 2 * R * TI; i += THREADS) {
        const int n = i % R, column = i / R % TI, which = i / (R * TI);
        const bool there = n < p.r && first_column + column < p.inner;
        const int64_t at = (int64_t(which) * p.inner + first_column + column) * p.b_stride + which * p.r + n;
        weights[1 + which][n * PITCH + column] = there ? p.b[at] : bf16();
    }

    float sums[3][MT][NT][4] = {};
    int stage = 0;
    for (int row = first_row; row < last_row; row += TT, stage ^= 1) {
        cp_async_wait<0>();
        // The tile is here, and every warp is done with the one before it.
        __syncthreads();
        if (row + TT < last_row) load(stage ^ 1, row + TT);
        auto& tile = tiles[stage];
#pragma unroll
        for (int i = threadIdx.x; i < TT * VECTORS; i += THREADS) {
            const int t = i / VECTORS, column = i % VECTORS * 8, at = t * PITCH + column;
            Bf16x8 packed[3];
            float e[8], g[8], d[8], act[8];
#pragma unroll
            for (int which = 0; which < 3; ++which) packed[which] = *reinterpret_cast<const Bf16x8*>(&tile[which][at]);
            packed[0].unpack(d);
            packed[1].unpack(e);
            packed[2].unpack(g);
            swiglu(e, g, act);
            swiglu_gradient(d, e, g);
            packed[0].pack(act);
            packed[1].pack(e);
            packed[2].pack(g);
#pragma unroll
            for (int which = 0; which < 3; ++which) *reinterpret_cast<Bf16x8*>(&tile[which][at]) = packed[which];
            if (row + t < last_row && first_column + column < p.inner) {
                bf16* to = p.gate_up + (row + t) * p.gate_up_stride + first_column + column;
                *reinterpret_cast<Bf16x8*>(to) = packed[1];
                *reinterpret_cast<Bf16x8*>(to + p.inner) = packed[2];
            }
        }
        __syncthreads();
        // Over the rows, each warp its own columns; then over the columns, a warp for each product.
#pragma unroll
        for (int which = 0; which < 3; ++which)
            add_over_rows<TT, PITCH, Z_PITCH>(sums[which], &tile[which][warp * WARP_COLUMNS], zs[stage][which]);
        if (warp < 3) {
            float sum[NT][4] = {};
            add_over_columns<TI, PITCH>(sum, tile[warp], weights[warp]);
            store_row_sums<R>(p.row_partials + (int64_t(blockIdx.x) * 3 + warp) * p.rows * R, sum, row, last_row);
        }
    }

#pragma unroll
    for (int which = 0; which < 3; ++which) {
        float* to = p.column_partials + (int64_t(blockIdx.y) * 3 + which) * p.inner * R;
        store_column_sums<R>(to, sums[which], first_column + warp * WARP_COLUMNS, p.inner, p.inner, which == 0);
    }
}

/// Adds partial sums in their order: one thread a value of z and dz, then of dA and dB.
template <int R>
__device__ __forceinline__ void finish(const SwigluLoraParams& p) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, of_rows = p.rows * 3 * R, of_columns = 3 * p.inner * R;
    if (i < of_rows) {
        const uint32_t which = i / (p.rows * R), row = i / R % p.rows, n = i % R;
        if (n >= p.r) return;
        float sum = 0.0f;
        for (int block = 0; block < p.column_blocks; ++block) sum += p.row_partials[int64_t(block) * of_rows + i];
        if (which == 0) p.z_down[row * p.z_down_stride + n] = to_bf16(p.scale_down * sum);
        else p.dz[row * p.dz_stride + (which - 1) * p.r + n] = to_bf16(p.scale_gate_up * sum);
    } else if (i - of_rows < of_columns) {
        const uint32_t at = i - of_rows, inner = p.inner, which = at / (inner * R), within = at % (inner * R);
        const uint32_t column = which == 0 ? within % inner : within / R, n = which == 0 ? within / inner : within % R;
        if (n >= p.r) return;
        float sum = 0.0f;
        for (int block = 0; block < p.row_blocks; ++block) sum += p.column_partials[int64_t(block) * of_columns + at];
        if (which == 0) p.da_down[int64_t(n) * inner + column] += sum;
        else (which == 1 ? p.db_gate : p.db_up)[int64_t(column) * p.r + n] += sum;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 2) swiglu_lora_r16(SwigluLoraParams p) { backward<16, 256>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) swiglu_lora_r32(SwigluLoraParams p) { backward<32, 128>(p); }
extern "C" __global__ void __launch_bounds__(256) swiglu_lora_finish_r16(SwigluLoraParams p) { finish<16>(p); }
extern "C" __global__ void __launch_bounds__(256) swiglu_lora_finish_r32(SwigluLoraParams p) { finish<32>(p); }
