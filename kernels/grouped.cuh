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
    /// Of a pair: whether the second tile lies below the first, or beside it.
    bool stacked;
};

/// The tiles of all groups, numbered group by group, without those that no group has; with `PAIRED` pairs of tiles, each of which share the columns,
/// and where a group has an odd number of tile rows, share the rows of the last. A warp looks at 32 groups at a time; all its lanes must ask for the
/// same tile, and never for one before the last.
template <int BM, int BN, bool PAIRED = false>
struct GroupTiles {
    static constexpr int HEIGHT = PAIRED ? 2 : 1;
    const int* offsets;
    int groups, columns;
    /// Tiles, or pairs, of a column that are walked together.
    int band;
    /// The first of the 32 groups that are looked at, and the tiles of all groups before it.
    int first_group, tiles_before;
    /// Of this lane's group: its rows, and the tiles of the 32 up to and with it.
    int begin, end, tiles;

    __device__ __forceinline__ GroupTiles(const int* offsets, int groups, int n, int raster_rows)
        : offsets(offsets), groups(groups), columns((n + BN - 1) / BN), band(max(raster_rows / HEIGHT, 1)), first_group(0), tiles_before(0) {
        look();
    }

    /// Tiles, or pairs, of a group with so many tile rows.
    __device__ __forceinline__ int count(int rows) const { return rows / HEIGHT * columns + rows % HEIGHT * ((columns + 1) / 2); }

    __device__ __forceinline__ void look() {
        const int lane = threadIdx.x % WARP, group = first_group + lane;
        begin = group < groups ? offsets[group] : 0;
        end = group < groups ? offsets[group + 1] : 0;
        tiles = count((end - begin + BM - 1) / BM);
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, tiles, distance);
            if (lane >= distance) tiles += before;
        }
    }

    /// Whether there is a tile of this number, and which it is: of a pair the first.
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
        const int local = number - tiles_before - (upto - count(rows)), whole = rows / HEIGHT;
        tile.stacked = PAIRED && local < whole * columns;
        if (PAIRED && !tile.stacked) {
            tile.row = whole * HEIGHT * BM;
            tile.column = (local - whole * columns) * 2 * BN;
            return true;
        }
        // Inside a group in bands, down each band's columns.
        const int bands_before = local / (band * columns), within = local - bands_before * band * columns;
        const int band_rows = min(band, whole - bands_before * band);
        tile.row = (bands_before * band + within % band_rows) * HEIGHT * BM;
        tile.column = within / band_rows * BN;
        return true;
    }
};

}  // namespace tandem
