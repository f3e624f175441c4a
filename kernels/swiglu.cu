//! SwiGLU: CUDA form of src/ops/swiglu.rs. Eight values a thread.

#include "common.cuh"

using namespace tandem;

namespace {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

}  // namespace

/// h = bf16(silu(gate)) · up.
extern "C" __global__ void __launch_bounds__(256) swiglu_forward(const bf16* gate, const bf16* up, bf16* h, int64_t n) {
    const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (first + 8 <= n) {
        float e[8], g[8];
        reinterpret_cast<const Bf16x8*>(gate + first)->unpack(e);
        reinterpret_cast<const Bf16x8*>(up + first)->unpack(g);
#pragma unroll
        for (int j = 0; j < 8; ++j) e[j] = to_float(to_bf16(e[j] * sigmoid(e[j]))) * g[j];
        Bf16x8 packed;
        packed.pack(e);
        *reinterpret_cast<Bf16x8*>(h + first) = packed;
    } else {
        for (int64_t i = first; i < n; ++i) {
            const float e = to_float(gate[i]);
            h[i] = to_bf16(to_float(to_bf16(e * sigmoid(e))) * to_float(up[i]));
        }
    }
}

/// In place: gate becomes dh·up·σ·(1 + gate·(1 − σ)), up becomes dh·silu(gate).
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(const bf16* dh, bf16* gate, bf16* up, int64_t n) {
    const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (first + 8 <= n) {
        float d[8], e[8], g[8];
        reinterpret_cast<const Bf16x8*>(dh + first)->unpack(d);
        reinterpret_cast<const Bf16x8*>(gate + first)->unpack(e);
        reinterpret_cast<const Bf16x8*>(up + first)->unpack(g);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float s = sigmoid(e[j]);
            const float de = d[j] * g[j] * s * (1.0f + e[j] * (1.0f - s));
            g[j] = d[j] * e[j] * s;
            e[j] = de;
        }
        Bf16x8 packed;
        packed.pack(e);
        *reinterpret_cast<Bf16x8*>(gate + first) = packed;
        packed.pack(g);
        *reinterpret_cast<Bf16x8*>(up + first) = packed;
    } else {
        for (int64_t i = first; i < n; ++i) {
            const float d = to_float(dh[i]), e = to_float(gate[i]), g = to_float(up[i]);
            const float s = sigmoid(e);
            gate[i] = to_bf16(d * g * s * (1.0f + e * (1.0f - s)));
            up[i] = to_bf16(d * e * s);
        }
    }
}
