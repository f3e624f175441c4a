//! Page-locked host memory, which copies reach without the host waiting, and fences in the compute stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, DriverError, result};
use serde::{Deserialize, Serialize};

use super::CudaDevice;
use super::driver::Driver;

/// Page-locked host memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PinnedBytes {
    /// Locked now.
    pub now: u64,
    /// Most that was locked at one time.
    pub peak: u64,
}

#[derive(Debug, Default)]
struct Counted {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Where page-locked memory comes from: the driver, or on a recording device nowhere. All of it is counted.
#[derive(Clone)]
pub(super) struct PinnedSource {
    context: Option<Arc<CudaContext>>,
    counted: Arc<Counted>,
}

impl PinnedSource {
    pub(super) fn of_driver(context: &Arc<CudaContext>) -> Self {
        Self { context: Some(Arc::clone(context)), counted: Arc::default() }
    }

    /// Memory that is counted and not there.
    pub(super) fn recording() -> Self {
        Self { context: None, counted: Arc::default() }
    }

    pub(super) fn bytes(&self) -> PinnedBytes {
        let Counted { now, peak } = &*self.counted;
        PinnedBytes { now: now.load(Ordering::Relaxed), peak: peak.load(Ordering::Relaxed) }
    }

    pub(super) fn reset_peak(&self) {
        let Counted { now, peak } = &*self.counted;
        peak.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Page-locked host memory.
pub(super) struct PinnedBuffer {
    /// Null on a recording device.
    pointer: *mut u8,
    bytes: usize,
    source: PinnedSource,
}

// SAFETY: the memory belongs to this value alone and has no ties to a thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: a shared reference gives the address, nothing else; who reads or writes there orders it.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` bytes, not set, aligned to a page.
    ///
    /// # Errors
    /// When the driver refuses them.
    pub(super) fn new(source: &PinnedSource, bytes: usize) -> Result<Self, DriverError> {
        let pointer = match &source.context {
            Some(context) => {
                context.bind_to_thread()?;
                // SAFETY: a plain allocation, freed once, in `drop`.
                unsafe { result::malloc_host(bytes, 0) }?.cast()
            }
            None => std::ptr::null_mut(),
        };
        let mut buffer = Self::counted(source, bytes);
        buffer.pointer = pointer;
        Ok(buffer)
    }

    /// Memory that is counted and not there.
    pub(super) fn counted(source: &PinnedSource, bytes: usize) -> Self {
        let now = source.counted.now.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        source.counted.peak.fetch_max(now, Ordering::Relaxed);
        Self { pointer: std::ptr::null_mut(), bytes, source: source.clone() }
    }

    /// First byte. On a recording device there is none, and nobody reads or writes there.
    pub(super) fn pointer(&self) -> *mut u8 {
        self.pointer
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        self.source.counted.now.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        let Some(context) = self.source.context.as_ref().filter(|_| !self.pointer.is_null()) else { return };
        // A copy may still be on its way.
        if context.bind_to_thread().is_err() || context.synchronize().is_err() {
            return;
        }
        // SAFETY: allocated in `new`, and no copy uses it any more.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

/// A point of the compute stream that the host can wait for. A fence that was never set is passed.
pub(super) struct Fence {
    event: CudaEvent,
    /// Launches before the point.
    launches: AtomicU64,
}

impl Fence {
    /// A fence that is not set.
    ///
    /// # Errors
    /// When the driver refuses an event.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        // Waiting gives the core to others, for example the loader.
        let event = context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC))?;
        Ok(Self { event, launches: AtomicU64::new(0) })
    }

    /// Sets the fence behind everything queued so far.
    pub(super) fn set(&self, device: &CudaDevice, driver: &Driver) {
        self.launches.store(device.counters().launches, Ordering::Relaxed);
        device.latch_result(self.event.record(&driver.stream), "recording an event");
    }

    /// Waits until the device has passed the fence.
    ///
    /// That is a host sync where nothing was launched behind the fence: the device stands still until the host has queued more. Otherwise the
    /// host is only held back from running further ahead.
    pub(super) fn wait(&self, device: &CudaDevice) {
        device.bind();
        if device.latch_result(self.event.try_is_complete(), "asking for an event") != Some(false) {
            return;
        }
        let is_last = self.launches.load(Ordering::Relaxed) == device.counters().launches;
        let counters = &device.inner.counters;
        let counter = if is_last { &counters.host_syncs } else { &counters.held_back };
        counter.fetch_add(1, Ordering::Relaxed);
        device.latch_result(self.event.synchronize(), "waiting for the device");
    }
}
