//! Number formats and the arithmetic of the CPU engine.

use half::bf16;
use serde::{Deserialize, Serialize};

/// Format of the values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Bytes of one value.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Arithmetic of the CPU engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// 32-bit floats rounded to bf16 wherever Transformers would store bf16.
    Bf16,
}

impl Precision {
    /// Rounds one value to the nearest bf16 (ties to even) under `Bf16`; leaves it alone under `F32`.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// [`Self::round`] for each value of a slice.
    pub fn round_slice(self, xs: &mut [f32]) {
        if self == Self::Bf16 {
            for x in xs {
                *x = bf16::from_f32(*x).to_f32();
            }
        }
    }
}
