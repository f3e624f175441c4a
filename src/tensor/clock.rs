//! The phase clock: which part of a step the time went to, by the host's clock (CPU) or by device events (GPU).
//!
//! One thread drives a step, so phases form a stack; the outermost one claims the time (a forward pass inside `recompute` is recompute).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::cuda::{EventClock, Mark};
use super::phase::{LaneKind, Pass, Phase, PhaseTime, Span};

/// Collects the phases of one step: by the host's clock, or by events of a device.
#[derive(Debug, Default)]
pub struct PhaseClock {
    state: Mutex<State>,
}

/// A span on the device whose times are read when the step has ended.
#[derive(Debug, Clone, Copy)]
struct Pending {
    phase: Phase,
    pass: Pass,
    layer: Option<u32>,
    from: Mark,
    to: Mark,
}

#[derive(Debug, Default)]
struct State {
    start: Option<Instant>,
    depth: u32,
    record_spans: bool,
    /// Milliseconds by phase and pass; `None` until something was booked.
    totals: [[Option<f64>; 3]; Phase::ALL.len()],
    spans: Vec<Span>,
    events: Option<EventClock>,
    origin: Option<Mark>,
    pending: Vec<Pending>,
}

/// The phases of a finished step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// One entry a phase, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTime>,
    /// Spans, where they were asked for.
    pub spans: Vec<Span>,
    /// From `begin_step` to `end_step`, in milliseconds, without waits that were booked from before it.
    pub step_ms: f64,
}

impl PhaseClock {
    /// A clock that reads a device's events.
    pub fn on_device(events: EventClock) -> Self {
        Self { state: Mutex::new(State { events: Some(events), ..State::default() }) }
    }

    /// Starts a step.
    pub fn begin_step(&self, record_spans: bool) {
        let mut state = self.lock();
        let mut events = state.events.take();
        let origin = events.as_mut().and_then(|events| {
            events.reset();
            events.mark()
        });
        *state = State { start: Some(Instant::now()), record_spans, events, origin, ..State::default() };
    }

    /// Books the time until the guard is dropped on `phase`, unless an outer phase already claims it.
    pub fn enter(&self, phase: Phase, pass: Pass, layer: Option<u32>) -> PhaseGuard<'_> {
        let mut state = self.lock();
        state.depth += 1;
        let outermost = state.depth == 1;
        let mark = if outermost { state.events.as_mut().and_then(EventClock::mark) } else { None };
        PhaseGuard { clock: self, phase, pass, layer, start: outermost.then(Instant::now), mark }
    }

    /// Books time that passed before the step began, for example waiting for data.
    pub fn book(&self, phase: Phase, pass: Pass, ms: f64) {
        let mut state = self.lock();
        *state.totals[phase as usize][pass as usize].get_or_insert(0.0) += ms;
    }

    /// Ends the step. With a device the caller has waited for it.
    pub fn end_step(&self) -> StepTimes {
        let mut guard = self.lock();
        let mut state = std::mem::take(&mut *guard);
        state.read_events();
        let step_ms = state.start.map_or(0.0, |start| start.elapsed().as_secs_f64() * 1e3);
        guard.events = state.events.take();
        let phases = Phase::ALL
            .into_iter()
            .map(|phase| {
                let [forward_ms, backward_ms, step_ms] = state.totals[phase as usize];
                PhaseTime { phase, forward_ms, backward_ms, step_ms }
            })
            .collect();
        StepTimes { phases, spans: state.spans, step_ms }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, phase: Phase, pass: Pass, layer: Option<u32>, start_ms: f64, ms: f64) {
        *self.totals[phase as usize][pass as usize].get_or_insert(0.0) += ms;
        if self.record_spans {
            self.spans.push(Span { lane: LaneKind::Compute, phase, pass, layer, start_ms, end_ms: start_ms + ms });
        }
    }

    /// Turns pending event pairs into times.
    fn read_events(&mut self) {
        let (Some(events), Some(origin)) = (self.events.take(), self.origin) else { return };
        for Pending { phase, pass, layer, from, to } in std::mem::take(&mut self.pending) {
            if let (Some(start_ms), Some(ms)) = (events.elapsed_ms(origin, from), events.elapsed_ms(from, to)) {
                self.add(phase, pass, layer, start_ms, ms);
            }
        }
        self.events = Some(events);
    }
}

/// Open phase; dropping it books the time.
#[derive(Debug)]
pub struct PhaseGuard<'a> {
    clock: &'a PhaseClock,
    phase: Phase,
    pass: Pass,
    layer: Option<u32>,
    start: Option<Instant>,
    mark: Option<Mark>,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.clock.lock();
        state.depth -= 1;
        let Some(start) = self.start else { return };
        let Self { phase, pass, layer, .. } = *self;
        if state.events.is_some() {
            let to = state.events.as_mut().and_then(EventClock::mark);
            if let Some((from, to)) = self.mark.zip(to) {
                state.pending.push(Pending { phase, pass, layer, from, to });
            }
            return;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let start_ms = state.start.map_or(0.0, |origin| start.saturating_duration_since(origin).as_secs_f64() * 1e3);
        state.add(phase, pass, layer, start_ms, ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outer_phase_claims_the_time() {
        let clock = PhaseClock::default();
        clock.begin_step(true);
        {
            let _outer = clock.enter(Phase::Recompute, Pass::Backward, Some(3));
            let _inner = clock.enter(Phase::Attention, Pass::Forward, Some(3));
        }
        let times = clock.end_step();
        let by = |phase| times.phases.iter().find(|t| t.phase == phase).copied().unwrap();
        assert!(by(Phase::Recompute).backward_ms.is_some());
        assert_eq!(by(Phase::Attention).total_ms(), None, "what was not measured is not zero");
        assert_eq!(times.spans.len(), 1);
        assert_eq!(times.spans[0].layer, Some(3));
    }

    #[test]
    fn a_new_step_starts_empty() {
        let clock = PhaseClock::default();
        clock.begin_step(false);
        drop(clock.enter(Phase::Mlp, Pass::Forward, None));
        clock.end_step();
        clock.begin_step(false);
        assert!(clock.end_step().phases.iter().all(|t| t.total_ms().is_none()));
    }
}
