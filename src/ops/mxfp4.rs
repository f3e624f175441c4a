//! Weights in MXFP4 on a device, and the matrices that products read, made of them.
//!
//! Contract: [`dequantize`] assigns. Nothing here has a backward pass: such weights do not train. Values are those of [`crate::formats::mxfp4`],
//! which bf16 holds exactly, so a GPU makes the same.

use rayon::prelude::*;

use crate::formats::mxfp4::{BLOCK, BLOCK_BYTES, Mxfp4, dequantize_block};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::{Bytes, Device, MemoryCategory, Tensor};

/// Blocks that a task of the CPU form makes at least.
const MIN_BLOCKS: usize = 1024;
/// Values that a block of the kernel makes; it has the same number.
const CHUNK: usize = 8192;
/// Threads of a block.
const THREADS: u32 = 256;

/// A weight in MXFP4: for experts [E, out, in].
#[derive(Debug)]
pub struct Mxfp4Weight {
    shape: Vec<usize>,
    blocks: Bytes,
    scales: Bytes,
}

impl Mxfp4Weight {
    /// Room for a weight of that shape, whose last dimension is a multiple of 32. All its values are 0.
    pub fn room(device: &Device, shape: &[usize]) -> Self {
        let values: usize = shape.iter().product();
        assert!(shape.last().is_some_and(|last| last.is_multiple_of(BLOCK)), "rows of whole blocks of MXFP4");
        Self {
            shape: shape.to_vec(),
            blocks: device.zero_bytes(MemoryCategory::Weights, values / BLOCK * BLOCK_BYTES),
            scales: device.zero_bytes(MemoryCategory::Weights, values / BLOCK),
        }
    }

    /// Dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of values.
    pub fn num_elements(&self) -> usize {
        self.scales.len() * BLOCK
    }

    /// Takes over the values of a weight of the same shape, as they are stored.
    pub fn set(&mut self, weight: &Mxfp4<'_>) {
        assert_eq!(weight.shape(), self.shape, "shapes of a weight in MXFP4");
        self.blocks.set(weight.blocks());
        self.scales.set(weight.scales());
    }

    /// The values as they are stored. From a GPU this waits for the device.
    pub fn to_stored(&self) -> (Vec<u8>, Vec<u8>) {
        (self.blocks.to_vec(), self.scales.to_vec())
    }
}

/// Makes `out`, of as many values as `weight` has and in their order.
pub fn dequantize(device: &Device, weight: &Mxfp4Weight, out: &mut Tensor) {
    assert_eq!(out.len(), weight.num_elements(), "room for a matrix in MXFP4");
    match device {
        Device::Cpu(_) => {
            let codes = weight.blocks.u8s().par_chunks_exact(BLOCK_BYTES).zip(weight.scales.u8s());
            let blocks = out.f32s_mut().par_chunks_exact_mut(BLOCK).zip(codes).with_min_len(MIN_BLOCKS);
            blocks.for_each(|(out, (codes, scale))| dequantize_block(codes, *scale, out));
        }
        Device::Cuda(gpu) => {
            let values = out.len();
            let args =
                kernel_args![weight.blocks.pointer(), weight.scales.pointer(), out.pointer(), (values / 8) as i64];
            gpu.launch("mxfp4_dequantize", Launch::new(values.div_ceil(CHUNK), THREADS), args);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, cpu};

    #[test]
    fn values_are_those_of_the_format() {
        let device = cpu(2);
        let shape = [3, 5, 64];
        let stored = Mxfp4::quantize(&Values::new(3).vec(3 * 5 * 64), &shape).unwrap();
        let mut weight = Mxfp4Weight::room(&device, &shape);
        weight.set(&stored);
        let mut out = device.empty(MemoryCategory::Workspace, &shape);
        dequantize(&device, &weight, &mut out);
        assert_eq!(out.f32s(), stored.dequantize());
        assert_eq!(weight.to_stored(), (stored.blocks().to_vec(), stored.scales().to_vec()));
    }
}
