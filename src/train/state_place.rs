//! Where the optimizer's state lies: moments, and exact values of weights whose products read a working copy. Nothing but the update touches them.

use crate::model::policy::Placement;
use crate::ops::adamw8::{self, Moment8};
use crate::tensor::{DType, Device, MemoryCategory, Tensor};

/// Where the state lies, as far as it can lie where it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StatePlace {
    /// Where it was asked to lie.
    pub asked: Placement,
    /// Bytes of it in host memory.
    pub host_bytes: u64,
    /// Why some or all of it lies on the device although it was to lie in host memory.
    pub refused: Option<String>,
    /// Why it stays in host memory although it was to lie on the device.
    pub stays: Option<String>,
}

impl StatePlace {
    /// Nothing lies anywhere yet.
    pub fn new(asked: Placement) -> Self {
        Self { asked, ..Self::default() }
    }

    /// Takes host memory if that is asked for and was not refused before.
    fn in_host<T>(&mut self, bytes: usize, take: impl FnOnce() -> Result<T, String>) -> Option<T> {
        if self.asked == Placement::Device || self.refused.is_some() {
            return None;
        }
        match take() {
            Ok(taken) => {
                self.host_bytes += bytes as u64;
                Some(taken)
            }
            Err(why) => {
                self.refused = Some(why);
                None
            }
        }
    }

    /// Zeros in f32 in host memory, if they are to lie there and can.
    pub fn host_f32(&mut self, device: &Device, category: MemoryCategory, shape: &[usize]) -> Option<Tensor> {
        let bytes = shape.iter().product::<usize>() * size_of::<f32>();
        self.in_host(bytes, || device.zeros_mapped(category, shape, DType::F32))
    }

    /// A moment of zeros in f32.
    pub fn moment(&mut self, device: &Device, shape: &[usize]) -> Tensor {
        let category = MemoryCategory::Optimizer;
        self.host_f32(device, category, shape).unwrap_or_else(|| device.zeros_f32(category, shape))
    }

    /// A moment of `len` zeros in 8 bits.
    pub fn moment8(&mut self, device: &Device, len: usize) -> Moment8 {
        let (category, blocks) = (MemoryCategory::Optimizer, len.div_ceil(adamw8::BLOCK));
        let room = blocks * adamw8::BLOCK;
        let codes = self.in_host(room, || device.zero_mapped_bytes(category, room));
        let codes = codes.unwrap_or_else(|| device.zero_bytes(category, room));
        Moment8 { codes, absmax: self.moment(device, &[blocks]) }
    }
}
