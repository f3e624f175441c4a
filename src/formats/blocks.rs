//! Element formats of weight files (plain floats and ggml's 32-element blocks) and their conversion to f32.
//!
//! Block layouts, little-endian, 32 consecutive elements of a row each (`d`, `m` are f16):
//! - Q4_0: `d`, 16 bytes; byte j holds element j in its low half and element j+16 in its high half; value `d·(q−8)`.
//! - Q4_1: `d`, `m`, 16 bytes in the same order; value `d·q + m`.
//! - Q8_0: `d`, 32 signed bytes; value `d·q`.
//! - MXFP4: a scale byte, 16 bytes in the order of Q4_0; value as `mxfp4` says.

use anyhow::bail;
use half::{bf16, f16};
use rayon::prelude::*;

use super::mxfp4;
use crate::base::error::Result;

/// Elements in a quantized block.
const BLOCK: usize = 32;
/// Elements a thread converts at a time; smaller tensors are converted on the calling thread. A multiple of [`BLOCK`].
const CHUNK: usize = 64 * 1024;

/// An element format that can be turned into f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockKind {
    /// 32-bit float.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits with a scale.
    Q4_0,
    /// 4 bits with a scale and a minimum.
    Q4_1,
    /// 8 bits with a scale.
    Q8_0,
    /// 4 bits with a power of two.
    Mxfp4,
}

impl BlockKind {
    /// The name shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Elements in one block: 1 for plain floats.
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 | Self::Mxfp4 => BLOCK,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 2 + BLOCK / 2,
            Self::Q4_1 => 4 + BLOCK / 2,
            Self::Q8_0 => 2 + BLOCK,
            Self::Mxfp4 => 1 + BLOCK / 2,
        }
    }
}

/// Convert `num_elements` elements stored as `kind` in `bytes` to f32, on several threads when they are many.
///
/// # Errors
/// When `bytes` is not exactly what `num_elements` elements take.
pub fn to_f32(kind: BlockKind, bytes: &[u8], num_elements: usize) -> Result<Vec<f32>> {
    let wanted = (num_elements / kind.block_elements()).checked_mul(kind.block_bytes());
    if !num_elements.is_multiple_of(kind.block_elements()) || wanted != Some(bytes.len()) {
        bail!("{num_elements} {} elements cannot be stored in {} bytes", kind.name(), bytes.len());
    }
    let mut out = vec![0f32; num_elements];
    let chunk_bytes = CHUNK / kind.block_elements() * kind.block_bytes();
    if num_elements <= CHUNK {
        convert(kind, bytes, &mut out);
    } else {
        out.par_chunks_mut(CHUNK).zip(bytes.par_chunks(chunk_bytes)).for_each(|(o, b)| convert(kind, b, o));
    }
    Ok(out)
}

/// Convert whole blocks; `bytes` and `out` hold the same number of them.
fn convert(kind: BlockKind, bytes: &[u8], out: &mut [f32]) {
    match kind {
        BlockKind::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        BlockKind::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        BlockKind::Bf16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        BlockKind::Q4_0 => {
            for (o, b) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<18>().0) {
                let d = f16::from_le_bytes([b[0], b[1]]).to_f32();
                nibbles(o, &b[2..], |q| d * (f32::from(q) - 8.0));
            }
        }
        BlockKind::Q4_1 => {
            for (o, b) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<20>().0) {
                let d = f16::from_le_bytes([b[0], b[1]]).to_f32();
                let m = f16::from_le_bytes([b[2], b[3]]).to_f32();
                nibbles(o, &b[4..], |q| d * f32::from(q) + m);
            }
        }
        BlockKind::Q8_0 => {
            for (o, b) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<34>().0) {
                let d = f16::from_le_bytes([b[0], b[1]]).to_f32();
                for (o, &q) in o.iter_mut().zip(&b[2..]) {
                    *o = d * f32::from(q.cast_signed());
                }
            }
        }
        BlockKind::Mxfp4 => {
            for (o, b) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<17>().0) {
                let scale = mxfp4::scale_value(b[0]);
                nibbles(o, &b[1..], |q| scale * mxfp4::CODE[usize::from(q)]);
            }
        }
    }
}

/// Spread 16 bytes over 32 elements: low halves first, then high halves.
fn nibbles(out: &mut [f32; BLOCK], packed: &[u8], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((l, h), &byte) in low.iter_mut().zip(high).zip(packed) {
        *l = value(byte & 0x0f);
        *h = value(byte >> 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block whose byte j is `j | (15 − j) << 4`, so element j is j and element j + 16 is 15 − j.
    fn ramp() -> [u8; 16] {
        std::array::from_fn(|j| j as u8 | (15 - j as u8) << 4)
    }

    #[test]
    fn q4_0_is_centred_on_eight() {
        let bytes: Vec<u8> = f16::from_f32(0.5).to_le_bytes().into_iter().chain(ramp()).collect();
        let x = to_f32(BlockKind::Q4_0, &bytes, 32).unwrap();
        assert_eq!(x[0], -4.0);
        assert_eq!(x[15], 3.5);
        assert_eq!(x[16], 3.5);
        assert_eq!(x[31], -4.0);
    }

    #[test]
    fn q4_1_adds_its_minimum() {
        let head = [f16::from_f32(0.25).to_le_bytes(), f16::from_f32(-1.0).to_le_bytes()].concat();
        let bytes: Vec<u8> = head.into_iter().chain(ramp()).collect();
        let x = to_f32(BlockKind::Q4_1, &bytes, 32).unwrap();
        assert_eq!(x[0], -1.0);
        assert_eq!(x[3], -0.25);
        assert_eq!(x[16], 2.75);
    }

    #[test]
    fn q8_0_is_signed() {
        let mut bytes = f16::from_f32(2.0).to_le_bytes().to_vec();
        bytes.extend((0..32).map(|i| (i as i8 - 16).cast_unsigned()));
        let x = to_f32(BlockKind::Q8_0, &bytes, 32).unwrap();
        assert_eq!(x[0], -32.0);
        assert_eq!(x[16], 0.0);
        assert_eq!(x[31], 30.0);
    }

    #[test]
    fn mxfp4_is_the_same_in_both_orders_of_its_bytes() {
        let bytes: Vec<u8> = std::iter::once(128).chain(ramp()).collect();
        let x = to_f32(BlockKind::Mxfp4, &bytes, 32).unwrap();
        assert_eq!((x[1], x[7], x[9], x[16], x[30]), (1.0, 12.0, -1.0, -12.0, 1.0));
        assert_eq!(mxfp4::Mxfp4::from_gguf(&[1, 32], &bytes).unwrap().dequantize(), x);
    }

    #[test]
    fn floats_keep_their_value() {
        let values = [1.5f32, -0.0, 3.0e-3, f32::INFINITY];
        let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(to_f32(BlockKind::F32, &f32s, 4).unwrap(), values);
        let bf: Vec<u8> = values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
        let want: Vec<f32> = values.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
        assert_eq!(to_f32(BlockKind::Bf16, &bf, 4).unwrap(), want);
        let half: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let want: Vec<f32> = values.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
        assert_eq!(to_f32(BlockKind::F16, &half, 4).unwrap(), want);
    }

    #[test]
    fn threads_change_nothing() {
        let blocks = 3 * CHUNK / BLOCK + 5;
        let bytes: Vec<u8> = (0..blocks * 34).map(|i| if i % 34 < 2 { 0x3c } else { (i * 7) as u8 }).collect();
        let whole = to_f32(BlockKind::Q8_0, &bytes, blocks * BLOCK).unwrap();
        let mut serial = vec![0f32; blocks * BLOCK];
        convert(BlockKind::Q8_0, &bytes, &mut serial);
        assert_eq!(whole, serial);
    }

    #[test]
    fn wrong_sizes_are_errors() {
        assert!(to_f32(BlockKind::Q4_0, &[0; 18], 31).is_err());
        assert!(to_f32(BlockKind::Q4_0, &[0; 17], 32).is_err());
        assert!(to_f32(BlockKind::F32, &[0; 7], 2).is_err());
        assert!(to_f32(BlockKind::F32, &[], usize::MAX).is_err());
    }
}
