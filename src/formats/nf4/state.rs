//! The parts in which bitsandbytes stores an NF4 weight in a safetensors file.
//!
//! `w` is the weight's name: `w` holds the packed codes, U8 [(elements + 1) / 2, 1] (or the same bytes as another type, `quant_storage`);
//! `w.absmax` F32 [blocks], or U8 with double quantization; `w.quant_map` F32 [16]; `w.nested_absmax` F32 [blocks / 256] and
//! `w.nested_quant_map` F32 [256] with double quantization; `w.quant_state.bitsandbytes__nf4` JSON as U8 ([`QuantState`]). Source: `QuantState.as_dict` of
//! bitsandbytes 0.50.

use std::borrow::Cow;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

use super::{Absmax, CODE, Nf4};
use crate::base::error::Result;
use crate::formats::blockwise8::MAP_LEN;
use crate::formats::safetensors::Dtype;

const ABSMAX: &str = ".absmax";
const QUANT_MAP: &str = ".quant_map";
const NESTED_ABSMAX: &str = ".nested_absmax";
const NESTED_QUANT_MAP: &str = ".nested_quant_map";
const STATE_NF4: &str = ".quant_state.bitsandbytes__nf4";
const STATE_FP4: &str = ".quant_state.bitsandbytes__fp4";
/// What follows a weight's name in the names of its parts.
pub const SUFFIXES: [&str; 6] = [ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_QUANT_MAP, STATE_NF4, STATE_FP4];

/// What to do about a model that bitsandbytes stored in another way.
pub const REMEDY: &str = "take the unquantized model, or one stored as NF4 (bnb_4bit_quant_type \"nf4\")";

/// The weight that a tensor of this name is a part of, where its name is that of a part.
pub fn owner(name: &str) -> Option<&str> {
    SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix))
}

/// A tensor as it lies in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Part<'a> {
    /// What follows the weight's name; nothing for the packed codes.
    pub suffix: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Its elements, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> Part<'a> {
    fn new(suffix: &'static str, dtype: Dtype, bytes: Cow<'a, [u8]>) -> Self {
        let shape = vec![bytes.len() / (dtype.bitsize() / 8)];
        Self { suffix, dtype, shape, bytes }
    }
}

/// What bitsandbytes writes as JSON beside the tensors.
#[derive(Debug, Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Finds the part of a weight with a suffix: its element type and bytes, where the file has it. The empty suffix is the weight itself.
pub type FindPart<'a, 'f> = dyn Fn(&str) -> Option<(Dtype, &'a [u8])> + 'f;

/// The parts of one weight in a file.
struct Parts<'a, 'f> {
    part: &'f FindPart<'a, 'f>,
}

impl<'a> Parts<'a, '_> {
    /// A part of any size.
    fn find(&self, suffix: &str) -> Result<(Dtype, &'a [u8])> {
        (self.part)(suffix)
            .with_context(|| format!("is incomplete: its part {suffix} is missing; fetch the model again"))
    }

    /// The bytes of a part that must have `elements` of a type.
    fn sized(&self, suffix: &str, dtype: Dtype, elements: usize) -> Result<&'a [u8]> {
        let (found, bytes) = self.find(suffix)?;
        ensure!(
            found == dtype && bytes.len() == elements * (dtype.bitsize() / 8),
            "is damaged: its part {suffix} is {} bytes of {found}, expected {elements} elements of {dtype}; fetch the model again",
            bytes.len()
        );
        Ok(bytes)
    }

    fn f32s(&self, suffix: &str, elements: usize) -> Result<Vec<f32>> {
        let bytes = self.sized(suffix, Dtype::F32, elements)?;
        Ok(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

impl<'a> Nf4<'a> {
    /// Puts a weight together from its parts. What grows with the weight stays in the file.
    ///
    /// # Errors
    /// When it is stored in another way than NF4, a part is missing or has the wrong size, or the parts contradict each other. Messages are made to
    /// follow the weight's name.
    pub fn read(part: &FindPart<'a, '_>) -> Result<Self> {
        if part(STATE_FP4).is_some() {
            bail!("is stored as FP4 by bitsandbytes, which Tandem does not read; {REMEDY}");
        }
        let parts = Parts { part };
        let (_, text) = parts.find(STATE_NF4)?;
        let state: QuantState = serde_json::from_slice(text)
            .with_context(|| format!("is damaged: its part {STATE_NF4} cannot be read; fetch the model again"))?;
        ensure!(state.quant_type == "nf4", "is stored as {:?} by bitsandbytes; Tandem reads nf4", state.quant_type);
        let dtype = dtype_of(&state.dtype)?;
        let blocksize = checked_blocksize(state.blocksize)?;
        let elements = state.shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d)).filter(|n| *n > 0);
        let elements = elements.with_context(|| format!("is damaged: its shape is {:?}", state.shape))?;
        let (_, packed) = parts.find("")?;
        ensure!(
            packed.len() == elements.div_ceil(2),
            "is damaged: it has {} bytes, the {elements} values of its shape {:?} take {}; fetch the model again",
            packed.len(),
            state.shape,
            elements.div_ceil(2)
        );
        ensure!(
            parts.f32s(QUANT_MAP, CODE.len())? == CODE,
            "does not use the values of NF4 (its part {QUANT_MAP} holds others); fetch the model again"
        );
        let blocks = elements.div_ceil(blocksize);
        let absmax = if part(NESTED_ABSMAX).is_some() || part(ABSMAX).is_some_and(|(dtype, _)| dtype == Dtype::U8) {
            let (Some(nested_blocksize), Some(offset)) = (state.nested_blocksize, state.nested_offset) else {
                bail!(
                    "is damaged: its part {STATE_NF4} lacks nested_blocksize or nested_offset; fetch the model again"
                );
            };
            let nested_blocksize = checked_blocksize(nested_blocksize)?;
            let mut map = Box::new([0.0; MAP_LEN]);
            map.copy_from_slice(&parts.f32s(NESTED_QUANT_MAP, MAP_LEN)?);
            Absmax::Nested {
                codes: Cow::Borrowed(parts.sized(ABSMAX, Dtype::U8, blocks)?),
                blocksize: nested_blocksize,
                scales: parts.f32s(NESTED_ABSMAX, blocks.div_ceil(nested_blocksize))?,
                map,
                offset,
            }
        } else {
            Absmax::F32(Cow::Borrowed(parts.sized(ABSMAX, Dtype::F32, blocks)?))
        };
        Ok(Self { shape: state.shape, dtype, blocksize, packed: Cow::Borrowed(packed), absmax })
    }
}

impl Nf4<'_> {
    /// The parts to write, as bitsandbytes names them.
    ///
    /// # Errors
    /// When the weight is of a type that bitsandbytes has no name for.
    pub fn parts(&self) -> Result<Vec<Part<'_>>> {
        let floats = |values: &[f32]| Cow::Owned(values.iter().flat_map(|x| x.to_le_bytes()).collect());
        let packed =
            Part { shape: vec![self.packed.len(), 1], ..Part::new("", Dtype::U8, Cow::Borrowed(&self.packed)) };
        let mut parts = vec![packed];
        let mut state = format!(
            "{{\"quant_type\": \"nf4\", \"blocksize\": {}, \"dtype\": \"{}\", \"shape\": {:?}",
            self.blocksize,
            dtype_name(self.dtype)?,
            self.shape
        );
        match &self.absmax {
            Absmax::F32(bytes) => parts.push(Part::new(ABSMAX, Dtype::F32, Cow::Borrowed(bytes))),
            Absmax::Nested { codes, blocksize, scales, map, offset } => {
                parts.push(Part::new(ABSMAX, Dtype::U8, Cow::Borrowed(codes)));
                parts.push(Part::new(NESTED_ABSMAX, Dtype::F32, floats(scales)));
                parts.push(Part::new(NESTED_QUANT_MAP, Dtype::F32, floats(&map[..])));
                // Python prints the f64 that equals the f32.
                let offset = f64::from(*offset);
                state += &format!(
                    ", \"nested_blocksize\": {blocksize}, \"nested_dtype\": \"float32\", \"nested_offset\": {offset:?}"
                );
            }
        }
        state.push('}');
        parts.push(Part::new(QUANT_MAP, Dtype::F32, floats(&CODE)));
        parts.push(Part::new(STATE_NF4, Dtype::U8, Cow::Owned(state.into_bytes())));
        Ok(parts)
    }
}

/// PyTorch's name of the types that are quantized.
pub(super) fn dtype_name(dtype: Dtype) -> Result<&'static str> {
    Ok(match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        other => bail!("weights of type {other} are not quantized"),
    })
}

fn dtype_of(name: &str) -> Result<Dtype> {
    Ok(match name {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        other => bail!("is quantized from values of type {other:?}; Tandem reads float32, float16 and bfloat16"),
    })
}

/// The sizes that bitsandbytes makes.
fn checked_blocksize(blocksize: usize) -> Result<usize> {
    ensure!(
        blocksize.is_power_of_two() && (32..=4096).contains(&blocksize),
        "is quantized in blocks of {blocksize}; expected a power of two from 32 to 4096"
    );
    Ok(blocksize)
}
