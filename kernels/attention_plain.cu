//! Packed attention the plain way: one warp a row and head, every value written once. The reference that the tiled kernels are held to on the
//! device, and the path of head sizes they do not take. CUDA form of src/ops/attention.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int MAX_PER_LANE = 8;  // head_dim up to 256

__device__ __forceinline__ void load(float (&to)[MAX_PER_LANE], const bf16* from, int d, int lane) {
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) {
        const int c = i * WARP + lane;
        to[i] = c < d ? to_float(from[c]) : 0.0f;
    }
}

__device__ __forceinline__ float dot(const float (&a)[MAX_PER_LANE], const float (&b)[MAX_PER_LANE]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) sum += a[i] * b[i];
    return warp_sum(sum);
}

__device__ __forceinline__ void store(bf16* to, const float (&from)[MAX_PER_LANE], float scale, int d, int lane) {
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i) {
        const int c = i * WARP + lane;
        if (c < d) to[c] = to_bf16(from[i] * scale);
    }
}

/// Whether `row` sees `key` by a dense mask [tokens, stride] (see attention_mask.cu); without one, by the bounds of the loop.
__device__ __forceinline__ bool sees(const uint32_t* mask, int stride, int row, int key) {
    return mask == nullptr || (mask[static_cast<int64_t>(row) * stride + key / 32] >> key % 32 & 1);
}

}  // namespace

/// bounds [2, T]: first row and one past the last row of each row's document. sinks [heads] or null: one more score of every row, with no
/// value. With a mask every row goes over all keys. Grid: (T, heads / warps a block).
extern "C" __global__ void __launch_bounds__(128) attention_plain_forward(const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
                                                                          const float* sinks, const int* bounds, const uint32_t* mask, int mask_stride,
                                                                          int tokens, int heads, int kv_heads, int d,
                                                                          float scale, int window, int64_t q_stride, int64_t k_stride,
                                                                          int64_t v_stride, int64_t o_stride) {
    const int head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = blockIdx.x;
    if (head >= heads) return;
    const int kv_at = head / (heads / kv_heads) * d;
    float query[MAX_PER_LANE], sum[MAX_PER_LANE] = {}, x[MAX_PER_LANE];
    load(query, q + row * q_stride + head * d, d, lane);
    float most = sinks ? sinks[head] : -INFINITY, total = sinks ? 1.0f : 0.0f;
    const int first = mask ? 0 : max(bounds[row], row + 1 - min(window, row + 1)), last = mask ? tokens : row + 1;
    for (int key = first; key < last; ++key) {
        if (!sees(mask, mask_stride, row, key)) continue;
        load(x, k + key * k_stride + kv_at, d, lane);
        const float score = dot(query, x) * scale;
        const float top = fmaxf(most, score);
        const float keep = __expf(most - top), p = __expf(score - top);
        load(x, v + key * v_stride + kv_at, d, lane);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) sum[i] = sum[i] * keep + p * x[i];
        total = total * keep + p;
        most = top;
    }
    store(o + row * o_stride + head * d, sum, 1.0f / total, d, lane);
    if (lane == 0) lse[int64_t(row) * heads + head] = most + __logf(total);
}

/// dq of each row and head. Grid as above.
extern "C" __global__ void __launch_bounds__(128) attention_plain_dq(const bf16* q, const bf16* k, const bf16* v, const bf16* o,
                                                                     const float* lse, const bf16* d_o, bf16* dq, bf16* dk, bf16* dv,
                                                                     const int* bounds, const uint32_t* mask, int mask_stride,
                                                                     int tokens, int heads, int kv_heads, int d,
                                                                     float scale, int window, int64_t q_stride, int64_t k_stride,
                                                                     int64_t v_stride, int64_t o_stride, int64_t do_stride,
                                                                     int64_t dqkv_stride) {
    const int head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = blockIdx.x;
    if (head >= heads) return;
    const int at = head * d, kv_at = head / (heads / kv_heads) * d;
    float query[MAX_PER_LANE], gradient[MAX_PER_LANE], x[MAX_PER_LANE], sum[MAX_PER_LANE] = {};
    load(query, q + row * q_stride + at, d, lane);
    load(gradient, d_o + row * do_stride + at, d, lane);
    load(x, o + row * o_stride + at, d, lane);
    const float delta = dot(gradient, x), log_sum = lse[int64_t(row) * heads + head];
    const int first = mask ? 0 : max(bounds[row], row + 1 - min(window, row + 1)), last = mask ? tokens : row + 1;
    for (int key = first; key < last; ++key) {
        if (!sees(mask, mask_stride, row, key)) continue;
        load(x, v + key * v_stride + kv_at, d, lane);
        const float dp = dot(gradient, x);
        load(x, k + key * k_stride + kv_at, d, lane);
        const float p = __expf(dot(query, x) * scale - log_sum);
        const float ds = p * (dp - delta);
#pragma unroll
        for (int i = 0; i < MAX_PER_LANE; ++i) sum[i] += ds * x[i];
    }
    store(dq + row * dqkv_stride + at, sum, scale, d, lane);
}

/// dk and dv of each row and key head. Grid: (T, kv_heads / warps a block).
extern "C" __global__ void __launch_bounds__(128) attention_plain_dkv(const bf16* q, const bf16* k, const bf16* v, const bf16* o,
                                                                      const float* lse, const bf16* d_o, bf16* dq, bf16* dk, bf16* dv,
                                                                      const int* bounds, const uint32_t* mask, int mask_stride,
                                                                      int tokens, int heads, int kv_heads, int d,
                                                                      float scale, int window, int64_t q_stride, int64_t k_stride,
                                                                      int64_t v_stride, int64_t o_stride, int64_t do_stride,
                                                                      int64_t dqkv_stride) {
    const int kv_head = blockIdx.y * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = blockIdx.x;
    if (kv_head >= kv_heads) return;
    const int group = heads / kv_heads, kv_at = kv_head * d;
    float key[MAX_PER_LANE], value[MAX_PER_LANE], x[MAX_PER_LANE], y[MAX_PER_LANE], sum_k[MAX_PER_LANE] = {}, sum_v[MAX_PER_LANE] = {};
    load(key, k + row * k_stride + kv_at, d, lane);
    load(value, v + row * v_stride + kv_at, d, lane);
    const int last = mask ? tokens : min(bounds[tokens + row], window > tokens ? tokens : row + window);
    for (int query = mask ? 0 : row; query < last; ++query) {
        if (!sees(mask, mask_stride, query, row)) continue;
        for (int g = 0; g < group; ++g) {
            const int head = kv_head * group + g;
            load(x, d_o + query * do_stride + head * d, d, lane);
            load(y, o + query * o_stride + head * d, d, lane);
            const float delta = dot(x, y), dp = dot(x, value);
            load(y, q + query * q_stride + head * d, d, lane);
            const float p = __expf(dot(y, key) * scale - lse[int64_t(query) * heads + head]);
            const float ds = p * (dp - delta);
#pragma unroll
            for (int i = 0; i < MAX_PER_LANE; ++i) {
                sum_v[i] += p * x[i];
                sum_k[i] += ds * y[i];
            }
        }
    }
    store(dk + row * dqkv_stride + kv_at, sum_k, scale, d, lane);
    store(dv + row * dqkv_stride + kv_at, sum_v, 1.0f, d, lane);
}

/// Adds to d_sinks [heads] what the sinks' scores get: −Σ exp(sink − lse)·D over the rows, each head's in a fixed order. Grid: heads.
extern "C" __global__ void __launch_bounds__(256) attention_plain_sinks(const bf16* o, const float* lse, const bf16* d_o, const float* sinks,
                                                                        float* d_sinks, int tokens, int heads, int d, int64_t o_stride,
                                                                        int64_t do_stride) {
    __shared__ float shared[WARP];
    const int head = blockIdx.x, lane = threadIdx.x % WARP;
    float x[MAX_PER_LANE], y[MAX_PER_LANE], sum = 0.0f;
    for (int row = threadIdx.x / WARP; row < tokens; row += blockDim.x / WARP) {
        load(x, d_o + row * do_stride + head * d, d, lane);
        load(y, o + row * o_stride + head * d, d, lane);
        const float part = __expf(sinks[head] - lse[int64_t(row) * heads + head]) * dot(x, y);
        if (lane == 0) sum += part;
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) d_sinks[head] -= sum;
}
