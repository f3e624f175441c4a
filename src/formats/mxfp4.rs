//! MXFP4: weights in 4 bits with a power of two for each 32 of them, as gpt-oss stores its experts.
//!
//! Numbers of a row lie in blocks of 32: `value = CODE[code] · 2^(scale − 127)`, with the code E2M1 (a sign, two bits of exponent, one of
//! mantissa) and one scale byte a block (E8M0). Two codes are a byte, the even number in the low half. Source: OCP Microscaling Formats 1.0, and the
//! layout of gpt-oss (`…_blocks` u8 [experts, out, in/32, 16], `…_scales` u8 [experts, out, in/32]).
//!
//! Scale 255 is what Transformers makes of it, 2^128: infinity, or NaN for codes of zero.
//!
//! GGUF files hold the same blocks as 17 bytes: the scale, then byte j with number j in its low half and number j + 16 in its high half.

use std::borrow::Cow;

use anyhow::{bail, ensure};
use rayon::prelude::*;

use crate::base::error::Result;

/// Numbers that share a scale.
pub const BLOCK: usize = 32;
/// Bytes of a block's codes.
pub const BLOCK_BYTES: usize = BLOCK / 2;
/// Bytes of a block in GGUF files.
const GGUF_BYTES: usize = 1 + BLOCK_BYTES;
/// Blocks that a thread converts at a time at least.
const MIN_BLOCKS: usize = 1024;
/// The sixteen values, in units of the scale: the high bit of a code is its sign.
pub const CODE: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A weight in MXFP4. What comes from a file stays there until it is dequantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mxfp4<'a> {
    /// Dimensions, slowest first; the last is a multiple of [`BLOCK`].
    shape: Vec<usize>,
    /// Sixteen bytes a block.
    blocks: Cow<'a, [u8]>,
    /// One byte a block.
    scales: Cow<'a, [u8]>,
}

/// 2^(scale − 127) in f32: a denormal number for 0, infinity for 255.
pub fn scale_value(scale: u8) -> f32 {
    f32::from_bits(if scale == 0 { 1 << 22 } else { u32::from(scale) << 23 })
}

/// Number of blocks of a weight of that shape.
fn num_blocks(shape: &[usize]) -> Result<usize> {
    let last = shape.last().copied().unwrap_or(0);
    ensure!(
        last > 0 && last.is_multiple_of(BLOCK),
        "has rows of {last} values; MXFP4 has blocks of {BLOCK}, so that must be a multiple of it"
    );
    let values = shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
    let Some(values) = values else { bail!("has the shape {shape:?}, which no file can hold") };
    Ok(values / BLOCK)
}

impl<'a> Mxfp4<'a> {
    /// A weight of `shape` (the last dimension that of its inputs) from its codes and scales as gpt-oss stores them.
    ///
    /// # Errors
    /// When the bytes are not those of such a weight, as a clause for the name of the tensor.
    pub fn new(shape: &[usize], blocks: impl Into<Cow<'a, [u8]>>, scales: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let (blocks, scales) = (blocks.into(), scales.into());
        let wanted = num_blocks(shape)?;
        ensure!(
            scales.len() == wanted && blocks.len() / BLOCK_BYTES == wanted && blocks.len().is_multiple_of(BLOCK_BYTES),
            "holds {} bytes of blocks and {} of scales; a weight in MXFP4 of shape {shape:?} has {wanted} blocks of \
             {BLOCK_BYTES} bytes and as many scales",
            blocks.len(),
            scales.len()
        );
        Ok(Self { shape: shape.to_vec(), blocks, scales })
    }

    /// Dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of values.
    pub fn num_elements(&self) -> usize {
        self.scales.len() * BLOCK
    }

    /// The codes, sixteen bytes a block.
    pub fn blocks(&self) -> &[u8] {
        &self.blocks
    }

    /// The scales, one byte a block.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The values, row-major. All but those of scales near the ends are values of bf16, too; none is rounded.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.num_elements()];
        let blocks = out.par_chunks_exact_mut(BLOCK).zip(self.blocks.par_chunks_exact(BLOCK_BYTES));
        let blocks = blocks.zip(self.scales.par_iter()).with_min_len(MIN_BLOCKS);
        blocks.for_each(|((out, codes), scale)| dequantize_block(codes, *scale, out));
        out
    }
}

/// The 32 values of one block.
pub fn dequantize_block(codes: &[u8], scale: u8, out: &mut [f32]) {
    let scale = scale_value(scale);
    let values = CODE.map(|x| x * scale);
    for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        *pair = [values[usize::from(byte & 0x0f)], values[usize::from(byte >> 4)]];
    }
}

impl Mxfp4<'static> {
    /// Quantizes row-major `values` of `shape`: the scale of a block is the power of two that brings its largest magnitude into 4..8, each number gets
    /// the nearest code, of two equally near ones the even one; what lies above 6 becomes 6. Values that MXFP4 has stay what they are.
    ///
    /// # Errors
    /// When a value is not finite or `shape` is not that of `values`, as a clause for the name of the tensor.
    pub fn quantize(values: &[f32], shape: &[usize]) -> Result<Self> {
        let wanted = num_blocks(shape)?;
        ensure!(values.len() == wanted * BLOCK, "has {} values; its shape is {shape:?}", values.len());
        if let Some(at) = values.par_iter().position_first(|x| !x.is_finite()) {
            bail!("cannot be stored in 4 bits: value {at} of {} is {}", values.len(), values[at]);
        }
        let (mut blocks, mut scales) = (vec![0; wanted * BLOCK_BYTES], vec![0; wanted]);
        let each = blocks.par_chunks_exact_mut(BLOCK_BYTES).zip(&mut scales).zip(values.par_chunks_exact(BLOCK));
        each.with_min_len(MIN_BLOCKS).for_each(|((codes, scale), values)| *scale = quantize_block(values, codes));
        Ok(Self { shape: shape.to_vec(), blocks: Cow::Owned(blocks), scales: Cow::Owned(scales) })
    }

    /// A weight of `shape` from the 17-byte blocks of a GGUF file.
    ///
    /// # Errors
    /// When the bytes are not those of such a weight, as a clause for the name of the tensor.
    pub fn from_gguf(shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let wanted = num_blocks(shape)?;
        ensure!(
            bytes.len() / GGUF_BYTES == wanted && bytes.len().is_multiple_of(GGUF_BYTES),
            "holds {} bytes; a weight in MXFP4 of shape {shape:?} has {wanted} blocks of {GGUF_BYTES} bytes in GGUF",
            bytes.len()
        );
        let (mut blocks, mut scales) = (vec![0; wanted * BLOCK_BYTES], vec![0; wanted]);
        let each = blocks.par_chunks_exact_mut(BLOCK_BYTES).zip(&mut scales).zip(bytes.par_chunks_exact(GGUF_BYTES));
        each.with_min_len(MIN_BLOCKS).for_each(|((codes, scale), from)| {
            *scale = from[0];
            let from = &from[1..];
            // Numbers 2i and 2i + 1 lie in one half of two bytes: the low one for the first sixteen, the high one for the others.
            for (i, byte) in codes.iter_mut().enumerate() {
                let (at, shift) = (2 * i % BLOCK_BYTES, if i < BLOCK_BYTES / 2 { 0 } else { 4 });
                *byte = (from[at] >> shift & 0x0f) | (from[at + 1] >> shift & 0x0f) << 4;
            }
        });
        Ok(Self { shape: shape.to_vec(), blocks: Cow::Owned(blocks), scales: Cow::Owned(scales) })
    }
}

/// Quantizes one block and gives its scale.
fn quantize_block(values: &[f32], codes: &mut [u8]) -> u8 {
    let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    // The exponent of f32 is that of a scale, which has the same bias; denormal numbers lie below what scales reach.
    let exponent = (largest.to_bits() >> 23) as i32 - 2;
    let scale = exponent.clamp(0, 254) as u8;
    // In f64, where neither 2^127 nor 2^−127 is near an end.
    let inverse = 2f64.powi(127 - i32::from(scale));
    let code = |x: f32| {
        let unit = f64::from(x.abs()) * inverse;
        // Middles between neighbours; one that lies on a middle goes to the even code.
        let middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let above = |(i, middle): (usize, &f64)| unit > *middle || (unit == *middle && i % 2 == 1);
        let magnitude = middles.iter().enumerate().filter(|middle| above(*middle)).count() as u8;
        magnitude | u8::from(x.is_sign_negative()) << 3
    };
    for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
        *byte = code(pair[0]) | code(pair[1]) << 4;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_scales_are_those_of_the_format() {
        // Codes 0..=15 twice, in order; scale 2^1.
        let codes: Vec<u8> = (0..16u8).map(|i| (2 * i % 16) | (2 * i % 16 + 1) << 4).collect();
        let weight = Mxfp4::new(&[1, 32], codes, vec![128]).unwrap();
        let want: Vec<f32> = CODE.iter().chain(&CODE).map(|x| 2.0 * x).collect();
        assert_eq!(weight.dequantize(), want);
        assert_eq!([0, 1, 127, 254].map(scale_value), [-127, -126, 0, 127].map(|n| 2f64.powi(n) as f32));
        // As Transformers: 2^128 is infinite in f32, and zero times it is not a number.
        let mut out = [0.0; 32];
        dequantize_block(&[0x90; 16], 255, &mut out);
        assert!(out[0].is_nan() && out[1] == f32::NEG_INFINITY);
    }

    #[test]
    fn values_of_the_format_come_back() {
        let mut bytes: Vec<u8> = (0..20 * 16u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        bytes[..16].fill(0);
        let scales: Vec<u8> = [0, 1, 2, 3, 100, 126, 127, 128, 200, 252].repeat(2);
        let weight = Mxfp4::new(&[2, 5, 64], bytes, scales).unwrap();
        let values = weight.dequantize();
        let again = Mxfp4::quantize(&values, weight.shape()).unwrap();
        assert_eq!(again.dequantize(), values);
    }

    #[test]
    fn the_nearest_code_is_taken() {
        let mut values = vec![0.0f32; 32];
        values[..12].copy_from_slice(&[7.9, -5.0, 5.1, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.26, 3.4, -2.6]);
        let want = [6.0, -4.0, 6.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -0.5, 3.0, -3.0];
        assert_eq!(Mxfp4::quantize(&values, &[32]).unwrap().dequantize()[..12], want);
        for power in [-120, -60, 3, 100] {
            let scaled: Vec<f32> = values.iter().map(|x| x * 2f32.powi(power)).collect();
            let want: Vec<f32> = want.iter().map(|x| x * 2f32.powi(power)).collect();
            assert_eq!(Mxfp4::quantize(&scaled, &[32]).unwrap().dequantize()[..12], want, "2^{power}");
        }
        assert!(Mxfp4::quantize(&[f32::NAN; 32], &[32]).unwrap_err().to_string().contains("value 0 of 32 is NaN"));
    }

    #[test]
    fn blocks_of_gguf_are_put_in_order() {
        // Number n of a block has code n % 16 (n / 16 flips the sign), so halves differ.
        let code = |n: u8| (n % 16) ^ (n / 16 * 8);
        let mut bytes = Vec::new();
        for scale in [120, 127] {
            bytes.push(scale);
            bytes.extend((0..16u8).map(|j| code(j) | code(j + 16) << 4));
        }
        let weight = Mxfp4::from_gguf(&[2, 32], &bytes).unwrap();
        assert_eq!(weight.scales(), [120, 127]);
        let want: Vec<f32> = (0..32u8).map(|n| CODE[usize::from(code(n))]).collect();
        assert_eq!(weight.dequantize()[32..], want);
        assert_eq!(weight.dequantize()[1], CODE[1] / 128.0);
    }

    #[test]
    fn bytes_of_another_number_are_refused() {
        assert!(Mxfp4::new(&[2, 32], vec![0; 32], vec![0; 2]).is_ok());
        for (shape, blocks, scales) in [
            (&[2usize, 32][..], 31, 2),
            (&[2, 32], 48, 2),
            (&[2, 32], 32, 1),
            (&[2, 33], 32, 2),
            (&[2, 0], 0, 0),
            (&[], 0, 0),
            (&[usize::MAX, 32], 32, 2),
        ] {
            assert!(Mxfp4::new(shape, vec![0; blocks], vec![0; scales]).is_err(), "{shape:?}");
        }
        assert!(Mxfp4::from_gguf(&[1, 32], &[0; 16]).unwrap_err().to_string().contains("17 bytes in GGUF"));
        assert!(Mxfp4::quantize(&[0.0; 32], &[64]).is_err());
    }
}
