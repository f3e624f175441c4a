//! Which of the own kernels (`kernels/matmul.cu`) computes a matrix product on a GPU without cuBLASLt, and how it is laid out.
//!
//! A product is cut into tiles, one block each. Large tiles read their operands less often but fill a card badly when there are few of them;
//! thin outputs (LoRA's z and dA, one token of generation) have tiles of their own. When even those leave most of a card idle, the sums are
//! split over k: the slices go to a workspace and a second kernel adds them in order, so that equal inputs give equal bits.
//! The choice depends on the shape and the card alone, never on time or chance.

use crate::tensor::cuda::blaslt::{Form, Operands, Shape};
use crate::tensor::dtype::DType;

/// What `kernels/matmul.cu` takes, by value: `MatmulParams` of `kernels/matmul.cuh`. Addresses are device addresses, strides are in values.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulParams {
    /// First operand, bf16.
    pub a: u64,
    /// Second operand, bf16.
    pub b: u64,
    /// Result, bf16 or f32.
    pub c: u64,
    /// What is added, scaled by beta, in the format of `c`: `c` itself when it accumulates.
    pub source: u64,
    /// f32 [split, m, n], or 0 when the product is not split.
    pub partials: u64,
    /// Values between rows of `a`.
    pub lda: i64,
    /// Values between rows of `b`.
    pub ldb: i64,
    /// Values between rows of `c`.
    pub ldc: i64,
    /// Values between rows of `source`.
    pub ld_source: i64,
    /// Rows of `c`.
    pub m: i32,
    /// Columns of `c`.
    pub n: i32,
    /// Length of the sums.
    pub k: i32,
    /// Length of the sums of one slice.
    pub k_slice: i32,
    /// Tile rows that are walked together.
    pub raster_rows: i32,
    /// [`OUT_F32`], [`A_VECTOR`], [`B_VECTOR`], [`C_VECTOR`], [`SOURCE_VECTOR`].
    pub flags: u32,
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on `source`; with 0 it is not read.
    pub beta: f32,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<MatmulParams>() == 104 && align_of::<MatmulParams>() == 8, "layout of MatmulParams");
    assert!(offset_of!(MatmulParams, source) == 24 && offset_of!(MatmulParams, partials) == 32);
    assert!(offset_of!(MatmulParams, ldc) == 56 && offset_of!(MatmulParams, ld_source) == 64);
    assert!(offset_of!(MatmulParams, k_slice) == 84 && offset_of!(MatmulParams, flags) == 92);
    assert!(offset_of!(MatmulParams, beta) == 100);
};

/// Flag: `c` and `source` are f32, not bf16.
pub const OUT_F32: u32 = 1;
/// Flag: rows of `a` start at multiples of 16 bytes.
pub const A_VECTOR: u32 = 2;
/// Flag: rows of `b` start at multiples of 16 bytes.
pub const B_VECTOR: u32 = 4;
/// Flag: rows of `c` start at multiples of 16 bytes.
pub const C_VECTOR: u32 = 8;
/// Flag: rows of `source` start at multiples of 16 bytes.
pub const SOURCE_VECTOR: u32 = 16;

/// Most workspace a plan asks for: a card keeps one buffer of this size.
pub const MAX_WORKSPACE_BYTES: usize = 32 << 20;

/// What the choice needs to know about a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// Shared memory that a block may ask for, in bytes: 101,376 on laptops' cards.
    pub max_shared_bytes: u32,
    /// Multiprocessors.
    pub num_sms: u32,
}

/// The launch that adds the slices of a split product; it takes the same parameters as the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Second {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block; it needs no dynamic shared memory.
    pub block: u32,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks: tiles, 1, slices.
    pub grid: [u32; 3],
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// Slices that the sums are split into.
    pub split: u32,
    /// Length of the sums of one slice.
    pub k_slice: usize,
    /// Tile rows that are walked together.
    pub raster_rows: u32,
    /// Bytes of the f32 workspace; 0 when the product is not split.
    pub workspace_bytes: usize,
    /// The second launch of a split product.
    pub second: Option<Second>,
}

/// One kernel of `kernels/matmul.cu`, in its three forms.
#[derive(Debug)]
struct Tile {
    /// Names for nt, nn, tn.
    names: [&'static str; 3],
    /// Rows and columns of `c` a block computes.
    rows: usize,
    cols: usize,
    /// Length of the sums a stage holds.
    depth: usize,
    stages: usize,
    threads: u32,
    /// Blocks that registers let a multiprocessor hold.
    resident: u32,
    /// Multiply-adds a clock that a busy multiprocessor reaches (H200, measured): what weighs one tile against another.
    rate: f64,
}

macro_rules! tile {
    ($name:literal, $rows:literal x $cols:literal x $depth:literal, $stages:literal stages, $threads:literal threads, $resident:literal a multiprocessor, $rate:literal) => {
        Tile {
            names: [concat!("matmul_nt_", $name), concat!("matmul_nn_", $name), concat!("matmul_tn_", $name)],
            rows: $rows,
            cols: $cols,
            depth: $depth,
            stages: $stages,
            threads: $threads,
            resident: $resident,
            rate: $rate,
        }
    };
}

/// Tiles for outputs that are large both ways, best first where several serve equally well.
const LARGE: [Tile; 4] = [
    tile!("256x128x64", 256 x 128 x 64, 3 stages, 256 threads, 1 a multiprocessor, 950.0),
    tile!("128x128x64", 128 x 128 x 64, 3 stages, 128 threads, 2 a multiprocessor, 920.0),
    tile!("128x128x32", 128 x 128 x 32, 3 stages, 128 threads, 2 a multiprocessor, 900.0),
    tile!("64x64", 64 x 64 x 64, 3 stages, 128 threads, 4 a multiprocessor, 650.0),
];

/// Tile for short sums, where reading and writing `c` is most of the work.
const THIN: Tile = tile!("64x64_thin", 64 x 64 x 32, 2 stages, 128 threads, 4 a multiprocessor, 650.0);
/// Longest sums that [`THIN`] serves: two of its stages.
const THIN_DEPTH: usize = 64;

/// Tiles for outputs with few columns, then few rows: up to [`NARROWEST`], up to [`NARROW`].
const FEW_COLUMNS: [Tile; 2] = [
    tile!("64x16", 64 x 16 x 64, 6 stages, 128 threads, 4 a multiprocessor, 400.0),
    tile!("64x32", 64 x 32 x 64, 4 stages, 128 threads, 4 a multiprocessor, 500.0),
];
const FEW_ROWS: [Tile; 2] = [
    tile!("16x64", 16 x 64 x 64, 6 stages, 128 threads, 4 a multiprocessor, 400.0),
    tile!("32x64", 32 x 64 x 64, 4 stages, 128 threads, 4 a multiprocessor, 500.0),
];

/// Most columns (rows) that the narrow tiles serve: the wider of the two serves two tiles' worth.
const NARROWEST: usize = 16;
const NARROW: usize = 64;

/// Name of the kernel that adds the slices of a split product, its threads, and the values each of them adds.
const REDUCE: &str = "matmul_reduce";
const REDUCE_THREADS: u32 = 256;
const REDUCE_PER_THREAD: usize = 4;

/// Slices start at multiples of this many of the sums, so that they keep the operands' alignment.
const SLICE_STEP: usize = 64;
/// Sums shorter than this are not split further.
const MIN_SLICE: usize = 256;
/// Tile rows walked together (measured: 2 to 32 are equal on a card with 60 MB of L2; fewer keep a small cache's working set small).
const RASTER_ROWS: usize = 8;
/// What a tile costs beside its sums, in sums: filling the stages and writing `c`.
const TILE_OVERHEAD: usize = 128;
/// Part of its resident blocks that keep a multiprocessor as busy as all of them (measured: one of two blocks reaches 0.86 of their rate).
const ALONE: f64 = 0.58;
/// Shared memory that the driver takes from a multiprocessor for every block.
const RESERVED_SHARED_BYTES: u32 = 1024;
/// Clocks that a second launch costs, and bytes of partial sums a multiprocessor moves a clock.
const SECOND_CLOCKS: f64 = 6000.0;
const BYTES_PER_CLOCK: f64 = 16.0;

impl Tile {
    const fn shared_bytes(&self) -> u32 {
        ((self.rows + self.cols) * self.depth * 2 * self.stages) as u32
    }

    fn num_tiles(&self, shape: &Shape) -> usize {
        shape.m.div_ceil(self.rows) * shape.n.div_ceil(self.cols)
    }

    /// Estimated clocks for a product that is split into `split` slices. Blocks run in rounds of as many as the card holds. A multiprocessor
    /// with fewer blocks than `resident` is not as busy as `rate` assumes: below [`ALONE`] of them, fewer blocks take no less time.
    fn clocks(&self, shape: &Shape, card: Card, split: usize) -> f64 {
        let k_slice = slice_length(shape.k, split) + TILE_OVERHEAD;
        let block = (self.rows * self.cols * k_slice) as f64 / self.rate;
        let sms = card.num_sms.max(1) as usize;
        let fit = (card.max_shared_bytes + RESERVED_SHARED_BYTES) / (self.shared_bytes() + RESERVED_SHARED_BYTES);
        let resident = self.resident.min(fit.max(1)) as usize;
        let round = |blocks: usize| (blocks as f64).max(f64::from(self.resident) * ALONE);
        let blocks = self.num_tiles(shape) * split;
        let (full, rest) = (blocks / (sms * resident), blocks % (sms * resident));
        let rounds = full as f64 * round(resident) + if rest == 0 { 0.0 } else { round(rest.div_ceil(sms)) };
        let second = if split == 1 {
            0.0
        } else {
            SECOND_CLOCKS + (split * shape.m * shape.n * 8) as f64 / (sms as f64 * BYTES_PER_CLOCK)
        };
        rounds * block + second
    }
}

/// Length of a slice when sums of length `k` are split into about `split` slices.
fn slice_length(k: usize, split: usize) -> usize {
    if split <= 1 { k.max(1) } else { k.div_ceil(split).next_multiple_of(SLICE_STEP) }
}

/// Bytes of partial sums: f32 [split, m, n].
fn workspace_bytes(shape: &Shape, split: usize) -> usize {
    if split > 1 { split * shape.m * shape.n * size_of::<f32>() } else { 0 }
}

/// The kernel and the layout for a product.
///
/// # Panics
/// When a size is zero (there is nothing to launch) or beyond 2³⁰, or when a stride is shorter than a row.
pub fn choose(shape: &Shape, card: Card) -> Plan {
    let Shape { form, m, n, k, lda, ldb, ldc, ld_source, .. } = *shape;
    assert!(m > 0 && n > 0, "an empty product needs no kernel");
    assert!(m <= 1 << 30 && n <= 1 << 30 && k <= 1 << 30, "sizes of a product are 32-bit numbers");
    let (a_cols, b_cols) = match form {
        Form::Nt => (k, k),
        Form::Nn => (k, n),
        Form::Tn => (m, n),
    };
    assert!(lda >= a_cols && ldb >= b_cols && ldc >= n && ld_source >= n, "rows of a matrix must not overlap");

    let sms = card.num_sms.max(1) as usize;
    let (few_columns, few_rows) = (n <= NARROW, m <= NARROW);
    let (tile, split) = if few_columns || few_rows {
        let tiles = if few_columns { &FEW_COLUMNS } else { &FEW_ROWS };
        let tile = &tiles[usize::from(if few_columns { n } else { m } > NARROWEST)];
        // Bound by reading the long operand: one block a multiprocessor keeps enough of it under way.
        (tile, (sms / tile.num_tiles(shape)).clamp(1, (k / MIN_SLICE).max(1)))
    } else if k <= THIN_DEPTH {
        (&THIN, 1)
    } else {
        cheapest(shape, card)
    };

    let k_slice = slice_length(k, split);
    let split = if split == 1 { 1 } else { k.div_ceil(k_slice) };
    let second = (split > 1).then(|| Second {
        kernel: REDUCE,
        grid: [(m * n).div_ceil(REDUCE_PER_THREAD * REDUCE_THREADS as usize) as u32, 1, 1],
        block: REDUCE_THREADS,
    });
    let name = match form {
        Form::Nt => 0,
        Form::Nn => 1,
        Form::Tn => 2,
    };
    // With short sums the rows of `c` are walked one after the other, as memory has them.
    let raster_rows = if k <= THIN_DEPTH { 1 } else { RASTER_ROWS.min(m.div_ceil(tile.rows)) };
    Plan {
        kernel: tile.names[name],
        grid: [tile.num_tiles(shape) as u32, 1, split as u32],
        block: tile.threads,
        shared_bytes: tile.shared_bytes(),
        split: split as u32,
        k_slice,
        raster_rows: raster_rows as u32,
        workspace_bytes: workspace_bytes(shape, split),
        second,
    }
}

/// The tile and the number of slices that the estimate likes best.
fn cheapest(shape: &Shape, card: Card) -> (&'static Tile, usize) {
    let mut best = (&LARGE[LARGE.len() - 1], 1, f64::INFINITY);
    for tile in LARGE.iter().filter(|tile| tile.shared_bytes() <= card.max_shared_bytes) {
        for split in [1, 2, 3, 4, 6, 8, 12, 16] {
            if split > 1 && (shape.k / split < MIN_SLICE || workspace_bytes(shape, split) > MAX_WORKSPACE_BYTES) {
                break;
            }
            let clocks = tile.clocks(shape, card, split);
            if clocks < best.2 {
                best = (tile, split, clocks);
            }
        }
    }
    (best.0, best.1)
}

impl Plan {
    /// Parameters of both launches. `workspace` is the address of [`Plan::workspace_bytes`] bytes, aligned to 16; 0 where none are needed.
    pub fn params(&self, shape: &Shape, operands: &Operands, workspace: u64) -> MatmulParams {
        let Shape { m, n, k, lda, ldb, ldc, ld_source, out, .. } = *shape;
        let Operands { a, b, c, source, alpha, beta } = *operands;
        assert!((self.split > 1) == (workspace != 0) && workspace.is_multiple_of(16), "workspace of a split product");
        let flag = |flag, set: bool| if set { flag } else { 0 };
        let rows_aligned = |address: u64, ld: usize, dtype: DType| {
            address.is_multiple_of(16) && (ld * dtype.num_bytes()).is_multiple_of(16)
        };
        MatmulParams {
            a,
            b,
            c,
            source,
            partials: workspace,
            lda: lda as i64,
            ldb: ldb as i64,
            ldc: ldc as i64,
            ld_source: ld_source as i64,
            m: m as i32,
            n: n as i32,
            k: k as i32,
            k_slice: self.k_slice as i32,
            raster_rows: self.raster_rows as i32,
            flags: flag(OUT_F32, out == DType::F32)
                | flag(A_VECTOR, rows_aligned(a, lda, DType::Bf16))
                | flag(B_VECTOR, rows_aligned(b, ldb, DType::Bf16))
                | flag(C_VECTOR, rows_aligned(c, ldc, out))
                | flag(SOURCE_VECTOR, rows_aligned(source, ld_source, out)),
            alpha,
            beta,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../../kernels/matmul.cu");
    const DATACENTER: Card = Card { max_shared_bytes: 232_448, num_sms: 132 };
    const LAPTOP: Card = Card { max_shared_bytes: 101_376, num_sms: 20 };

    fn shape(form: Form, [m, n, k]: [usize; 3]) -> Shape {
        let (lda, ldb) = match form {
            Form::Nt => (k, k),
            Form::Nn => (k, n),
            Form::Tn => (m, n),
        };
        Shape { form, m, n, k, lda, ldb, ldc: n, ld_source: n, out: DType::Bf16 }
    }

    fn tiles() -> impl Iterator<Item = &'static Tile> {
        LARGE.iter().chain([&THIN]).chain(&FEW_COLUMNS).chain(&FEW_ROWS)
    }

    /// Kernel, its rows, columns, depth, stages and threads, as the source instantiates it.
    fn instantiated(name: &str) -> [usize; 5] {
        let line = SOURCE.lines().find(|line| line.contains(&format!(" {name}("))).expect(name);
        let list = |start: &str, end: char| -> Vec<usize> {
            let from = line.find(start).expect(start) + start.len();
            let to = line[from..].find(end).expect("an end") + from;
            line[from..to].split(',').filter_map(|part| part.trim().parse().ok()).collect()
        };
        let (bounds, tile) = (list("__launch_bounds__(", ')'), list("product<", '>'));
        assert_eq!(bounds[0], tile[0] / tile[3] * (tile[1] / tile[4]) * 32, "{name}: launch bounds");
        [tile[0], tile[1], tile[2], tile[5], bounds[0]]
    }

    #[test]
    fn every_tile_is_what_the_kernel_source_says() {
        for tile in tiles() {
            for (name, form) in tile.names.iter().zip(["Nt", "Nn", "Tn"]) {
                let want = [tile.rows, tile.cols, tile.depth, tile.stages, tile.threads as usize];
                assert_eq!(instantiated(name), want, "{name}");
                assert!(
                    SOURCE
                        .contains(&format!("{name}(const __grid_constant__ MatmulParams p) {{ product<Form::{form}, "))
                );
            }
        }
        let count = SOURCE.matches("extern \"C\" __global__").count();
        assert_eq!(count, tiles().count() * 3 + 1, "a kernel that is never chosen");
        assert!(SOURCE.contains(&format!("{REDUCE}(const __grid_constant__ MatmulParams p)")));
    }

    #[test]
    fn all_shapes_are_covered_by_tiles_and_slices_on_every_card() {
        for card in [DATACENTER, LAPTOP, Card { max_shared_bytes: 101_376, num_sms: 1 }] {
            for form in [Form::Nt, Form::Nn, Form::Tn] {
                for m in [1, 4, 16, 17, 63, 64, 65, 300, 8192, 100_000] {
                    for n in [1, 4, 16, 33, 64, 255, 4096, 151_669] {
                        for k in [0, 1, 4, 16, 65, 512, 8191, 24_576] {
                            let shape = shape(form, [m, n, k]);
                            let plan = choose(&shape, card);
                            let tile = tiles().find(|tile| tile.names.contains(&plan.kernel)).expect("a known tile");
                            assert!(plan.shared_bytes <= card.max_shared_bytes, "{shape:?}: {plan:?}");
                            assert_eq!(plan.grid, [tile.num_tiles(&shape) as u32, 1, plan.split]);
                            assert!(plan.grid[0] as usize * tile.rows * tile.cols >= m * n);
                            // The slices cover k, and none is empty.
                            assert!(plan.split as usize * plan.k_slice >= k, "{shape:?}: {plan:?}");
                            assert!(
                                plan.split == 1 || (plan.split as usize - 1) * plan.k_slice < k,
                                "{shape:?}: {plan:?}"
                            );
                            assert!(plan.split == 1 || plan.k_slice.is_multiple_of(SLICE_STEP));
                            assert_eq!(plan.second.is_some(), plan.split > 1);
                            assert_eq!(plan.workspace_bytes > 0, plan.split > 1);
                            assert!(plan.workspace_bytes <= MAX_WORKSPACE_BYTES, "{shape:?}: {plan:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn big_products_take_big_tiles_and_thin_ones_thin_tiles() {
        let kernel = |form, sizes, card| choose(&shape(form, sizes), card).kernel;
        assert_eq!(kernel(Form::Nt, [8192, 4096, 4096], DATACENTER), "matmul_nt_256x128x64");
        assert!(choose(&shape(Form::Nn, [8192, 4096, 4096]), LAPTOP).shared_bytes <= LAPTOP.max_shared_bytes);
        assert_eq!(kernel(Form::Nt, [8192, 16, 4096], LAPTOP), "matmul_nt_64x16");
        assert_eq!(kernel(Form::Tn, [16, 4096, 8192], LAPTOP), "matmul_tn_16x64");
        assert_eq!(kernel(Form::Tn, [24, 4096, 8192], LAPTOP), "matmul_tn_32x64");
        assert_eq!(kernel(Form::Nt, [8192, 4096, 16], LAPTOP), "matmul_nt_64x64_thin");
    }

    #[test]
    fn tall_sums_of_a_small_output_are_split() {
        let plan = choose(&shape(Form::Tn, [16, 4096, 8192]), DATACENTER);
        assert_eq!((plan.split, plan.k_slice, plan.workspace_bytes), (2, 4096, 2 * 16 * 4096 * 4));
        let second = plan.second.expect("a second launch");
        assert_eq!((second.kernel, second.grid, second.block), ("matmul_reduce", [64, 1, 1], 256));
        // One slice fills a small card.
        assert_eq!(choose(&shape(Form::Tn, [16, 4096, 8192]), LAPTOP).split, 1);
    }

    #[test]
    fn flags_follow_addresses_and_strides() {
        let plain = shape(Form::Nt, [100, 64, 128]);
        let plan = choose(&plain, LAPTOP);
        let operands = Operands { a: 256, b: 512, c: 1024, source: 1024, alpha: 1.0, beta: 0.0 };
        let workspace = if plan.split > 1 { 4096 } else { 0 };
        let flags = |shape: &Shape, operands: &Operands| plan.params(shape, operands, workspace).flags;
        let all = A_VECTOR | B_VECTOR | C_VECTOR | SOURCE_VECTOR;
        assert_eq!(flags(&plain, &operands), all);
        assert_eq!(flags(&plain, &Operands { a: 258, ..operands }), all & !A_VECTOR);
        assert_eq!(flags(&plain, &Operands { source: 1032, ..operands }), all & !SOURCE_VECTOR);
        assert_eq!(flags(&Shape { ldb: 132, ..plain }, &operands), all & !B_VECTOR);
        // 68 values are a multiple of 16 bytes as f32, not as bf16.
        assert_eq!(flags(&Shape { ldc: 68, ..plain }, &operands), all & !C_VECTOR);
        assert_eq!(flags(&Shape { ld_source: 68, ..plain }, &operands), all & !SOURCE_VECTOR);
        let f32s = Shape { ldc: 68, ld_source: 68, out: DType::F32, ..plain };
        assert_eq!(flags(&f32s, &operands), OUT_F32 | all);
        let params = plan.params(&plain, &operands, workspace);
        assert_eq!((params.m, params.n, params.k, params.ldc), (100, 64, 128, 64));
        let apart = plan.params(&Shape { ld_source: 96, ..plain }, &Operands { source: 2048, ..operands }, workspace);
        assert_eq!((apart.c, apart.ldc, apart.source, apart.ld_source), (1024, 64, 2048, 96));
    }
}
