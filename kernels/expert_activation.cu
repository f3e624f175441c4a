//! The activation between an expert's two products: CUDA form of src/ops/expert_activation.rs. Eight values a thread.

#include "swiglu.cuh"

using namespace tandem;

namespace {

/// Both values as bf16 has them; two at once, for one at a time takes a conversion at an eighth of the rate.
__device__ __forceinline__ float2 rounded(float a, float b) { return unpack_bf16(pack_bf16(a, b)); }

/// Comparisons that NaN fails, so that it passes through.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }

/// Where gate and up of eight columns of a row lie.
__device__ __forceinline__ void load(const bf16* row, int column, int width, bool interleaved, float (&gate)[8], float (&up)[8]) {
    const Bf16x8* first = reinterpret_cast<const Bf16x8*>(row + (interleaved ? 2 * column : column));
    const Bf16x8* second = interleaved ? first + 1 : reinterpret_cast<const Bf16x8*>(row + width + column);
    const Bf16x8 a = *first, b = *second;
    float low[8], high[8];
    a.unpack(low);
    b.unpack(high);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        // The first vector has gate and up of the first four columns, the second those of the others.
        gate[j] = interleaved ? (j < 4 ? low[2 * (j % 4)] : high[2 * (j % 4)]) : low[j];
        up[j] = interleaved ? (j < 4 ? low[2 * (j % 4) + 1] : high[2 * (j % 4) + 1]) : high[j];
    }
}

__device__ __forceinline__ void store(bf16* row, int column, int width, bool interleaved, const float (&gate)[8], const float (&up)[8]) {
    Bf16x8* first = reinterpret_cast<Bf16x8*>(row + (interleaved ? 2 * column : column));
    Bf16x8* second = interleaved ? first + 1 : reinterpret_cast<Bf16x8*>(row + width + column);
    float low[8], high[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        low[j] = interleaved ? (j % 2 == 0 ? gate[j / 2] : up[j / 2]) : gate[j];
        high[j] = interleaved ? (j % 2 == 0 ? gate[4 + j / 2] : up[4 + j / 2]) : up[j];
    }
    Bf16x8 a, b;
    a.pack(low);
    b.pack(high);
    *first = a;
    *second = b;
}

/// h of gate and up. A limit of 0 stands for silu. Rounded where Transformers rounds, but for h itself.
__device__ __forceinline__ void activate(const float (&gate)[8], const float (&up)[8], float alpha, float limit, float (&h)[8]) {
    if (limit == 0.0f) return swiglu(gate, up, h);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float e0 = at_most(gate[j], limit), e1 = at_most(gate[j + 1], limit);
        const float g0 = at_least(at_most(up[j], limit), -limit), g1 = at_least(at_most(up[j + 1], limit), -limit);
        const float2 steep = rounded(alpha * e0, alpha * e1);
        const float2 s = rounded(sigmoid(steep.x), sigmoid(steep.y));
        const float2 glu = rounded(e0 * s.x, e1 * s.y);
        const float2 shifted = rounded(g0 + 1.0f, g1 + 1.0f);
        h[j] = shifted.x * glu.x;
        h[j + 1] = shifted.y * glu.y;
    }
}

/// In place, from the gradient d of h: gate and up become their gradients.
__device__ __forceinline__ void gradient(const float (&d)[8], float (&gate)[8], float (&up)[8], float alpha, float limit) {
    if (limit == 0.0f) return swiglu_gradient(d, gate, up);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float e = at_most(gate[j], limit), g = at_least(at_most(up[j], limit), -limit), s = sigmoid(alpha * e);
        const float d_gate = d[j] * (g + 1.0f) * s * (1.0f + alpha * e * (1.0f - s)), d_up = d[j] * e * s;
        gate[j] = gate[j] > limit ? 0.0f : d_gate;
        up[j] = fabsf(up[j]) > limit ? 0.0f : d_up;
    }
}

/// The host keeps the same struct in src/ops/expert_activation.rs.
struct BackwardParams {
    const bf16* u;
    const int* source;
    const float* weights;
    bf16* gate_up;
    float* dweights;
    bf16* h;  // or null
    int64_t u_stride;
    int64_t gate_up_stride;
    int64_t h_stride;
    int32_t width;
    int32_t interleaved;
    float alpha;
    float limit;
};
static_assert(sizeof(BackwardParams) == 88, "the host's struct has 88 bytes");

}  // namespace

/// gate_up [rows, 2·width] → h [rows, width].
extern "C" __global__ void __launch_bounds__(256) expert_activation(const bf16* gate_up, bf16* h, int64_t rows, int width,
                                                                    int64_t gate_up_stride, int64_t h_stride, int interleaved, float alpha,
                                                                    float limit) {
    const Run run(width);
    if (run.row >= rows) return;
    float gate[8], up[8], act[8];
    load(gate_up + run.row * gate_up_stride, run.column, width, interleaved, gate, up);
    activate(gate, up, alpha, limit, act);
    Bf16x8 packed;
    packed.pack(act);
    *reinterpret_cast<Bf16x8*>(h + run.row * h_stride + run.column) = packed;
}

/// For row p of pair q = source[p]: dweights[q] = ⟨u, h⟩, gate_up becomes its gradient from weights[q]·u, and h, where wanted, weights[q] times the
/// activation. A block a row.
extern "C" __global__ void __launch_bounds__(256) expert_activation_backward(const __grid_constant__ BackwardParams p) {
    __shared__ float shared[WARP];
    const int64_t row = blockIdx.x;
    const int pair = p.source[row];
    const float weight = p.weights[pair];
    const bf16* const u = p.u + row * p.u_stride;
    bf16* const gate_up = p.gate_up + row * p.gate_up_stride;
    float dot = 0.0f;
    for (int column = threadIdx.x * 8; column < p.width; column += blockDim.x * 8) {
        float d[8], gate[8], up[8], act[8];
        reinterpret_cast<const Bf16x8*>(u + column)->unpack(d);
        load(gate_up, column, p.width, p.interleaved, gate, up);
        activate(gate, up, p.alpha, p.limit, act);
        // As it was stored in the forward pass.
        Bf16x8 packed;
        packed.pack(act);
        packed.unpack(act);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            dot += d[j] * act[j];
            d[j] *= weight;
            act[j] *= weight;
        }
        gradient(d, gate, up, p.alpha, p.limit);
        store(gate_up, column, p.width, p.interleaved, gate, up);
        if (p.h != nullptr) {
            packed.pack(act);
            *reinterpret_cast<Bf16x8*>(p.h + row * p.h_stride + column) = packed;
        }
    }
    dot = block_sum(dot, shared);
    if (threadIdx.x == 0) p.dweights[pair] = dot;
}
