//! Backward of SwiGLU and of the adapters around it in one pass over memory: CUDA form of src/ops/swiglu_lora.rs.
//!
//! A block has TI columns and walks down its share of the rows, TT at a time: it makes act, the gradients of gate and up, writes the latter where
//! gate and up were, and keeps the tiles of all three in shared memory for the six small products on tensor cores. Products over rows (dA, dB) stay
//! in registers to the end; those over columns (z, dz) leave a partial sum for every tile. A second kernel adds the partial sums in their order.

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

constexpr int THREADS = 256, WARPS = THREADS / WARP, TT = 32;

template <int R, int TI>
__device__ __forceinline__ void backward(const SwigluLoraParams& p) {
    // Rows of odd multiples of 16 bytes: eight that ldmatrix reads together lie in different banks.
    constexpr int PITCH = TI + 8, Z_PITCH = R + 8;
    constexpr int VECTORS = TI / 8, PER_THREAD = TT * VECTORS / THREADS, Z_VECTORS = 3 * TT * R / 8;
    constexpr int WARP_COLUMNS = TI / WARPS, MT = WARP_COLUMNS / 16, NT = R / 8;
    static_assert(MT * 16 == WARP_COLUMNS && PER_THREAD * THREADS == TT * VECTORS && PER_THREAD % 2 == 0 && R % 16 == 0, "whole pieces");
    extern __shared__ __align__(16) unsigned char shared_memory[];
    bf16(*const tiles)[TT * PITCH] = reinterpret_cast<bf16(*)[TT * PITCH]>(shared_memory);
    bf16(*const weights)[R * PITCH] = reinterpret_cast<bf16(*)[R * PITCH]>(tiles + 3);
    bf16(*const zs)[TT * Z_PITCH] = reinterpret_cast<bf16(*)[TT * Z_PITCH]>(weights + 3);

    const int first_column = blockIdx.x * TI, first_row = blockIdx.y * p.rows_per_block;
    const int last_row = min(first_row + p.rows_per_block, p.rows);
    const int warp = threadIdx.x / WARP;

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
    for (int row = first_row; row < last_row; row += TT) {
#pragma unroll
        for (int i = threadIdx.x; i < Z_VECTORS; i += THREADS) {
            const int which = i / (TT * R / 8), t = i / (R / 8) % TT, n = i % (R / 8) * 8;
            Bf16x8 value = {};
            if (row + t < last_row && n < p.r) {
                const bf16* from = which == 0 ? p.dz_down + (row + t) * p.dz_down_stride + n
                                              : p.z + (row + t) * p.z_stride + (which - 1) * p.r + n;
                value = *reinterpret_cast<const Bf16x8*>(from);
            }
            *reinterpret_cast<Bf16x8*>(&zs[which][t * Z_PITCH + n]) = value;
        }
        // Two vectors of each at a time: more do not fit the registers.
#pragma unroll 1
        for (int k = 0; k < PER_THREAD; k += 2) {
            Bf16x8 gate[2] = {}, up[2] = {}, d_act[2] = {};
            int t[2], column[2];
            bool there[2];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const int i = threadIdx.x + (k + u) * THREADS;
                t[u] = i / VECTORS, column[u] = i % VECTORS * 8;
                there[u] = row + t[u] < last_row && first_column + column[u] < p.inner;
                if (there[u]) {
                    const bf16* from = p.gate_up + (row + t[u]) * p.gate_up_stride + first_column + column[u];
                    gate[u] = *reinterpret_cast<const Bf16x8*>(from);
                    up[u] = *reinterpret_cast<const Bf16x8*>(from + p.inner);
                    d_act[u] = *reinterpret_cast<const Bf16x8*>(p.d_act + (row + t[u]) * p.d_act_stride + first_column + column[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                float e[8], g[8], d[8], act[8];
                gate[u].unpack(e);
                up[u].unpack(g);
                d_act[u].unpack(d);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    act[j] = swiglu(e[j], g[j]);
                    swiglu_gradient(d[j], e[j], g[j]);
                }
                d_act[u].pack(act);
                gate[u].pack(e);
                up[u].pack(g);
                const int at = t[u] * PITCH + column[u];
                *reinterpret_cast<Bf16x8*>(&tiles[0][at]) = d_act[u];
                *reinterpret_cast<Bf16x8*>(&tiles[1][at]) = gate[u];
                *reinterpret_cast<Bf16x8*>(&tiles[2][at]) = up[u];
                if (there[u]) {
                    bf16* to = p.gate_up + (row + t[u]) * p.gate_up_stride + first_column + column[u];
                    *reinterpret_cast<Bf16x8*>(to) = gate[u];
                    *reinterpret_cast<Bf16x8*>(to + p.inner) = up[u];
                }
            }
        }
        __syncthreads();

        // Over the rows, each warp its own columns; then over the columns, a warp for each product and sixteen rows.
#pragma unroll
        for (int which = 0; which < 3; ++which)
            add_over_rows<TT, PITCH, Z_PITCH>(sums[which], &tiles[which][warp * WARP_COLUMNS], zs[which]);
        if (warp < 3 * TT / 16) {
            const int which = warp % 3, first = warp / 3 * 16;
            float sum[NT][4] = {};
            add_over_columns<TI, PITCH>(sum, &tiles[which][first * PITCH], weights[which]);
            float* to = p.row_partials + (int64_t(blockIdx.x) * 3 + which) * p.rows * R;
            store_row_sums<R>(to, sum, row + first, last_row);
        }
        __syncthreads();
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
