//! Matrix products on tensor cores for cards without cuBLASLt: bf16 operands, f32 sums. CUDA form of src/ops/matmul.rs.
//!
//! A block computes one tile of `c`. Which kernel serves a shape, with which grid, is decided in src/ops/matmul_plan.rs.

#include "matmul.cuh"

using namespace tandem;

extern "C" __global__ void __launch_bounds__(128, 2) matmul_nt_128x128x32(const __grid_constant__ MatmulParams p) { product<Form::Nt, 128, 128, 32, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) matmul_nn_128x128x32(const __grid_constant__ MatmulParams p) { product<Form::Nn, 128, 128, 32, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) matmul_tn_128x128x32(const __grid_constant__ MatmulParams p) { product<Form::Tn, 128, 128, 32, 64, 64, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 2) matmul_nt_128x128x64(const __grid_constant__ MatmulParams p) { product<Form::Nt, 128, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) matmul_nn_128x128x64(const __grid_constant__ MatmulParams p) { product<Form::Nn, 128, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) matmul_tn_128x128x64(const __grid_constant__ MatmulParams p) { product<Form::Tn, 128, 128, 64, 64, 64, 3>(p); }

extern "C" __global__ void __launch_bounds__(256, 1) matmul_nt_256x128x64(const __grid_constant__ MatmulParams p) { product<Form::Nt, 256, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) matmul_nn_256x128x64(const __grid_constant__ MatmulParams p) { product<Form::Nn, 256, 128, 64, 64, 64, 3>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) matmul_tn_256x128x64(const __grid_constant__ MatmulParams p) { product<Form::Tn, 256, 128, 64, 64, 64, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_64x64(const __grid_constant__ MatmulParams p) { product<Form::Nt, 64, 64, 64, 32, 32, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_64x64(const __grid_constant__ MatmulParams p) { product<Form::Nn, 64, 64, 64, 32, 32, 3>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_64x64(const __grid_constant__ MatmulParams p) { product<Form::Tn, 64, 64, 64, 32, 32, 3>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_64x64_thin(const __grid_constant__ MatmulParams p) { product<Form::Nt, 64, 64, 32, 32, 32, 2, true>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_64x64_thin(const __grid_constant__ MatmulParams p) { product<Form::Nn, 64, 64, 32, 32, 32, 2, true>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_64x64_thin(const __grid_constant__ MatmulParams p) { product<Form::Tn, 64, 64, 32, 32, 32, 2, true>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_64x32(const __grid_constant__ MatmulParams p) { product<Form::Nt, 64, 32, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_64x32(const __grid_constant__ MatmulParams p) { product<Form::Nn, 64, 32, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_64x32(const __grid_constant__ MatmulParams p) { product<Form::Tn, 64, 32, 64, 16, 32, 4>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_64x16(const __grid_constant__ MatmulParams p) { product<Form::Nt, 64, 16, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_64x16(const __grid_constant__ MatmulParams p) { product<Form::Nn, 64, 16, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_64x16(const __grid_constant__ MatmulParams p) { product<Form::Tn, 64, 16, 64, 16, 16, 6>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_32x64(const __grid_constant__ MatmulParams p) { product<Form::Nt, 32, 64, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_32x64(const __grid_constant__ MatmulParams p) { product<Form::Nn, 32, 64, 64, 16, 32, 4>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_32x64(const __grid_constant__ MatmulParams p) { product<Form::Tn, 32, 64, 64, 16, 32, 4>(p); }

extern "C" __global__ void __launch_bounds__(128, 4) matmul_nt_16x64(const __grid_constant__ MatmulParams p) { product<Form::Nt, 16, 64, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_nn_16x64(const __grid_constant__ MatmulParams p) { product<Form::Nn, 16, 64, 64, 16, 16, 6>(p); }
extern "C" __global__ void __launch_bounds__(128, 4) matmul_tn_16x64(const __grid_constant__ MatmulParams p) { product<Form::Tn, 16, 64, 64, 16, 16, 6>(p); }

/// Second stage of a product that is split over k: adds the slices in order and writes `c`. Four values a thread.
extern "C" __global__ void __launch_bounds__(256) matmul_reduce(const __grid_constant__ MatmulParams p) {
    const int64_t count = int64_t(p.m) * p.n, first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
    if (first >= count) return;
    const int slices = (p.k + p.k_slice - 1) / p.k_slice;
    const bool vector = count % 4 == 0;
    float sums[4] = {};
#pragma unroll 4
    for (int slice = 0; slice < slices; ++slice) {
        const float* from = p.partials + slice * count + first;
        if (vector) {
            const float4 v = *reinterpret_cast<const float4*>(from);
            sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] += first + i < count ? from[i] : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (first + i >= count) return;
        const int64_t row = (first + i) / p.n, column = (first + i) % p.n;
        const int64_t to = row * p.ldc + column, from = row * p.ld_source + column;
        const float value = p.alpha * sums[i];
        if (p.flags & OUT_F32) {
            const float* source = static_cast<const float*>(p.source);
            static_cast<float*>(p.c)[to] = p.beta != 0.0f ? fmaf(p.beta, source[from], value) : value;
        } else {
            const bf16* source = static_cast<const bf16*>(p.source);
            static_cast<bf16*>(p.c)[to] = to_bf16(p.beta != 0.0f ? fmaf(p.beta, to_float(source[from]), value) : value);
        }
    }
}
