//! SwiGLU of eight values, and its gradient.
#pragma once

#include "common.cuh"

namespace tandem {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

/// h = silu(gate) · up, with silu(gate) rounded before the product, as Transformers does. Two values are rounded at once: one at a time takes a
/// conversion at an eighth of the rate.
__device__ __forceinline__ void swiglu(const float (&gate)[8], const float (&up)[8], float (&h)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float2 silu = unpack_bf16(pack_bf16(gate[j] * sigmoid(gate[j]), gate[j + 1] * sigmoid(gate[j + 1])));
        h[j] = silu.x * up[j];
        h[j + 1] = silu.y * up[j + 1];
    }
}

/// In place, from the gradient d of swiglu(gate, up): gate becomes d·up·σ·(1 + gate·(1 − σ)), up becomes d·silu(gate).
__device__ __forceinline__ void swiglu_gradient(const float (&d)[8], float (&gate)[8], float (&up)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float s = sigmoid(gate[j]), d_gate = d[j] * up[j] * s * (1.0f + gate[j] * (1.0f - s));
        up[j] = d[j] * gate[j] * s;
        gate[j] = d_gate;
    }
}

}  // namespace tandem
