//! Products by group: their parameters, and which tile of which group a block computes. The offsets of the groups stay on the device.
#pragma once

#include "common.cuh"

namespace tandem {

/// `GroupedParams` of src/ops/grouped_matmul_plan.rs.
struct GroupedParams {
    const bf16* a;
    const bf16* b;
    /// bf16, or f32 for sums over the rows of a group.
    void* c;
    /// [groups, n], or null.
    const bf16* bias;
    /// First row of each group and the end: [groups + 1].
    const int* offsets;
    /// Values between rows.
    int64_t lda, ldb, ldc;
    /// Rows of `c` a group where sums go over the rows of a group (there `k` is not used); else not used.
    int m;
    /// Columns of `c`, and length of the sums.
    int n, k;
    int groups;
    /// Tile rows of a group that are walked together, so that their operands stay in the L2 cache.
    int raster_rows;
    uint32_t flags;
    float alpha, beta;
};
// Fields of 8 bytes, then fields of 4: with this size there is no padding, so their order fixes every offset.
static_assert(sizeof(GroupedParams) == 8 * 8 + 8 * 4, "size of GroupedParams");

/// One tile of a group: the rows of the group, and where the tile begins, counted from the group's first row.
struct GroupTile {
    int group, begin, end, row, column;
};

/// The tiles of all groups, numbered group by group, without those that no group has. A warp looks at 32 groups at a time; all its lanes must
/// ask for the same tile, and never for one before the last.
template <int BM, int BN>
struct GroupTiles {
    const int* offsets;
    int groups, columns, raster_rows;
    /// The first of the 32 groups that are looked at, and the tiles of all groups before it.
    int first_group, tiles_before;
    /// Of this lane's group: its rows, and the tiles of the 32 up to and with it.
    int begin, end, tiles;

    __device__ __forceinline__ GroupTiles(const int* offsets, int groups, int n, int raster_rows)
        : offsets(offsets), groups(groups), columns((n + BN - 1) / BN), raster_rows(raster_rows), first_group(0), tiles_before(0) {
        look();
    }

    __device__ __forceinline__ void look() {
        const int lane = threadIdx.x % WARP, group = first_group + lane;
        begin = group < groups ? offsets[group] : 0;
        end = group < groups ? offsets[group + 1] : 0;
        tiles = (end - begin + BM - 1) / BM * columns;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, tiles, distance);
            if (lane >= distance) tiles += before;
        }
    }

    /// Whether there is a tile of this number, and which it is.
    __device__ __forceinline__ bool find(int number, GroupTile& tile) {
        uint32_t later;
        while (!(later = __ballot_sync(0xffffffffu, tiles > number - tiles_before))) {
            if (first_group + WARP >= groups) return false;
            tiles_before += __shfl_sync(0xffffffffu, tiles, WARP - 1);
            first_group += WARP;
            look();
        }
        const int owner = __ffs(int(later)) - 1;
        tile.group = first_group + owner;
        tile.begin = __shfl_sync(0xffffffffu, begin, owner);
        tile.end = __shfl_sync(0xffffffffu, end, owner);
        const int rows = (tile.end - tile.begin + BM - 1) / BM, upto = __shfl_sync(0xffffffffu, tiles, owner);
        // Inside a group in bands of `raster_rows` tile rows, down each band's columns.
        const int local = number - tiles_before - (upto - rows * columns);
        const int band = local / (raster_rows * columns), within = local - band * raster_rows * columns;
        const int band_rows = min(raster_rows, rows - band * raster_rows);
        tile.row = (band * raster_rows + within % band_rows) * BM;
        tile.column = within / band_rows * BN;
        return true;
    }
};

}  // namespace tandem
