//! Matrices made of weights in MXFP4: CUDA form of src/ops/mxfp4.rs. It reads half a byte and writes two for each value, so it is as fast as memory is;
//! eight values of a thread are one load of four bytes and one store of sixteen.

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int THREADS = 256;
/// Runs of eight values that a thread makes, all of them loaded first.
constexpr int RUNS = 4;

/// Two values of bf16 from the four codes `codes` holds in its low 16 bits: those of the first two in `first`, of the others in `second`.
/// A byte permutation with a code for each of its four selectors is a look-up in a table of eight bytes.
__device__ __forceinline__ void values_of(uint32_t codes, uint32_t& first, uint32_t& second) {
    const uint32_t magnitudes = codes & 0x7777u;
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6 are 0000, 3f00, 3f80, 3fc0, 4000, 4040, 4080, 40c0.
    const uint32_t low = __byte_perm(0xc0800000u, 0xc0804000u, magnitudes);
    const uint32_t high = __byte_perm(0x3f3f3f00u, 0x40404040u, magnitudes);
    first = __byte_perm(low, high, 0x5140) | (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u);
    second = __byte_perm(low, high, 0x7362) | (codes << 4 & 0x8000u) | (codes << 16 & 0x80000000u);
}

/// Products in bf16: exact wherever bf16 has the value, denormal ones included; beyond its ends and for zero times infinity as in f32.
__device__ __forceinline__ uint32_t times(uint32_t pair, bf162 scale) {
    const bf162 product = __hmul2(*reinterpret_cast<const bf162*>(&pair), scale);
    return *reinterpret_cast<const uint32_t*>(&product);
}

/// 2^(scale − 127) twice: a denormal number for 0, infinity for 255.
__device__ __forceinline__ bf162 scale_of(uint32_t scale) {
    const uint32_t bits = scale == 0 ? 0x40u : scale << 7, pair = bits << 16 | bits;
    return *reinterpret_cast<const bf162*>(&pair);
}

}  // namespace

/// out [runs, 8] of blocks [runs] (eight codes each) and a scale for each four runs.
extern "C" __global__ void __launch_bounds__(THREADS) mxfp4_dequantize(const uint32_t* blocks, const unsigned char* scales, bf16* out,
                                                                       int64_t runs) {
    const int64_t first = int64_t(blockIdx.x) * (THREADS * RUNS) + threadIdx.x;
    uint32_t codes[RUNS], scale[RUNS];
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int64_t run = first + i * THREADS;
        codes[i] = run < runs ? blocks[run] : 0;
        scale[i] = run < runs ? scales[run / 4] : 0;
    }
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const int64_t run = first + i * THREADS;
        if (run >= runs) return;
        Bf16x8 values;
        values_of(codes[i], values.pair[0], values.pair[1]);
        values_of(codes[i] >> 16, values.pair[2], values.pair[3]);
        const bf162 factor = scale_of(scale[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) values.pair[j] = times(values.pair[j], factor);
        reinterpret_cast<Bf16x8*>(out)[run] = values;
    }
}
