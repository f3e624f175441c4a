//! A few values of the device that the host reads later, when the device has passed their copy: nobody waits for them.

use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::{DriverError, sys};

use super::CudaDevice;
use super::driver::Driver;
use super::pinned::{Fence, PinnedBuffer};

/// Copies that may be under way or unread.
const NUM_SLOTS: usize = 2;

/// Slots for copies of as many f32, used in turns.
pub struct Readback {
    device: CudaDevice,
    /// On a recording device without fences. `None` when the driver refused the memory: the device is latched then.
    parts: Option<(PinnedBuffer, Option<[Fence; NUM_SLOTS]>)>,
    /// What is read from a recording device, which computes nothing.
    initial: Vec<f32>,
    next: AtomicUsize,
}

/// A copy that was queued. It must be read before two more are queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadSlot(usize);

impl std::fmt::Debug for Readback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readback").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Readback {
    /// Allocates the slots for values that begin as `initial`; on failure the device is latched.
    pub fn new(device: &CudaDevice, initial: Vec<f32>) -> Self {
        let fences = || match device.driver() {
            Some(Driver { context, .. }) => Ok(Some([Fence::new(context)?, Fence::new(context)?])),
            None => Ok::<_, DriverError>(None),
        };
        let parts = || {
            Ok::<_, DriverError>((
                PinnedBuffer::new(device.pinned(), NUM_SLOTS * initial.len() * size_of::<f32>())?,
                fences()?,
            ))
        };
        let parts = device.latch_result(parts(), "allocating page-locked memory");
        Self { device: device.clone(), parts, initial, next: AtomicUsize::new(0) }
    }

    /// Queues a copy of the values at `pointer` in device memory.
    pub fn queue(&self, pointer: u64) -> ReadSlot {
        let slot = self.next.fetch_add(1, Ordering::Relaxed) % NUM_SLOTS;
        let parts = self.parts.as_ref().filter(|_| !self.device.has_failed());
        if let Some((driver, (buffer, Some(fences)))) = self.device.driver().zip(parts) {
            // SAFETY: the slot lies within the buffer, which lives until the device has passed the copy; it is read behind its fence only.
            let status = unsafe {
                let to = buffer.pointer().cast::<f32>().add(slot * self.initial.len());
                sys::cuMemcpyDtoHAsync_v2(
                    to.cast(),
                    pointer,
                    size_of_val(self.initial.as_slice()),
                    driver.stream.cu_stream(),
                )
            };
            self.device.latch_result(status.result(), "copying to the host");
            fences[slot].set(&self.device, driver);
        }
        ReadSlot(slot)
    }

    /// The values of a copy, when the device has passed it. Zeros where the device failed before; the values at the beginning on a recording device.
    pub fn read(&self, slot: ReadSlot) -> Vec<f32> {
        let len = self.initial.len();
        let Some((buffer, fences)) = &self.parts else { return vec![0.0; len] };
        let Some(fences) = fences else { return self.initial.clone() };
        fences[slot.0].wait(&self.device);
        // SAFETY: within the buffer; the device has written it, and writes it again only after two more calls of `queue`.
        unsafe {
            let from = buffer.pointer().cast::<f32>().add(slot.0 * len);
            (0..len).map(|i| from.add(i).read_volatile()).collect()
        }
    }
}
