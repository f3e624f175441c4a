//! Rotary position embedding, rotate-half form: pairs `(x[i], x[i + d/2])` turn by `position·inv_freq[i]`.
//!
//! Positions restart at 0 in every document. Backward turns by the negative angle. In place; nothing is saved but the table.

use rayon::prelude::*;

use super::MIN_ROWS_PER_TASK;
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, Indices, MemoryCategory, Precision, Tensor, ViewMut};

/// Cosines and sines of every position up to a length, [positions, d/2] each.
#[derive(Debug)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
}

impl RopeTable {
    /// The table for positions `0..num_positions`. Angles are products in f32, as Transformers computes them.
    pub fn new(device: &Device, inv_freq: &[f32], num_positions: usize) -> Self {
        Self::scaled(device, inv_freq, 1.0, num_positions)
    }

    /// As [`Self::new`], cosines and sines multiplied by `factor` before they are rounded (YaRN). Turned vectors are then longer by that factor, and so
    /// are gradients on their way back.
    pub fn scaled(device: &Device, inv_freq: &[f32], factor: f32, num_positions: usize) -> Self {
        let shape = [num_positions, inv_freq.len()];
        let precision = device.precision();
        let table = |f: fn(f64) -> f64| {
            if !device.keeps_values() {
                return device.empty_f32(MemoryCategory::Metadata, &shape);
            }
            let angles = (0..num_positions).flat_map(|p| inv_freq.iter().map(move |freq| p as f32 * freq));
            let values = angles.map(|angle| precision.round(f(f64::from(angle)) as f32 * factor)).collect();
            device.tensor_f32(MemoryCategory::Metadata, &shape, values)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// Positions in the table.
    pub fn num_positions(&self) -> usize {
        self.cos.rows()
    }

    /// Half the size of a head: pairs that turn.
    pub(super) fn half(&self) -> usize {
        self.cos.cols()
    }

    /// Addresses of cosines and sines on a GPU.
    pub(super) fn pointers(&self) -> (u64, u64) {
        (self.cos.pointer(), self.sin.pointer())
    }

    /// Turns one head on the CPU. Each product is rounded before the sum, as bf16 arithmetic in Transformers does.
    pub(super) fn rotate_head(&self, precision: Precision, head: &mut [f32], position: i32, sign: f32) {
        let at = position as usize * self.half()..(position as usize + 1) * self.half();
        let (cos, sin) = (&self.cos.f32s()[at.clone()], &self.sin.f32s()[at]);
        let (low, high) = head.split_at_mut(cos.len());
        let round = |x| precision.round(x);
        for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (x, y, s) = (*a, *b, sign * s);
            *a = round(round(x * c) - round(y * s));
            *b = round(round(y * c) + round(x * s));
        }
    }
}

/// Rows of a block of the GPU's kernels, a warp each, and heads of a row that a lane has; the kernels have the same numbers.
const ROWS_A_BLOCK: usize = 8;
const HEADS_A_LANE: usize = 4;

/// Grid of the GPU's kernels over `rows` rows of `heads` heads of 2·`half` values, as `kernels/rope.cuh` reads it: a lane has four pairs of a head.
pub(super) fn head_launch(rows: usize, heads: usize, half: usize) -> Launch {
    assert!(half.is_multiple_of(4) && half <= 128, "heads of {} values on a GPU", 2 * half);
    let heads_a_warp = 32 / (half / 4).next_power_of_two() * HEADS_A_LANE;
    let grid = [rows.div_ceil(ROWS_A_BLOCK) as u32, heads.div_ceil(heads_a_warp) as u32, 1];
    Launch { grid, ..Launch::new(1, 32 * ROWS_A_BLOCK as u32) }
}

/// Turns `x` [T, heads·d] in place by the angles of `position_ids` [T].
pub fn forward<'x>(device: &Device, x: impl Into<ViewMut<'x>>, table: &RopeTable, position_ids: &Indices) {
    rotate(device, x.into(), table, position_ids, 1.0);
}

/// Turns a gradient [T, heads·d] in place by the negative angles.
pub fn backward<'x>(device: &Device, dx: impl Into<ViewMut<'x>>, table: &RopeTable, position_ids: &Indices) {
    rotate(device, dx.into(), table, position_ids, -1.0);
}

fn rotate(device: &Device, mut x: ViewMut<'_>, table: &RopeTable, position_ids: &Indices, sign: f32) {
    let (width, stride, half) = (x.cols(), x.stride(), table.half());
    assert_eq!((x.rows(), width % (2 * half)), (position_ids.len(), 0), "shapes of rope");
    match device {
        Device::Cpu(cpu) => {
            let precision = cpu.precision();
            let rows = x.f32s_mut().par_chunks_mut(stride).zip(position_ids.i32s().par_iter());
            rows.with_min_len(MIN_ROWS_PER_TASK).for_each(|(row, &position)| {
                for head in row[..width].chunks_exact_mut(2 * half) {
                    table.rotate_head(precision, head, position, sign);
                }
            });
        }
        Device::Cuda(gpu) => {
            let heads = width / (2 * half);
            let args = kernel_args![
                x.pointer(),
                table.cos.pointer(),
                table.sin.pointer(),
                position_ids.pointer(),
                x.rows() as i64,
                heads as i32,
                half as i32,
                stride as i64,
                i32::from(sign < 0.0)
            ];
            gpu.launch("rope", head_launch(x.rows(), heads, half), args);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_all_heads() {
        let source = include_str!("../../kernels/rope.cuh");
        assert!(source.contains(&format!("ROWS_A_BLOCK = {ROWS_A_BLOCK};")));
        assert!(source.contains(&format!("HEADS_A_LANE = {HEADS_A_LANE};")));
        assert_eq!(head_launch(17, 40, 64).grid, [3, 5, 1], "two heads of 128 beside each other");
        assert_eq!(head_launch(1, 40, 32).grid, [1, 3, 1]);
        assert_eq!(head_launch(8, 3, 128).grid, [1, 1, 1]);
        assert_eq!(head_launch(8, 33, 20).grid, [1, 3, 1], "five lanes take the place of eight");
    }
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};

    #[test]
    fn backward_undoes_forward_and_positions_index_the_table() {
        let device = cpu(2);
        let mut v = Values::new(5);
        let (rows, heads, d) = (4, 3, 8);
        let table = RopeTable::new(&device, &[1.0, 0.1, 0.01, 0.001], 10);
        let positions = device.indices(MemoryCategory::Metadata, vec![0, 1, 0, 9]);
        let mut x = v.tensor(&device, &[rows, heads * d]);
        let before = x.f32s().to_vec();
        forward(&device, &mut x, &table, &positions);
        assert_eq!(x.f32s()[..heads * d], before[..heads * d], "position 0 does not turn");
        let (a, b) = (before[heads * d], before[heads * d + 4]);
        assert!((x.f32s()[heads * d] - (a * 1f32.cos() - b * 1f32.sin())).abs() < 1e-6);
        // A turn keeps lengths, and the negative turn undoes it.
        backward(&device, &mut x, &table, &positions);
        assert_close("round trip", x.f32s(), &before, 1e-6);
    }

    #[test]
    fn a_factor_lengthens_what_turns_and_gradients_agree_with_finite_differences() {
        let device = cpu(1);
        let mut v = Values::new(6);
        let (rows, width) = (3, 2 * 8);
        let (inv_freq, positions) = ([1.0, 0.1, 0.01, 0.001], device.indices(MemoryCategory::Metadata, vec![0, 3, 7]));
        let table = RopeTable::scaled(&device, &inv_freq, 1.25, 10);
        let (x, dy) = (v.tensor(&device, &[rows, width]), v.tensor(&device, &[rows, width]));
        let run = |x: &[f32], table: &RopeTable| {
            let mut y = device.tensor(MemoryCategory::Workspace, &[rows, width], x.to_vec());
            forward(&device, &mut y, table, &positions);
            y
        };
        let plain = run(x.f32s(), &RopeTable::new(&device, &inv_freq, 10));
        let longer: Vec<f32> = plain.f32s().iter().map(|y| 1.25 * y).collect();
        assert_close("scaled", run(x.f32s(), &table).f32s(), &longer, 1e-6);
        let mut dx = device.tensor(MemoryCategory::Workspace, &[rows, width], dy.to_vec());
        backward(&device, &mut dx, &table, &positions);
        assert_gradient("dx", x.f32s(), dx.f32s(), |x| dot(dy.f32s(), run(x, &table).f32s()));
    }
}
