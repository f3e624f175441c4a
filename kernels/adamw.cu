//! AdamW, global norm, clipping and clearing over all trainable tensors at once: CUDA form of src/ops/adamw.rs, src/ops/adamw8.rs and src/ops/norm.rs.
//!
//! A table names the tensors, a work list cuts them into chunks of 16,384 values, one a block. Moments are f32 or codes of 8 bits, as the table says. The clip factor and the finite flag stay on
//! the device: `state` = {norm, clip factor, 1 when the update may happen, loss sum}.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int CHUNK = 16384;
constexpr int THREADS = 512;
/// Values with an absmax of their own, where moments have 8 bits; a warp has one such block, a lane eight values that follow each other.
constexpr int BLOCK = 256;
constexpr int MAP_LEN = 256;

/// One trainable tensor; the host keeps the same struct in src/ops/multi_tensor.rs.
struct Entry {
    float* param;
    bf16* working;
    float* grad;
    void* m;  // f32, or codes where m_absmax is not null
    void* v;
    float* m_absmax;
    float* v_absmax;
    int64_t n;
    int64_t working_stride;  // values between rows of `working`
    int32_t working_cols;    // values a row of it has
    int32_t decays;
};
static_assert(sizeof(Entry) == 80, "the host's struct has 80 bytes");

struct Chunk {
    int32_t tensor;
    int32_t number;
};

/// Calls f(index) for each value of the block's chunk.
template <class F>
__device__ __forceinline__ void for_each(const Entry& entry, int number, F f) {
    const int64_t first = int64_t(number) * CHUNK, last = min(first + CHUNK, entry.n);
    for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) f(i);
}

}  // namespace

/// Sets every gradient to zero.
extern "C" __global__ void __launch_bounds__(512) clear_gradients(const Entry* entries, const Chunk* chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    for_each(entry, chunk.number, [&](int64_t i) { entry.grad[i] = 0.0f; });
}

/// partials[block] = Σ grad² over the block's chunk.
extern "C" __global__ void __launch_bounds__(512) sum_of_squares(const Entry* entries, const Chunk* chunks, float* partials) {
    __shared__ float shared[WARP];
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    float sum = 0.0f;
    for_each(entry, chunk.number, [&](int64_t i) { sum += entry.grad[i] * entry.grad[i]; });
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// From all partials and the loss: norm, clip factor min(1, max_norm / (norm + 1e-6)), and whether both are finite, now and in every
/// step before: a step that was queued behind one that failed must not update. One block.
extern "C" __global__ void __launch_bounds__(1024) clip_state(const float* partials, int n, const float* loss_sum, float max_norm,
                                                              float* state) {
    __shared__ float shared[WARP];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x != 0) return;
    const float norm = sqrtf(sum);
    state[0] = norm;
    state[1] = max_norm > 0.0f ? fminf(1.0f, max_norm / (norm + 1e-6f)) : 1.0f;
    state[3] = loss_sum[0];
    if (!(isfinite(norm) && isfinite(loss_sum[0]))) state[2] = 0.0f;
}

namespace {

/// What the formula needs, as in src/ops/adamw.rs; `decay` is 1 where there is none.
struct Constants {
    float scale, step_size, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps;
};

/// Moments in f32.
__device__ __forceinline__ void update(const Entry& entry, int number, const Constants& c) {
    float* first = static_cast<float*>(entry.m);
    float* second = static_cast<float*>(entry.v);
    for_each(entry, number, [&](int64_t i) {
        const float g = entry.grad[i] * c.scale;
        const float before = first[i];
        const float m = before + (g - before) * c.one_minus_beta1;
        const float v = second[i] * c.beta2 + g * g * c.one_minus_beta2;
        const float w = entry.param[i] * c.decay - c.step_size * (m / (sqrtf(v) / c.root_correction2 + c.eps));
        entry.param[i] = w;
        first[i] = m;
        second[i] = v;
        if (entry.working != nullptr) {
            const int64_t row = i / entry.working_cols;
            entry.working[row * entry.working_stride + (i - row * entry.working_cols)] = to_bf16(w);
        }
    });
}

/// The code whose value is nearest to x: how many of 255 ascending middles are below it. `middles` has infinity behind them.
__device__ __forceinline__ int nearest(const float* middles, float x) {
    int code = 0;
#pragma unroll
    for (int step = MAP_LEN / 2; step > 0; step /= 2) code += middles[code + step - 1] < x ? step : 0;
    return code;
}

/// x in units of its block; 0 in a block of zeros.
__device__ __forceinline__ float unit(float x, float absmax) { return absmax > 0.0f ? __fdiv_rn(x, absmax) : 0.0f; }

/// The nearest code that does not change the sign.
__device__ __forceinline__ int signed_code(const float* map, const float* middles, float x, float absmax) {
    const int code = nearest(middles, unit(x, absmax));
    if (signbit(map[code]) == signbit(x)) return code;
    return x > 0.0f ? code + 1 : code - 1;
}

/// Moments in 8 bits. `maps` has for each moment the values of its map, then its middles. No sum is fused with its product, so that every bit is
/// that of the CPU form. All threads of the block take part.
__device__ __forceinline__ void update8(const Entry& entry, int number, const Constants& c, const float* maps) {
    const float *m_map = maps, *m_middles = maps + MAP_LEN, *v_map = maps + 2 * MAP_LEN, *v_middles = maps + 3 * MAP_LEN;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint2* m_codes = static_cast<uint2*>(entry.m);
    uint2* v_codes = static_cast<uint2*>(entry.v);
    const int64_t begin = int64_t(number) * CHUNK, end = min(begin + CHUNK, entry.n);
    for (int64_t start = begin + warp * BLOCK; start < end; start += THREADS / WARP * BLOCK) {
        const int64_t block = start / BLOCK, first = start + 8 * lane;
        const int count = int(max(int64_t(0), min(int64_t(8), entry.n - first)));
        // Codes have room for whole blocks.
        uint2 m_packed = m_codes[first / 8], v_packed = v_codes[first / 8];
        const float m_before = entry.m_absmax[block], v_before = entry.v_absmax[block];
        float m[8], v[8], w[8];
        float m_largest = 0.0f, v_largest = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            m[j] = v[j] = w[j] = 0.0f;
            if (j < count) {
                const int shift = 8 * (j % 4);
                const uint32_t m_code = (j < 4 ? m_packed.x : m_packed.y) >> shift & 0xff;
                const uint32_t v_code = (j < 4 ? v_packed.x : v_packed.y) >> shift & 0xff;
                const float g = __fmul_rn(entry.grad[first + j], c.scale);
                m[j] = __fadd_rn(__fmul_rn(__fmul_rn(m_map[m_code], m_before), c.beta1), __fmul_rn(g, c.one_minus_beta1));
                v[j] = __fadd_rn(__fmul_rn(__fmul_rn(v_map[v_code], v_before), c.beta2),
                                 __fmul_rn(__fmul_rn(g, g), c.one_minus_beta2));
                const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[j]), c.root_correction2), c.eps);
                w[j] = __fsub_rn(__fmul_rn(entry.param[first + j], c.decay), __fmul_rn(c.step_size, __fdiv_rn(m[j], root)));
                entry.param[first + j] = w[j];
                m_largest = fmaxf(m_largest, fabsf(m[j]));
                v_largest = fmaxf(v_largest, fabsf(v[j]));
            }
        }
        m_largest = warp_max(m_largest);
        v_largest = warp_max(v_largest);
        m_packed = v_packed = make_uint2(0, 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j < count) {
                const uint32_t m_code = signed_code(m_map, m_middles, m[j], m_largest);
                const uint32_t v_code = nearest(v_middles, unit(v[j], v_largest));
                (j < 4 ? m_packed.x : m_packed.y) |= m_code << 8 * (j % 4);
                (j < 4 ? v_packed.x : v_packed.y) |= v_code << 8 * (j % 4);
            }
        }
        m_codes[first / 8] = m_packed;
        v_codes[first / 8] = v_packed;
        if (lane == 0) {
            entry.m_absmax[block] = m_largest;
            entry.v_absmax[block] = v_largest;
        }
        if (entry.working != nullptr && count > 0) {
            int64_t row = first / entry.working_cols;
            int column = int(first - row * entry.working_cols);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (j < count) {
                    entry.working[row * entry.working_stride + column] = to_bf16(w[j]);
                    if (++column == entry.working_cols) {
                        column = 0;
                        ++row;
                    }
                }
            }
        }
    }
}

}  // namespace

/// One AdamW update; `working`, if not null, gets the new value in bf16. `maps`: 4·256 floats, for moments in 8 bits.
extern "C" __global__ void __launch_bounds__(THREADS) adamw(const Entry* entries, const Chunk* chunks, const float* state, const float* maps,
                                                            float step_size, float decay, float beta1, float one_minus_beta1, float beta2,
                                                            float one_minus_beta2, float root_correction2, float eps) {
    __shared__ float shared[4 * MAP_LEN];
    if (state[2] == 0.0f) return;
    const Chunk chunk = chunks[blockIdx.x];
    const Entry entry = entries[chunk.tensor];
    const Constants c = {state[1], step_size, entry.decays ? decay : 1.0f, beta1, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps};
    if (entry.m_absmax == nullptr) {
        update(entry, chunk.number, c);
        return;
    }
    for (int i = threadIdx.x; i < 4 * MAP_LEN; i += THREADS) shared[i] = maps[i];
    __syncthreads();
    update8(entry, chunk.number, c, shared);
}
