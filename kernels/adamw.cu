//! AdamW, global norm, clipping and clearing over all trainable tensors at once: CUDA form of src/ops/adamw.rs and src/ops/norm.rs.
//!
//! A table names the tensors, a work list cuts them into chunks of 16,384 values, one a block. The clip factor and the finite flag stay on
//! the device: `state` = {norm, clip factor, 1 when the update may happen, loss sum}.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int CHUNK = 16384;

/// One trainable tensor; the host keeps the same struct in src/ops/multi_tensor.rs.
struct Entry {
    float* param;
    bf16* working;
    float* grad;
    float* m;
    float* v;
    int64_t n;
    int64_t working_stride;  // values between rows of `working`
    int32_t working_cols;    // values a row of it has
    int32_t decays;
};
static_assert(sizeof(Entry) == 64, "the host's struct has 64 bytes");

struct Chunk {
    int32_t tensor;
    int32_t number;
};

/// Calls f(index) for each value of the block's chunk.
template <class F>
__device__ __forceinline__ void for_each(const Entry& entry, int number, F f) {
    const int64_t first = int64_t(number) * CHUNK, last = min(first + CHUNK, entry.n);
    for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) f(i);
}

}  // namespace

/// Sets every gradient to zero.
extern "C" __global__ void __launch_bounds__(512) clear_gradients(const Entry* entries, const Chunk* chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    for_each(entry, chunk.number, [&](int64_t i) { entry.grad[i] = 0.0f; });
}

/// partials[block] = Σ grad² over the block's chunk.
extern "C" __global__ void __launch_bounds__(512) sum_of_squares(const Entry* entries, const Chunk* chunks, float* partials) {
    __shared__ float shared[WARP];
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    float sum = 0.0f;
    for_each(entry, chunk.number, [&](int64_t i) { sum += entry.grad[i] * entry.grad[i]; });
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// From all partials and the loss: norm, clip factor min(1, max_norm / (norm + 1e-6)), and whether both are finite, now and in every
/// step before: a step that was queued behind one that failed must not update. One block.
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
    if (!(isfinite(norm) && isfinite(loss_sum[0]))) state[2] = 0.0f;
}

/// One AdamW update in f32; `working`, if not null, gets the new value in bf16.
extern "C" __global__ void __launch_bounds__(512) adamw(const Entry* entries, const Chunk* chunks, const float* state, float step_size,
                                                        float decay, float one_minus_beta1, float beta2, float one_minus_beta2,
                                                        float root_correction2, float eps) {
    if (state[2] == 0.0f) return;
    const float scale = state[1];
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    const float keep = entry.decays ? decay : 1.0f;
    for_each(entry, chunk.number, [&](int64_t i) {
        const float g = entry.grad[i] * scale;
        const float m = entry.m[i] + (g - entry.m[i]) * one_minus_beta1;
        const float v = entry.v[i] * beta2 + g * g * one_minus_beta2;
        const float w = entry.param[i] * keep - step_size * (m / (sqrtf(v) / root_correction2 + eps));
        entry.param[i] = w;
        entry.m[i] = m;
        entry.v[i] = v;
        if (entry.working != nullptr) {
            const int64_t row = i / entry.working_cols;
            entry.working[row * entry.working_stride + (i - row * entry.working_cols)] = to_bf16(w);
        }
    });
}
