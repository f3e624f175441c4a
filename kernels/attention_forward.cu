//! The forward attention kernels. Grid: query tiles (their greatest number) × Hq / heads of a tile, heads fastest. The host keeps
//! the same sizes in `src/ops/attention/kernels.rs`.

#include "attention_forward.cuh"

using namespace tandem;

// Padded head size, query rows × heads, heads, key rows a step, stages, warps, Q in registers, masked.

using ForwardD64 = ForwardShape<64, 64, 1, 32, 2, 4, true>;
extern "C" __global__ void __launch_bounds__(ForwardD64::THREADS, 4) attention_forward_d64(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD64>(p);
}

using ForwardD64H4 = ForwardShape<64, 128, 4, 32, 3, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD64H4::THREADS, 3) attention_forward_d64_h4(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD64H4>(p);
}

using ForwardD96 = ForwardShape<96, 128, 1, 32, 3, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD96::THREADS, 2) attention_forward_d96(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD96>(p);
}

using ForwardD96H4 = ForwardShape<96, 128, 4, 32, 3, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD96H4::THREADS, 2) attention_forward_d96_h4(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD96H4>(p);
}

using ForwardD128 = ForwardShape<128, 128, 1, 32, 2, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD128::THREADS, 2) attention_forward_d128(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128>(p);
}

using ForwardD128H2 = ForwardShape<128, 128, 2, 32, 2, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD128H2::THREADS, 2) attention_forward_d128_h2(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128H2>(p);
}

using ForwardD128H4 = ForwardShape<128, 128, 4, 32, 2, 4, false>;
extern "C" __global__ void __launch_bounds__(ForwardD128H4::THREADS, 2) attention_forward_d128_h4(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128H4>(p);
}

// For SMs with 100 KB of shared memory.

using ForwardD64H4Small = ForwardShape<64, 64, 4, 32, 2, 4, true>;
extern "C" __global__ void __launch_bounds__(ForwardD64H4Small::THREADS, 4) attention_forward_d64_h4_small(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD64H4Small>(p);
}

using ForwardD128Small = ForwardShape<128, 128, 1, 64, 2, 8, true>;
extern "C" __global__ void __launch_bounds__(ForwardD128Small::THREADS, 1) attention_forward_d128_small(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128Small>(p);
}

using ForwardD128H4Small = ForwardShape<128, 128, 4, 64, 2, 8, true>;
extern "C" __global__ void __launch_bounds__(ForwardD128H4Small::THREADS, 1) attention_forward_d128_h4_small(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128H4Small>(p);
}

// By a dense mask: any group, for large and for small SMs.

using ForwardD64Masked = ForwardShape<64, 128, 1, 32, 3, 4, false, true>;
extern "C" __global__ void __launch_bounds__(ForwardD64Masked::THREADS, 3) attention_forward_d64_masked(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD64Masked>(p);
}

using ForwardD64MaskedSmall = ForwardShape<64, 64, 1, 32, 2, 4, true, true>;
extern "C" __global__ void __launch_bounds__(ForwardD64MaskedSmall::THREADS, 4) attention_forward_d64_masked_small(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD64MaskedSmall>(p);
}

using ForwardD128Masked = ForwardShape<128, 128, 1, 32, 2, 4, false, true>;
extern "C" __global__ void __launch_bounds__(ForwardD128Masked::THREADS, 2) attention_forward_d128_masked(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128Masked>(p);
}

using ForwardD128MaskedSmall = ForwardShape<128, 128, 1, 64, 2, 8, true, true>;
extern "C" __global__ void __launch_bounds__(ForwardD128MaskedSmall::THREADS, 1) attention_forward_d128_masked_small(const __grid_constant__ ForwardParams p) {
    attention_forward<ForwardD128MaskedSmall>(p);
}
