//! SwiGLU of one value, and its gradient.
#pragma once

#include "common.cuh"

namespace tandem {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

/// silu(gate) · up, with silu(gate) rounded before the product, as Transformers does.
__device__ __forceinline__ float swiglu(float gate, float up) { return to_float(to_bf16(gate * sigmoid(gate))) * up; }

/// In place, from the gradient d of swiglu(gate, up): gate becomes d·up·σ·(1 + gate·(1 − σ)), up becomes d·silu(gate).
__device__ __forceinline__ void swiglu_gradient(float d, float& gate, float& up) {
    const float s = sigmoid(gate);
    const float d_gate = d * up * s * (1.0f + gate * (1.0f - s));
    up = d * gate * s;
    gate = d_gate;
}

}  // namespace tandem
