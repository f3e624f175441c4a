//! Time on the device: events recorded on the compute stream, read when the step has ended.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::CudaDevice;

/// Events of one step, reused from step to step.
pub struct EventClock {
    device: CudaDevice,
    events: Vec<CudaEvent>,
    used: usize,
}

/// Number of an event in its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(usize);

impl std::fmt::Debug for EventClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventClock").field("used", &self.used).finish_non_exhaustive()
    }
}

impl EventClock {
    /// A clock for the compute stream of `device`.
    pub fn new(device: CudaDevice) -> Self {
        Self { device, events: Vec::new(), used: 0 }
    }

    /// Starts a step: its events may be recorded anew.
    pub fn reset(&mut self) {
        self.used = 0;
    }

    /// Marks this point of the compute stream.
    pub fn mark(&mut self) -> Option<Mark> {
        if self.used == self.events.len() {
            let event = self.device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            self.events.push(self.device.latch_result(event, "making a timing event")?);
        }
        let recorded = self.events[self.used].record(self.device.stream());
        self.device.latch_result(recorded, "recording a timing event")?;
        self.used += 1;
        Some(Mark(self.used - 1))
    }

    /// Milliseconds between two marks that the device has passed.
    pub fn elapsed_ms(&self, from: Mark, to: Mark) -> Option<f64> {
        let (from, to) = (self.events.get(from.0)?, self.events.get(to.0)?);
        from.elapsed_ms(to).ok().map(f64::from)
    }
}
