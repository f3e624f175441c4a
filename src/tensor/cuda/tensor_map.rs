//! What Hopper's copy engine is told about a matrix: where it lies, and the boxes that are copied of it. Made on the host, passed to a kernel by value.

use std::ptr::from_mut;

use cudarc::driver::sys::{self, CUtensorMap};

use super::CudaDevice;

/// Description of a matrix for the copy engine, as kernels take it by value (`TensorMap` of kernels/hopper.cuh).
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<CUtensorMap>(), "size of a tensor map");

/// bf16 matrices of equal shape, one behind the other, and the box of one of them that one copy brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boxes {
    /// Device address, a multiple of 16.
    pub pointer: u64,
    /// Columns, rows and matrices; what a box has outside of them is filled with zeros.
    pub sizes: [usize; 3],
    /// Values between rows and between matrices, multiples of 8.
    pub strides: [usize; 2],
    /// Rows of a box, up to 256. It has [`BOX_COLUMNS`] columns, swizzled over the 128 bytes that they are.
    pub box_rows: usize,
}

/// Columns of a box.
pub const BOX_COLUMNS: usize = 64;

impl CudaDevice {
    /// The description of `boxes`: of one matrix when `dimensions` is 2, of a stack when it is 3. Nothing is allocated and nothing is queued. When the
    /// driver refuses, the device is latched.
    pub fn tensor_map(&self, boxes: &Boxes, dimensions: usize) -> TensorMap {
        let &Boxes { pointer, sizes, strides, box_rows } = boxes;
        assert!(matches!(dimensions, 2 | 3) && box_rows <= 256, "a box of {box_rows} rows in {dimensions} dimensions");
        if self.driver().is_none() || self.has_failed() {
            return TensorMap::default();
        }
        let sizes = sizes.map(|size| size as u64);
        let strides = strides.map(|stride| 2 * stride as u64);
        let (extents, steps) = ([BOX_COLUMNS as u32, box_rows as u32, 1], [1; 3]);
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many values as there are dimensions, of strides one less; the driver writes the map and keeps no pointer to them.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                from_mut(&mut map),
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                dimensions as u32,
                pointer as *mut _,
                sizes.as_ptr(),
                strides.as_ptr(),
                extents.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        self.latch_result(status.result(), "describing a matrix to the copy engine");
        TensorMap(map.opaque)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::cuda::{DeviceFacts, RecordingFacts};

    #[test]
    fn a_recording_device_needs_no_driver_for_it() {
        let device = CudaDevice::recording(RecordingFacts::unbounded(DeviceFacts::assumed(1 << 30), false));
        let boxes = Boxes { pointer: 4096, sizes: [64, 8, 2], strides: [64, 512], box_rows: 128 };
        assert_eq!(device.tensor_map(&boxes, 3), TensorMap::default());
        device.check().unwrap();
    }
}
