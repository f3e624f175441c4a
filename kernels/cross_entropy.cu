//! Cross-entropy of rows of logits with the gradient in place: CUDA form of src/ops/cross_entropy.rs. One block a row, and one block a
//! multiprocessor: the rows in work then fit the L2 cache of large cards, so that the second pass over a row does not read memory again.

#include "common.cuh"

using namespace tandem;

namespace {

/// Vectors that a thread loads before it uses the first.
constexpr int AHEAD = 4;

}  // namespace

/// logits [rows, stride], of which `vocab` columns count; losses [rows]. With `weight` ≠ 0 the logits become their gradient times it, and the
/// padding columns become 0.
extern "C" __global__ void __launch_bounds__(1024) cross_entropy(bf16* logits, const int* targets, float* losses, int vocab, int64_t stride,
                                                                 float weight) {
    __shared__ float shared[WARP];
    bf16* row = logits + int64_t(blockIdx.x) * stride;
    const int vectors = vocab / 8;
    // One pass keeps each thread's running maximum and sum.
    float most = -INFINITY, sum = 0.0f;
    const auto see = [&](float v) {
        if (v > most) {
            sum *= __expf(most - v);
            most = v;
        }
        sum += __expf(v - most);
    };
    for (int first = threadIdx.x; first < vectors; first += AHEAD * blockDim.x) {
        Bf16x8 packed[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * blockDim.x;
            if (i < vectors) packed[k] = reinterpret_cast<const Bf16x8*>(row)[i];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (first + k * blockDim.x >= vectors) break;
            float v[8];
            packed[k].unpack(v);
            float top = v[0];
#pragma unroll
            for (int j = 1; j < 8; ++j) top = fmaxf(top, v[j]);
            if (top > most) {
                sum *= __expf(most - top);
                most = top;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += __expf(v[j] - most);
        }
    }
    for (int i = vectors * 8 + threadIdx.x; i < vocab; i += blockDim.x) see(to_float(row[i]));
    const float max_all = block_max(most, shared);
    const float sum_all = block_sum(most == -INFINITY ? 0.0f : sum * __expf(most - max_all), shared);
    const int target = targets[blockIdx.x];
    if (threadIdx.x == 0) losses[blockIdx.x] = max_all + __logf(sum_all) - to_float(row[target]);
    if (weight == 0.0f) return;
    __syncthreads();
    const float scale = weight / sum_all;
    for (int first = threadIdx.x; first < vectors; first += AHEAD * blockDim.x) {
        Bf16x8 packed[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * blockDim.x;
            if (i < vectors) packed[k] = reinterpret_cast<const Bf16x8*>(row)[i];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int i = first + k * blockDim.x;
            if (i >= vectors) break;
            float v[8];
            packed[k].unpack(v);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                v[j] = __expf(v[j] - max_all) * scale;
                if (i * 8 + j == target) v[j] -= weight;
            }
            packed[k].pack(v);
            reinterpret_cast<Bf16x8*>(row)[i] = packed[k];
        }
    }
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
