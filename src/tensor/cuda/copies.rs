//! Clearing and copying device memory, in stream order.

use std::sync::PoisonError;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};

use super::{CudaDevice, staging};

/// Rows in device memory with gaps between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pitched {
    /// How many.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes between the starts of rows.
    pub pitch: usize,
}

impl Pitched {
    pub(super) fn is_contiguous(self) -> bool {
        self.rows <= 1 || self.row_bytes == self.pitch
    }
}

/// A copy of nothing between device addresses; callers set what they need.
pub(super) fn empty_copy() -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: 0,
        Height: 0,
    }
}

pub(super) fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: callers pass numbers, whose bytes are all initialized; the slice covers exactly their memory.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

impl CudaDevice {
    /// Fills `bytes` bytes at `pointer` with zeros, in stream order.
    pub fn zero(&self, pointer: u64, bytes: usize) {
        if bytes == 0 || self.has_failed() {
            return;
        }
        self.count_launch();
        let Some(driver) = self.driver() else { return };
        // SAFETY: the caller owns the buffer.
        let status = unsafe { result::memset_d8_async(pointer, 0, bytes, driver.stream.cu_stream()) };
        self.latch_result(status, "clearing memory");
    }

    /// Copies host values to the device, in stream order; returns when the host's slice may change. Nobody waits for more than the copies that
    /// are on their way.
    pub fn upload<T: Copy>(&self, pointer: u64, values: &[T]) {
        let bytes = size_of_val(values);
        self.upload_rows(pointer, Pitched { rows: 1, row_bytes: bytes, pitch: bytes }, values);
    }

    /// As [`Self::upload`], to rows with gaps between them; `values` holds them one after the other.
    pub fn upload_rows<T: Copy>(&self, pointer: u64, rows: Pitched, values: &[T]) {
        if values.is_empty() || self.has_failed() || self.refuses_while_capturing("copying to the device") {
            return;
        }
        let Some(driver) = self.driver() else { return };
        let bytes = bytes_of(values);
        let mut staging = driver.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if rows.is_contiguous() {
            staging.upload(self, driver, pointer, bytes);
        } else if rows.row_bytes <= staging::HALF_BYTES {
            staging.upload_rows(self, driver, pointer, rows, bytes);
        } else {
            for (row, bytes) in bytes.chunks(rows.row_bytes).enumerate() {
                staging.upload(self, driver, pointer + (row * rows.pitch) as u64, bytes);
            }
        }
    }

    /// As [`Self::download`], from rows with gaps between them.
    pub fn download_rows<T: Copy + Default>(&self, pointer: u64, rows: Pitched) -> Vec<T> {
        let len = rows.rows * rows.row_bytes / size_of::<T>();
        if rows.is_contiguous() {
            return self.download(pointer, len);
        }
        let mut values = vec![T::default(); len];
        if len == 0 || self.has_failed() || self.refuses_while_capturing("copying to the host") {
            return values;
        }
        if let Some(driver) = self.driver() {
            let copy = CUDA_MEMCPY2D {
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcDevice: pointer,
                srcPitch: rows.pitch,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
                dstHost: values.as_mut_ptr().cast(),
                dstPitch: rows.row_bytes,
                WidthInBytes: rows.row_bytes,
                Height: rows.rows,
                ..empty_copy()
            };
            // SAFETY: the destination has room for all rows and lives until the synchronization below.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&copy, driver.stream.cu_stream()) };
            self.latch_result(status.result(), "copying rows to the host");
        }
        self.synchronize();
        values
    }

    /// Copies within the device, in stream order.
    pub fn copy(&self, from: u64, to: u64, bytes: usize) {
        if bytes > 0 && !self.has_failed() {
            self.count_launch();
            self.bring(from, to, bytes);
        }
    }

    /// As [`Self::copy`], for what a batch brings to a recorded graph. As uploads of batches do, it counts as no launch.
    pub fn bring(&self, from: u64, to: u64, bytes: usize) {
        if bytes == 0 || self.has_failed() {
            return;
        }
        let Some(driver) = self.driver() else { return };
        // SAFETY: both ranges are owned by the caller and do not overlap.
        let status = unsafe { result::memcpy_dtod_async(to, from, bytes, driver.stream.cu_stream()) };
        self.latch_result(status, "copying on the device");
    }

    /// Copies device values to the host and waits for them: a host sync. A recording device has zeros.
    pub fn download<T: Copy + Default>(&self, pointer: u64, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        if len == 0 || self.has_failed() || self.refuses_while_capturing("copying to the host") {
            return values;
        }
        if let Some(driver) = self.driver() {
            // SAFETY: the destination lives until the synchronization below.
            let status = unsafe { result::memcpy_dtoh_async(&mut values, pointer, driver.stream.cu_stream()) };
            self.latch_result(status, "copying to the host");
        }
        self.synchronize();
        values
    }
}
