//! AdamW, global norm and clipping: CUDA form of src/ops/adamw.rs and src/ops/norm.rs.
//!
//! The clip factor and the finite flag stay on the device: `state` = {norm, clip factor, 1 when the update may happen, loss sum}.

#include "common.cuh"

using namespace tandem;

/// partials[block] = Σ x² over the block's run of 65,536 values.
extern "C" __global__ void __launch_bounds__(1024) sum_of_squares_partials(const float* x, float* partials, int64_t n) {
    __shared__ float shared[WARP];
    const int64_t first = int64_t(blockIdx.x) * 65536, last = min(first + 65536, n);
    float sum = 0.0f;
    for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) sum += x[i] * x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// From all partials and the loss: norm, clip factor min(1, max_norm / (norm + 1e-6)), and whether both are finite. One block.
extern "C" __global__ void __launch_bounds__(1024) clip_state(const float* partials, int n, const float* loss_sum, float max_norm,
                                                              float* state) {
    __shared__ float shared[WARP];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x != 0) return;
    const float norm = sqrtf(sum);
    state[0] = norm;
    state[1] = max_norm > 0.0f ? fminf(1.0f, max_norm / (norm + 1e-6f)) : 1.0f;
    state[3] = loss_sum[0];
    state[2] = isfinite(norm) && isfinite(loss_sum[0]) ? 1.0f : 0.0f;
}

/// One AdamW update in f32; `working`, if not null, gets the new value in bf16.
extern "C" __global__ void __launch_bounds__(256) adamw(float* param, bf16* working, const float* grad, float* m, float* v, const float* state,
                                                        int64_t n, float step_size, float decay, float one_minus_beta1, float beta2,
                                                        float one_minus_beta2, float root_correction2, float eps) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n || state[2] == 0.0f) return;
    const float g = grad[i] * state[1];
    float w = param[i] * decay;
    const float m1 = m[i] + (g - m[i]) * one_minus_beta1;
    const float v1 = v[i] * beta2 + g * g * one_minus_beta2;
    w -= step_size * (m1 / (sqrtf(v1) / root_correction2 + eps));
    param[i] = w;
    m[i] = m1;
    v[i] = v1;
    if (working != nullptr) working[i] = to_bf16(w);
}
