//! Rows of tokens brought to their experts, and the experts' rows summed for each token.

use rayon::prelude::*;

use crate::kernel_args;
use crate::ops::min_rows;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, Tensor, View, ViewMut};

/// Vectors of eight values in a block of the kernel that sums; each is a thread's.
const VECTORS: usize = 128;
/// Rows of a block of the kernel that gathers; each is a warp's.
const ROWS: usize = 8;

/// `xs[p] = x[source[first + p] / k]`: `x` [T, H], `xs` [count, H]. The inputs of a run of sorted rows.
pub fn gather<'x, 'y>(
    device: &Device,
    x: impl Into<View<'x>>,
    source: &Indices,
    first: usize,
    k: usize,
    xs: impl Into<ViewMut<'y>>,
) {
    let (x, mut xs) = (x.into(), xs.into());
    let (count, width) = (xs.rows(), xs.cols());
    assert!(x.cols() == width && first + count <= source.len() && k > 0, "shapes of gathered rows");
    match device {
        Device::Cpu(_) => {
            let stride = xs.stride();
            let rows = xs.f32s_mut().par_chunks_mut(stride).zip(&source.i32s()[first..first + count]);
            rows.with_min_len(min_rows(width))
                .for_each(|(xs, pair)| xs[..width].copy_from_slice(x.row(*pair as usize / k)));
        }
        Device::Cuda(gpu) => {
            assert!(in_vectors(width, &[x.stride(), xs.stride()]), "rows that are gathered in vectors of eight");
            let (pointers, strides) = ((x.pointer(), xs.pointer()), (x.stride() as i64, xs.stride() as i64));
            let source = source.pointer() + 4 * first as u64;
            let (width, count_i32, k) = (width as i32, count as i32, k as i32);
            let args = kernel_args![pointers.0, source, pointers.1, count_i32, width, k, strides.0, strides.1];
            gpu.launch("gather_experts", Launch::new(count.div_ceil(ROWS), 32 * ROWS as u32), args);
        }
    }
}

/// `y[t] = residual[t] + Σ_j weights[t][j]·ys[place[t·k + j]]`: `ys` [R, H], `y` [T, H], `weights` f32 [T, k]. Without weights each is 1, without a
/// residual it is 0. Sums are f32, in the order of j, and rounded once.
pub fn combine<'s, 'y>(
    device: &Device,
    ys: impl Into<View<'s>>,
    place: &Indices,
    k: usize,
    weights: Option<&Tensor>,
    residual: Option<View<'_>>,
    y: impl Into<ViewMut<'y>>,
) {
    let (ys, mut y) = (ys.into(), y.into());
    let (tokens, width) = (y.rows(), y.cols());
    assert!(
        place.len() == tokens * k
            && ys.cols() == width
            && ys.rows() >= place.len()
            && weights.is_none_or(|weights| weights.len() == place.len())
            && residual.is_none_or(|residual| (residual.rows(), residual.cols()) == (tokens, width)),
        "shapes of combined rows"
    );
    match device {
        Device::Cpu(cpu) => {
            let (precision, stride) = (cpu.precision(), y.stride());
            let rows = y.f32s_mut().par_chunks_mut(stride).enumerate().with_min_len(min_rows(width * k));
            rows.for_each(|(t, y)| {
                let y = &mut y[..width];
                match residual {
                    Some(residual) => y.copy_from_slice(residual.row(t)),
                    None => y.fill(0.0),
                }
                for pair in t * k..(t + 1) * k {
                    let weight = weights.map_or(1.0, |weights| weights.f32s()[pair]);
                    let row = ys.row(place.i32s()[pair] as usize);
                    y.iter_mut().zip(row).for_each(|(y, x)| *y += weight * x);
                }
                precision.round_slice(y);
            });
        }
        Device::Cuda(gpu) => {
            let residual_stride = residual.map_or(0, |residual| residual.stride());
            assert!(
                in_vectors(width, &[ys.stride(), residual_stride, y.stride()]),
                "rows that are summed in vectors of eight"
            );
            let args = kernel_args![
                ys.pointer(),
                place.pointer(),
                weights.map_or(0, Tensor::pointer),
                residual.map_or(0, |residual| residual.pointer()),
                y.pointer(),
                ys.stride() as i64,
                residual_stride as i64,
                y.stride() as i64,
                width as i32,
                k as i32,
            ];
            let runs = (width / 8).div_ceil(VECTORS) as u32;
            gpu.launch(
                "combine_experts",
                Launch { grid: [tokens as u32, runs, 1], ..Launch::new(1, VECTORS as u32) },
                args,
            );
        }
    }
}

/// Whether rows can be moved eight values at a time.
fn in_vectors(width: usize, strides: &[usize]) -> bool {
    width.is_multiple_of(8) && strides.iter().all(|stride| stride.is_multiple_of(8))
}
