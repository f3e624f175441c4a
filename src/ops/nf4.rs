//! Weights in NF4 on a device, and the matrices that products read, made of them.
//!
//! Contract: [`dequantize`] assigns. Nothing here has a backward pass: such weights do not train. Values are those of [`crate::formats::nf4`]:
//! `CODE[code] · absmax`, rounded to the type that the weight was made of, then to the device's format.

use std::mem::offset_of;

use rayon::prelude::*;

use crate::formats::blockwise8::MAP_LEN;
use crate::formats::nf4::{Absmax, BLOCK, CODE, NESTED_BLOCK, Nf4, round};
use crate::formats::safetensors::Dtype;
use crate::tensor::cuda::Launch;
use crate::tensor::{Bytes, Device, Gpu, MemoryCategory, Precision, Tensor, View};

/// Weights that one matrix is made of at most.
pub const MAX_WEIGHTS: usize = 3;
/// Values that a block of the kernel makes; it has the same number.
const CHUNK: usize = 8192;
/// Threads of a block.
const THREADS: u32 = 256;

/// A weight [rows, cols] in NF4.
#[derive(Debug)]
pub struct Nf4Weight {
    rows: usize,
    cols: usize,
    /// To which values are rounded first.
    dtype: Dtype,
    blocksize: usize,
    packed: Bytes,
    scales: Scales,
}

/// The absmaxes of blocks.
#[derive(Debug)]
enum Scales {
    /// One f32 a block.
    F32(Tensor),
    /// In 8 bits: `map[code] · scales[block of codes] + offset`.
    Nested { codes: Bytes, blocksize: usize, scales: Tensor, map: Tensor, offset: f32 },
}

impl Scales {
    /// Room for the scales of `blocks` blocks; `nested` of so many codes a scale, or f32.
    fn room(device: &Device, blocks: usize, nested: Option<usize>) -> Self {
        let f32s = |len| device.zeros_f32(MemoryCategory::Weights, &[len]);
        match nested {
            None => Self::F32(f32s(blocks)),
            Some(blocksize) => Self::Nested {
                codes: device.zero_bytes(MemoryCategory::Weights, blocks),
                blocksize,
                scales: f32s(blocks.div_ceil(blocksize)),
                map: f32s(MAP_LEN),
                offset: 0.0,
            },
        }
    }

    fn nested_blocksize(&self) -> Option<usize> {
        match self {
            Self::F32(_) => None,
            Self::Nested { blocksize, .. } => Some(*blocksize),
        }
    }
}

impl Nf4Weight {
    /// Room for a weight of that shape, its absmaxes in 8 bits where `double`. Its values are not set.
    pub fn room(device: &Device, rows: usize, cols: usize, double: bool) -> Self {
        let blocks = (rows * cols).div_ceil(BLOCK);
        Self {
            rows,
            cols,
            dtype: Dtype::BF16,
            blocksize: BLOCK,
            packed: device.zero_bytes(MemoryCategory::Weights, (rows * cols).div_ceil(2)),
            scales: Scales::room(device, blocks, double.then_some(NESTED_BLOCK)),
        }
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    /// Whether absmaxes are kept in 8 bits.
    pub fn is_double(&self) -> bool {
        self.scales.nested_blocksize().is_some()
    }

    /// Takes over the values of a weight of the same shape, as they are stored.
    pub fn set(&mut self, device: &Device, weight: &Nf4<'_>) {
        assert_eq!(weight.shape(), self.shape(), "shapes of a weight in NF4");
        (self.dtype, self.blocksize) = (weight.dtype(), weight.blocksize());
        self.packed.set(weight.packed());
        let nested = match weight.absmax() {
            Absmax::F32(_) => None,
            Absmax::Nested { blocksize, .. } => Some(*blocksize),
        };
        let blocks = weight.num_elements().div_ceil(self.blocksize);
        let has_room = match &self.scales {
            Scales::F32(absmax) => nested.is_none() && absmax.len() == blocks,
            Scales::Nested { codes, blocksize, .. } => nested == Some(*blocksize) && codes.len() == blocks,
        };
        if !has_room {
            self.scales = Scales::room(device, blocks, nested);
        }
        match (&mut self.scales, weight.absmax()) {
            (Scales::F32(to), Absmax::F32(from)) => {
                let values: Vec<f32> = from.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                to.set(&values);
            }
            (
                Scales::Nested { codes, scales, map, offset, .. },
                Absmax::Nested { codes: from, scales: from_scales, map: from_map, offset: from_offset, .. },
            ) => {
                codes.set(from);
                scales.set(from_scales);
                map.set(from_map.as_slice());
                *offset = *from_offset;
            }
            _ => unreachable!("the room was made for this form"),
        }
    }

    /// The values, row-major, in the format of `device`. From a GPU this waits for the device.
    pub fn to_vec(&self, device: &Device) -> Vec<f32> {
        let mut out = device.empty(MemoryCategory::Workspace, &[self.rows, self.cols]);
        dequantize(device, &[(0, self)], None, &mut out);
        out.to_vec()
    }

    /// The absmax of every block, on the CPU.
    fn absmaxes(&self) -> Vec<f32> {
        match &self.scales {
            Scales::F32(absmax) => absmax.f32s().to_vec(),
            Scales::Nested { codes, blocksize, scales, map, offset } => {
                let (scales, map) = (scales.f32s(), map.f32s());
                let value = |(i, code): (usize, &u8)| map[usize::from(*code)] * scales[i / blocksize] + offset;
                codes.u8s().iter().enumerate().map(value).collect()
            }
        }
    }
}

/// The adapters beside and below the weights of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Border<'a> {
    /// B of all adapters [N, R].
    pub b: View<'a>,
    /// A of all adapters [R, in].
    pub a: View<'a>,
}

/// Makes the matrix `out` [≥N + R, ≥in + R] of `weights`, each with its first row, and of the adapters of `border`: the weights one below the other,
/// B behind their columns, A below their rows. What lies below B and behind the columns is left alone.
pub fn dequantize(device: &Device, weights: &[(usize, &Nf4Weight)], border: Option<Border<'_>>, out: &mut Tensor) {
    let (Some((_, first)), Some((last_row, last))) = (weights.first(), weights.last()) else { return };
    let (cols, rows) = (first.cols, last_row + last.rows);
    assert!(weights.iter().all(|(_, weight)| weight.cols == cols), "weights of one matrix read one input");
    let r = border.map_or(0, |border| border.b.cols());
    assert!(out.rows() >= rows + r && out.cols() >= cols + r, "room for a matrix in NF4 with its adapters");
    if let Some(Border { a, b }) = border {
        assert_eq!((a.rows(), a.cols(), b.rows()), (r, cols, rows), "shapes of the adapters of a matrix in NF4");
    }
    match device {
        Device::Cpu(cpu) => dequantize_on_cpu(cpu.precision(), weights, border, (rows, cols), out),
        Device::Cuda(gpu) => launch(gpu, weights, border, (rows, cols), out),
    }
}

fn dequantize_on_cpu(
    precision: Precision,
    weights: &[(usize, &Nf4Weight)],
    border: Option<Border<'_>>,
    (rows, cols): (usize, usize),
    out: &mut Tensor,
) {
    let stride = out.cols();
    for (first_row, weight) in weights {
        let absmaxes = weight.absmaxes();
        let lines = out.f32s_mut()[first_row * stride..].par_chunks_mut(stride).take(weight.rows);
        let packed = weight.packed.u8s();
        lines.enumerate().for_each(|(row, line)| {
            for (col, value) in line[..cols].iter_mut().enumerate() {
                let i = row * cols + col;
                let code = (packed[i / 2] >> if i.is_multiple_of(2) { 4 } else { 0 }) & 0x0f;
                let exact = CODE[usize::from(code)] * absmaxes[i / weight.blocksize];
                *value = precision.round(round(exact, weight.dtype));
            }
        });
    }
    if let Some(Border { a, b }) = border {
        let out = out.f32s_mut();
        (0..rows).for_each(|row| out[row * stride + cols..][..b.cols()].copy_from_slice(b.row(row)));
        (0..a.rows()).for_each(|row| out[(rows + row) * stride..][..cols].copy_from_slice(a.row(row)));
    }
}

/// One weight, laid out as in `kernels/nf4.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    packed: u64,
    /// One a block, or 0 where `absmax` has one f32 a block.
    codes: u64,
    absmax: u64,
    map: u64,
    offset: f32,
    first_row: i32,
    /// Of the numbers that share an absmax.
    block_shift: i32,
    /// Of the codes that share a scale.
    nested_shift: i32,
    num_values: i64,
    /// 0: bf16, 1: f16, 2: f32.
    rounding: i32,
    _padding: i32,
}

const _: () = assert!(size_of::<Part>() == 64 && offset_of!(Part, num_values) == 48);

/// A matrix, laid out as in `kernels/nf4.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Params {
    parts: [Part; MAX_WEIGHTS],
    out: u64,
    b: u64,
    a: u64,
    stride: i64,
    b_stride: i64,
    a_stride: i64,
    /// Blocks of the grid before each part, before B, before A.
    starts: [i32; MAX_WEIGHTS + 2],
    cols: i32,
    rows: i32,
    r: i32,
}

const _: () = assert!(size_of::<Params>() == 272 && offset_of!(Params, starts) == 240 && offset_of!(Params, r) == 268);

fn launch(
    gpu: &Gpu,
    weights: &[(usize, &Nf4Weight)],
    border: Option<Border<'_>>,
    (rows, cols): (usize, usize),
    out: &mut Tensor,
) {
    assert!(weights.len() <= MAX_WEIGHTS && cols.is_multiple_of(8), "a matrix in NF4 that the kernel takes");
    let mut params = Params {
        parts: Default::default(),
        out: out.pointer(),
        b: border.map_or(0, |border| border.b.pointer()),
        a: border.map_or(0, |border| border.a.pointer()),
        stride: out.cols() as i64,
        b_stride: border.map_or(0, |border| border.b.stride() as i64),
        a_stride: border.map_or(0, |border| border.a.stride() as i64),
        starts: [0; MAX_WEIGHTS + 2],
        cols: cols as i32,
        rows: rows as i32,
        r: border.map_or(0, |border| border.b.cols() as i32),
    };
    let mut blocks = 0;
    for (i, part) in params.parts.iter_mut().enumerate() {
        params.starts[i] = blocks as i32;
        if let Some((first_row, weight)) = weights.get(i) {
            *part = weight.part(*first_row);
            blocks += (weight.rows * cols).div_ceil(CHUNK);
        }
    }
    params.starts[MAX_WEIGHTS] = blocks as i32;
    let r = params.r as usize;
    blocks += (rows * r).div_ceil(CHUNK);
    params.starts[MAX_WEIGHTS + 1] = blocks as i32;
    blocks += (r * cols).div_ceil(CHUNK);
    gpu.launch_struct("nf4_dequantize", Launch::new(blocks, THREADS), &params);
}

impl Nf4Weight {
    fn part(&self, first_row: usize) -> Part {
        let part = Part {
            packed: self.packed.pointer(),
            first_row: first_row as i32,
            block_shift: self.blocksize.trailing_zeros() as i32,
            num_values: (self.rows * self.cols) as i64,
            rounding: match self.dtype {
                Dtype::BF16 => 0,
                Dtype::F16 => 1,
                _ => 2,
            },
            ..Part::default()
        };
        match &self.scales {
            Scales::F32(absmax) => Part { absmax: absmax.pointer(), ..part },
            Scales::Nested { codes, blocksize, scales, map, offset } => Part {
                codes: codes.pointer(),
                absmax: scales.pointer(),
                map: map.pointer(),
                offset: *offset,
                nested_shift: blocksize.trailing_zeros() as i32,
                ..part
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};

    #[test]
    fn a_matrix_of_weights_and_adapters_has_the_values_of_the_format() {
        let device = cpu(2);
        let (cols, r, outs) = (48, 3, [5, 7]);
        let mut values = Values::new(11);
        for double in [true, false] {
            for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                let stored: Vec<_> = outs
                    .iter()
                    .map(|&rows| Nf4::quantize("w", &values.vec(rows * cols), &[rows, cols], dtype, double).unwrap())
                    .collect();
                let weights: Vec<Nf4Weight> = stored
                    .iter()
                    .zip(outs)
                    .map(|(stored, rows)| {
                        let mut weight = Nf4Weight::room(&device, rows, cols, true);
                        weight.set(&device, stored);
                        assert_eq!(weight.is_double(), double);
                        weight
                    })
                    .collect();
                let (a, b) = (values.tensor(&device, &[r, cols]), values.tensor(&device, &[12, r]));
                let border = Border { b: b.view(), a: a.view() };
                let mut out = device.tensor(MemoryCategory::Workspace, &[16, 52], vec![9.0; 16 * 52]);
                dequantize(&device, &[(0, &weights[0]), (5, &weights[1])], Some(border), &mut out);
                let mut want = vec![9.0; 16 * 52];
                let mut first = 0;
                for stored in &stored {
                    let exact = stored.dequantize().unwrap();
                    for line in exact.chunks(cols) {
                        want[first * 52..][..cols].copy_from_slice(line);
                        want[first * 52 + cols..][..r].copy_from_slice(b.view().row(first));
                        first += 1;
                    }
                }
                (0..r).for_each(|row| want[(12 + row) * 52..][..cols].copy_from_slice(a.view().row(row)));
                assert_eq!(out.f32s(), want, "double {double}, {dtype}");
                assert_eq!(weights[1].to_vec(&device), stored[1].dequantize().unwrap());
            }
        }
    }
}
