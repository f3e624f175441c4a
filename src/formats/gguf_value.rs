//! The value and tensor types that a GGUF file may hold, and the cursor that reads them without trusting any count.

use std::ops::Range;

use anyhow::{Context as _, bail};

use super::blocks::BlockKind;
use crate::base::error::Result;

/// Longest name of a key or tensor that is believed; the format itself allows 65,535 bytes.
const MAX_NAME_BYTES: u64 = 65_535;

/// Type of a metadata value, with its number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// 0
    U8,
    /// 1
    I8,
    /// 2
    U16,
    /// 3
    I16,
    /// 4
    U32,
    /// 5
    I32,
    /// 6
    F32,
    /// 7: one byte, 0 or 1.
    Bool,
    /// 8: u64 length, then that many bytes of UTF-8.
    String,
    /// 9: u32 element type, u64 count, elements.
    Array,
    /// 10
    U64,
    /// 11
    I64,
    /// 12
    F64,
}

impl ValueKind {
    /// The kind with this number, if there is one.
    pub fn from_number(n: u32) -> Option<Self> {
        Some(match n {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of one value, where all have the same size.
    pub fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

/// A metadata value. Arrays stay in the file; this says where.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// u8, u16, u32, u64.
    Uint(u64),
    /// i8, i16, i32, i64.
    Int(i64),
    /// f32, f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    String(String),
    /// `count` elements of type `kind` in the given bytes of the file.
    Array {
        /// Element type; never [`ValueKind::Array`].
        kind: ValueKind,
        /// Number of elements, checked against the bytes of the file.
        count: usize,
        /// Where they are in the file.
        bytes: Range<usize>,
    },
}

impl GgufValue {
    /// What it is, for error messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Uint(_) => "an unsigned integer",
            Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a truth value",
            Self::String(_) => "text",
            Self::Array { .. } => "an array",
        }
    }
}

/// Type of a tensor's elements as ggml numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GgmlType(pub u32);

impl GgmlType {
    /// Name, elements a block, bytes a block; `None` for a number this version does not know.
    fn row(self) -> Option<(&'static str, usize, usize)> {
        Some(match self.0 {
            0 => ("F32", 1, 4),
            1 => ("F16", 1, 2),
            2 => ("Q4_0", 32, 18),
            3 => ("Q4_1", 32, 20),
            6 => ("Q5_0", 32, 22),
            7 => ("Q5_1", 32, 24),
            8 => ("Q8_0", 32, 34),
            9 => ("Q8_1", 32, 36),
            10 => ("Q2_K", 256, 84),
            11 => ("Q3_K", 256, 110),
            12 => ("Q4_K", 256, 144),
            13 => ("Q5_K", 256, 176),
            14 => ("Q6_K", 256, 210),
            15 => ("Q8_K", 256, 292),
            16 => ("IQ2_XXS", 256, 66),
            17 => ("IQ2_XS", 256, 74),
            18 => ("IQ3_XXS", 256, 98),
            19 => ("IQ1_S", 256, 50),
            20 => ("IQ4_NL", 32, 18),
            21 => ("IQ3_S", 256, 110),
            22 => ("IQ2_S", 256, 82),
            23 => ("IQ4_XS", 256, 136),
            24 => ("I8", 1, 1),
            25 => ("I16", 1, 2),
            26 => ("I32", 1, 4),
            27 => ("I64", 1, 8),
            28 => ("F64", 1, 8),
            29 => ("IQ1_M", 256, 56),
            30 => ("BF16", 1, 2),
            34 => ("TQ1_0", 256, 54),
            35 => ("TQ2_0", 256, 66),
            39 => ("MXFP4", 32, 17),
            _ => return None,
        })
    }

    /// The name shown to people.
    pub fn name(self) -> String {
        self.row().map_or_else(|| format!("type {}", self.0), |(name, ..)| name.to_owned())
    }

    /// How to turn it into f32, where Tandem can.
    pub fn block_kind(self) -> Option<BlockKind> {
        Some(match self.0 {
            0 => BlockKind::F32,
            1 => BlockKind::F16,
            2 => BlockKind::Q4_0,
            3 => BlockKind::Q4_1,
            8 => BlockKind::Q8_0,
            30 => BlockKind::Bf16,
            39 => BlockKind::Mxfp4,
            _ => return None,
        })
    }

    /// The number in the file of a kind Tandem can read.
    pub fn of(kind: BlockKind) -> Self {
        Self(match kind {
            BlockKind::F32 => 0,
            BlockKind::F16 => 1,
            BlockKind::Q4_0 => 2,
            BlockKind::Q4_1 => 3,
            BlockKind::Q8_0 => 8,
            BlockKind::Bf16 => 30,
            BlockKind::Mxfp4 => 39,
        })
    }

    /// Bytes of a tensor whose rows have `row_elements` elements and which has `num_elements` in all.
    ///
    /// # Errors
    /// When the type is not known, rows do not hold whole blocks, or the size overflows.
    pub fn tensor_bytes(self, row_elements: u64, num_elements: u64) -> Result<u64> {
        let Some((name, elements, bytes)) = self.row() else {
            bail!(
                "element type {} is not known to this version of Tandem; use a GGUF file in F16, BF16, Q8_0 or Q4_0",
                self.0
            );
        };
        if !row_elements.is_multiple_of(elements as u64) {
            bail!("rows of {row_elements} elements do not hold whole {name} blocks of {elements}");
        }
        (num_elements / elements as u64).checked_mul(bytes as u64).context("its size overflows")
    }
}

/// Reads a byte slice front to back; every read is checked against what is left.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes not read yet.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `n` bytes.
    pub(super) fn take(&mut self, n: u64) -> Result<&'a [u8]> {
        let left = self.left();
        let Some(n) = usize::try_from(n).ok().filter(|n| *n <= left) else {
            bail!(
                "the file ends inside its header: {n} bytes wanted at byte {}, {left} left; it is truncated or damaged, fetch it again",
                self.at
            );
        };
        let out = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(out)
    }

    /// The next `N` bytes as an array.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A length-prefixed string.
    pub(super) fn string(&mut self) -> Result<&'a str> {
        let at = self.at;
        let len = self.u64()?;
        std::str::from_utf8(self.take(len)?).with_context(|| format!("the text at byte {at} is not UTF-8"))
    }

    /// A length-prefixed string that is short: the name of a key or of a tensor.
    pub(super) fn name(&mut self) -> Result<&'a str> {
        let at = self.at;
        let len = self.u64()?;
        if len > MAX_NAME_BYTES {
            bail!(
                "the name at byte {at} claims {len} bytes (at most {MAX_NAME_BYTES} are allowed): the file is damaged"
            );
        }
        std::str::from_utf8(self.take(len)?).with_context(|| format!("the name at byte {at} is not UTF-8"))
    }

    fn kind(&mut self) -> Result<ValueKind> {
        let at = self.at;
        let n = self.u32()?;
        ValueKind::from_number(n)
            .with_context(|| format!("value type {n} at byte {at} does not exist: the file is damaged"))
    }

    /// A value with its type number before it.
    pub(super) fn typed_value(&mut self) -> Result<GgufValue> {
        let kind = self.kind()?;
        if kind != ValueKind::Array {
            return self.value(kind);
        }
        let kind = self.kind()?;
        let count = self.u64()?;
        let start = self.at;
        match kind.size() {
            Some(size) => {
                let len = count.checked_mul(size as u64).context("an array's size overflows: the file is damaged")?;
                self.take(len)?;
            }
            None if kind == ValueKind::String => {
                for _ in 0..count {
                    let len = self.u64()?;
                    self.take(len)?;
                }
            }
            None => bail!("arrays of arrays are not supported"),
        }
        // Every element took at least one byte of the file, so the count fits.
        Ok(GgufValue::Array { kind, count: count as usize, bytes: start..self.at })
    }

    /// A single value of a type other than array.
    pub(super) fn value(&mut self, kind: ValueKind) -> Result<GgufValue> {
        Ok(match kind {
            ValueKind::U8 => GgufValue::Uint(u8::from_le_bytes(self.array()?).into()),
            ValueKind::U16 => GgufValue::Uint(u16::from_le_bytes(self.array()?).into()),
            ValueKind::U32 => GgufValue::Uint(self.u32()?.into()),
            ValueKind::U64 => GgufValue::Uint(self.u64()?),
            ValueKind::I8 => GgufValue::Int(i8::from_le_bytes(self.array()?).into()),
            ValueKind::I16 => GgufValue::Int(i16::from_le_bytes(self.array()?).into()),
            ValueKind::I32 => GgufValue::Int(i32::from_le_bytes(self.array()?).into()),
            ValueKind::I64 => GgufValue::Int(i64::from_le_bytes(self.array()?)),
            ValueKind::F32 => GgufValue::Float(f32::from_le_bytes(self.array()?).into()),
            ValueKind::F64 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            ValueKind::Bool => GgufValue::Bool(self.array::<1>()?[0] != 0),
            ValueKind::String => GgufValue::String(self.string()?.to_owned()),
            ValueKind::Array => bail!("arrays of arrays are not supported"),
        })
    }
}
