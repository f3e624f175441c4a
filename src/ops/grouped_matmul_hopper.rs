//! Products by group on Hopper's tensor cores (`kernels/grouped_matmul_hopper.cu`): for which products, how wide a tile is, how they are laid out.

use super::grouped_matmul_plan::{
    FEW_ROWS_A_GROUP, GroupedOperands, GroupedParams, GroupedShape, most_row_tiles, params, rows_aligned,
};
use crate::tensor::Gpu;
use crate::tensor::cuda::blaslt::Form;
use crate::tensor::cuda::tensor_map::{BOX_COLUMNS, Boxes, TensorMap};
use crate::tensor::cuda::{DeviceFacts, Launch};
use crate::tensor::dtype::DType;

/// What the kernels take, by value: `HopperParams` there.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
struct HopperParams {
    a: TensorMap,
    b: TensorMap,
    product: GroupedParams,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<HopperParams>() == 384 && align_of::<HopperParams>() == 64, "layout of HopperParams");
    assert!(offset_of!(HopperParams, b) == 128 && offset_of!(HopperParams, product) == 256);
};

/// Kernels of one width of tiles, for nt and nn. Two blocks of a cluster compute two tiles, and each reads half of what both need.
#[derive(Debug)]
struct Tile {
    names: [&'static str; 2],
    cols: usize,
    /// What a column costs: narrow tiles read more for each product.
    cost: f64,
}

/// Best first where several serve equally well. 240 divides 2,880 and 5,760, the widths of gpt-oss.
const TILES: [Tile; 3] = [
    Tile { names: ["grouped_nt_hopper_128x256", "grouped_nn_hopper_128x256"], cols: 256, cost: 1.0 },
    Tile { names: ["grouped_nt_hopper_128x240", "grouped_nn_hopper_128x240"], cols: 240, cost: 1.0 },
    Tile { names: ["grouped_nt_hopper_128x128", "grouped_nn_hopper_128x128"], cols: 128, cost: 1.25 },
];

/// Rows of a tile, length of the sums that a stage holds, stages, threads.
const ROWS: usize = 128;
const DEPTH: usize = BOX_COLUMNS;
const STAGES: usize = 4;
const THREADS: u32 = 384;
/// Biases that are on their way, and bytes of a tile's.
const BIASES: usize = 3;
const BIAS_BYTES: usize = 512;
/// Bytes that a warp writes through.
const STAGING_BYTES: usize = 2 * 16 * 64 * 2;
/// Warps that multiply.
const WARPS: usize = 8;
/// Blocks of a cluster.
const PAIR: usize = 2;
/// Narrowest result: below, the narrow tiles of every card waste less.
const MIN_WIDTH: usize = 64;

impl Tile {
    /// Shared memory: up to 1,024 bytes before the first stage, the stages, what is written, biases, and two barriers a stage.
    fn shared_bytes(&self, form: Form) -> u32 {
        let b_lines = if form == Form::Nt { self.cols } else { self.cols.next_multiple_of(BOX_COLUMNS) };
        let stages = STAGES * ((ROWS + b_lines) * DEPTH * 2 + 16);
        (1024 + stages + WARPS * STAGING_BYTES + BIASES * BIAS_BYTES) as u32
    }

    /// The tile that computes the fewest columns for a width.
    fn of_width(n: usize) -> &'static Self {
        let cost = |tile: &Self| (n.div_ceil(tile.cols) * tile.cols) as f64 * tile.cost;
        TILES.iter().reduce(|best, tile| if cost(tile) < cost(best) { tile } else { best }).unwrap_or(&TILES[0])
    }
}

/// Whether the kernels run on a card and take a product.
pub fn takes(facts: &DeviceFacts, shape: &GroupedShape, operands: &GroupedOperands) -> bool {
    let &GroupedShape { form, n, k, lda, ldb, ldc, .. } = shape;
    facts.compute_capability == (9, 0)
        && !facts.laptop_tiles
        && form != Form::Tn
        && n.is_multiple_of(8)
        && k.is_multiple_of(8)
        // With one stage of sums the copies would be more tiles ahead than there is room for biases.
        && k > DEPTH
        && operands.bias.is_multiple_of(16)
        && [(operands.a, lda), (operands.b, ldb), (operands.c, ldc)]
            .iter()
            .all(|&(address, ld)| rows_aligned(address, ld, DType::Bf16))
}

/// Whether the kernels are the better choice for a product that they take.
pub fn is_better(shape: &GroupedShape) -> bool {
    shape.n > MIN_WIDTH && shape.rows.div_ceil(shape.groups) > FEW_ROWS_A_GROUP
}

/// Queues a product that [`takes`] accepts. What the copy engine is told goes with the launch, so a graph that records it has a copy.
pub fn launch(gpu: &Gpu, shape: &GroupedShape, operands: &GroupedOperands) {
    let &GroupedShape { form, groups, rows, n, k, lda, ldb, .. } = shape;
    let tile = Tile::of_width(n);
    let a = Boxes { pointer: operands.a, sizes: [k, rows, 1], strides: [lda, 0], box_rows: ROWS / PAIR };
    let (name, b_sizes, b_box_rows) =
        if form == Form::Nt { (0, [k, n, groups], tile.cols / PAIR) } else { (1, [n, k, groups], DEPTH) };
    let b = Boxes { pointer: operands.b, sizes: b_sizes, strides: [ldb, b_sizes[1] * ldb], box_rows: b_box_rows };
    let params = HopperParams { a: gpu.tensor_map(&a, 2), b: gpu.tensor_map(&b, 3), product: params(shape, operands) };
    let (kernel, shared_bytes) = (tile.names[name], tile.shared_bytes(form));
    gpu.allow_shared_bytes(kernel, shared_bytes);
    // Blocks stay: as many as there are multiprocessors, in whole clusters. A tile may have a cluster for itself.
    let pairs = (gpu.facts().num_sms as usize / PAIR).max(1);
    let blocks = (most_row_tiles(shape, ROWS) * n.div_ceil(tile.cols)).min(pairs) * PAIR;
    gpu.launch_struct(kernel, Launch { shared_bytes, ..Launch::new(blocks, THREADS) }, &params);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../../kernels/grouped_matmul_hopper.cu");

    #[test]
    fn every_tile_is_what_the_kernel_source_says() {
        let mut count = 0;
        for tile in &TILES {
            for (name, along) in tile.names.into_iter().zip([true, false]) {
                let start = "extern \"C\" __global__ void TANDEM_PAIRS __launch_bounds__";
                let start = format!("{start}({THREADS}, 1) {name}(");
                let line = SOURCE.lines().find(|line| line.starts_with(&start)).expect(name);
                assert!(line.contains(&format!("multiply<{}, {along}>(p)", tile.cols)), "{name}");
                count += 1;
            }
            for form in [Form::Nt, Form::Nn] {
                assert!(tile.shared_bytes(form) <= 232_448, "{tile:?}: more than a block of this card can have");
            }
        }
        assert_eq!(SOURCE.matches("extern \"C\" __global__").count(), count, "a kernel that is never chosen");
        for constants in [
            format!("BM = {ROWS}, DEPTH = {DEPTH}, STAGES = {STAGES}, WARPGROUP = {};", THREADS / 3),
            format!("BIASES = {BIASES}, BIAS_BYTES = {BIAS_BYTES};"),
            "PIECE_COLUMNS = 64, PIECE_BYTES = 16 * PIECE_COLUMNS * 2, STAGING_BYTES = 2 * PIECE_BYTES;".to_owned(),
            format!("#define TANDEM_PAIRS __cluster_dims__({PAIR}, 1, 1)"),
        ] {
            assert!(SOURCE.contains(&constants), "{constants}");
        }
        assert_eq!((WARPS, STAGING_BYTES), (THREADS as usize / 32 * 2 / 3, 4096));
    }

    #[test]
    fn tiles_fit_the_widths_of_models() {
        for (n, cols) in [(2880, 240), (5760, 240), (4096, 256), (1536, 256), (14_336, 256), (128, 128), (72, 128)] {
            assert_eq!(Tile::of_width(n).cols, cols, "{n} columns");
        }
    }

    #[test]
    fn only_aligned_products_on_hopper_are_taken() {
        let mut facts = DeviceFacts::assumed(1 << 30);
        let shape =
            GroupedShape { form: Form::Nt, groups: 4, rows: 1000, m: 0, n: 256, k: 128, lda: 128, ldb: 136, ldc: 264 };
        let operands = GroupedOperands { a: 256, b: 512, c: 1024, bias: 0, offsets: 64, alpha: 1.0, beta: 0.0 };
        assert!(!takes(&facts, &shape, &operands));
        facts.compute_capability = (9, 0);
        assert!(takes(&facts, &shape, &operands) && is_better(&shape));
        assert!(!takes(&facts, &GroupedShape { form: Form::Tn, ..shape }, &operands));
        assert!(!takes(&facts, &GroupedShape { ldb: 132, ..shape }, &operands));
        assert!(!takes(&facts, &shape, &GroupedOperands { a: 264, ..operands }));
        assert!(!takes(&facts, &GroupedShape { k: 64, ..shape }, &operands));
        assert!(!takes(&facts, &shape, &GroupedOperands { bias: 8, ..operands }));
        assert!(!is_better(&GroupedShape { groups: 100, ..shape }));
        facts.laptop_tiles = true;
        assert!(!takes(&facts, &shape, &operands));
    }
}
