//! The phase clock: which part of a step the time went to, by the host's clock (CPU) or by device events (GPU).
//!
//! One thread drives a step, so phases form a stack; the outermost one claims the time (a forward pass inside `recompute` is recompute).
//! On a GPU a step is closed when it is queued and read when the device has done it, which may be after the next one was queued. Work that is recorded
//! as a graph has its marks in the graph: its phases are a [`Script`], which every launch books anew.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::cuda::{EventClock, EventHandle};
use super::phase::{LaneKind, Pass, Phase, PhaseTime, Span};

/// Steps whose marks are kept: one being queued, one that waits to be read, and the one before it, at whose end that one began.
pub const NUM_SETS: usize = 3;

/// A point in the device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Set of its step.
    pub set: usize,
    /// Number in its set.
    pub index: usize,
    /// Launches before it: between two marks with the same number there was nothing to do.
    pub launches: u64,
}

/// Where marks are made, in [`NUM_SETS`] sets that are used in turns, one a step.
pub trait Marks: std::fmt::Debug + Send {
    /// Lets the marks of this set be made anew.
    fn reset(&mut self);
    /// Goes on to the next set.
    fn turn(&mut self);
    /// The mark that would be made now.
    fn next(&self) -> Mark;
    /// Marks this point of a lane's stream; `None` when the device failed. While a graph is recorded, the graph marks it when it runs.
    fn mark(&mut self, lane: LaneKind) -> Option<Mark>;
    /// Takes the next `count` marks of this set for a graph that makes them, and gives their names; `None` when the device failed.
    fn take(&mut self, count: usize) -> Option<Vec<EventHandle>>;
    /// Milliseconds between two marks; `None` while the device has not passed both.
    fn elapsed_ms(&self, from: Mark, to: Mark) -> Option<f64>;
}

/// Collects the phases of steps: by the host's clock, or by events of a device.
#[derive(Debug, Default)]
pub struct PhaseClock {
    state: Mutex<State>,
}

/// Milliseconds by phase and pass; `None` until something was booked.
type Totals = [[Option<f64>; 3]; Phase::ALL.len()];

/// A copy between device and host, beside compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copying {
    /// Which way.
    pub lane: LaneKind,
    /// Pass that it belongs to.
    pub pass: Pass,
    /// Block whose activation it is.
    pub layer: u32,
    /// Bytes.
    pub bytes: u64,
}

/// A copy whose times are read later.
#[derive(Debug, Clone, Copy)]
struct PendingCopy {
    copying: Copying,
    from: Mark,
    to: Mark,
}

/// What the host did: queueing the work of a phase.
#[derive(Debug, Clone, Copy)]
struct HostSpan {
    phase: Phase,
    pass: Pass,
    layer: Option<u32>,
    start: Instant,
    end: Instant,
}

/// A span on the device whose times are read later.
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
    /// Of the step that is open, if one is.
    start: Option<Instant>,
    depth: u32,
    times: Times,
    device: Option<DeviceClock>,
}

#[derive(Debug)]
struct DeviceClock {
    marks: Box<dyn Marks>,
    /// End of the last step, while nothing but the next one follows it.
    last_end: Option<Mark>,
    before: Option<Mark>,
    begin: Option<Mark>,
    pending: Vec<Pending>,
    copies: Vec<PendingCopy>,
    /// What the host did in the step.
    host: Vec<HostSpan>,
    /// The end of the step that was read last, on the device and by the host's clock.
    read_end: Option<(Mark, Instant)>,
    /// While a graph is recorded: its first mark, and how many phases and copies were booked before it.
    script_start: Option<(Mark, usize, usize)>,
}

/// The phases of work that is recorded as a graph; sets, numbers and launches of its marks count from its start.
#[derive(Debug, Clone, Default)]
pub struct Script {
    num_marks: usize,
    pending: Vec<Pending>,
    copies: Vec<PendingCopy>,
}

/// What is known of a step's times so far.
#[derive(Debug, Default)]
struct Times {
    record_spans: bool,
    data_wait_ms: f64,
    totals: Totals,
    spans: Vec<Span>,
    copied: CopiedBytes,
}

/// Bytes that were copied in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopiedBytes {
    /// To the host.
    pub d2h: u64,
    /// To the device.
    pub h2d: u64,
}

/// A step that was queued, for [`PhaseClock::read`].
#[derive(Debug)]
pub struct ClosedStep {
    times: Times,
    host_ms: f64,
    /// On a device.
    queued: Option<QueuedStep>,
}

#[derive(Debug)]
struct QueuedStep {
    /// End of the step before, when this one followed it directly.
    before: Option<Mark>,
    begin: Mark,
    end: Mark,
    pending: Vec<Pending>,
    copies: Vec<PendingCopy>,
    host: Vec<HostSpan>,
    /// When the host began to queue it.
    began: Instant,
}

/// The phases of a finished step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// One entry a phase, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTime>,
    /// Spans, where they were asked for.
    pub spans: Vec<Span>,
    /// What was copied beside compute.
    pub copied: CopiedBytes,
    /// The whole step with the wait before it, in milliseconds. On a device, where a step follows another directly: from the end of that one to
    /// its own end, so that steps add up to the time that passed.
    pub step_ms: f64,
}

impl PhaseClock {
    /// A clock that reads a device's events.
    pub fn on_device(events: EventClock) -> Self {
        Self::with_marks(Box::new(events))
    }

    fn with_marks(marks: Box<dyn Marks>) -> Self {
        let device = DeviceClock {
            marks,
            last_end: None,
            before: None,
            begin: None,
            pending: Vec::new(),
            copies: Vec::new(),
            host: Vec::new(),
            read_end: None,
            script_start: None,
        };
        Self { state: Mutex::new(State { device: Some(device), ..State::default() }) }
    }

    /// Starts a step for whose data the host waited `data_wait_ms`.
    pub fn begin_step(&self, record_spans: bool, data_wait_ms: f64) {
        let mut state = self.lock();
        let mut device = state.device.take();
        if let Some(device) = &mut device {
            device.marks.reset();
            device.before = device.last_end.take();
            device.begin = device.marks.mark(LaneKind::Compute);
            device.pending.clear();
            device.copies.clear();
            device.host.clear();
        }
        let times = Times { record_spans, data_wait_ms, ..Times::default() };
        *state = State { start: Some(Instant::now()), times, device, ..State::default() };
    }

    /// Books the time until the guard is dropped on `phase`, unless an outer phase already claims it or no step is open.
    pub fn enter(&self, phase: Phase, pass: Pass, layer: Option<u32>) -> PhaseGuard<'_> {
        let mut state = self.lock();
        state.depth += 1;
        let counts = state.depth == 1 && state.start.is_some();
        let mark =
            if counts { state.device.as_mut().and_then(|device| device.marks.mark(LaneKind::Compute)) } else { None };
        PhaseGuard { clock: self, phase, pass, layer, start: counts.then(Instant::now), mark }
    }

    /// Times a copy beside compute, which `queue` queues on its lane's stream. Without a device it is timed by who copies ([`Self::book_copy`]).
    pub fn copy(&self, copying: Copying, queue: impl FnOnce()) {
        let mark = || {
            let mut state = self.lock();
            let in_step = state.start.is_some();
            state.device.as_mut().filter(|_| in_step).and_then(|device| device.marks.mark(copying.lane))
        };
        let from = mark();
        queue();
        if let Some((from, to)) = from.zip(mark())
            && let Some(device) = &mut self.lock().device
        {
            device.copies.push(PendingCopy { copying, from, to });
        }
    }

    /// Books a copy that ran from `start` to `end` by the host's clock, unless no step is open.
    pub fn book_copy(&self, copying: Copying, start: Instant, end: Instant) {
        let mut state = self.lock();
        if let Some(origin) = state.start {
            let ms = |at: Instant| at.saturating_duration_since(origin).as_secs_f64() * 1e3;
            state.times.add_copy(copying, ms(start), ms(end));
        }
    }

    /// Says that what follows is recorded as a graph, outside of any phase, and not done.
    pub fn begin_script(&self) {
        if let Some(device) = &mut self.lock().device {
            device.script_start = Some((device.marks.next(), device.pending.len(), device.copies.len()));
        }
    }

    /// The phases since [`Self::begin_script`], for [`Self::replay`]; they are not booked.
    pub fn end_script(&self) -> Script {
        let mut state = self.lock();
        let Some(device) = &mut state.device else { return Script::default() };
        let Some((first, booked, copied)) = device.script_start.take() else { return Script::default() };
        let relative =
            |mark: Mark| Mark { set: 0, index: mark.index - first.index, launches: mark.launches - first.launches };
        let pending = device.pending.drain(booked.min(device.pending.len())..);
        let pending = pending.map(|phase| Pending { from: relative(phase.from), to: relative(phase.to), ..phase });
        let pending = pending.collect();
        let copies = device.copies.drain(copied.min(device.copies.len())..);
        let copies = copies.map(|copy| PendingCopy { from: relative(copy.from), to: relative(copy.to), ..copy });
        Script { num_marks: device.marks.next().index - first.index, pending, copies: copies.collect() }
    }

    /// Books the phases of a graph that `launch` queues, with marks of their own, whose names `launch` gets; unless an outer phase claims the time or
    /// no step is open. Nothing is queued when the device failed.
    pub fn replay(&self, script: &Script, launch: impl FnOnce(&[EventHandle])) {
        let mut state = self.lock();
        let counts = state.depth == 0 && state.start.is_some();
        let Some(device) = &mut state.device else { return };
        let first = device.marks.next();
        let Some(events) = device.marks.take(script.num_marks) else { return };
        if counts {
            let made = |mark: Mark| Mark {
                set: first.set,
                index: first.index + mark.index,
                launches: first.launches + mark.launches,
            };
            let phases = script.pending.iter();
            device.pending.extend(phases.map(|&phase| Pending { from: made(phase.from), to: made(phase.to), ..phase }));
            let copies = script.copies.iter();
            device.copies.extend(copies.map(|&copy| PendingCopy { from: made(copy.from), to: made(copy.to), ..copy }));
        }
        drop(state);
        launch(&events);
    }

    /// Ends the step: on a device, the queueing of it. The next step follows it directly unless [`Self::pause`] is called between them.
    pub fn end_step(&self) -> ClosedStep {
        let mut state = self.lock();
        let began = state.start.take();
        let host_ms = began.map_or(0.0, |start| start.elapsed().as_secs_f64() * 1e3);
        let queued = state.device.as_mut().and_then(|device| {
            let end = device.marks.mark(LaneKind::Compute);
            device.marks.turn();
            device.last_end = end;
            let (before, begin) = (device.before.take(), device.begin.take());
            let (pending, copies) = (std::mem::take(&mut device.pending), std::mem::take(&mut device.copies));
            let host = std::mem::take(&mut device.host);
            Some(QueuedStep { before, begin: begin?, end: end?, pending, copies, host, began: began? })
        });
        ClosedStep { times: std::mem::take(&mut state.times), host_ms, queued }
    }

    /// Says that what comes now belongs to no step; drops a step that was not ended.
    pub fn pause(&self) {
        let mut state = self.lock();
        state.start = None;
        if let Some(device) = &mut state.device {
            device.last_end = None;
        }
    }

    /// The times of a step. On a device it must have been passed, and at most one step may have been ended after it.
    pub fn read(&self, step: ClosedStep) -> StepTimes {
        let ClosedStep { mut times, host_ms, queued } = step;
        let mut state = self.lock();
        let step_ms = match (queued, &mut state.device) {
            (Some(queued), Some(device)) => {
                let ms = times.read(&queued, device.marks.as_ref());
                times.add_host(&queued, device);
                ms
            }
            _ => {
                let waited = times.data_wait_ms;
                times.book(Phase::DataWait, Pass::Step, waited);
                host_ms + waited
            }
        };
        let phases = Phase::ALL
            .into_iter()
            .map(|phase| {
                let [forward_ms, backward_ms, step_ms] = times.totals[phase as usize];
                PhaseTime { phase, forward_ms, backward_ms, step_ms }
            })
            .collect();
        StepTimes { phases, spans: times.spans, copied: times.copied, step_ms }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Times {
    fn book(&mut self, phase: Phase, pass: Pass, ms: f64) {
        *self.totals[phase as usize][pass as usize].get_or_insert(0.0) += ms;
    }

    fn add(&mut self, phase: Phase, pass: Pass, layer: Option<u32>, start_ms: f64, ms: f64) {
        self.book(phase, pass, ms);
        if self.record_spans {
            self.spans.push(Span { lane: LaneKind::Compute, phase, pass, layer, start_ms, end_ms: start_ms + ms });
        }
    }

    fn add_copy(&mut self, copying: Copying, start_ms: f64, end_ms: f64) {
        let Copying { lane, pass, layer, bytes } = copying;
        match lane {
            LaneKind::D2h => self.copied.d2h += bytes,
            _ => self.copied.h2d += bytes,
        }
        if self.record_spans {
            self.spans.push(Span { lane, phase: Phase::ExposedCopy, pass, layer: Some(layer), start_ms, end_ms });
        }
    }

    /// Adds what the host did, on the axis of the device's work. The host's time of the device's start is known where the device stood still before
    /// the step (it began when the host did), and from there on by the device's own clock.
    fn add_host(&mut self, step: &QueuedStep, device: &mut DeviceClock) {
        let elapsed = |from, to| device.marks.elapsed_ms(from, to).map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1e3));
        let known = device.read_end.filter(|(end, _)| step.before == Some(*end));
        let begin = known.and_then(|(end, at)| Some(at + elapsed(end, step.begin)?)).unwrap_or(step.began);
        device.read_end = elapsed(step.begin, step.end).map(|ms| (step.end, begin + ms));
        if self.record_spans {
            let ms = |at: Instant| match at.checked_duration_since(begin) {
                Some(after) => after.as_secs_f64() * 1e3,
                None => begin.duration_since(at).as_secs_f64() * -1e3,
            };
            self.spans.extend(step.host.iter().map(|&HostSpan { phase, pass, layer, start, end }| Span {
                lane: LaneKind::Host,
                phase,
                pass,
                layer,
                start_ms: ms(start),
                end_ms: ms(end),
            }));
        }
    }

    /// Turns the marks of a step into times, and gives that of the whole step.
    fn read(&mut self, step: &QueuedStep, marks: &dyn Marks) -> f64 {
        let QueuedStep { before, begin, end, ref pending, ref copies, .. } = *step;
        let elapsed = |from, to| marks.elapsed_ms(from, to).unwrap_or(0.0);
        // Where the steps follow each other, waiting for data costs what the device stood still for; the rest was beside its work.
        let stood_still = before.map_or(self.data_wait_ms, |before| elapsed(before, begin));
        let waited_for_data = stood_still.min(self.data_wait_ms);
        self.book(Phase::DataWait, Pass::Step, waited_for_data);
        // With nothing launched between two marks the device waited for the host.
        let mut host_wait_ms = stood_still - waited_for_data;
        let mut gap = |from: Mark, to: Mark| {
            if from.launches == to.launches {
                host_wait_ms += elapsed(from, to);
            }
        };
        let mut last = begin;
        for &Pending { phase, pass, layer, from, to } in pending {
            gap(last, from);
            self.add(phase, pass, layer, elapsed(begin, from), elapsed(from, to));
            last = to;
        }
        gap(last, end);
        for &PendingCopy { copying, from, to } in copies {
            self.add_copy(copying, elapsed(begin, from), elapsed(begin, to));
        }
        self.book(Phase::HostWait, Pass::Step, host_wait_ms);
        stood_still + elapsed(begin, end)
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
        if let Some(device) = &mut state.device {
            if let Some((from, to)) = self.mark.zip(device.marks.mark(LaneKind::Compute)) {
                device.pending.push(Pending { phase, pass, layer, from, to });
                device.host.push(HostSpan { phase, pass, layer, start, end: Instant::now() });
            }
            return;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let start_ms = state.start.map_or(0.0, |origin| start.saturating_duration_since(origin).as_secs_f64() * 1e3);
        state.times.add(phase, pass, layer, start_ms, ms);
    }
}

#[cfg(test)]
mod tests;
