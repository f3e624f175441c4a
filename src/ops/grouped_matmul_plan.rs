//! Which kernel of `kernels/grouped_matmul.cu` computes a product by group, and how it is laid out.
//!
//! The host does not know how many rows a group has. Grids are as large as they have to be at most, and blocks without a tile end at once. The
//! choice depends on the shape and the card alone, so equal inputs give equal bits.

use super::matmul_plan::{A_VECTOR, B_VECTOR, C_VECTOR, Card, OUT_F32, SOURCE_VECTOR};
use crate::tensor::cuda::blaslt::Form;
use crate::tensor::dtype::DType;

/// What `kernels/grouped_matmul.cu` takes, by value: `GroupedParams` of `kernels/grouped.cuh`. Addresses are device addresses, strides are in values.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedParams {
    /// First operand, bf16.
    pub a: u64,
    /// Second operand, bf16.
    pub b: u64,
    /// Result: bf16, and f32 for [`Form::Tn`].
    pub c: u64,
    /// bf16 [groups, n], or 0.
    pub bias: u64,
    /// i32 [groups + 1].
    pub offsets: u64,
    /// Values between rows of `a`.
    pub lda: i64,
    /// Values between rows of `b`.
    pub ldb: i64,
    /// Values between rows of `c`.
    pub ldc: i64,
    /// Rows of `c` a group, for [`Form::Tn`].
    pub m: i32,
    /// Columns of `c`.
    pub n: i32,
    /// Length of the sums, but for [`Form::Tn`].
    pub k: i32,
    /// Groups.
    pub groups: i32,
    /// Tile rows of a group that are walked together.
    pub raster_rows: i32,
    /// As in [`MatmulParams`](super::matmul_plan::MatmulParams).
    pub flags: u32,
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on what `c` holds; with 0 it is not read.
    pub beta: f32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<GroupedParams>() == 96 && align_of::<GroupedParams>() == 8, "layout of GroupedParams");
    assert!(offset_of!(GroupedParams, offsets) == 32 && offset_of!(GroupedParams, ldc) == 56);
    assert!(offset_of!(GroupedParams, groups) == 76 && offset_of!(GroupedParams, beta) == 92);
};

/// Tile rows walked together: few groups have more, and the operands of as many stay in a large cache.
const RASTER_ROWS: usize = 16;

/// Shape of a product by group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedShape {
    /// nt, nn: rows of groups times the group's matrix; tn: sums over the rows of groups.
    pub form: Form,
    /// Number of groups.
    pub groups: usize,
    /// Rows of `a`, of all groups.
    pub rows: usize,
    /// Rows of `c` a group, for [`Form::Tn`]; else 0.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// Length of the sums; 0 for [`Form::Tn`].
    pub k: usize,
    /// Values between rows of `a`.
    pub lda: usize,
    /// Values between rows of `b`.
    pub ldb: usize,
    /// Values between rows of `c`.
    pub ldc: usize,
}

/// Operands of a product by group: device addresses and factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedOperands {
    /// First operand, bf16.
    pub a: u64,
    /// Second operand, bf16.
    pub b: u64,
    /// Result: bf16, and f32 for [`Form::Tn`].
    pub c: u64,
    /// bf16 [groups, n], or 0.
    pub bias: u64,
    /// i32 [groups + 1].
    pub offsets: u64,
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on what `c` holds.
    pub beta: f32,
}

/// How a product by group is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedPlan {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks.
    pub blocks: usize,
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
}

/// One kernel, in up to three forms.
#[derive(Debug)]
struct Tile {
    /// Names for nt, nn, tn; empty where there is no such kernel.
    names: [&'static str; 3],
    rows: usize,
    cols: usize,
    /// Length of the sums a stage holds.
    depth: usize,
    stages: usize,
}

/// Threads of every kernel.
const THREADS: u32 = 128;

const fn tile(names: [&'static str; 3], [rows, cols, depth]: [usize; 3], stages: usize) -> Tile {
    Tile { names, rows, cols, depth, stages }
}

const LARGE: Tile =
    tile(["grouped_nt_128x128x64", "grouped_nn_128x128x64", "grouped_tn_128x128x64"], [128, 128, 64], 3);
/// As [`LARGE`], for cards with less shared memory.
const LAPTOP: Tile =
    tile(["grouped_nt_128x128x32", "grouped_nn_128x128x32", "grouped_tn_128x128x32"], [128, 128, 32], 3);
const SMALL: Tile = tile(["grouped_nt_64x64", "grouped_nn_64x64", "grouped_tn_64x64"], [64, 64, 64], 3);
/// For short sums, where reading and writing `c` is most of the work.
const THIN: Tile = tile(["grouped_nt_64x64_thin", "grouped_nn_64x64_thin", ""], [64, 64, 32], 2);
const FEW_COLUMNS: [Tile; 2] = [
    tile(["grouped_nt_64x16", "grouped_nn_64x16", "grouped_tn_64x16"], [64, 16, 64], 6),
    tile(["grouped_nt_64x32", "grouped_nn_64x32", "grouped_tn_64x32"], [64, 32, 64], 4),
];
const FEW_ROWS: [Tile; 2] =
    [tile(["", "", "grouped_tn_16x64"], [16, 64, 64], 6), tile(["", "", "grouped_tn_32x64"], [32, 64, 64], 4)];

/// Most columns (rows) that the narrow tiles serve: the wider of the two serves two tiles' worth.
const NARROWEST: usize = 16;
const NARROW: usize = 64;
/// Longest sums that [`THIN`] serves: two of its stages.
const THIN_DEPTH: usize = 64;
/// Rows a group up to which small tiles win: a large one computes half a tile for nothing at the end of a group, and is 1.4 times as fast.
pub const FEW_ROWS_A_GROUP: usize = 48;
/// Shared memory that the driver takes from a multiprocessor for every block.
const RESERVED_SHARED_BYTES: u32 = 1024;

impl Tile {
    const fn shared_bytes(&self) -> u32 {
        ((self.rows + self.cols) * self.depth * 2 * self.stages) as u32
    }

    /// Most tiles that there can be: every group with rows ends with a tile that may hold one row.
    fn most_tiles(&self, shape: &GroupedShape) -> usize {
        let columns = shape.n.div_ceil(self.cols);
        match shape.form {
            Form::Tn => shape.groups * shape.m.div_ceil(self.rows) * columns,
            Form::Nt | Form::Nn => most_row_tiles(shape, self.rows) * columns,
        }
    }
}

/// Most tiles of `tile_rows` rows that all groups have together.
pub fn most_row_tiles(shape: &GroupedShape, tile_rows: usize) -> usize {
    (shape.rows + shape.groups.min(shape.rows) * (tile_rows - 1)) / tile_rows
}

/// The kernel and the layout for a product.
///
/// # Panics
/// When a size is zero (there is nothing to launch) or beyond 2³⁰, or when a stride is shorter than a row.
pub fn choose(shape: &GroupedShape, card: Card) -> GroupedPlan {
    let &GroupedShape { form, groups, rows, m, n, k, lda, ldb, ldc } = shape;
    let (a_cols, b_cols) = match form {
        Form::Nt => (k, k),
        Form::Nn => (k, n),
        Form::Tn => (m, n),
    };
    assert!(rows > 0 && groups > 0 && a_cols > 0 && b_cols > 0, "an empty product needs no kernel");
    assert!([groups, rows, m, n, k].iter().all(|&size| size <= 1 << 30), "sizes of a product are 32-bit numbers");
    assert!(lda >= a_cols && ldb >= b_cols && ldc >= n, "rows of a matrix must not overlap");

    let sms = card.num_sms.max(1) as usize;
    let tile = if n <= NARROW {
        &FEW_COLUMNS[usize::from(n > NARROWEST)]
    } else if form == Form::Tn && m <= NARROW {
        &FEW_ROWS[usize::from(m > NARROWEST)]
    } else if form != Form::Tn && k <= THIN_DEPTH {
        &THIN
    } else if (form != Form::Tn && rows.div_ceil(groups) <= FEW_ROWS_A_GROUP) || LARGE.most_tiles(shape) < sms {
        &SMALL
    } else if card.max_shared_bytes + RESERVED_SHARED_BYTES >= 2 * (LARGE.shared_bytes() + RESERVED_SHARED_BYTES) {
        &LARGE
    } else {
        &LAPTOP
    };
    let name = match form {
        Form::Nt => 0,
        Form::Nn => 1,
        Form::Tn => 2,
    };
    GroupedPlan {
        kernel: tile.names[name],
        blocks: tile.most_tiles(shape),
        threads: THREADS,
        shared_bytes: tile.shared_bytes(),
    }
}

/// Parameters of a launch.
pub fn params(shape: &GroupedShape, operands: &GroupedOperands) -> GroupedParams {
    let &GroupedShape { form, groups, m, n, k, lda, ldb, ldc, .. } = shape;
    let &GroupedOperands { a, b, c, bias, offsets, alpha, beta } = operands;
    let out = if form == Form::Tn { DType::F32 } else { DType::Bf16 };
    let flag = |flag, set: bool| if set { flag } else { 0 };
    GroupedParams {
        a,
        b,
        c,
        bias,
        offsets,
        lda: lda as i64,
        ldb: ldb as i64,
        ldc: ldc as i64,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        groups: groups as i32,
        // With short sums the rows of `c` are walked one after the other, as memory has them.
        raster_rows: if k <= THIN_DEPTH { 1 } else { RASTER_ROWS as i32 },
        flags: flag(OUT_F32, out == DType::F32)
            | flag(A_VECTOR, rows_aligned(a, lda, DType::Bf16))
            | flag(B_VECTOR, rows_aligned(b, ldb, DType::Bf16))
            | flag(C_VECTOR | SOURCE_VECTOR, rows_aligned(c, ldc, out)),
        alpha,
        beta,
    }
}

/// Whether rows start at multiples of 16 bytes.
pub fn rows_aligned(address: u64, ld: usize, dtype: DType) -> bool {
    address.is_multiple_of(16) && (ld * dtype.num_bytes()).is_multiple_of(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../../kernels/grouped_matmul.cu");
    const DATACENTER: Card = Card { max_shared_bytes: 232_448, num_sms: 132 };
    const SMALL_CARD: Card = Card { max_shared_bytes: 101_376, num_sms: 20 };

    fn tiles() -> impl Iterator<Item = &'static Tile> {
        [&LARGE, &LAPTOP, &SMALL, &THIN].into_iter().chain(&FEW_COLUMNS).chain(&FEW_ROWS)
    }

    fn shape(form: Form, [groups, rows, m, n, k]: [usize; 5]) -> GroupedShape {
        let (lda, ldb) = match form {
            Form::Nt => (k, k),
            Form::Nn => (k, n),
            Form::Tn => (m, n),
        };
        let (m, k) = if form == Form::Tn { (m, 0) } else { (0, k) };
        GroupedShape { form, groups, rows, m, n, k, lda, ldb, ldc: n }
    }

    #[test]
    fn every_tile_is_what_the_kernel_source_says() {
        let mut count = 0;
        for tile in tiles() {
            let forms = ["rows_of_groups<Form::Nt, ", "rows_of_groups<Form::Nn, ", "sums_over_groups<"];
            for (name, form) in tile.names.iter().zip(forms).filter(|(name, _)| !name.is_empty()) {
                let line = SOURCE.lines().find(|line| line.contains(&format!(" {name}("))).expect(name);
                assert!(line.contains(&format!("__launch_bounds__({THREADS}, ")), "{name}");
                let from = line.find(form).expect(name) + form.len();
                let list = line[from..].split('>').next().expect(name);
                let numbers: Vec<usize> = list.split(',').filter_map(|part| part.trim().parse().ok()).collect();
                assert_eq!(
                    [numbers[0], numbers[1], numbers[2], numbers[5]],
                    [tile.rows, tile.cols, tile.depth, tile.stages],
                    "{name}"
                );
                assert_eq!(numbers[0] / numbers[3] * (numbers[1] / numbers[4]) * 32, THREADS as usize, "{name}");
                count += 1;
            }
        }
        assert_eq!(SOURCE.matches("extern \"C\" __global__").count(), count, "a kernel that is never chosen");
    }

    #[test]
    fn grids_hold_all_tiles_that_groups_can_have() {
        for (groups, rows) in [(1, 1), (4, 3), (8, 1000), (128, 129), (32, 32_768)] {
            let shape = shape(Form::Nt, [groups, rows, 0, 256, 128]);
            // The worst case: all groups but one have one row.
            let used = groups.min(rows);
            let worst = used - 1 + (rows - (used - 1)).div_ceil(64);
            let most = most_row_tiles(&shape, 64);
            assert!(most >= worst && most <= rows.div_ceil(64) + used, "{shape:?}: {most} row tiles, {worst} needed");
        }
    }

    #[test]
    fn every_shape_has_a_kernel_on_every_card() {
        for card in [DATACENTER, SMALL_CARD, Card { max_shared_bytes: 101_376, num_sms: 1 }] {
            for form in [Form::Nt, Form::Nn, Form::Tn] {
                for (groups, rows) in [(1, 1), (8, 64), (32, 32_768), (128, 4096)] {
                    for m in [8, 16, 64, 72, 2880] {
                        for n in [8, 16, 64, 72, 2880, 5760] {
                            for k in [8, 64, 72, 2880] {
                                let shape = shape(form, [groups, rows, m, n, k]);
                                let plan = choose(&shape, card);
                                assert!(!plan.kernel.is_empty() && plan.blocks > 0, "{shape:?}");
                                assert!(plan.shared_bytes <= card.max_shared_bytes, "{shape:?}: {plan:?}");
                                assert!(i32::try_from(plan.blocks).is_ok(), "{shape:?}: {plan:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn experts_take_large_tiles_and_adapters_thin_ones() {
        let kernel = |form, sizes, card| choose(&shape(form, sizes), card).kernel;
        assert_eq!(kernel(Form::Nt, [32, 32_768, 0, 5760, 2880], DATACENTER), "grouped_nt_128x128x64");
        assert_eq!(kernel(Form::Nn, [32, 32_768, 0, 2880, 5760], SMALL_CARD), "grouped_nn_128x128x32");
        assert_eq!(kernel(Form::Nt, [128, 1024, 0, 1536, 2048], DATACENTER), "grouped_nt_64x64");
        assert_eq!(kernel(Form::Nt, [32, 32_768, 0, 16, 2880], DATACENTER), "grouped_nt_64x16");
        assert_eq!(kernel(Form::Nt, [32, 32_768, 0, 2880, 32], DATACENTER), "grouped_nt_64x64_thin");
        assert_eq!(kernel(Form::Tn, [32, 32_768, 5760, 2880, 0], DATACENTER), "grouped_tn_128x128x64");
        assert_eq!(kernel(Form::Tn, [32, 32_768, 16, 2880, 0], DATACENTER), "grouped_tn_16x64");
        assert_eq!(kernel(Form::Tn, [32, 32_768, 2880, 32, 0], DATACENTER), "grouped_tn_64x32");
    }

    #[test]
    fn flags_follow_addresses_and_strides() {
        let shape = shape(Form::Nn, [4, 100, 0, 64, 128]);
        let operands = GroupedOperands { a: 256, b: 512, c: 1024, bias: 0, offsets: 64, alpha: 1.0, beta: 0.0 };
        let all = A_VECTOR | B_VECTOR | C_VECTOR | SOURCE_VECTOR;
        assert_eq!((params(&shape, &operands).flags, params(&shape, &operands).raster_rows), (all, 16));
        assert_eq!(params(&GroupedShape { k: 32, ..shape }, &operands).raster_rows, 1);
        assert_eq!(params(&shape, &GroupedOperands { c: 1026, ..operands }).flags, A_VECTOR | B_VECTOR);
        assert_eq!(params(&GroupedShape { ldb: 68, ..shape }, &operands).flags, all & !B_VECTOR);
        // 68 values are a multiple of 16 bytes as f32, not as bf16.
        let sums = GroupedShape { form: Form::Tn, m: 128, k: 0, ldc: 68, ..shape };
        assert_eq!(params(&sums, &operands).flags, OUT_F32 | all);
    }
}
