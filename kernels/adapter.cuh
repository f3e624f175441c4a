//! The small products of adapters on tensor cores, from tiles in shared memory that are read from global memory once.
#pragma once

#include "common.cuh"

namespace tandem {

/// Offset, for this lane, of what it names for ldmatrix over a piece of 16×16 in rows `pitch` apart. `lines_first`: the second of the four 8×8
/// matrices lies below the first, not beside it.
__device__ __forceinline__ int piece(int pitch, bool lines_first) {
    const int lane = threadIdx.x % WARP, j = lane / 8;
    const int line = (lines_first ? j % 2 : j / 2) * 8 + lane % 8, column = (lines_first ? j / 2 : j % 2) * 8;
    return line * pitch + column;
}

/// sums [MT·16, NT·8] += Yᵀ·Z: Y [ROWS, ≥MT·16] from the warp's first column on in rows of PITCH, Z [ROWS, NT·8] in rows of Z_PITCH.
template <int ROWS, int PITCH, int Z_PITCH, int MT, int NT>
__device__ __forceinline__ void add_over_rows(float (&sums)[MT][NT][4], const bf16* y, const bf16* z) {
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step) {
        uint32_t b[NT / 2][4];
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) ldmatrix_x4_trans(b[n], z + step * 16 * Z_PITCH + n * 16 + piece(Z_PITCH, true));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            uint32_t a[4];
            ldmatrix_x4_trans(a, y + step * 16 * PITCH + m * 16 + piece(PITCH, false));
#pragma unroll
            for (int n = 0; n < NT / 2; ++n) {
                mma_16816(sums[m][2 * n], a, b[n][0], b[n][1]);
                mma_16816(sums[m][2 * n + 1], a, b[n][2], b[n][3]);
            }
        }
    }
}

/// sum [16, NT·8] += Y·Wᵀ: Y [16, COLUMNS] and W [NT·8, COLUMNS], both in rows of PITCH.
template <int COLUMNS, int PITCH, int NT>
__device__ __forceinline__ void add_over_columns(float (&sum)[NT][4], const bf16* y, const bf16* w) {
#pragma unroll 4
    for (int step = 0; step < COLUMNS / 16; ++step) {
        uint32_t a[4];
        ldmatrix_x4(a, y + step * 16 + piece(PITCH, true));
#pragma unroll
        for (int n = 0; n < NT / 2; ++n) {
            uint32_t b[4];
            ldmatrix_x4(b, w + n * 16 * PITCH + step * 16 + piece(PITCH, false));
            mma_16816(sum[2 * n], a, b[0], b[1]);
            mma_16816(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/// Writes sums of 16 rows from `row` on to `to` [·, R] in f32, rows before `last` only.
template <int R>
__device__ __forceinline__ void store_row_sums(float* to, const float (&sum)[R / 8][4], int row, int last) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = row + half * 8 + lane / 4;
        if (t >= last) continue;
#pragma unroll
        for (int n = 0; n < R / 8; ++n)
            *reinterpret_cast<float2*>(to + int64_t(t) * R + n * 8 + lane % 4 * 2) = make_float2(sum[n][half * 2], sum[n][half * 2 + 1]);
    }
}

/// Writes sums of the warp's columns from `column` on, those before `last` only: as [columns, R], or [R, columns] where `across`.
template <int R, int MT>
__device__ __forceinline__ void store_column_sums(float* to, const float (&sums)[MT][R / 8][4], int column, int last, int columns, bool across) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int c = column + m * 16 + half * 8 + lane / 4;
            if (c >= last) continue;
#pragma unroll
            for (int n = 0; n < R / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int r = n * 8 + lane % 4 * 2 + i;
                    to[across ? int64_t(r) * columns + c : int64_t(c) * R + r] = sums[m][n][half * 2 + i];
                }
        }
}

}  // namespace tandem
