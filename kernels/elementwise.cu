//! Element by element: CUDA form of src/ops/elementwise.rs.

#include "common.cuh"

using namespace tandem;

namespace {

/// Whether eight values at this address can be moved at once.
__device__ __forceinline__ bool aligned(const void* p) { return (reinterpret_cast<uint64_t>(p) & 15) == 0; }

}  // namespace

/// x [rows, width] += y.
extern "C" __global__ void __launch_bounds__(256) add_assign(bf16* x, const bf16* y, int64_t rows, int width, int64_t x_stride,
                                                             int64_t y_stride) {
    const Run run(width);
    if (run.row >= rows) return;
    bf16* to = x + run.row * x_stride + run.column;
    const bf16* from = y + run.row * y_stride + run.column;
    if (run.columns == 8 && aligned(to) && aligned(from)) {
        float a[8], b[8];
        reinterpret_cast<const Bf16x8*>(to)->unpack(a);
        reinterpret_cast<const Bf16x8*>(from)->unpack(b);
#pragma unroll
        for (int j = 0; j < 8; ++j) a[j] += b[j];
        Bf16x8 packed;
        packed.pack(a);
        *reinterpret_cast<Bf16x8*>(to) = packed;
    } else {
        for (int j = 0; j < run.columns; ++j) to[j] = to_bf16(to_float(to[j]) + to_float(from[j]));
    }
}

/// y [rows, width] = x.
extern "C" __global__ void __launch_bounds__(256) copy_block(const bf16* x, bf16* y, int64_t rows, int width, int64_t x_stride,
                                                             int64_t y_stride) {
    const Run run(width);
    if (run.row >= rows) return;
    bf16* to = y + run.row * y_stride + run.column;
    const bf16* from = x + run.row * x_stride + run.column;
    if (run.columns == 8 && aligned(to) && aligned(from)) {
        *reinterpret_cast<Bf16x8*>(to) = *reinterpret_cast<const Bf16x8*>(from);
    } else {
        for (int j = 0; j < run.columns; ++j) to[j] = from[j];
    }
}

/// Every row of y [rows, width] becomes bias [width].
extern "C" __global__ void __launch_bounds__(256) broadcast_rows(const bf16* bias, bf16* y, int64_t rows, int width, int64_t stride) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < rows * width) y[i / width * stride + i % width] = bias[i % width];
}

/// Sums over runs of 64 rows: partials [ceil(rows / 64), width]. Grid: (runs, ceil(width / 256)).
extern "C" __global__ void __launch_bounds__(256) sum_rows_partials(const bf16* dy, float* partials, int64_t rows, int width,
                                                                    int64_t stride) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const int64_t first = int64_t(blockIdx.x) * 64, last = min(first + 64, rows);
    float sum = 0.0f;
    for (int64_t row = first; row < last; ++row) sum += to_float(dy[row * stride + column]);
    partials[int64_t(blockIdx.x) * width + column] = sum;
}

/// out [width] += Σ over the rows of partials [count, width], in order.
extern "C" __global__ void __launch_bounds__(256) add_partials(const float* partials, float* out, int count, int width) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) sum += partials[int64_t(i) * width + column];
    out[column] += sum;
}

/// y [count, width] = x[rows[r], :]. One block a row.
extern "C" __global__ void __launch_bounds__(256) gather_rows(const bf16* x, const int* rows, bf16* y, int width) {
    const bf16* from = x + int64_t(rows[blockIdx.x]) * width;
    bf16* to = y + int64_t(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
        reinterpret_cast<Bf16x8*>(to)[i] = reinterpret_cast<const Bf16x8*>(from)[i];
    }
    for (int i = width / 8 * 8 + threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

/// x[rows[r], ..width] = y [count, width]. One block a row; the rest of x stays.
extern "C" __global__ void __launch_bounds__(256) scatter_rows(const bf16* y, const int* rows, bf16* x, int width, int64_t stride) {
    const bf16* from = y + int64_t(blockIdx.x) * width;
    bf16* to = x + int64_t(rows[blockIdx.x]) * stride;
    for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
        reinterpret_cast<Bf16x8*>(to)[i] = reinterpret_cast<const Bf16x8*>(from)[i];
    }
    for (int i = width / 8 * 8 + threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

/// table[ids[t]] += dx[t] in f32, for t in order: each thread owns a column, so no two threads meet and the order is fixed.
extern "C" __global__ void __launch_bounds__(64) embedding_backward(const bf16* dx, const int* ids, float* table, int tokens, int width,
                                                                    int64_t stride) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    for (int t = 0; t < tokens; ++t) table[int64_t(ids[t]) * width + column] += to_float(dx[int64_t(t) * stride + column]);
}
