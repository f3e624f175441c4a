//! Biases of the router and of experts: CUDA form of src/ops/expert_bias.rs.

#include "common.cuh"

using namespace tandem;

/// logits f32 [count / width, width] += bias [width].
extern "C" __global__ void __launch_bounds__(256) expert_bias_add(const bf16* bias, float* logits, int64_t count, int width) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) logits[i] += to_float(bias[i % width]);
}

/// dbias f32 [experts, width] += Σ weight · dy over the rows of each expert, in order; without weights they are 1. Grid: (ceil(width / 256), experts).
extern "C" __global__ void __launch_bounds__(256) expert_bias_gradient(const bf16* dy, const int* offsets, const int* source,
                                                                       const float* weights, float* dbias, int width, int64_t stride) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int first = offsets[blockIdx.y], last = offsets[blockIdx.y + 1];
    float sum = 0.0f;
#pragma unroll 4
    for (int row = first; row < last; ++row) {
        const float weight = weights ? weights[source[row]] : 1.0f;
        sum = fmaf(weight, to_float(dy[row * stride + column]), sum);
    }
    dbias[int64_t(blockIdx.y) * width + column] += sum;
}
