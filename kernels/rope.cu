//! Rotary embedding in place: CUDA form of src/ops/rope.rs.

#include "common.cuh"

using namespace tandem;

/// x [rows, heads·2·half] with `row_stride` values between rows; cos and sin [positions, half]. One thread a pair.
extern "C" __global__ void __launch_bounds__(256) rope(bf16* x, const float* cos, const float* sin, const int* positions, int64_t rows,
                                                       int heads, int half, int64_t row_stride, float sign) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= rows * heads * half) return;
    const int pair = i % half;
    const int head = i / half % heads;
    const int64_t row = i / (int64_t(half) * heads);
    const int64_t at = int64_t(positions[row]) * half + pair;
    const float c = cos[at], s = sign * sin[at];
    bf16* low = x + row * row_stride + int64_t(head) * 2 * half + pair;
    const float a = to_float(low[0]), b = to_float(low[half]);
    // Each product is rounded before the sum, as bf16 arithmetic in Transformers does.
    const auto round = [](float v) { return to_float(to_bf16(v)); };
    low[0] = to_bf16(round(a * c) - round(b * s));
    low[half] = to_bf16(round(b * c) + round(a * s));
}
