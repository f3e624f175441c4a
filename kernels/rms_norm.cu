//! RMSNorm: CUDA form of src/ops/rms_norm.rs. A few warps a row where their registers hold one, else a block a row. Widths and strides are multiples of 8.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int ROWS_PER_PARTIAL = 64;

/// Sum over the threads that share a row: a warp, or the whole block.
template <bool WARP_ROW>
__device__ __forceinline__ float row_sum(float x, float* shared) {
    return WARP_ROW ? warp_sum(x) : block_sum(x, shared);
}

/// Eight values of a row, normalized: rounded before they meet the weight, or after it alone, as Transformers does in gpt-oss. The product of two
/// bf16 is exact in f32, so one of bf16 arithmetic is the same after rounding.
__device__ __forceinline__ Bf16x8 normalized(const Bf16x8& x, const Bf16x8& weight, float r, int after_weight) {
    float v[8];
    x.unpack(v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= r;
    Bf16x8 packed;
    if (after_weight) {
        float w[8];
        weight.unpack(w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= w[j];
        packed.pack(v);
        return packed;
    }
    packed.pack(v);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const bf162 product = __hmul2_rn(reinterpret_cast<const bf162&>(packed.pair[j]), reinterpret_cast<const bf162&>(weight.pair[j]));
        packed.pair[j] = reinterpret_cast<const uint32_t&>(product);
    }
    return packed;
}

__device__ __forceinline__ float sum_of_squares(const Bf16x8& x) {
    float v[8], sum = 0.0f;
    x.unpack(v);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
    return sum;
}

/// WARPS warps a row of up to 256·VECTORS·WARPS values, all of it loaded before the first is used. Blocks of 256 threads.
template <int WARPS, int VECTORS>
__device__ __forceinline__ void forward(const bf16* __restrict__ x, const bf16* __restrict__ weight, bf16* __restrict__ y,
                                        float* __restrict__ rstd, int64_t rows, int width, int64_t y_stride, float eps,
                                        int after_weight) {
    constexpr int LANES = WARPS * WARP, ROWS = 256 / LANES;
    __shared__ float shared[ROWS][WARPS];
    const int lane = threadIdx.x % LANES, vectors = width / 8;
    const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / LANES;
    // Warps that share a row meet at a barrier, so none may leave before it.
    if (WARPS == 1 && row >= rows) return;
    const Bf16x8* in = reinterpret_cast<const Bf16x8*>(x + row * width);
    const Bf16x8* w = reinterpret_cast<const Bf16x8*>(weight);
    Bf16x8* out = reinterpret_cast<Bf16x8*>(y + row * y_stride);
    Bf16x8 value[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int i = lane + k * LANES;
        value[k] = i < vectors && row < rows ? in[i] : Bf16x8{};
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) sum += sum_of_squares(value[k]);
    sum = warp_sum(sum);
    if constexpr (WARPS > 1) {
        float* const sums = shared[threadIdx.x / LANES];
        if (lane % WARP == 0) sums[lane / WARP] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += sums[i];
    }
    if (row >= rows) return;
    const float r = rsqrtf(sum / width + eps);
    if (lane == 0) rstd[row] = r;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        // Else the compiler keeps the unpacked values, twice as large, from the sum on.
        asm volatile("" : "+r"(value[k].pair[0]), "+r"(value[k].pair[1]), "+r"(value[k].pair[2]), "+r"(value[k].pair[3]));
        const int i = lane + k * LANES;
        if (i < vectors) out[i] = normalized(value[k], w[i], r, after_weight);
    }
}

template <bool WARP_ROW>
__device__ __forceinline__ void backward(const bf16* __restrict__ dy, const bf16* __restrict__ x, const bf16* __restrict__ weight,
                                         const float* __restrict__ rstd, bf16* __restrict__ dx, int64_t rows, int width, int64_t dx_stride,
                                         int accumulate) {
    __shared__ float shared[WARP];
    const int lane = WARP_ROW ? threadIdx.x % WARP : threadIdx.x;
    const int lanes = WARP_ROW ? WARP : blockDim.x;
    const int64_t row = WARP_ROW ? int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP : blockIdx.x;
    if (row >= rows) return;
    const Bf16x8* gradient = reinterpret_cast<const Bf16x8*>(dy + row * width);
    const Bf16x8* in = reinterpret_cast<const Bf16x8*>(x + row * width);
    const Bf16x8* w = reinterpret_cast<const Bf16x8*>(weight);
    Bf16x8* out = reinterpret_cast<Bf16x8*>(dx + row * dx_stride);
    const int vectors = width / 8;
    float sum = 0.0f;
    for (int i = lane; i < vectors; i += lanes) {
        float d[8], v[8], g[8];
        gradient[i].unpack(d);
        in[i].unpack(v);
        w[i].unpack(g);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += g[j] * d[j] * v[j];
    }
    sum = row_sum<WARP_ROW>(sum, shared);
    const float r = rstd[row];
    const float scale = sum * r * r * r / width;
    for (int i = lane; i < vectors; i += lanes) {
        float d[8], v[8], g[8], before[8];
        gradient[i].unpack(d);
        in[i].unpack(v);
        w[i].unpack(g);
        if (accumulate) out[i].unpack(before);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = r * (g[j] * d[j]) - v[j] * scale;
            if (accumulate) v[j] = before[j] + to_float(to_bf16(v[j]));
        }
        Bf16x8 packed;
        packed.pack(v);
        out[i] = packed;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_1024(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps, int after_weight) {
    forward<1, 4>(x, weight, y, rstd, rows, width, y_stride, eps, after_weight);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_2048(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps, int after_weight) {
    forward<1, 8>(x, weight, y, rstd, rows, width, y_stride, eps, after_weight);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_4096(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps, int after_weight) {
    forward<2, 8>(x, weight, y, rstd, rows, width, y_stride, eps, after_weight);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_8192(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps, int after_weight) {
    forward<4, 8>(x, weight, y, rstd, rows, width, y_stride, eps, after_weight);
}

/// A block a row.
extern "C" __global__ void __launch_bounds__(512) rms_norm_forward_block(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps, int after_weight) {
    __shared__ float shared[WARP];
    const int64_t row = blockIdx.x;
    const int vectors = width / 8;
    const Bf16x8* in = reinterpret_cast<const Bf16x8*>(x + row * width);
    const Bf16x8* w = reinterpret_cast<const Bf16x8*>(weight);
    Bf16x8* out = reinterpret_cast<Bf16x8*>(y + row * y_stride);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) sum += sum_of_squares(in[i]);
    const float r = rsqrtf(block_sum(sum, shared) / width + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) out[i] = normalized(in[i], w[i], r, after_weight);
}

extern "C" __global__ void __launch_bounds__(256) rms_norm_backward_warp(const bf16* dy, const bf16* x, const bf16* weight, const float* rstd, bf16* dx, int64_t rows,
        int width, int64_t dx_stride, int accumulate) {
    backward<true>(dy, x, weight, rstd, dx, rows, width, dx_stride, accumulate);
}

extern "C" __global__ void __launch_bounds__(512) rms_norm_backward_block(const bf16* dy, const bf16* x, const bf16* weight, const float* rstd, bf16* dx, int64_t rows,
        int width, int64_t dx_stride, int accumulate) {
    backward<false>(dy, x, weight, rstd, dx, rows, width, dx_stride, accumulate);
}

/// Partial sums of the weight's gradient over runs of 64 rows: partials [ceil(rows / 64), width]. Grid: (runs, ceil(width / 256)).
extern "C" __global__ void __launch_bounds__(256) rms_norm_weight_partials(const bf16* dy, const bf16* x, const float* rstd,
                                                                           float* partials, int64_t rows, int width) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int64_t first = int64_t(blockIdx.x) * ROWS_PER_PARTIAL;
    const int64_t last = min(first + ROWS_PER_PARTIAL, rows);
    float sum = 0.0f;
    for (int64_t row = first; row < last; ++row) {
        sum += to_float(dy[row * width + column]) * to_float(x[row * width + column]) * rstd[row];
    }
    partials[int64_t(blockIdx.x) * width + column] = sum;
}
