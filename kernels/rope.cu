//! Rotary embedding in place: CUDA form of src/ops/rope.rs. A warp a head.

#include "rope.cuh"

using namespace tandem;

/// x [rows, heads·2·half] with `row_stride` values between rows; cos and sin [positions, half]. `half` is even.
extern "C" __global__ void __launch_bounds__(256) rope(bf16* x, const float* cos, const float* sin, const int* positions, int64_t rows,
                                                       int heads, int half, int64_t row_stride, float sign) {
    const int64_t i = int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int64_t row = i / heads;
    if (row >= rows) return;
    bf16* at = x + row * row_stride + (i - row * heads) * 2 * half;
    const int64_t angle = int64_t(positions[row]) * half;
    Head head;
    load_head(head, at, half);
    rotate(head, cos + angle, sin + angle, half, sign);
    store_head(at, head, half);
}
