//! RMSNorm of query and key heads with the rotary embedding: CUDA form of src/ops/qk_norm.rs. A warp a row and some of its heads.

#include "rope.cuh"

using namespace tandem;

namespace {

constexpr int ROWS_PER_PARTIAL = 64;

/// Σ over the values of a head of a·b.
__device__ __forceinline__ float head_dot(const HeadLanes& lanes, const Pairs& a, const Pairs& b) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += a.low[j] * b.low[j] + a.high[j] * b.high[j];
    return lanes.sum(sum);
}

__device__ __forceinline__ float rstd_of(const HeadLanes& lanes, const Pairs& x, int half, float eps) {
    return rsqrtf(head_dot(lanes, x, x) / (2 * half) + eps);
}

}  // namespace

/// x [rows, (q_heads + k_heads)·2·half] → y, same shape; cos and sin [positions, half].
extern "C" __global__ void __launch_bounds__(32 * ROWS_A_BLOCK) qk_norm_forward(const bf16* x, bf16* y, const bf16* q_weight, const bf16* k_weight,
                                                                                const float* cos, const float* sin, const int* positions,
                                                                                int64_t rows, int q_heads, int k_heads, int half,
                                                                                int64_t x_stride, int64_t y_stride, float eps) {
    const HeadLanes lanes(half);
    if (lanes.row >= rows) return;
    const bf16* const from = x + lanes.row * x_stride;
    bf16* const to = y + lanes.row * y_stride;
    PackedPairs packed[HEADS_A_LANE];
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i)
        packed[i] = lanes.load(from + lanes.head(i) * 2 * half, half, lanes.head(i) < q_heads + k_heads);
    const Angles angles(lanes, cos, sin, positions[lanes.row], half);
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i) {
        const int head = lanes.head(i);
        Pairs value = packed[i].unpack();
        const PackedPairs weight = lanes.load(head < q_heads ? q_weight : k_weight, half, true);
        const float r = rstd_of(lanes, value, half, eps);
#pragma unroll
        for (int j = 0; j < 4; ++j) value.low[j] *= r, value.high[j] *= r;
        // The normalized value is rounded before it meets the weight, as Transformers does.
        PackedPairs y_pairs(value);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            y_pairs.low[j] = __hmul2_rn(y_pairs.low[j], weight.low[j]);
            y_pairs.high[j] = __hmul2_rn(y_pairs.high[j], weight.high[j]);
        }
        rotate<false>(y_pairs, angles);
        lanes.store(to + head * 2 * half, half, y_pairs, head < q_heads + k_heads);
    }
}

/// In place: the gradient dy of y becomes that of x.
extern "C" __global__ void __launch_bounds__(32 * ROWS_A_BLOCK) qk_norm_backward(const bf16* x, bf16* dy, const bf16* q_weight, const bf16* k_weight,
                                                                                 const float* cos, const float* sin, const int* positions,
                                                                                 int64_t rows, int q_heads, int k_heads, int half,
                                                                                 int64_t x_stride, int64_t dy_stride, float eps) {
    const HeadLanes lanes(half);
    if (lanes.row >= rows) return;
    const bf16* const from = x + lanes.row * x_stride;
    bf16* const to = dy + lanes.row * dy_stride;
    PackedPairs values[HEADS_A_LANE], gradients[HEADS_A_LANE];
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i) {
        const bool there = lanes.head(i) < q_heads + k_heads;
        values[i] = lanes.load(from + lanes.head(i) * 2 * half, half, there);
        gradients[i] = lanes.load(to + lanes.head(i) * 2 * half, half, there);
    }
    const Angles angles(lanes, cos, sin, positions[lanes.row], half);
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i) {
        const int head = lanes.head(i);
        const Pairs value = values[i].unpack();
        const Pairs weight = lanes.load(head < q_heads ? q_weight : k_weight, half, true).unpack();
        rotate<true>(gradients[i], angles);
        Pairs gradient = gradients[i].unpack();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            gradient.low[j] *= weight.low[j];
            gradient.high[j] *= weight.high[j];
        }
        const float r = rstd_of(lanes, value, half, eps);
        const float scale = head_dot(lanes, gradient, value) * r * r * r / (2 * half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            gradient.low[j] = r * gradient.low[j] - value.low[j] * scale;
            gradient.high[j] = r * gradient.high[j] - value.high[j] * scale;
        }
        lanes.store(to + head * 2 * half, half, PackedPairs(gradient), head < q_heads + k_heads);
    }
}

/// Partial sums of a weight's gradient over runs of 64 rows and `heads` heads: partials [ceil(rows / 64), 2·half]. x and dy start at the first
/// of those heads. One block a run; its warps share the rows, and the sums of lanes and warps meet in order.
extern "C" __global__ void __launch_bounds__(256) qk_norm_weight_partials(const bf16* x, const bf16* dy, const float* cos,
                                                                          const float* sin, const int* positions, float* partials,
                                                                          int64_t rows, int heads, int half, int64_t x_stride,
                                                                          int64_t dy_stride, float eps) {
    constexpr int WARPS = 8, MAX_DIM = 256;
    __shared__ float shared[WARPS][MAX_DIM];
    const HeadLanes lanes(half);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t first = int64_t(blockIdx.x) * ROWS_PER_PARTIAL, last = min(first + ROWS_PER_PARTIAL, rows);
    Pairs sum = {};
    for (int64_t row = first + warp; row < last; row += WARPS) {
        const Angles angles(lanes, cos, sin, positions[row], half);
        // Every lane comes to every sum: heads past the last are zeros.
        for (int at = 0; at < heads; at += lanes.slots) {
            const int head = at + lane / lanes.group;
            const Pairs value = lanes.load(x + row * x_stride + head * 2 * half, half, head < heads).unpack();
            PackedPairs packed = lanes.load(dy + row * dy_stride + head * 2 * half, half, head < heads);
            rotate<true>(packed, angles);
            const Pairs gradient = packed.unpack();
            const float r = rstd_of(lanes, value, half, eps);
            // With an eps of zero `r` of a head that is not there is infinite.
            if (head >= heads) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum.low[j] += gradient.low[j] * value.low[j] * r;
                sum.high[j] += gradient.high[j] * value.high[j] * r;
            }
        }
    }
    for (int offset = WARP / 2; offset >= lanes.group; offset /= 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum.low[j] += __shfl_xor_sync(0xffffffffu, sum.low[j], offset);
            sum.high[j] += __shfl_xor_sync(0xffffffffu, sum.high[j], offset);
        }
    }
    if (lane < lanes.group && lanes.active) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            shared[warp][lanes.pair + j] = sum.low[j];
            shared[warp][half + lanes.pair + j] = sum.high[j];
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < 2 * half; column += blockDim.x) {
        float total = 0.0f;
        for (int w = 0; w < WARPS; ++w) total += shared[w][column];
        partials[int64_t(blockIdx.x) * 2 * half + column] = total;
    }
}
