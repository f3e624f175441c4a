//! RMSNorm of query and key heads with the rotary embedding: CUDA form of src/ops/qk_norm.rs. A warp a head.

#include "rope.cuh"

using namespace tandem;

namespace {

constexpr int ROWS_PER_PARTIAL = 64;

/// Σ over the values of a head of f(value of a, value of b).
template <class F>
__device__ __forceinline__ float head_sum(const Head& a, const Head& b, F f) {
    float sum = 0.0f;
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
#pragma unroll
        for (int j = 0; j < 2; ++j) sum += f(a.low[run][j], b.low[run][j]) + f(a.high[run][j], b.high[run][j]);
    }
    return warp_sum(sum);
}

__device__ __forceinline__ float rstd_of(const Head& x, int half, float eps) {
    const float squares = head_sum(x, x, [](float a, float b) { return a * b; });
    return rsqrtf(squares / (2 * half) + eps);
}

/// Which head of which row this warp has, where its values lie, and its norm's weight.
struct Place {
    int64_t row;
    int head;
    __device__ __forceinline__ Place(int heads) {
        const int64_t i = int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
        row = i / heads;
        head = int(i - row * heads);
    }
};

}  // namespace

/// x [rows, (q_heads + k_heads)·2·half] → y, same shape; cos and sin [positions, half].
extern "C" __global__ void __launch_bounds__(256) qk_norm_forward(const bf16* x, bf16* y, const bf16* q_weight, const bf16* k_weight,
                                                                  const float* cos, const float* sin, const int* positions, int64_t rows,
                                                                  int q_heads, int k_heads, int half, int64_t x_stride, int64_t y_stride,
                                                                  float eps) {
    const Place place(q_heads + k_heads);
    if (place.row >= rows) return;
    Head value, weight;
    load_head(value, x + place.row * x_stride + int64_t(place.head) * 2 * half, half);
    load_head(weight, place.head < q_heads ? q_weight : k_weight, half);
    const float r = rstd_of(value, half, eps);
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            // The normalized value is rounded before it meets the weight, as Transformers does.
            value.low[run][j] = rounded(rounded(value.low[run][j] * r) * weight.low[run][j]);
            value.high[run][j] = rounded(rounded(value.high[run][j] * r) * weight.high[run][j]);
        }
    }
    const int64_t angle = int64_t(positions[place.row]) * half;
    rotate(value, cos + angle, sin + angle, half, 1.0f);
    store_head(y + place.row * y_stride + int64_t(place.head) * 2 * half, value, half);
}

/// In place: the gradient dy of y becomes that of x.
extern "C" __global__ void __launch_bounds__(256) qk_norm_backward(const bf16* x, bf16* dy, const bf16* q_weight, const bf16* k_weight,
                                                                   const float* cos, const float* sin, const int* positions,
                                                                   int64_t rows, int q_heads, int k_heads, int half, int64_t x_stride,
                                                                   int64_t dy_stride, float eps) {
    const Place place(q_heads + k_heads);
    if (place.row >= rows) return;
    bf16* at = dy + place.row * dy_stride + int64_t(place.head) * 2 * half;
    Head value, gradient, weight;
    load_head(value, x + place.row * x_stride + int64_t(place.head) * 2 * half, half);
    load_head(gradient, at, half);
    load_head(weight, place.head < q_heads ? q_weight : k_weight, half);
    const int64_t angle = int64_t(positions[place.row]) * half;
    rotate(gradient, cos + angle, sin + angle, half, -1.0f);
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            gradient.low[run][j] *= weight.low[run][j];
            gradient.high[run][j] *= weight.high[run][j];
        }
    }
    const float r = rstd_of(value, half, eps);
    const float scale = head_sum(gradient, value, [](float a, float b) { return a * b; }) * r * r * r / (2 * half);
#pragma unroll
    for (int run = 0; run < PAIR_RUNS; ++run) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            gradient.low[run][j] = r * gradient.low[run][j] - value.low[run][j] * scale;
            gradient.high[run][j] = r * gradient.high[run][j] - value.high[run][j] * scale;
        }
    }
    store_head(at, gradient, half);
}

/// Partial sums of a weight's gradient over runs of 64 rows and `heads` heads: partials [ceil(rows / 64), 2·half]. x and dy start at the first
/// of those heads. One block a run; its warps share the rows, and their sums meet in order.
extern "C" __global__ void __launch_bounds__(256) qk_norm_weight_partials(const bf16* x, const bf16* dy, const float* cos,
                                                                          const float* sin, const int* positions, float* partials,
                                                                          int64_t rows, int heads, int half, int64_t x_stride,
                                                                          int64_t dy_stride, float eps) {
    constexpr int WARPS = 8, MAX_DIM = PAIR_RUNS * 4 * WARP;
    __shared__ float shared[WARPS][MAX_DIM];
    const int warp = threadIdx.x / WARP;
    const int64_t first = int64_t(blockIdx.x) * ROWS_PER_PARTIAL, last = min(first + ROWS_PER_PARTIAL, rows);
    Head sum = {};
    for (int64_t row = first + warp; row < last; row += WARPS) {
        const int64_t angle = int64_t(positions[row]) * half;
        for (int h = 0; h < heads; ++h) {
            Head value, gradient;
            load_head(value, x + row * x_stride + int64_t(h) * 2 * half, half);
            load_head(gradient, dy + row * dy_stride + int64_t(h) * 2 * half, half);
            rotate(gradient, cos + angle, sin + angle, half, -1.0f);
            const float r = rstd_of(value, half, eps);
#pragma unroll
            for (int run = 0; run < PAIR_RUNS; ++run) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    sum.low[run][j] += gradient.low[run][j] * value.low[run][j] * r;
                    sum.high[run][j] += gradient.high[run][j] * value.high[run][j] * r;
                }
            }
        }
    }
    for_each_pair(half, [&](int run, int pair) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            shared[warp][pair + j] = sum.low[run][j];
            shared[warp][half + pair + j] = sum.high[run][j];
        }
    });
    __syncthreads();
    for (int column = threadIdx.x; column < 2 * half; column += blockDim.x) {
        float total = 0.0f;
        for (int w = 0; w < WARPS; ++w) total += shared[w][column];
        partials[int64_t(blockIdx.x) * 2 * half + column] = total;
    }
}
