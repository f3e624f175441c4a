//! Dropout with a counter-based mask (Philox4x32-10): CUDA form of src/ops/dropout.rs, bit for bit the same mask.

#include "common.cuh"

using namespace tandem;

namespace {

/// Four random words of counter (block, stream) under key seed; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
__device__ __forceinline__ uint4 philox(uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = uint32_t(stream), c3 = uint32_t(stream >> 32);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

}  // namespace

/// y = mask ⊙ x / (1 − p), or, with `accumulate`, y += that. `first` is the number of the first value; a thread has the four values of one block of
/// random words, as far as they are among the `n`.
extern "C" __global__ void __launch_bounds__(256) dropout(const bf16* x, bf16* y, int64_t n, uint64_t seed, uint64_t stream,
                                                          uint64_t first, uint32_t threshold, float keep, int accumulate) {
    const uint64_t block = first / 4 + uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t start = int64_t(block * 4) - int64_t(first);
    if (start >= n) return;
    const uint4 words = philox(seed, stream, block);
    const uint32_t bits[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int64_t i = start + j;
        if (i >= 0 && i < n) {
            const float value = bits[j] < threshold ? 0.0f : to_float(x[i]) * keep;
            y[i] = to_bf16(accumulate ? to_float(y[i]) + value : value);
        }
    }
}
