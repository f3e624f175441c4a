//! Rotary embedding in place: CUDA form of src/ops/rope.rs. A warp a row and some of its heads.

#include "rope.cuh"

using namespace tandem;

/// x [rows, heads·2·half] with `row_stride` values between rows; cos and sin [positions, half].
extern "C" __global__ void __launch_bounds__(32 * ROWS_A_BLOCK) rope(bf16* x, const float* cos, const float* sin, const int* positions, int64_t rows,
                                                                     int heads, int half, int64_t row_stride, int back) {
    const HeadLanes lanes(half);
    if (lanes.row >= rows) return;
    bf16* const row = x + lanes.row * row_stride;
    PackedPairs packed[HEADS_A_LANE];
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i) packed[i] = lanes.load(row + lanes.head(i) * 2 * half, half, lanes.head(i) < heads);
    const Angles angles(lanes, cos, sin, positions[lanes.row], half);
#pragma unroll
    for (int i = 0; i < HEADS_A_LANE; ++i) {
        if (back) rotate<true>(packed[i], angles);
        else rotate<false>(packed[i], angles);
        lanes.store(row + lanes.head(i) * 2 * half, half, packed[i], lanes.head(i) < heads);
    }
}
