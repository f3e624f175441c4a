//! Matrices made of weights in NF4 and of adapters: CUDA form of src/ops/nf4.rs.
//!
//! One launch makes a whole matrix [W B; A ·]: its blocks are divided over up to three weights, B and A. It reads half a byte and writes two for each
//! value, so it is as fast as memory is; eight values of a thread are one store of 16 bytes.

#include <cuda_fp16.h>

#include "common.cuh"

using namespace tandem;

namespace {

constexpr int MAX_WEIGHTS = 3;
constexpr int THREADS = 256;
/// Runs of eight values that a thread makes, all of them loaded first.
constexpr int RUNS = 4;
constexpr int CHUNK = THREADS * RUNS * 8;
constexpr int MAP_LEN = 256;

/// One weight; the host keeps the same struct in src/ops/nf4.rs.
struct Part {
    const uint32_t* packed;        // two codes a byte, the even number in the high half
    const unsigned char* codes;    // of absmaxes; null where `absmax` has one a block
    const float* absmax;           // of blocks, or the scales of blocks of codes
    const float* map;              // what codes of absmaxes stand for
    float offset;
    int32_t first_row;
    int32_t block_shift;
    int32_t nested_shift;
    int64_t num_values;
    int32_t rounding;  // of the type that the weight was made of: 0 bf16, 1 f16, 2 f32
    int32_t padding;
};
static_assert(sizeof(Part) == 64, "the host's struct has 64 bytes");

struct Params {
    Part parts[MAX_WEIGHTS];
    bf16* out;
    const bf16* b;  // [rows, r]
    const bf16* a;  // [r, cols]
    int64_t stride;
    int64_t b_stride;
    int64_t a_stride;
    int32_t starts[MAX_WEIGHTS + 2];
    int32_t cols;
    int32_t rows;
    int32_t r;
};
static_assert(sizeof(Params) == 272, "the host's struct has 272 bytes");

/// The sixteen values in units of absmax.
__constant__ float CODE[16] = {
    -1.0f,         -0.6961928f,  -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f,    0.1609302f,   0.2461123f,   0.33791524f, 0.44070983f,  0.562617f,    0.72295684f,   1.0f,
};

/// Copies a chunk of a block of a matrix, eight values a run.
__device__ __forceinline__ void copy_chunk(const bf16* from, int64_t from_stride, bf16* to, int64_t to_stride, int rows, int cols, int chunk) {
    const uint32_t per_row = uint32_t(cols) / 8, runs = uint32_t(rows) * per_row;
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const uint32_t run = uint32_t(chunk) * (THREADS * RUNS) + i * THREADS + threadIdx.x;
        if (run >= runs) return;
        const uint32_t row = run / per_row, column = (run - row * per_row) * 8;
        *reinterpret_cast<Bf16x8*>(to + row * to_stride + column) = *reinterpret_cast<const Bf16x8*>(from + row * from_stride + column);
    }
}

template <int ROUNDING>
__device__ __forceinline__ float rounded(float x) {
    return ROUNDING == 1 ? __half2float(__float2half_rn(x)) : x;
}

/// Makes a chunk of a weight. `code` holds CODE, `map` the part's map, both in shared memory: sixteen values lie in sixteen banks, so lanes never
/// wait for each other.
template <int ROUNDING>
__device__ __forceinline__ void dequantize_chunk(const Params& p, const Part& part, int chunk, const float* code, const float* map) {
    const uint32_t first = uint32_t(chunk) * (THREADS * RUNS) + threadIdx.x;
    const uint32_t runs = uint32_t(part.num_values / 8);
    uint32_t packed[RUNS];
    float absmax[RUNS];
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const uint32_t run = first + i * THREADS;
        packed[i] = run < runs ? part.packed[run] : 0;
    }
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const uint32_t run = min(first + i * THREADS, runs - 1);
        const uint32_t block = run >> (part.block_shift - 3);
        // Product and sum are rounded each, as on the host.
        absmax[i] = part.codes == nullptr ? part.absmax[block]
                                          : __fadd_rn(__fmul_rn(map[part.codes[block]], part.absmax[block >> part.nested_shift]), part.offset);
    }
    const uint32_t per_row = uint32_t(p.cols) / 8;
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
        const uint32_t run = first + i * THREADS;
        if (run >= runs) return;
        float values[8];
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const uint32_t pair = packed[i] >> (8 * byte);
            values[2 * byte] = rounded<ROUNDING>(code[(pair >> 4) & 15] * absmax[i]);
            values[2 * byte + 1] = rounded<ROUNDING>(code[pair & 15] * absmax[i]);
        }
        const uint32_t row = run / per_row, column = (run - row * per_row) * 8;
        Bf16x8 out;
        out.pack(values);
        *reinterpret_cast<Bf16x8*>(p.out + (part.first_row + int64_t(row)) * p.stride + column) = out;
    }
}

}  // namespace

/// out = [W B; A ·], W in NF4. Grid: the chunks of all weights, of B and of A, one after another.
extern "C" __global__ void __launch_bounds__(THREADS) nf4_dequantize(const __grid_constant__ Params p) {
    __shared__ float code[16];
    __shared__ float map[MAP_LEN];
    const int block = int(blockIdx.x);
    if (block >= p.starts[MAX_WEIGHTS + 1]) {
        copy_chunk(p.a, p.a_stride, p.out + p.rows * p.stride, p.stride, p.r, p.cols, block - p.starts[MAX_WEIGHTS + 1]);
        return;
    }
    if (block >= p.starts[MAX_WEIGHTS]) {
        copy_chunk(p.b, p.b_stride, p.out + p.cols, p.stride, p.rows, p.r, block - p.starts[MAX_WEIGHTS]);
        return;
    }
    const int number = block >= p.starts[2] ? 2 : block >= p.starts[1] ? 1 : 0;
    const Part& part = p.parts[number];
    if (threadIdx.x < 16) code[threadIdx.x] = CODE[threadIdx.x];
    if (part.codes != nullptr) map[threadIdx.x] = part.map[threadIdx.x];
    __syncthreads();
    const int chunk = block - p.starts[number];
    if (part.rounding == 1) {
        dequantize_chunk<1>(p, part, chunk, code, map);
    } else {
        dequantize_chunk<0>(p, part, chunk, code, map);
    }
}
