//! What the kernels share: bf16 conversions, warp and block sums, 16-byte vectors, and the sm_80 tensor-core building blocks.
#pragma once

#include <cuda_bf16.h>

// NVRTC has no <stdint.h> without a host compiler.
#ifdef __CUDACC_RTC__
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <math_constants.h>
#include <stdint.h>
#endif

using bf16 = __nv_bfloat16;
using bf162 = __nv_bfloat162;

namespace tandem {

constexpr int WARP = 32;

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ bf16 to_bf16(float x) { return __float2bfloat16_rn(x); }

/// Two bf16 in one register, low half first.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    bf162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

/// The two values of a packed register.
__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// Eight bf16 loaded or stored as one 16-byte access.
struct alignas(16) Bf16x8 {
    uint32_t pair[4];
    __device__ __forceinline__ void unpack(float out[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 v = unpack_bf16(pair[i]);
            out[2 * i] = v.x;
            out[2 * i + 1] = v.y;
        }
    }
    __device__ __forceinline__ void pack(const float in[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = pack_bf16(in[2 * i], in[2 * i + 1]);
    }
};

/// Which run of eight columns of [rows, width] this thread has; the last run of a row may be shorter, and the last threads of a grid find a row
/// that is not there.
struct Run {
    int64_t row;
    int column;
    int columns;
    __device__ __forceinline__ explicit Run(int width) {
        const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        const int runs = (width + 7) / 8;
        row = i / runs;
        column = int(i - row * runs) * 8;
        columns = min(8, width - column);
    }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

/// Sum over a block of up to 1,024 threads; every thread gets it. `shared` holds 32 floats and may be reused after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

/// Maximum over a block; as `block_sum`.
__device__ __forceinline__ float block_max(float x, float* shared) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? shared[lane] : -INFINITY);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes from global to shared memory without a register; writes zeros when `valid` is false.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes));
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::); }

/// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING));
}

/// Four 8×8 matrices of bf16 from shared memory; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

/// As `ldmatrix_x4`, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

/// c [16×8] += a [16×16] · b [16×8], bf16 operands, fp32 accumulators (m16n8k16).
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace tandem
