//! The backward attention kernels: queries first (they write lse and D by head), then keys, with several parts the sums of the keys' parts, then
//! the sinks. Grids: query tiles (their greatest number) × Hq / heads of a tile, heads fastest; (Hkv × parts, key tiles), parts fastest; T; Hq.
//! The host keeps the same sizes in `src/ops/attention/kernels.rs`.

#include "attention_backward.cuh"

using namespace tandem;

// Padded head size, query rows × heads, heads, key rows a step, a chunk, stages, warps, q and do in registers, masked.

using QueryD64 = QueryShape<64, 64, 1, 32, 32, 2, 4, false>;
extern "C" __global__ void __launch_bounds__(QueryD64::THREADS, 4) attention_backward_query_d64(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD64>(p);
}

using QueryD64H4 = QueryShape<64, 64, 4, 64, 32, 2, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD64H4::THREADS, 4) attention_backward_query_d64_h4(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD64H4>(p);
}

using QueryD96 = QueryShape<96, 64, 1, 32, 32, 3, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD96::THREADS, 2) attention_backward_query_d96(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD96>(p);
}

using QueryD96H4 = QueryShape<96, 64, 4, 32, 32, 3, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD96H4::THREADS, 2) attention_backward_query_d96_h4(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD96H4>(p);
}

using QueryD128 = QueryShape<128, 64, 1, 32, 32, 3, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD128::THREADS, 2) attention_backward_query_d128(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128>(p);
}

using QueryD128H2 = QueryShape<128, 64, 2, 32, 32, 3, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD128H2::THREADS, 2) attention_backward_query_d128_h2(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128H2>(p);
}

using QueryD128H4 = QueryShape<128, 128, 4, 32, 32, 2, 4, false>;
extern "C" __global__ void __launch_bounds__(QueryD128H4::THREADS, 1) attention_backward_query_d128_h4(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128H4>(p);
}

// For SMs with 100 KB of shared memory.

using QueryD128H4Small = QueryShape<128, 64, 4, 32, 32, 3, 4, true>;
extern "C" __global__ void __launch_bounds__(QueryD128H4Small::THREADS, 2) attention_backward_query_d128_h4_small(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128H4Small>(p);
}

// By a dense mask: any group.

using QueryD64Masked = QueryShape<64, 64, 1, 32, 32, 2, 4, false, true>;
extern "C" __global__ void __launch_bounds__(QueryD64Masked::THREADS, 4) attention_backward_query_d64_masked(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD64Masked>(p);
}

using QueryD128Masked = QueryShape<128, 128, 1, 32, 32, 2, 4, false, true>;
extern "C" __global__ void __launch_bounds__(QueryD128Masked::THREADS, 1) attention_backward_query_d128_masked(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128Masked>(p);
}

using QueryD128MaskedSmall = QueryShape<128, 64, 1, 32, 32, 3, 4, true, true>;
extern "C" __global__ void __launch_bounds__(QueryD128MaskedSmall::THREADS, 2) attention_backward_query_d128_masked_small(const __grid_constant__ BackwardParams p) {
    attention_backward_query<QueryD128MaskedSmall>(p);
}

// Padded head size, key rows, query rows a step, a chunk, stages, warps, k in registers, v in registers, masked.

using KeyD64 = KeyShape<64, 128, 32, 32, 2, 4, false, false>;
extern "C" __global__ void __launch_bounds__(KeyD64::THREADS, 2) attention_backward_key_d64(const __grid_constant__ BackwardParams p) {
    attention_backward_key<KeyD64>(p);
}

using KeyD96 = KeyShape<96, 64, 32, 32, 2, 4, true, false>;
extern "C" __global__ void __launch_bounds__(KeyD96::THREADS, 2) attention_backward_key_d96(const __grid_constant__ BackwardParams p) {
    attention_backward_key<KeyD96>(p);
}

using KeyD128 = KeyShape<128, 64, 32, 32, 2, 4, true, false>;
extern "C" __global__ void __launch_bounds__(KeyD128::THREADS, 2) attention_backward_key_d128(const __grid_constant__ BackwardParams p) {
    attention_backward_key<KeyD128>(p);
}

using KeyD64Masked = KeyShape<64, 128, 32, 32, 2, 4, false, false, true>;
extern "C" __global__ void __launch_bounds__(KeyD64Masked::THREADS, 2) attention_backward_key_d64_masked(const __grid_constant__ BackwardParams p) {
    attention_backward_key<KeyD64Masked>(p);
}

using KeyD128Masked = KeyShape<128, 64, 32, 32, 2, 4, true, false, true>;
extern "C" __global__ void __launch_bounds__(KeyD128Masked::THREADS, 2) attention_backward_key_d128_masked(const __grid_constant__ BackwardParams p) {
    attention_backward_key<KeyD128Masked>(p);
}

extern "C" __global__ void __launch_bounds__(128) attention_backward_key_finish(const __grid_constant__ BackwardParams p) {
    tandem::attention_backward_key_finish(p);
}

extern "C" __global__ void __launch_bounds__(128) attention_backward_sinks(const __grid_constant__ BackwardParams p) {
    tandem::attention_backward_sinks(p);
}
