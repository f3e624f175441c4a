//! The phase clock of the CPU engine: which part of a step the time went to.
//!
//! One thread drives a step, so phases form a stack; the outermost one claims the time (a forward pass inside `recompute` is recompute).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::phase::{LaneKind, Pass, Phase, PhaseTime, Span};

/// Collects the phases of one step.
#[derive(Debug, Default)]
pub struct PhaseClock {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    start: Option<Instant>,
    depth: u32,
    record_spans: bool,
    /// Milliseconds by phase and pass; `None` until something was booked.
    totals: [[Option<f64>; 3]; Phase::ALL.len()],
    spans: Vec<Span>,
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
    /// Starts a step.
    pub fn begin_step(&self, record_spans: bool) {
        *self.lock() = State { start: Some(Instant::now()), record_spans, ..State::default() };
    }

    /// Books the time until the guard is dropped on `phase`, unless an outer phase already claims it.
    pub fn enter(&self, phase: Phase, pass: Pass, layer: Option<u32>) -> PhaseGuard<'_> {
        let mut state = self.lock();
        state.depth += 1;
        PhaseGuard { clock: self, phase, pass, layer, start: (state.depth == 1).then(Instant::now) }
    }

    /// Books time that passed before the step began, for example waiting for data.
    pub fn book(&self, phase: Phase, pass: Pass, ms: f64) {
        let mut state = self.lock();
        *state.totals[phase as usize][pass as usize].get_or_insert(0.0) += ms;
    }

    /// Ends the step.
    pub fn end_step(&self) -> StepTimes {
        let state = std::mem::take(&mut *self.lock());
        let step_ms = state.start.map_or(0.0, |start| start.elapsed().as_secs_f64() * 1e3);
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

/// Open phase; dropping it books the time.
#[derive(Debug)]
pub struct PhaseGuard<'a> {
    clock: &'a PhaseClock,
    phase: Phase,
    pass: Pass,
    layer: Option<u32>,
    start: Option<Instant>,
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.clock.lock();
        state.depth -= 1;
        let Some(start) = self.start else { return };
        let end = Instant::now();
        let ms = (end - start).as_secs_f64() * 1e3;
        *state.totals[self.phase as usize][self.pass as usize].get_or_insert(0.0) += ms;
        if let (true, Some(origin)) = (state.record_spans, state.start) {
            let start_ms = start.saturating_duration_since(origin).as_secs_f64() * 1e3;
            state.spans.push(Span {
                lane: LaneKind::Compute,
                phase: self.phase,
                pass: self.pass,
                layer: self.layer,
                start_ms,
                end_ms: start_ms + ms,
            });
        }
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
