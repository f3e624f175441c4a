//! Time on the device: events recorded on the compute stream, read when the device has passed them.

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};

use super::CudaDevice;
use crate::tensor::clock::{Mark, Marks, NUM_SETS};

/// Events of the last steps, used again in turns.
pub struct EventClock {
    device: CudaDevice,
    sets: [Vec<CudaEvent>; NUM_SETS],
    set: usize,
    /// Events of this set that are recorded.
    used: usize,
}

impl std::fmt::Debug for EventClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventClock").field("used", &self.used).finish_non_exhaustive()
    }
}

impl EventClock {
    /// A clock for the compute stream of `device`.
    pub fn new(device: CudaDevice) -> Self {
        Self { device, sets: Default::default(), set: 0, used: 0 }
    }
}

impl Marks for EventClock {
    fn reset(&mut self) {
        self.used = 0;
    }

    fn turn(&mut self) {
        self.set = (self.set + 1) % NUM_SETS;
        self.used = 0;
    }

    fn mark(&mut self) -> Option<Mark> {
        let events = &mut self.sets[self.set];
        if self.used == events.len() {
            let event = self.device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            events.push(self.device.latch_result(event, "making a timing event")?);
        }
        let recorded = events[self.used].record(self.device.stream());
        self.device.latch_result(recorded, "recording a timing event")?;
        self.used += 1;
        Some(Mark { set: self.set, index: self.used - 1, launches: self.device.counters().launches })
    }

    fn elapsed_ms(&self, from: Mark, to: Mark) -> Option<f64> {
        let event = |mark: Mark| self.sets[mark.set].get(mark.index);
        let (from, to) = (event(from)?, event(to)?);
        // cudarc's own `elapsed_ms` would wait for both.
        self.device.bind();
        // SAFETY: both events live and were recorded on the compute stream.
        unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) }.ok().map(f64::from)
    }
}
