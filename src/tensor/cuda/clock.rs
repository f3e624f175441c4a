//! Time on the device: events recorded on its streams, read when the device has passed them.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, result};

use super::CudaDevice;
use crate::tensor::clock::{Mark, Marks, NUM_SETS};
use crate::tensor::phase::LaneKind;

/// Events of the last steps, used again in turns.
pub struct EventClock {
    device: CudaDevice,
    /// Empty on a recording device.
    sets: [Vec<CudaEvent>; NUM_SETS],
    set: usize,
    /// Events of this set that are recorded.
    used: usize,
}

/// Names an event of the clock to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventHandle(CUevent);

// SAFETY: a name; the driver takes it from any thread.
unsafe impl Send for EventHandle {}
// SAFETY: as above.
unsafe impl Sync for EventHandle {}

impl EventHandle {
    pub(super) fn of(event: &CudaEvent) -> Self {
        Self(event.cu_event())
    }

    pub(super) fn get(self) -> CUevent {
        self.0
    }
}

impl std::fmt::Debug for EventClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventClock").field("used", &self.used).finish_non_exhaustive()
    }
}

impl EventClock {
    /// A clock for the streams of `device`.
    pub fn new(device: CudaDevice) -> Self {
        Self { device, sets: Default::default(), set: 0, used: 0 }
    }

    /// The next event of this set, made if there is none.
    fn next_event(&mut self, context: &Arc<CudaContext>) -> Option<&CudaEvent> {
        let events = &mut self.sets[self.set];
        if self.used == events.len() {
            let event = context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            events.push(self.device.latch_result(event, "making a timing event")?);
        }
        events.get(self.used)
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

    fn next(&self) -> Mark {
        Mark { set: self.set, index: self.used, launches: self.device.counters().launches }
    }

    fn mark(&mut self, lane: LaneKind) -> Option<Mark> {
        let device = self.device.clone();
        if let Some(driver) = device.driver() {
            let event = self.next_event(&driver.context)?;
            device.latch_result(device.record_event(driver, event, lane), "recording a timing event")?;
        }
        let mark = self.next();
        self.used += 1;
        Some(mark)
    }

    fn take(&mut self, count: usize) -> Option<Vec<EventHandle>> {
        let device = self.device.clone();
        let mut handles = Vec::with_capacity(count);
        for _ in 0..count {
            if let Some(driver) = device.driver() {
                handles.push(EventHandle::of(self.next_event(&driver.context)?));
            }
            self.used += 1;
        }
        Some(handles)
    }

    fn elapsed_ms(&self, from: Mark, to: Mark) -> Option<f64> {
        let event = |mark: Mark| self.sets[mark.set].get(mark.index);
        let (from, to) = (event(from)?, event(to)?);
        // cudarc's own `elapsed_ms` would wait for both.
        self.device.bind();
        // SAFETY: both events live and were recorded.
        unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) }.ok().map(f64::from)
    }
}
