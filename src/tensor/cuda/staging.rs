//! Uploads through page-locked memory: from pageable memory the driver may wait for the stream before it takes a copy.
//!
//! The memory has two halves. Uploads go one behind the other into one of them; when it is full a fence is set and the other half is used,
//! once the device has passed that one's fence. A half holds the metadata of about 120,000 tokens, so in training it has passed long ago.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};

use super::CudaDevice;
use super::pinned::{Fence, PinnedBuffer};

/// Bytes of one half: the largest upload that is staged.
pub(super) const HALF_BYTES: usize = 4 << 20;
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
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self {
            buffer: PinnedBuffer::new(context, 2 * HALF_BYTES)?,
            fences: [Fence::new(context)?, Fence::new(context)?],
            turns: Turns::default(),
        })
    }

    /// Queues a copy of `values`, at most [`HALF_BYTES`], to `pointer` in device memory that the caller owns.
    pub(super) fn upload<T: Copy>(&mut self, device: &CudaDevice, pointer: u64, values: &[T]) {
        let bytes = size_of_val(values);
        debug_assert!(bytes <= HALF_BYTES);
        let Place { offset, left } = self.turns.place(bytes);
        if let Some(left) = left {
            self.fences[left].set(device);
            self.fences[1 - left].wait(device);
        }
        // SAFETY: the place lies within the buffer, apart from every upload whose fence has not been waited for; the device reads it only
        // before the fence of its half, which is waited for before the place is used again. `Drop` of the buffer waits for the device.
        let status = unsafe {
            let staged = self.buffer.pointer().add(offset);
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), staged, bytes);
            sys::cuMemcpyHtoDAsync_v2(pointer, staged.cast(), bytes, device.stream().cu_stream())
        };
        device.latch_result(status.result(), "copying to the device");
    }
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
