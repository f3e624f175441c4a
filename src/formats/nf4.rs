//! NF4: weights in 4 bits as bitsandbytes stores and computes them.
//!
//! A weight is taken as one row-major run of numbers in blocks of 64. Each block has its largest magnitude `absmax`, each number the 4-bit code of
//! the nearest of sixteen values: `value = CODE[code] · absmax[block]`, rounded to the type that the weight had. Two codes are a byte, the even
//! number in the high half. Source: Dettmers et al. 2023, "QLoRA", and bitsandbytes 0.50 (`quantize_4bit`, form for the CPU), byte for byte.
//!
//! Double quantization stores absmax in 8 bits, too: less its mean, in blocks of 256, by the signed dynamic map ([`super::blockwise8`]).

mod mean;
mod state;

use std::borrow::Cow;

use anyhow::{bail, ensure};
use half::{bf16, f16};
use rayon::prelude::*;

pub use self::state::{FindPart, Part, REMEDY, SUFFIXES, owner};
use super::blockwise8::{self, MAP_LEN, dynamic_map};
use super::safetensors::Dtype;
use crate::base::error::Result;

/// The sixteen values, in units of absmax: quantiles of the normal distribution, with an exact zero.
pub const CODE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
/// A number gets the code that is the number of middles below it.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut i = 0;
    while i < middles.len() {
        middles[i] = (CODE[i] + CODE[i + 1]) / 2.0;
        i += 1;
    }
    middles
};
/// Code of zero; it also fills the low half of the last byte of an odd number of values.
const ZERO: u8 = 7;
/// Numbers that share an absmax.
pub const BLOCK: usize = 64;
/// Absmaxes that share a scale under double quantization.
pub const NESTED_BLOCK: usize = 256;
/// What bitsandbytes divides by at least.
const SMALLEST: f32 = 1e-38;
/// Numbers that a thread converts at a time: a multiple of every size of block that is read.
const CHUNK: usize = 1 << 16;

/// A weight in NF4. What comes from a file stays there until it is dequantized.
#[derive(Debug, Clone, PartialEq)]
pub struct Nf4<'a> {
    /// Dimensions, slowest first.
    shape: Vec<usize>,
    /// Type of the weight it was made of: F32, F16 or BF16.
    dtype: Dtype,
    /// Numbers that share an absmax.
    blocksize: usize,
    /// Two codes a byte.
    packed: Cow<'a, [u8]>,
    absmax: Absmax<'a>,
}

/// The largest magnitudes of blocks.
#[derive(Debug, Clone, PartialEq)]
pub enum Absmax<'a> {
    /// Little-endian f32.
    F32(Cow<'a, [u8]>),
    /// `map[code] · scales[block] + offset`.
    Nested {
        /// A code for each block of the weight.
        codes: Cow<'a, [u8]>,
        /// Codes that share a scale.
        blocksize: usize,
        /// One for each block of codes.
        scales: Vec<f32>,
        /// What the codes stand for.
        map: Box<[f32; MAP_LEN]>,
        /// Mean of the absmaxes.
        offset: f32,
    },
}

impl Nf4<'static> {
    /// Quantizes the weight `name`, given as row-major `values` of `shape`, in blocks of [`BLOCK`]; with `double` its absmaxes, too. `dtype` is the
    /// type that the values came in, to which they will be rounded again.
    ///
    /// # Errors
    /// When a value is not finite or the values are so large that the mean of the absmaxes is not; when `shape` is not that of `values`.
    pub fn quantize(name: &str, values: &[f32], shape: &[usize], dtype: Dtype, double: bool) -> Result<Self> {
        ensure!(
            !values.is_empty() && shape.iter().product::<usize>() == values.len(),
            "tensor {name} has {} values; its shape is {shape:?}",
            values.len()
        );
        state::dtype_name(dtype)?;
        if let Some(at) = values.par_iter().position_first(|x| !x.is_finite()) {
            bail!("tensor {name} cannot be stored in 4 bits: value {at} of {} is {}", values.len(), values[at]);
        }
        let mut packed = vec![0; values.len().div_ceil(2)];
        let mut absmax = vec![0.0; values.len().div_ceil(BLOCK)];
        let blocks = values.par_chunks(BLOCK).zip(packed.par_chunks_mut(BLOCK / 2)).zip(&mut absmax);
        blocks
            .with_min_len(CHUNK / BLOCK)
            .for_each(|((values, packed), absmax)| *absmax = quantize_block(values, packed));

        let absmax = if double {
            let offset = mean::mean(&absmax);
            ensure!(offset.is_finite(), "tensor {name} cannot be stored in 4 bits: its values are too large");
            absmax.iter_mut().for_each(|x| *x -= offset);
            let map = Box::new(dynamic_map());
            let nested = blockwise8::quantize(&absmax, &map, NESTED_BLOCK);
            let codes = Cow::Owned(nested.codes);
            Absmax::Nested { codes, blocksize: NESTED_BLOCK, scales: nested.absmax, map, offset }
        } else {
            Absmax::F32(Cow::Owned(absmax.iter().flat_map(|x| x.to_le_bytes()).collect()))
        };
        Ok(Self { shape: shape.to_vec(), dtype, blocksize: BLOCK, packed: Cow::Owned(packed), absmax })
    }
}

/// Quantizes one block and gives its absmax. bitsandbytes multiplies a whole block by the inverse and divides a partial one, whose absmax it also
/// keeps above zero.
fn quantize_block(values: &[f32], packed: &mut [u8]) -> f32 {
    let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let divisor = largest.max(SMALLEST);
    let (inverse, is_whole) = (1.0 / divisor, values.len() == BLOCK);
    let code = |x: f32| {
        let unit = if is_whole { x * inverse } else { x / divisor };
        MIDDLES.iter().filter(|middle| unit > **middle).count() as u8
    };
    for (byte, pair) in packed.iter_mut().zip(values.chunks(2)) {
        *byte = code(pair[0]) << 4 | pair.get(1).map_or(ZERO, |x| code(*x));
    }
    if is_whole { largest } else { divisor }
}

impl Nf4<'_> {
    /// Dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of values.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Type of the weight that it was made of, to which values are rounded.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Numbers that share an absmax: a power of two from 32 on.
    pub fn blocksize(&self) -> usize {
        self.blocksize
    }

    /// Two codes a byte, the even number in the high half.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// The largest magnitudes of blocks as they are stored.
    pub fn absmax(&self) -> &Absmax<'_> {
        &self.absmax
    }

    /// Bytes of the packed codes and of what belongs to them, without the fixed tables.
    pub fn num_bytes(&self) -> usize {
        let absmax = match &self.absmax {
            Absmax::F32(bytes) => bytes.len(),
            Absmax::Nested { codes, scales, .. } => codes.len() + 4 * scales.len(),
        };
        self.packed.len() + absmax
    }

    /// The values, row-major, rounded to the type that the weight had: what bitsandbytes multiplies by.
    ///
    /// # Errors
    /// When an absmax is not finite: the file is damaged.
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        let absmax = self.finite_absmaxes()?;
        let mut out = vec![0.0; self.num_elements()];
        let chunks = out.par_chunks_mut(CHUNK).zip(self.packed.par_chunks(CHUNK / 2));
        chunks.zip(absmax.par_chunks(CHUNK / self.blocksize)).for_each(|((out, packed), absmax)| {
            let blocks = out.chunks_mut(self.blocksize).zip(packed.chunks(self.blocksize / 2));
            for ((out, packed), absmax) in blocks.zip(absmax) {
                let values = CODE.map(|x| round(x * absmax, self.dtype));
                for (pair, byte) in out.chunks_mut(2).zip(packed) {
                    pair[0] = values[usize::from(byte >> 4)];
                    if let Some(odd) = pair.get_mut(1) {
                        *odd = values[usize::from(byte & 0x0f)];
                    }
                }
            }
        });
        Ok(out)
    }

    /// Looks at what [`Self::dequantize`] would refuse.
    ///
    /// # Errors
    /// When an absmax is not finite: the file is damaged.
    pub fn check(&self) -> Result<()> {
        self.finite_absmaxes().map(drop)
    }

    fn finite_absmaxes(&self) -> Result<Vec<f32>> {
        let absmax = self.absmaxes();
        ensure!(
            absmax.iter().all(|x| x.is_finite()),
            "is damaged: it holds a scale that is not finite; fetch the model again"
        );
        Ok(absmax)
    }

    /// The absmax of every block.
    fn absmaxes(&self) -> Vec<f32> {
        match &self.absmax {
            Absmax::F32(bytes) => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Absmax::Nested { codes, blocksize, scales, map, offset } => {
                blockwise8::dequantize(codes, scales, map, *blocksize).map(|x| x + offset).collect()
            }
        }
    }
}

/// Rounds to the nearest value of a float type, ties to even.
pub fn round(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => bf16::from_f32(x).to_f32(),
        Dtype::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

#[cfg(test)]
mod tests;
