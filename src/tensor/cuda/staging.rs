//! Uploads through page-locked memory: from pageable memory the driver may wait for the stream before it takes a copy.
//!
//! The memory has two halves. Uploads go one behind the other into one of them; when it is full a fence is set and the other half is used,
//! once the device has passed that one's fence. A half holds the metadata of about 120,000 tokens, so in training it has passed long ago. Weights stream
//! through both: one is filled from the file while the device takes the other.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUmemorytype};
use cudarc::driver::{CudaContext, DriverError};
use rayon::prelude::*;

use super::CudaDevice;
use super::copies::{Pitched, empty_copy};
use super::driver::Driver;
use super::pinned::{Fence, PinnedBuffer, PinnedSource};

/// Bytes of one half: the longest row that is staged.
pub(super) const HALF_BYTES: usize = 4 << 20;
/// Bytes of both.
pub(super) const BYTES: usize = 2 * HALF_BYTES;
/// Every upload starts at a multiple of this.
const ALIGN: usize = 256;

/// Page-locked memory for uploads on their way.
pub(super) struct Staging {
    buffer: PinnedBuffer,
    /// Ends of the uploads of each half.
    fences: [Fence; 2],
    turns: Turns,
}

/// Which half is in use, and how much of it.
#[derive(Debug, Default)]
struct Turns {
    half: usize,
    used: usize,
}

/// Where an upload goes.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    offset: usize,
    /// The half that is left for it, when the turn passes to the other one.
    left: Option<usize>,
}

impl Turns {
    /// A place for `bytes` bytes, at most [`HALF_BYTES`].
    fn place(&mut self, bytes: usize) -> Place {
        let mut left = None;
        if self.used + bytes > HALF_BYTES {
            left = Some(self.half);
            *self = Self { half: 1 - self.half, used: 0 };
        }
        let offset = self.half * HALF_BYTES + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        Place { offset, left }
    }
}

impl Staging {
    /// Allocates both halves.
    ///
    /// # Errors
    /// When the driver refuses them.
    pub(super) fn new(context: &Arc<CudaContext>, pinned: &PinnedSource) -> Result<Self, DriverError> {
        Ok(Self {
            buffer: PinnedBuffer::new(pinned, BYTES)?,
            fences: [Fence::new(context)?, Fence::new(context)?],
            turns: Turns::default(),
        })
    }

    /// Queues a copy of `bytes` to device memory that the caller owns, piece by piece: while the device takes one half, the next piece is copied
    /// into the other.
    pub(super) fn upload(&mut self, device: &CudaDevice, driver: &Driver, pointer: u64, bytes: &[u8]) {
        let stream = driver.stream.cu_stream();
        for (number, piece) in bytes.chunks(HALF_BYTES).enumerate() {
            let (staged, to) = (self.stage(device, driver, piece), pointer + (number * HALF_BYTES) as u64);
            // SAFETY: `staged` holds the piece until the device has read it. The caller owns the destination.
            let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, staged, piece.len(), stream) };
            device.latch_result(status.result(), "copying to the device");
        }
    }

    /// As [`Self::upload`], to rows with gaps between them. A row must fit a half.
    pub(super) fn upload_rows(
        &mut self,
        device: &CudaDevice,
        driver: &Driver,
        pointer: u64,
        rows: Pitched,
        bytes: &[u8],
    ) {
        let Pitched { row_bytes, pitch, .. } = rows;
        debug_assert!((1..=HALF_BYTES).contains(&row_bytes) && bytes.len() == rows.rows * row_bytes);
        let stream = driver.stream.cu_stream();
        let rows_per_piece = HALF_BYTES / row_bytes;
        for (number, piece) in bytes.chunks(rows_per_piece * row_bytes).enumerate() {
            let copy = CUDA_MEMCPY2D {
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
                srcHost: self.stage(device, driver, piece),
                srcPitch: row_bytes,
                dstDevice: pointer + (number * rows_per_piece * pitch) as u64,
                dstPitch: pitch,
                WidthInBytes: row_bytes,
                Height: piece.len() / row_bytes,
                ..empty_copy()
            };
            // SAFETY: as in `upload`.
            let status = unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) };
            device.latch_result(status.result(), "copying to the device");
        }
    }

    /// Copies a piece of at most [`HALF_BYTES`] into page-locked memory, where it stays until the device has passed the fence of its half: the
    /// caller queues the copy to the device before the next piece is staged.
    fn stage(&mut self, device: &CudaDevice, driver: &Driver, piece: &[u8]) -> *const c_void {
        let Place { offset, left } = self.turns.place(piece.len());
        if let Some(left) = left {
            self.fences[left].set(device, driver);
            self.fences[1 - left].wait(device);
        }
        // SAFETY: the place lies within the buffer, apart from every piece whose fence has not been waited for; `Drop` of the buffer waits for
        // the device.
        let staged = unsafe { std::slice::from_raw_parts_mut(self.buffer.pointer().add(offset), piece.len()) };
        copy(piece, staged);
        staged.as_ptr().cast()
    }
}

/// Copies with all threads where that pays: weights come out of a mapped file, whose pages the disk has to bring first.
fn copy(from: &[u8], to: &mut [u8]) {
    const PART: usize = 512 << 10;
    if to.len() <= PART {
        return to.copy_from_slice(from);
    }
    to.par_chunks_mut(PART).zip(from.par_chunks(PART)).for_each(|(to, from)| to.copy_from_slice(from));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_of_a_half_lie_apart_and_the_halves_take_turns() {
        let mut turns = Turns::default();
        let mut in_use: [Vec<(usize, usize)>; 2] = Default::default();
        let mut left = Vec::new();
        for i in 0..400 {
            let bytes = [1, ALIGN, 300_001, HALF_BYTES, 70_000][i % 5];
            let place = turns.place(bytes);
            if let Some(half) = place.left {
                left.push(half);
                in_use[1 - half].clear();
            }
            let (half, end) = (place.offset / HALF_BYTES, place.offset + bytes);
            assert!(end <= (half + 1) * HALF_BYTES, "{place:?} of {bytes} bytes crosses the end of its half");
            assert_eq!(place.offset % ALIGN, 0);
            assert!(in_use[half].iter().all(|&(start, stop)| stop <= place.offset || end <= start), "{place:?}");
            in_use[half].push((place.offset, end));
        }
        assert!(left.len() > 100 && left.windows(2).all(|pair| pair[0] != pair[1]), "{left:?}");
    }
}
