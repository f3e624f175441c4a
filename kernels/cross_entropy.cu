//! Cross-entropy of rows of logits with the gradient in place: CUDA form of src/ops/cross_entropy.rs. One block a row. What shared memory holds of
//! the row is read from memory once; the rest is the first of the second pass, so that it is still in the L2 cache.

#include "common.cuh"

using namespace tandem;

namespace {

/// Vectors that a thread loads before it uses the first.
constexpr int AHEAD = 4;

/// Below every bf16, so that the first maximum of a thread needs no case of its own.
constexpr float LOWEST = -3.402823466e38f;

/// Σ exp(v − most) of what a thread has seen.
struct Running {
    float most = LOWEST, sum = 0.0f;
    template <int N>
    __device__ __forceinline__ void see(const float (&v)[N]) {
        float top = v[0];
#pragma unroll
        for (int j = 1; j < N; ++j) top = fmaxf(top, v[j]);
        if (top > most) {
            sum *= __expf(most - top);
            most = top;
        }
#pragma unroll
        for (int j = 0; j < N; ++j) sum += __expf(v[j] - most);
    }
};

/// Calls f(i, vector i) for i = first + threadIdx.x … last, blockDim.x apart.
template <class F>
__device__ __forceinline__ void for_each_vector(const Bf16x8* from, int first, int last, F f) {
    for (int at = first + threadIdx.x; at < last; at += AHEAD * blockDim.x) {
        Bf16x8 loaded[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = at + k * blockDim.x;
            if (i < last) loaded[k] = from[i];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = at + k * blockDim.x;
            if (i < last) f(i, loaded[k]);
        }
    }
}

}  // namespace

/// logits [rows, stride], of which `vocab` columns count; losses [rows]. With `weight` ≠ 0 the logits become their gradient times it, and the
/// padding columns become 0. The first `kept` vectors of eight columns stay in dynamic shared memory.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy(bf16* logits, const int* targets, float* losses, int vocab, int64_t stride,
                                                                 float weight, int kept) {
    __shared__ float shared[WARP];
    extern __shared__ Bf16x8 row_start[];
    bf16* row = logits + int64_t(blockIdx.x) * stride;
    Bf16x8* const in = reinterpret_cast<Bf16x8*>(row);
    const int vectors = vocab / 8, target = targets[blockIdx.x];
    // Read by every thread before the first barrier: behind it lies the gradient.
    const float target_logit = to_float(row[target]);
    Running running;
    for_each_vector(in, 0, vectors, [&](int i, const Bf16x8& packed) {
        if (i < kept) row_start[i] = packed;
        float v[8];
        packed.unpack(v);
        running.see(v);
    });
    for (int i = vectors * 8 + threadIdx.x; i < vocab; i += blockDim.x) {
        const float v[1] = {to_float(row[i])};
        running.see(v);
    }
    const float max_all = block_max(running.most, shared);
    const float sum_all = block_sum(running.sum * __expf(running.most - max_all), shared);
    if (threadIdx.x == 0) losses[blockIdx.x] = max_all + __logf(sum_all) - target_logit;
    if (weight == 0.0f) return;
    const float scale = weight / sum_all;
    const auto write = [&](int i, const Bf16x8& packed) {
        float v[8];
        packed.unpack(v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __expf(v[j] - max_all) * scale;
        if (i == target / 8) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] -= j == target % 8 ? weight : 0.0f;
        }
        Bf16x8 gradient;
        gradient.pack(v);
        in[i] = gradient;
    };
    for_each_vector(in, kept, vectors, write);
    // Each thread finds here what it has put there itself.
    for (int i = threadIdx.x; i < kept; i += blockDim.x) write(i, row_start[i]);
    for (int i = vectors * 8 + threadIdx.x; i < stride; i += blockDim.x) {
        float v = i < vocab ? __expf(to_float(row[i]) - max_all) * scale : 0.0f;
        if (i == target) v -= weight;
        row[i] = to_bf16(v);
    }
}

/// out[0] += Σ losses [n], by one block in a fixed order.
extern "C" __global__ void __launch_bounds__(1024) add_sum(const float* losses, float* out, int n) {
    __shared__ float shared[WARP];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) out[0] += sum;
}
