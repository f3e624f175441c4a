//! Matrix products by group on Hopper's tensor cores: bf16 operands, f32 sums. CUDA form of src/ops/grouped_matmul.rs for compute capability 9.0.
//!
//! Two blocks of a cluster compute two tiles that lie one below the other, or, in the last tile row of a group, side by side: what both read each brings
//! one half of to both. They stay on their multiprocessors and walk over the tiles of all groups. One warp of a block lets the copy engine fill a ring
//! of stages, as far ahead as there is room, past the end of a tile too; two warpgroups multiply 64 rows each, one stage apart, so that one multiplies
//! while the other writes. Rows of the next group that a tile holds behind the end of its own are multiplied and not written.
//! src/ops/grouped_matmul_hopper.rs chooses the kernel and describes the operands.

#include "attention_ptx.cuh"
#include "grouped.cuh"
#include "hopper.cuh"

using namespace tandem;

/// `HopperParams` of src/ops/grouped_matmul_hopper.rs.
struct HopperParams {
    /// [rows, k] in boxes of 64 columns and 64 rows.
    TensorMap a;
    /// [groups, n, k] in boxes of half a tile's rows and 64 columns; for nn [groups, k, n] in boxes of 64 rows and 64 columns.
    TensorMap b;
    GroupedParams p;
};
static_assert(sizeof(HopperParams) == 384, "size of HopperParams");

namespace {

// Other architectures need the names, as an image holds the same kernels everywhere; nothing launches them there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int BM = 128, DEPTH = 64, STAGES = 4, WARPGROUP = 128;
/// Biases of a tile and of those that the copies may be ahead: sums are longer than a stage, so four stages belong to three tiles at most.
constexpr int BIASES = 3, BIAS_BYTES = 512;
/// What a warp writes goes through shared memory in pieces of 16 rows and 64 columns: the room for two.
constexpr int PIECE_COLUMNS = 64, PIECE_BYTES = 16 * PIECE_COLUMNS * 2, STAGING_BYTES = 2 * PIECE_BYTES;
/// Bytes of a line of a stage, and between groups of eight lines.
constexpr uint32_t LINE_BYTES = DEPTH * 2, EIGHT_LINES = 8 * LINE_BYTES;

/// Writes the sums of a warp, 16 rows from `row` on: `c = alpha·sums + bias + beta·c`, rounded once; with `ADDS` what `c` holds is read. Pieces are turned
/// in shared memory, so that a warp reads and writes 128 bytes of four rows at a time. `bias`: address of the tile's biases in shared memory, or 0.
template <int BN, bool ADDS>
__device__ __forceinline__ void store_rows(const float (&sums)[BN / 2], const GroupedParams& p, const GroupTile& tile, int row, uint32_t staging,
                                           uint32_t bias) {
    const int lane = threadIdx.x % WARP, rows = tile.end - tile.begin - row;
    // Of the units of 16 bytes of a piece's line r, unit u lies at u ^ r % 8: the lines of a matrix of 8×8 fall into different banks.
    const int matrix_row = lane % 16, matrix_unit = lane / 16, line = lane / 8, unit = lane % 8;
    bf16* c = static_cast<bf16*>(p.c) + (tile.begin + row + line) * p.ldc + tile.column + unit * 8;
#pragma unroll
    for (int piece = 0; piece < (BN + PIECE_COLUMNS - 1) / PIECE_COLUMNS; ++piece) {
        const uint32_t room = staging + piece % 2 * PIECE_BYTES;
        const int column = piece * PIECE_COLUMNS + unit * 8;
        const bool exists = column < BN && tile.column + column < p.n;
        const auto place = [&](int y) { return room + y * PIECE_COLUMNS * 2 + (unit ^ y % 8) * 16; };
        if constexpr (ADDS) {
#pragma unroll
            for (int y = line; y < 16; y += 4) {
                uint4 got = make_uint4(0, 0, 0, 0);
                if (exists && y < rows) got = *reinterpret_cast<const uint4*>(c + (y - line) * p.ldc + piece * PIECE_COLUMNS);
                store_shared_16(place(y), got);
            }
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < PIECE_COLUMNS / 16; ++i) {
            const int first = piece * PIECE_COLUMNS / 8 + i * 2;
            if (first >= BN / 8) continue;
            const uint32_t matrices = room + matrix_row * PIECE_COLUMNS * 2 + ((i * 2 + matrix_unit) ^ matrix_row % 8) * 16;
            uint32_t v[4] = {};
            if constexpr (ADDS) ldmatrix_x4_at(v, matrices);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int j = first + e / 2, half = e % 2;
                const float2 added = bias ? unpack_bf16(load_shared(bias + j * 16 + lane % 4 * 4)) : make_float2(0.0f, 0.0f);
                float low = fmaf(p.alpha, sums[4 * j + 2 * half], added.x), high = fmaf(p.alpha, sums[4 * j + 2 * half + 1], added.y);
                if constexpr (ADDS) {
                    const float2 before = unpack_bf16(v[e]);
                    low = fmaf(p.beta, before.x, low), high = fmaf(p.beta, before.y, high);
                }
                v[e] = pack_bf16(low, high);
            }
            store_matrices(matrices, v);
        }
        // Orders the pieces too: the room of this one is written again after the next one's has been.
        __syncwarp();
#pragma unroll
        for (int y = line; y < 16; y += 4) {
            const uint4 v = load_shared_16(place(y));
            if (exists && y < rows) *reinterpret_cast<uint4*>(c + (y - line) * p.ldc + piece * PIECE_COLUMNS) = v;
        }
    }
}

/// Tiles of 128×BN. `ALONG`: the rows of `b` lie along the sums (nt), else across them (nn).
template <int BN, bool ALONG>
__device__ __forceinline__ void multiply(const HopperParams& params) {
    // Across the sums a stage of `b` is made of blocks of 64 columns, the last of which may stick out of the tile.
    constexpr int BLOCKS = (BN + 63) / 64;
    constexpr uint32_t BLOCK_BYTES = DEPTH * LINE_BYTES;
    constexpr uint32_t A_BYTES = BM * LINE_BYTES, B_BYTES = ALONG ? BN * LINE_BYTES : BLOCKS * BLOCK_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
    static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "the swizzle goes by the address");
    static_assert(ALONG ? BN / 2 % 8 == 0 : BLOCKS % 2 == 0, "each block of a cluster brings one half");
    const GroupedParams& p = params.p;
    extern __shared__ unsigned char shared[];
    // The swizzle goes by the address: stages begin at multiples of 1,024 bytes.
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024, staging = stages + STAGES * STAGE_BYTES;
    const uint32_t biases = staging + 2 * WARPGROUP / WARP * STAGING_BYTES, full = biases + BIASES * BIAS_BYTES, empty = full + STAGES * 8;
    const int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP, rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + stage * 8, 1);
            // One arrival for each warp that multiplies, of both blocks: both have what a block brings.
            barrier_init(empty + stage * 8, 2 * WARPGROUP / WARP * 2);
        }
        barriers_are_ready();
        prefetch_map(params.a);
        prefetch_map(params.b);
    }
    cluster_sync();

    // A stage is free when both blocks are done with it.
    const auto release = [&](int stage) {
        if (lane < 2) barrier_arrive_at(empty + stage * 8, lane);
    };
    const int k_blocks = (p.k + DEPTH - 1) / DEPTH;
    const int first = blockIdx.x / 2, stride = gridDim.x / 2;
    GroupTiles<BM, BN, true> tiles(p.offsets, p.groups, p.n, p.raster_rows);
    GroupTile tile{};
    const auto take_own = [&] {
        if (tile.stacked) tile.row += rank * BM;
        else tile.column += rank * BN;
    };
    int stage = 0, bias = 0;
    if (warpgroup == 0) {
        give_registers<48>();
        if (threadIdx.x < WARP) {
            uint32_t parity = 1;
            for (int number = first; tiles.find(number, tile); number += stride) {
                take_own();
                if (lane == 0) {
                    const int row = tile.begin + tile.row, bias_bytes = p.bias ? max(min(BN, p.n - tile.column), 0) * 2 : 0;
                    for (int block = 0; block < k_blocks; ++block) {
                        const uint32_t a = stages + stage * STAGE_BYTES, b = a + A_BYTES, barrier = full + stage * 8;
                        const int depth = block * DEPTH;
                        barrier_wait(empty + stage * 8, parity);
                        barrier_arrive_expecting(barrier, STAGE_BYTES + (block == 0 ? bias_bytes : 0));
                        if (block == 0 && bias_bytes > 0) {
                            copy_bytes(biases + bias * BIAS_BYTES, p.bias + int64_t(tile.group) * p.n + tile.column, bias_bytes, barrier);
                        }
                        if (tile.stacked) {
                            copy_box(a, params.a, barrier, depth, row);
                            copy_box(a + BM / 2 * LINE_BYTES, params.a, barrier, depth, row + BM / 2);
                        } else {
                            const int half = rank * (BM / 2);
                            copy_box_to_two(a + half * LINE_BYTES, params.a, barrier, depth, row + half);
                        }
                        if constexpr (ALONG) {
                            constexpr int HALF = BN / 2;
                            if (tile.stacked) {
                                copy_box_to_two(b + rank * HALF * LINE_BYTES, params.b, barrier, depth, tile.column + rank * HALF, tile.group);
                            } else {
                                copy_box(b, params.b, barrier, depth, tile.column, tile.group);
                                copy_box(b + HALF * LINE_BYTES, params.b, barrier, depth, tile.column + HALF, tile.group);
                            }
                        } else {
                            // Two or four copies: nothing is gained by unrolling, and this warp has few registers.
                            const int count = tile.stacked ? BLOCKS / 2 : BLOCKS, from = tile.stacked ? rank * count : 0;
#pragma unroll 1
                            for (int i = from; i < from + count; ++i) {
                                const int column = tile.column + i * 64;
                                if (tile.stacked) copy_box_to_two(b + i * BLOCK_BYTES, params.b, barrier, column, depth, tile.group);
                                else copy_box(b + i * BLOCK_BYTES, params.b, barrier, column, depth, tile.group);
                            }
                        }
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                }
                if (++bias == BIASES) bias = 0;
                __syncwarp();
            }
        }
    } else {
        take_registers<224>();
        const int row = (warpgroup - 1) * 64, warp = threadIdx.x / WARP - WARPGROUP / WARP;
        int last = 0;
        uint32_t parity = 0;
        float sums[BN / 2];
        for (int number = first; tiles.find(number, tile); number += stride) {
            take_own();
            // The second warpgroup starts a stage later, and stays behind.
            if (number == first && warpgroup == 2) barrier_wait(full + 8, 0);
            if (tile.row + row >= tile.end - tile.begin) {
                // None of this warpgroup's rows belongs to the group: the stages pass by.
                for (int block = 0; block < k_blocks; ++block) {
                    barrier_wait(full + stage * 8, parity);
                    __syncwarp();
                    release(stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            } else {
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
                const int warp_row = tile.row + row + warp % 4 * 16;
                const uint32_t room = staging + warp * STAGING_BYTES, added = p.bias ? biases + bias * BIAS_BYTES : 0;
                if (p.beta != 0.0f) store_rows<BN, true>(sums, p, tile, warp_row, room, added);
                else store_rows<BN, false>(sums, p, tile, warp_row, room, added);
            }
            if (++bias == BIASES) bias = 0;
        }
    }
    // Nobody goes while the other block still brings something here, or arrives.
    cluster_sync();
}

#else

template <int BN, bool ALONG>
__device__ __forceinline__ void multiply(const HopperParams&) {
    __trap();
}

#endif

}  // namespace

// Blocks come in clusters of two, which other architectures do not know of.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TANDEM_PAIRS __cluster_dims__(2, 1, 1)
#else
#define TANDEM_PAIRS
#endif

extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nt_hopper_128x256(const __grid_constant__ HopperParams p) { multiply<256, true>(p); }
extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nn_hopper_128x256(const __grid_constant__ HopperParams p) { multiply<256, false>(p); }
extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nt_hopper_128x240(const __grid_constant__ HopperParams p) { multiply<240, true>(p); }
extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nn_hopper_128x240(const __grid_constant__ HopperParams p) { multiply<240, false>(p); }
extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nt_hopper_128x128(const __grid_constant__ HopperParams p) { multiply<128, true>(p); }
extern "C" __global__ void TANDEM_PAIRS __launch_bounds__(384, 1) grouped_nn_hopper_128x128(const __grid_constant__ HopperParams p) { multiply<128, false>(p); }
