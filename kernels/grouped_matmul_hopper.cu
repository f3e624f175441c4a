//! Matrix products by group on Hopper's tensor cores: bf16 operands, f32 sums. CUDA form of src/ops/grouped_matmul.rs for compute capability 9.0.
//!
//! A block stays on its multiprocessor and walks over tiles of all groups. One warp lets the copy engine fill a ring of stages, as far ahead as
//! there is room, past the end of a tile too; two warpgroups multiply 64 rows each and write them from their registers. Rows of the next group that a
//! tile holds behind the end of its own are multiplied and not written. Two blocks of a cluster may compute neighbouring tiles of the same rows: each
//! then brings half of the rows to both. src/ops/grouped_matmul_hopper.rs chooses the kernel and describes the operands.

#include "grouped.cuh"
#include "hopper.cuh"
#include "matmul.cuh"

using namespace tandem;

/// `HopperParams` of src/ops/grouped_matmul_hopper.rs.
struct HopperParams {
    /// [rows, k] in boxes of 64 columns and 128 rows, for pairs of blocks 64.
    TensorMap a;
    /// [groups, n, k] in boxes of a tile's rows and 64 columns; for nn [groups, k, n] in boxes of 64 rows and 64 columns.
    TensorMap b;
    GroupedParams p;
};
static_assert(sizeof(HopperParams) == 384, "size of HopperParams");

namespace {

// Other architectures need the names, as an image holds the same kernels everywhere; nothing launches them there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BM = 128, DEPTH = 64, STAGES = 4, WARPGROUP = 128;
/// Bytes of a line of a stage, and between groups of eight lines.
constexpr uint32_t LINE_BYTES = DEPTH * 2, EIGHT_LINES = 8 * LINE_BYTES;

/// Writes the sums of a warpgroup, 64 rows from `row` on: `c = alpha·sums + bias + beta·c`, rounded once. Four lanes exchange their pairs, so that each
/// reads and writes 16 bytes of a row.
template <int BN>
__device__ __forceinline__ void store_rows(const float (&sums)[BN / 2], const GroupedParams& p, const GroupTile& tile, int row) {
    const int lane = threadIdx.x % WARP, rows = tile.end - tile.begin;
    row += threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    const bf16* bias = p.bias ? p.bias + int64_t(tile.group) * p.n + tile.column : nullptr;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int y = row + half * 8;
        bf16* line = static_cast<bf16*>(p.c) + (tile.begin + y) * p.ldc + tile.column;
#pragma unroll
        for (int group = 0; group < (BN + 31) / 32; ++group) {
            const int x = (group * 4 + lane % 4) * 8;
            const bool exists = y < rows && x < BN && tile.column + x < p.n;
            uint32_t v[4] = {};
            if (p.beta != 0.0f) {
                if (exists) {
                    const uint4 got = *reinterpret_cast<const uint4*>(line + x);
                    v[0] = got.x, v[1] = got.y, v[2] = got.z, v[3] = got.w;
                }
                transpose_quad(v);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = group * 4 + e;
                if (j >= BN / 8) continue;
                float low = p.alpha * sums[4 * j + 2 * half], high = p.alpha * sums[4 * j + 2 * half + 1];
                if (bias) {
                    const float2 added = unpack_bf16(load_pair(bias, j * 8 + lane % 4 * 2, p.n - tile.column));
                    low += added.x, high += added.y;
                }
                const float2 before = unpack_bf16(v[e]);
                v[e] = pack_bf16(fmaf(p.beta, before.x, low), fmaf(p.beta, before.y, high));
            }
            transpose_quad(v);
            if (exists) *reinterpret_cast<uint4*>(line + x) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

/// Tiles of 128×BN. `ALONG`: the rows of `b` lie along the sums (nt), else across them (nn). `PAIR`: blocks come in clusters of two, which compute
/// tiles side by side.
template <int BN, bool ALONG, bool PAIR>
__device__ __forceinline__ void multiply(const HopperParams& params) {
    constexpr int BLOCKS_A_CLUSTER = PAIR ? 2 : 1;
    // Across the sums a stage of `b` is made of blocks of 64 columns, the last of which may stick out of the tile.
    constexpr int BLOCKS = (BN + 63) / 64;
    constexpr uint32_t BLOCK_BYTES = DEPTH * LINE_BYTES;
    constexpr uint32_t A_BYTES = BM * LINE_BYTES, B_BYTES = ALONG ? BN * LINE_BYTES : BLOCKS * BLOCK_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
    static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the swizzle goes by the address");
    const GroupedParams& p = params.p;
    extern __shared__ unsigned char shared[];
    // The swizzle goes by the address: stages begin at multiples of 1,024 bytes.
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024, full = stages + STAGES * STAGE_BYTES, empty = full + STAGES * 8;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP, rank = PAIR ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            // One arrival for each warp that multiplies, of both blocks: both have what a block brings.
            barrier_init(empty + stage * 8, 2 * WARPGROUP / WARP * BLOCKS_A_CLUSTER);
        }
        barriers_are_ready();
        prefetch_map(params.a);
        prefetch_map(params.b);
    }
    if constexpr (PAIR) cluster_sync();
    else __syncthreads();

    // A stage is free when both blocks are done with it.
    const auto release = [&](int stage) {
        if constexpr (PAIR) {
            if (lane < 2) barrier_arrive_at(empty + stage * 8, lane);
        } else {
            if (lane == 0) barrier_arrive(empty + stage * 8);
        }
    };
    const int k_blocks = (p.k + DEPTH - 1) / DEPTH;
    const int first = blockIdx.x / BLOCKS_A_CLUSTER, stride = gridDim.x / BLOCKS_A_CLUSTER;
    GroupTiles<BM, BN * BLOCKS_A_CLUSTER> tiles(p.offsets, p.groups, p.n, p.raster_rows);
    GroupTile tile;
    int stage = 0;
    if (warpgroup == 0) {
        give_registers<40>();
        if (threadIdx.x < WARP) {
            uint32_t parity = 1;
            for (int number = first; tiles.find(number, tile); number += stride) {
                const int column = tile.column + rank * BN;
                if (lane == 0) {
                    for (int block = 0; block < k_blocks; ++block) {
                        const uint32_t a = stages + stage * STAGE_BYTES, b = a + A_BYTES, barrier = full + stage * 8;
                        barrier_wait(empty + stage * 8, parity);
                        barrier_arrive_expecting(barrier, STAGE_BYTES);
                        if constexpr (PAIR) {
                            const int half = rank * (BM / 2);
                            copy_box_to_two(a + half * LINE_BYTES, params.a, barrier, block * DEPTH, tile.begin + tile.row + half);
                        } else {
                            copy_box(a, params.a, barrier, block * DEPTH, tile.begin + tile.row);
                        }
                        if constexpr (ALONG) {
                            copy_box(b, params.b, barrier, block * DEPTH, column, tile.group);
                        } else {
#pragma unroll
                            for (int i = 0; i < BLOCKS; ++i) {
                                copy_box(b + i * BLOCK_BYTES, params.b, barrier, column + i * 64, block * DEPTH, tile.group);
                            }
                        }
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
                __syncwarp();
            }
        }
    } else {
        take_registers<232>();
        const int row = (warpgroup - 1) * 64;
        int last = 0;
        uint32_t parity = 0;
        float sums[BN / 2];
        for (int number = first; tiles.find(number, tile); number += stride) {
            if (tile.row + row >= tile.end - tile.begin) {
                // None of this warpgroup's rows belongs to the group: the stages pass by.
                for (int block = 0; block < k_blocks; ++block) {
                    barrier_wait(full + stage * 8, parity);
                    __syncwarp();
                    release(stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                continue;
            }
            for (int block = 0; block < k_blocks; ++block) {
                const uint32_t a = stages + stage * STAGE_BYTES, b = a + A_BYTES;
                // 16 of the sums further: 32 bytes along a line, or 16 lines down.
                constexpr uint32_t B_STEP = (ALONG ? 32 : 16 * LINE_BYTES) / 16;
                const uint64_t a_operand = wgmma_operand(a + row * LINE_BYTES, 16, EIGHT_LINES);
                const uint64_t b_operand = wgmma_operand(b, ALONG ? 16 : BLOCK_BYTES, EIGHT_LINES);
                barrier_wait(full + stage * 8, parity);
                keep_in_place(sums);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < DEPTH / 16; ++step) {
                    wgmma_step<ALONG ? 0 : 1>(sums, a_operand + step * 2, b_operand + step * B_STEP, block + step > 0);
                }
                wgmma_commit();
                // The products of the stage before are done, so it may be filled again.
                wgmma_wait<1>();
                if (block > 0) release(last);
                last = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            wgmma_wait<0>();
            keep_in_place(sums);
            release(last);
            tile.column += rank * BN;
            store_rows<BN>(sums, p, tile, tile.row + row);
        }
    }
    // Nobody goes while the other block still brings something here, or arrives.
    if constexpr (PAIR) cluster_sync();
}

#else

template <int BN, bool ALONG, bool PAIR>
__device__ __forceinline__ void multiply(const HopperParams&) {
    __trap();
}

#endif

}  // namespace

// The kernels of pairs run in clusters of two blocks, which other architectures do not know of.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
extern "C" __cluster_dims__(2, 1, 1) __global__ void grouped_nt_hopper_pair_128x256(const __grid_constant__ HopperParams p);
extern "C" __cluster_dims__(2, 1, 1) __global__ void grouped_nn_hopper_pair_128x256(const __grid_constant__ HopperParams p);
extern "C" __cluster_dims__(2, 1, 1) __global__ void grouped_nt_hopper_pair_128x240(const __grid_constant__ HopperParams p);
extern "C" __cluster_dims__(2, 1, 1) __global__ void grouped_nn_hopper_pair_128x240(const __grid_constant__ HopperParams p);
#endif

extern "C" __global__ void __launch_bounds__(384, 1) grouped_nt_hopper_128x256(const __grid_constant__ HopperParams p) { multiply<256, true, false>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) grouped_nn_hopper_128x256(const __grid_constant__ HopperParams p) { multiply<256, false, false>(p); }

extern "C" __global__ void __launch_bounds__(384, 1) grouped_nt_hopper_128x240(const __grid_constant__ HopperParams p) { multiply<240, true, false>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) grouped_nn_hopper_128x240(const __grid_constant__ HopperParams p) { multiply<240, false, false>(p); }

extern "C" __global__ void __launch_bounds__(384, 1) grouped_nt_hopper_128x128(const __grid_constant__ HopperParams p) { multiply<128, true, false>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) grouped_nn_hopper_128x128(const __grid_constant__ HopperParams p) { multiply<128, false, false>(p); }

extern "C" __global__ void __launch_bounds__(384, 1) grouped_nt_hopper_pair_128x256(const __grid_constant__ HopperParams p) { multiply<256, true, true>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) grouped_nn_hopper_pair_128x256(const __grid_constant__ HopperParams p) { multiply<256, false, true>(p); }

extern "C" __global__ void __launch_bounds__(384, 1) grouped_nt_hopper_pair_128x240(const __grid_constant__ HopperParams p) { multiply<240, true, true>(p); }
extern "C" __global__ void __launch_bounds__(384, 1) grouped_nn_hopper_pair_128x240(const __grid_constant__ HopperParams p) { multiply<240, false, true>(p); }
