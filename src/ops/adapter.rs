//! Gradients of adapters: products with r rows or columns, which cost what reading their large operand costs, so it is read once.
//!
//! `dA += dzᵀ·x`, `dB += dyᵀ·z`, and `dz = s·dy·B` in the pass over dy that makes dB.

use std::mem::offset_of;

use super::{elementwise, matmul};
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Gpu, MemoryCategory, Tensor, View, ViewMut};

/// Layers of one projection.
const MAX_LAYERS: usize = 3;
/// Rows of a block's tile, and tiles in flight.
const TILE_ROWS: usize = 64;
const STAGES: usize = 2;
/// Threads of a block.
const THREADS: u32 = 256;
/// Blocks of these kernels, and of those of `swiglu_lora`, that a multiprocessor holds at once.
const BLOCKS_PER_SM: usize = 2;

/// A kernel for ranks up to `rank`, and how many columns its blocks have.
#[derive(Debug, PartialEq, Eq)]
struct Kernel {
    rank: usize,
    name: &'static str,
    finish: &'static str,
    columns: usize,
    with_b: bool,
}

const KERNELS: [Kernel; 6] = [
    Kernel { rank: 16, name: "adapter_r16", finish: "adapter_finish_r16", columns: 256, with_b: false },
    Kernel { rank: 32, name: "adapter_r32", finish: "adapter_finish_r32", columns: 256, with_b: false },
    Kernel { rank: 48, name: "adapter_r48", finish: "adapter_finish_r48", columns: 256, with_b: false },
    Kernel { rank: 96, name: "adapter_r96", finish: "adapter_finish_r96", columns: 128, with_b: false },
    Kernel { rank: 16, name: "adapter_b_r16", finish: "adapter_finish_r16", columns: 256, with_b: true },
    Kernel { rank: 32, name: "adapter_b_r32", finish: "adapter_finish_r32", columns: 128, with_b: true },
];

impl Kernel {
    /// For rank `rank`, if there is one: ranks are multiples of 8.
    fn choose(rank: usize, with_b: bool) -> Option<&'static Self> {
        let fits = |kernel: &&Self| kernel.with_b == with_b && rank <= kernel.rank;
        KERNELS.iter().find(fits).filter(|_| rank.is_multiple_of(8))
    }

    /// Tiles of y and z, and a slice of B; 16 bytes lie behind every row.
    fn shared_bytes(&self) -> u32 {
        let b = if self.with_b { self.rank * (self.columns + 8) } else { 0 };
        (2 * (STAGES * TILE_ROWS * (self.columns + 8 + self.rank + 8) + b)) as u32
    }
}

/// How many blocks share the rows of every column block, and the rows of each, in whole tiles: as many blocks in all as the card holds at once.
pub(super) fn split_rows(gpu: &Gpu, column_blocks: usize, rows: usize, tile_rows: usize) -> (usize, usize) {
    let at_once = BLOCKS_PER_SM * gpu.facts().num_sms as usize;
    let row_blocks = (at_once / column_blocks).clamp(1, rows.div_ceil(tile_rows));
    let rows_per_block = rows.div_ceil(row_blocks).next_multiple_of(tile_rows);
    (rows.div_ceil(rows_per_block), rows_per_block)
}

/// Parameters of the kernels, laid out as in `kernels/adapter.cu`. Addresses are device addresses, strides count values.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct AdapterParams {
    y: u64,
    z: u64,
    b: u64,
    dz: u64,
    row_partials: u64,
    column_partials: u64,
    gradients: [u64; MAX_LAYERS],
    y_stride: i64,
    z_stride: i64,
    b_stride: i64,
    dz_stride: i64,
    first_column: [i32; MAX_LAYERS + 1],
    first_block: [i32; MAX_LAYERS + 1],
    rows: i32,
    r: i32,
    layers: i32,
    rows_per_block: i32,
    row_blocks: i32,
    across: i32,
    scale: f32,
    unused: i32,
}

const _: () = assert!(size_of::<AdapterParams>() == 168);
const _: () = assert!(offset_of!(AdapterParams, y_stride) == 72 && offset_of!(AdapterParams, rows) == 136);

/// `da` [R, in] `+= dzᵀ·x` with `dz` [T, R] and `x` [T, in].
pub fn a_gradient(device: &Device, dz: View<'_>, x: View<'_>, da: &mut Tensor) {
    assert_eq!((dz.rows(), da.rows(), da.cols()), (x.rows(), dz.cols(), x.cols()), "shapes of an adapter's A");
    match (device, Kernel::choose(dz.cols(), false)) {
        (Device::Cuda(gpu), Some(kernel)) => {
            let pass = Pass { y: x, z: dz, r: dz.cols(), widths: &[x.cols()], across: true, b: None };
            pass.launch(gpu, kernel, [da.pointer()].into_iter());
        }
        _ => matmul::tn(device, 1.0, dz, x, 1.0, da),
    }
}

/// `db` [N, r] `+= dyᵀ·z` with `dy` [T, N] and `z` [T, r].
pub fn b_gradient(device: &Device, dy: View<'_>, z: View<'_>, db: &mut Tensor) {
    assert_eq!((dy.rows(), db.rows(), db.cols()), (z.rows(), dy.cols(), z.cols()), "shapes of an adapter's B");
    match (device, Kernel::choose(z.cols(), false)) {
        (Device::Cuda(gpu), Some(kernel)) => {
            let pass = Pass { y: dy, z, r: z.cols(), widths: &[dy.cols()], across: false, b: None };
            pass.launch(gpu, kernel, [db.pointer()].into_iter());
        }
        _ => matmul::tn(device, 1.0, dy, z, 1.0, db),
    }
}

/// For layers beside each other, `widths` columns each (N in all) with adapters of one rank r (R = r for each layer): the columns of `dy` [T, ≥N + R]
/// behind its first N become `dz = scale·dy·B`, with `b` [N, R] a block for each layer and zeros elsewhere, and `db` of each layer [width, r]
/// `+= dyᵀ·z` with `z` [T, R].
pub fn b_gradients_and_dz(
    device: &Device,
    scale: f32,
    mut dy: ViewMut<'_>,
    widths: &[usize],
    z: View<'_>,
    b: View<'_>,
    db: &mut [&mut Tensor],
) {
    let (n, layers) = (widths.iter().sum::<usize>(), widths.len());
    let r = z.cols() / layers.max(1);
    assert_eq!((db.len(), r * layers, z.rows()), (layers, z.cols(), dy.rows()), "shapes of adapters' B");
    assert_eq!((b.rows(), b.cols()), (n, z.cols()), "shapes of adapters' B");
    assert!(n + z.cols() <= dy.cols(), "no room for dz behind {n} columns");
    assert!(db.iter().zip(widths).all(|(db, width)| db.len() == width * r), "gradients of adapters' B");
    match (device, Kernel::choose(r, true)) {
        (Device::Cuda(gpu), Some(kernel)) if layers <= MAX_LAYERS => {
            let dz = dy.as_view().columns(n, z.cols());
            let pass = Pass { y: dy.as_view().columns(0, n), z, r, widths, across: false, b: Some((b, scale, dz)) };
            pass.launch(gpu, kernel, db.iter().map(|db| db.pointer()));
        }
        _ => {
            let mut first = 0;
            for (layer, (db, &width)) in db.iter_mut().zip(widths).enumerate() {
                matmul::tn(device, 1.0, dy.as_view().columns(first, width), z.columns(layer * r, r), 1.0, &mut **db);
                first += width;
            }
            matmul::extend_nn(device, scale, dy.reborrow(), b);
            elementwise::round(device, dy.columns(n, z.cols()));
        }
    }
}

/// One pass over y on a GPU.
struct Pass<'a> {
    y: View<'a>,
    z: View<'a>,
    /// Columns of z that a layer has.
    r: usize,
    /// Columns of y that each layer has.
    widths: &'a [usize],
    /// The gradient is [r, columns], not [columns, r].
    across: bool,
    /// B, the scale of dz, and where it goes.
    b: Option<(View<'a>, f32, View<'a>)>,
}

impl Pass<'_> {
    fn launch(&self, gpu: &Gpu, kernel: &Kernel, gradients: impl Iterator<Item = u64>) {
        let (rows, columns, layers) = (self.y.rows(), self.y.cols(), self.widths.len());
        if rows == 0 {
            return;
        }
        let mut params = AdapterParams {
            y: self.y.pointer(),
            z: self.z.pointer(),
            y_stride: self.y.stride() as i64,
            z_stride: self.z.stride() as i64,
            rows: rows as i32,
            r: self.r as i32,
            layers: layers as i32,
            across: i32::from(self.across),
            ..AdapterParams::default()
        };
        params.gradients.iter_mut().zip(gradients).for_each(|(to, gradient)| *to = gradient);
        for (layer, width) in self.widths.iter().enumerate() {
            params.first_column[layer + 1] = params.first_column[layer] + *width as i32;
            params.first_block[layer + 1] = params.first_block[layer] + width.div_ceil(kernel.columns) as i32;
        }
        let column_blocks = params.first_block[layers] as usize;
        let (row_blocks, rows_per_block) = split_rows(gpu, column_blocks, rows, TILE_ROWS);
        (params.rows_per_block, params.row_blocks) = (rows_per_block as i32, row_blocks as i32);

        let workspace = |values: usize| {
            let bytes = values * size_of::<f32>();
            (gpu.alloc(MemoryCategory::Workspace, bytes), gpu.ledger().charge(MemoryCategory::Workspace, bytes as u64))
        };
        let (column_partials, _charge) = workspace(row_blocks * columns * kernel.rank);
        params.column_partials = column_partials.pointer();
        let (row_partials, _charge) =
            workspace(if self.b.is_some() { 2 * column_blocks * rows * kernel.rank } else { 0 });
        if let Some((b, scale, dz)) = self.b {
            (params.b, params.b_stride) = (b.pointer(), b.stride() as i64);
            (params.dz, params.dz_stride, params.scale) = (dz.pointer(), dz.stride() as i64, scale);
            params.row_partials = row_partials.pointer();
        }
        gpu.allow_shared_bytes(kernel.name, kernel.shared_bytes());
        let grid = [column_blocks as u32, row_blocks as u32, 1];
        gpu.launch_struct(kernel.name, Launch { grid, block: THREADS, shared_bytes: kernel.shared_bytes() }, &params);
        let of_dz = if self.b.is_some() { layers * rows } else { 0 };
        gpu.launch_struct(kernel.finish, Launch::elements(kernel.rank * (columns + of_dz), 1), &params);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_close, cpu};

    #[test]
    fn dz_and_both_gradients_are_the_products_they_say() {
        let device = cpu(2);
        let mut v = Values::new(31);
        let (t, widths, r) = (5, [4, 3], 2);
        let (n, scale) = (7, 0.5);
        let dy_values = v.vec(t * n);
        let mut dy = device.zeros(MemoryCategory::Workspace, &[t, n + 2 * r + 1]);
        dy.first_columns_mut(n).set(&dy_values);
        let z = v.tensor(&device, &[t, 2 * r]);
        let mut b = v.vec(n * 2 * r);
        let layer_of = |column: usize| usize::from(column >= widths[0]);
        for (i, b) in b.iter_mut().enumerate() {
            if layer_of(i / (2 * r)) != i % (2 * r) / r {
                *b = 0.0;
            }
        }
        let b = device.tensor(MemoryCategory::Workspace, &[n, 2 * r], b);
        let [mut first, mut second] = widths.map(|width| device.zeros_f32(MemoryCategory::Workspace, &[width, r]));
        first.f32s_mut().fill(1.0);
        device.run(|| {
            let db = &mut [&mut first, &mut second];
            b_gradients_and_dz(&device, scale, dy.view_mut(), &widths, z.view(), b.view(), db);
        });
        let at = |x: &[f32], cols: usize, row: usize, col: usize| x[row * cols + col];
        let want: Vec<f32> = (0..n * r)
            .map(|i| {
                let (column, k) = (i / r, layer_of(i / r) * r + i % r);
                let sum: f32 = (0..t).map(|t| at(&dy_values, n, t, column) * at(z.f32s(), 2 * r, t, k)).sum();
                sum + if column < widths[0] { 1.0 } else { 0.0 }
            })
            .collect();
        assert_close("dB", &[first.f32s(), second.f32s()].concat(), &want, 1e-5);
        let want: Vec<f32> = (0..t * 2 * r)
            .map(|i| {
                (0..n).map(|c| scale * at(&dy_values, n, i / (2 * r), c) * at(b.f32s(), 2 * r, c, i % (2 * r))).sum()
            })
            .collect();
        assert_close("dz", &dy.view().columns(n, 2 * r).to_vec(), &want, 1e-5);
        assert_eq!(dy.first_columns(n).to_vec(), dy_values);
    }

    #[test]
    fn kernels_are_those_of_the_cuda_source() {
        let source = include_str!("../../kernels/adapter.cu");
        assert!(
            source.contains(&format!("constexpr int THREADS = {THREADS}, WARPS = THREADS / WARP, TT = {TILE_ROWS};"))
        );
        for kernel in &KERNELS {
            let Kernel { rank, name, finish, columns, with_b } = kernel;
            assert!(
                source.contains(&format!("{name}(AdapterParams p) {{ products<{rank}, {columns}, {with_b}>(p); }}"))
            );
            assert!(source.contains(&format!("{finish}(AdapterParams p) {{ finish<{rank}>(p); }}")));
            assert!(kernel.shared_bytes() <= 99 << 10, "laptops have 99 KiB: {kernel:?}");
        }
        let name = |rank, with_b| Kernel::choose(rank, with_b).map(|kernel| kernel.name);
        assert_eq!(
            (name(8, false), name(40, false), name(56, false)),
            (Some("adapter_r16"), Some("adapter_r48"), Some("adapter_r96"))
        );
        assert_eq!(
            (name(12, false), name(104, false), name(24, true), name(40, true)),
            (None, None, Some("adapter_b_r32"), None)
        );
    }
}
