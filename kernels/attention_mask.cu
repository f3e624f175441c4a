//! The dense mask of the masked attention kernels. CUDA form of src/ops/attention/mask.rs.

#include "common.cuh"

using namespace tandem;

/// The lowest `n` bits, 0 ≤ n ≤ 32.
__device__ __forceinline__ uint32_t low_bits(int n) { return n == 32 ? 0xffffffffu : (1u << n) - 1; }

/// mask [T, stride] u32: bit k % 32 of word k / 32 of row q says whether q sees key k: first_key[q] ≤ k ≤ q. `stride` is a multiple
/// of 4: each thread writes 16 bytes. Grid: T·stride / 4 threads.
extern "C" __global__ void __launch_bounds__(256) attention_mask(const int* first_key, uint4* mask, int tokens, int stride) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int units = stride / 4, row = static_cast<int>(at / units), key = static_cast<int>(at % units) * 128;
    if (row >= tokens) return;
    const int first = first_key[row];
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int base = key + i * 32;
        words[i] = low_bits(min(max(row + 1 - base, 0), 32)) & ~low_bits(min(max(first - base, 0), 32));
    }
    mask[at] = make_uint4(words[0], words[1], words[2], words[3]);
}
