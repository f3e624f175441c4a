//! RMSNorm: CUDA form of src/ops/rms_norm.rs. One warp a row up to 1,024 values, one block a row beyond. Widths and strides are multiples of 8.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int ROWS_PER_PARTIAL = 64;

/// Sum over the threads that share a row: a warp, or the whole block.
template <bool WARP_ROW>
__device__ __forceinline__ float row_sum(float x, float* shared) {
    return WARP_ROW ? warp_sum(x) : block_sum(x, shared);
}

template <bool WARP_ROW>
__device__ __forceinline__ void forward(const bf16* __restrict__ x, const bf16* __restrict__ weight, bf16* __restrict__ y,
                                        float* __restrict__ rstd, int64_t rows, int width, int64_t y_stride, float eps) {
    __shared__ float shared[WARP];
    const int lane = WARP_ROW ? threadIdx.x % WARP : threadIdx.x;
    const int lanes = WARP_ROW ? WARP : blockDim.x;
    const int64_t row = WARP_ROW ? int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP : blockIdx.x;
    if (row >= rows) return;
    const Bf16x8* in = reinterpret_cast<const Bf16x8*>(x + row * width);
    const Bf16x8* w = reinterpret_cast<const Bf16x8*>(weight);
    Bf16x8* out = reinterpret_cast<Bf16x8*>(y + row * y_stride);
    const int vectors = width / 8;
    float sum = 0.0f;
    for (int i = lane; i < vectors; i += lanes) {
        float v[8];
        in[i].unpack(v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[j] * v[j];
    }
    sum = row_sum<WARP_ROW>(sum, shared);
    const float r = rsqrtf(sum / width + eps);
    if (lane == 0) rstd[row] = r;
    for (int i = lane; i < vectors; i += lanes) {
        float v[8], g[8];
        in[i].unpack(v);
        w[i].unpack(g);
        // The normalized value is rounded before it meets the weight, as Transformers does.
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = to_float(to_bf16(v[j] * r)) * g[j];
        Bf16x8 packed;
        packed.pack(v);
        out[i] = packed;
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

extern "C" __global__ void __launch_bounds__(256) rms_norm_forward_warp(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps) {
    forward<true>(x, weight, y, rstd, rows, width, y_stride, eps);
}

extern "C" __global__ void __launch_bounds__(512) rms_norm_forward_block(const bf16* x, const bf16* weight, bf16* y, float* rstd, int64_t rows, int width,
        int64_t y_stride, float eps) {
    forward<false>(x, weight, y, rstd, rows, width, y_stride, eps);
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
