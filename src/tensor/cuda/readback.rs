//! A few values of the device that the host reads later, when the device has passed their copy: nobody waits for them.

use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys;

use super::CudaDevice;
use super::pinned::{Fence, PinnedBuffer};

/// Copies that may be under way or unread.
const NUM_SLOTS: usize = 2;

/// Slots for copies of `N` f32, used in turns.
pub struct Readback<const N: usize> {
    device: CudaDevice,
    /// `None` when the driver refused the memory: the device is latched then.
    parts: Option<(PinnedBuffer, [Fence; NUM_SLOTS])>,
    next: AtomicUsize,
}

/// A copy that was queued. It must be read before two more are queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadSlot(usize);

impl<const N: usize> std::fmt::Debug for Readback<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readback").field("next", &self.next).finish_non_exhaustive()
    }
}

impl<const N: usize> Readback<N> {
    /// Allocates the slots; on failure the device is latched.
    pub fn new(device: &CudaDevice) -> Self {
        let parts = || {
            let fences = [Fence::new(device.context())?, Fence::new(device.context())?];
            Ok::<_, cudarc::driver::DriverError>((
                PinnedBuffer::new(device.context(), NUM_SLOTS * size_of::<[f32; N]>())?,
                fences,
            ))
        };
        let parts = device.latch_result(parts(), "allocating page-locked memory");
        Self { device: device.clone(), parts, next: AtomicUsize::new(0) }
    }

    /// Queues a copy of the `N` values at `pointer` in device memory.
    pub fn queue(&self, pointer: u64) -> ReadSlot {
        let slot = self.next.fetch_add(1, Ordering::Relaxed) % NUM_SLOTS;
        if let Some((buffer, fences)) = self.parts.as_ref().filter(|_| !self.device.has_failed()) {
            // SAFETY: the slot lies within the buffer, which lives until the device has passed the copy; it is read behind its fence only.
            let status = unsafe {
                let to = buffer.pointer().cast::<[f32; N]>().add(slot);
                sys::cuMemcpyDtoHAsync_v2(to.cast(), pointer, size_of::<[f32; N]>(), self.device.stream().cu_stream())
            };
            self.device.latch_result(status.result(), "copying to the host");
            fences[slot].set(&self.device);
        }
        ReadSlot(slot)
    }

    /// The values of a copy, when the device has passed it. Zeros where the device failed before.
    pub fn read(&self, slot: ReadSlot) -> [f32; N] {
        let Some((buffer, fences)) = &self.parts else { return [0.0; N] };
        fences[slot.0].wait(&self.device);
        // SAFETY: within the buffer; the device has written it, and writes it again only after two more calls of `queue`.
        unsafe { buffer.pointer().cast::<[f32; N]>().add(slot.0).read_volatile() }
    }
}
