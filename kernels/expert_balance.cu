//! The auxiliary loss that balances experts: CUDA form of src/ops/expert_balance.rs.

#include "common.cuh"

using namespace tandem;

/// gradient [experts] = weight · counts, loss [1] = loss_weight · Σ probabilities · counts. One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) expert_balance(const float* probabilities, const float* counts, float* gradient, float* loss,
                                                                 int experts, float weight, float loss_weight) {
    __shared__ float sums[256];
    float sum = 0.0f;
    for (int e = threadIdx.x; e < experts; e += 256) {
        gradient[e] = weight * counts[e];
        sum = fmaf(probabilities[e], counts[e], sum);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) loss[0] = loss_weight * sums[0];
}
