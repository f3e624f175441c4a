//! SwiGLU: CUDA form of src/ops/swiglu.rs. Eight values a thread.

#include "swiglu.cuh"

using namespace tandem;

namespace {

/// Eight values from any address, zeros behind `count`.
__device__ __forceinline__ void load(float (&to)[8], const bf16* from, int count, bool vector) {
    if (vector) {
        reinterpret_cast<const Bf16x8*>(from)->unpack(to);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) to[j] = j < count ? to_float(from[j]) : 0.0f;
    }
}

__device__ __forceinline__ void store(bf16* to, const float (&from)[8], int count, bool vector) {
    if (vector) {
        Bf16x8 packed;
        packed.pack(from);
        *reinterpret_cast<Bf16x8*>(to) = packed;
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < count) to[j] = to_bf16(from[j]);
    }
}

/// Whether all runs of rows can be moved in vectors: widths and strides are multiples of 8, and so are the columns that they start at.
__device__ __forceinline__ bool vectors(int width, int64_t a_stride, int64_t b_stride) {
    return ((width | a_stride | b_stride) & 7) == 0;
}

}  // namespace

/// h = bf16(silu(gate)) · up with gate_up [rows, 2·width]: gate in the first half of the columns.
extern "C" __global__ void __launch_bounds__(256) swiglu_forward(const bf16* gate_up, bf16* h, int64_t rows, int width,
                                                                 int64_t gate_up_stride, int64_t h_stride) {
    const Run run(width);
    if (run.row >= rows) return;
    const bool vector = vectors(width, gate_up_stride, h_stride);
    const bf16* gate = gate_up + run.row * gate_up_stride + run.column;
    float e[8], g[8];
    load(e, gate, run.columns, vector);
    load(g, gate + width, run.columns, vector);
    float act[8];
    swiglu(e, g, act);
    store(h + run.row * h_stride + run.column, act, run.columns, vector);
}

/// In place: gate becomes dh·up·σ·(1 + gate·(1 − σ)), up becomes dh·silu(gate).
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(const bf16* dh, bf16* gate_up, int64_t rows, int width,
                                                                  int64_t dh_stride, int64_t gate_up_stride) {
    const Run run(width);
    if (run.row >= rows) return;
    const bool vector = vectors(width, gate_up_stride, dh_stride);
    bf16* gate = gate_up + run.row * gate_up_stride + run.column;
    float d[8], e[8], g[8];
    load(d, dh + run.row * dh_stride + run.column, run.columns, vector);
    load(e, gate, run.columns, vector);
    load(g, gate + width, run.columns, vector);
    swiglu_gradient(d, e, g);
    store(gate, e, run.columns, vector);
    store(gate + width, g, run.columns, vector);
}
