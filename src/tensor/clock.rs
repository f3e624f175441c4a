//! The phase clock: which part of a step the time went to, by the host's clock (CPU) or by device events (GPU).
//!
//! One thread drives a step, so phases form a stack; the outermost one claims the time (a forward pass inside `recompute` is recompute).
//! On a GPU a step is closed when it is queued and read when the device has done it, which may be after the next one was queued. Work that is recorded
//! as a graph has its marks in the graph: its phases are a [`Script`], which every launch books anew.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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
    /// Marks this point of the compute stream; `None` when the device failed. While a graph is recorded, the graph marks it when it runs.
    fn mark(&mut self) -> Option<Mark>;
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
    /// While a graph is recorded: its first mark, and how many phases were booked before it.
    script_start: Option<(Mark, usize)>,
}

/// The phases of work that is recorded as a graph; sets, numbers and launches of its marks count from its start.
#[derive(Debug, Clone, Default)]
pub struct Script {
    num_marks: usize,
    pending: Vec<Pending>,
}

/// What is known of a step's times so far.
#[derive(Debug, Default)]
struct Times {
    record_spans: bool,
    data_wait_ms: f64,
    totals: Totals,
    spans: Vec<Span>,
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
}

/// The phases of a finished step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// One entry a phase, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTime>,
    /// Spans, where they were asked for.
    pub spans: Vec<Span>,
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
        let device =
            DeviceClock { marks, last_end: None, before: None, begin: None, pending: Vec::new(), script_start: None };
        Self { state: Mutex::new(State { device: Some(device), ..State::default() }) }
    }

    /// Starts a step for whose data the host waited `data_wait_ms`.
    pub fn begin_step(&self, record_spans: bool, data_wait_ms: f64) {
        let mut state = self.lock();
        let mut device = state.device.take();
        if let Some(device) = &mut device {
            device.marks.reset();
            device.before = device.last_end.take();
            device.begin = device.marks.mark();
            device.pending.clear();
        }
        let times = Times { record_spans, data_wait_ms, ..Times::default() };
        *state = State { start: Some(Instant::now()), times, device, ..State::default() };
    }

    /// Books the time until the guard is dropped on `phase`, unless an outer phase already claims it or no step is open.
    pub fn enter(&self, phase: Phase, pass: Pass, layer: Option<u32>) -> PhaseGuard<'_> {
        let mut state = self.lock();
        state.depth += 1;
        let counts = state.depth == 1 && state.start.is_some();
        let mark = if counts { state.device.as_mut().and_then(|device| device.marks.mark()) } else { None };
        PhaseGuard { clock: self, phase, pass, layer, start: counts.then(Instant::now), mark }
    }

    /// Says that what follows is recorded as a graph, outside of any phase, and not done.
    pub fn begin_script(&self) {
        if let Some(device) = &mut self.lock().device {
            device.script_start = Some((device.marks.next(), device.pending.len()));
        }
    }

    /// The phases since [`Self::begin_script`], for [`Self::replay`]; they are not booked.
    pub fn end_script(&self) -> Script {
        let mut state = self.lock();
        let Some(device) = &mut state.device else { return Script::default() };
        let Some((first, booked)) = device.script_start.take() else { return Script::default() };
        let relative =
            |mark: Mark| Mark { set: 0, index: mark.index - first.index, launches: mark.launches - first.launches };
        let pending = device.pending.drain(booked.min(device.pending.len())..);
        let pending = pending.map(|phase| Pending { from: relative(phase.from), to: relative(phase.to), ..phase });
        Script { num_marks: device.marks.next().index - first.index, pending: pending.collect() }
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
        }
        drop(state);
        launch(&events);
    }

    /// Ends the step: on a device, the queueing of it. The next step follows it directly unless [`Self::pause`] is called between them.
    pub fn end_step(&self) -> ClosedStep {
        let mut state = self.lock();
        let host_ms = state.start.take().map_or(0.0, |start| start.elapsed().as_secs_f64() * 1e3);
        let queued = state.device.as_mut().and_then(|device| {
            let end = device.marks.mark();
            device.marks.turn();
            device.last_end = end;
            let pending = std::mem::take(&mut device.pending);
            Some(QueuedStep { before: device.before.take(), begin: device.begin.take()?, end: end?, pending })
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
        let state = self.lock();
        let step_ms = match (queued, &state.device) {
            (Some(queued), Some(device)) => times.read(&queued, device.marks.as_ref()),
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
        StepTimes { phases, spans: times.spans, step_ms }
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

    /// Turns the marks of a step into times, and gives that of the whole step.
    fn read(&mut self, step: &QueuedStep, marks: &dyn Marks) -> f64 {
        let QueuedStep { before, begin, end, ref pending } = *step;
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
            if let Some((from, to)) = self.mark.zip(device.marks.mark()) {
                device.pending.push(Pending { phase, pass, layer, from, to });
            }
            return;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let start_ms = state.start.map_or(0.0, |origin| start.saturating_duration_since(origin).as_secs_f64() * 1e3);
        state.times.add(phase, pass, layer, start_ms, ms);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn total(times: &StepTimes, phase: Phase) -> Option<f64> {
        times.phases.iter().find(|t| t.phase == phase).unwrap().total_ms()
    }

    #[test]
    fn the_outer_phase_claims_the_time() {
        let clock = PhaseClock::default();
        clock.begin_step(true, 0.0);
        {
            let _outer = clock.enter(Phase::Recompute, Pass::Backward, Some(3));
            let _inner = clock.enter(Phase::Attention, Pass::Forward, Some(3));
        }
        let times = clock.read(clock.end_step());
        let by = |phase| times.phases.iter().find(|t| t.phase == phase).copied().unwrap();
        assert!(by(Phase::Recompute).backward_ms.is_some());
        assert_eq!(by(Phase::Attention).total_ms(), None, "what was not measured is not zero");
        assert_eq!(times.spans.len(), 1);
        assert_eq!(times.spans[0].layer, Some(3));
    }

    #[test]
    fn a_new_step_starts_empty_and_what_lies_between_steps_is_not_booked() {
        let clock = PhaseClock::default();
        clock.begin_step(false, 0.0);
        drop(clock.enter(Phase::Mlp, Pass::Forward, None));
        clock.end_step();
        drop(clock.enter(Phase::Mlp, Pass::Forward, None));
        clock.begin_step(false, 5.0);
        let times = clock.read(clock.end_step());
        assert_eq!(times.phases.iter().filter_map(PhaseTime::total_ms).collect::<Vec<_>>(), [5.0]);
        assert_eq!(total(&times, Phase::DataWait), Some(5.0));
        assert!(times.step_ms >= 5.0);
    }

    /// A device whose time the test sets.
    #[derive(Debug, Clone, Default)]
    struct FakeDevice(Arc<Mutex<Fake>>);

    #[derive(Debug, Default)]
    struct Fake {
        now_ms: f64,
        launches: u64,
        set: usize,
        sets: [Vec<f64>; NUM_SETS],
        /// While a graph is recorded: its work (in ms) and its marks, in order.
        recorded: Option<Vec<Recorded>>,
    }

    #[derive(Debug, Clone, Copy)]
    enum Recorded {
        Work(f64),
        Mark,
    }

    impl FakeDevice {
        /// Lets the device work for `ms`.
        fn work(&self, ms: f64) {
            let mut fake = self.0.lock().unwrap();
            fake.launches += 1;
            match &mut fake.recorded {
                Some(recorded) => recorded.push(Recorded::Work(ms)),
                None => fake.now_ms += ms,
            }
        }

        /// What `work` lets the device do, recorded and not done, with the phases of it.
        fn record(&self, clock: &PhaseClock, work: impl FnOnce()) -> (Vec<Recorded>, Script) {
            clock.begin_script();
            let launches = self.0.lock().unwrap().launches;
            self.0.lock().unwrap().recorded = Some(Vec::new());
            work();
            let mut fake = self.0.lock().unwrap();
            fake.launches = launches;
            let recorded = fake.recorded.take().unwrap();
            drop(fake);
            (recorded, clock.end_script())
        }

        /// Does recorded work, each piece `slower` times as slow; its marks are the last ones that were taken.
        fn launch(&self, recorded: &[Recorded], slower: f64) {
            let mut fake = self.0.lock().unwrap();
            let set = fake.set;
            let num_marks = recorded.iter().filter(|r| matches!(r, Recorded::Mark)).count();
            let mut next = fake.sets[set].len() - num_marks;
            for &piece in recorded {
                match piece {
                    Recorded::Work(ms) => {
                        fake.launches += 1;
                        fake.now_ms += slower * ms;
                    }
                    Recorded::Mark => {
                        let now = fake.now_ms;
                        fake.sets[set][next] = now;
                        next += 1;
                    }
                }
            }
        }

        /// Lets the device stand still for `ms`.
        fn idle(&self, ms: f64) {
            self.0.lock().unwrap().now_ms += ms;
        }
    }

    impl Marks for FakeDevice {
        fn reset(&mut self) {
            let mut fake = self.0.lock().unwrap();
            let set = fake.set;
            fake.sets[set].clear();
        }

        fn turn(&mut self) {
            let mut fake = self.0.lock().unwrap();
            fake.set = (fake.set + 1) % NUM_SETS;
        }

        fn next(&self) -> Mark {
            let fake = self.0.lock().unwrap();
            Mark { set: fake.set, index: fake.sets[fake.set].len(), launches: fake.launches }
        }

        fn mark(&mut self) -> Option<Mark> {
            let mark = self.next();
            let mut fake = self.0.lock().unwrap();
            let now = fake.now_ms;
            match &mut fake.recorded {
                Some(recorded) => {
                    recorded.push(Recorded::Mark);
                    fake.sets[mark.set].push(f64::NAN);
                }
                None => fake.sets[mark.set].push(now),
            }
            Some(mark)
        }

        fn take(&mut self, count: usize) -> Option<Vec<EventHandle>> {
            let mut fake = self.0.lock().unwrap();
            let (set, taken) = (fake.set, fake.sets[fake.set].len() + count);
            fake.sets[set].resize(taken, f64::NAN);
            Some(Vec::new())
        }

        fn elapsed_ms(&self, from: Mark, to: Mark) -> Option<f64> {
            let fake = self.0.lock().unwrap();
            Some(fake.sets[to.set].get(to.index)? - fake.sets[from.set].get(from.index)?)
        }
    }

    /// Queues a step: a phase of `mlp_ms`, 1 ms of nothing to do, 2 ms of work outside of phases, a phase of 4 ms.
    fn queue(clock: &PhaseClock, device: &FakeDevice, data_wait_ms: f64, mlp_ms: f64) -> ClosedStep {
        clock.begin_step(true, data_wait_ms);
        {
            let _phase = clock.enter(Phase::Mlp, Pass::Forward, Some(0));
            device.work(mlp_ms);
        }
        device.idle(1.0);
        drop(clock.enter(Phase::Metadata, Pass::Forward, None));
        device.work(2.0);
        {
            let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
            device.work(4.0);
        }
        clock.end_step()
    }

    #[test]
    fn steps_of_a_device_are_read_one_late_and_add_up_to_the_time_that_passed() {
        let device = FakeDevice::default();
        let clock = PhaseClock::with_marks(Box::new(device.clone()));
        let (mut before, mut read) = (None, Vec::new());
        for step in 0..7 {
            // The device stands still for 3 ms before every step but the first; data came after 0, 2, 4 … ms.
            device.idle(if step == 0 { 0.0 } else { 3.0 });
            let closed = queue(&clock, &device, 2.0 * f64::from(step), 10.0 * f64::from(step + 1));
            read.extend(before.replace(closed).map(|before| clock.read(before)));
        }
        read.extend(before.map(|before| clock.read(before)));
        assert_eq!(read.len(), 7);
        for (step, times) in (0..).zip(&read) {
            let mlp = 10.0 * f64::from(step + 1);
            assert_eq!(total(times, Phase::Mlp), Some(mlp), "each step has its own marks");
            assert_eq!(total(times, Phase::Optimizer), Some(4.0));
            let stood_still: f64 = if step == 0 { 0.0 } else { 3.0 };
            let data = stood_still.min(2.0 * f64::from(step));
            assert_eq!(total(times, Phase::DataWait), Some(data), "step {step}");
            assert_eq!(total(times, Phase::HostWait), Some(stood_still - data + 1.0), "step {step}");
            assert_eq!(times.step_ms, stood_still + mlp + 1.0 + 2.0 + 4.0);
            let attributed: f64 = times.phases.iter().filter_map(PhaseTime::total_ms).sum();
            assert_eq!(times.step_ms - attributed, 2.0, "work outside of phases is not attributed");
            assert_eq!((times.spans[0].start_ms, times.spans[2].start_ms), (0.0, mlp + 3.0));
        }
        assert_eq!(read.iter().map(|times| times.step_ms).sum::<f64>(), device.0.lock().unwrap().now_ms);
    }

    #[test]
    fn what_is_done_between_steps_of_a_device_belongs_to_none() {
        let device = FakeDevice::default();
        let clock = PhaseClock::with_marks(Box::new(device.clone()));
        let first = queue(&clock, &device, 0.0, 1.0);
        // A step that is begun and given up.
        clock.begin_step(true, 0.0);
        device.work(100.0);
        clock.pause();
        let phase = clock.enter(Phase::Attention, Pass::Forward, None);
        device.work(1000.0);
        drop(phase);
        let second = queue(&clock, &device, 5.0, 10.0);
        assert_eq!(clock.read(first).step_ms, 8.0);
        let times = clock.read(second);
        assert_eq!((times.step_ms, total(&times, Phase::Attention)), (22.0, None));
        assert_eq!(total(&times, Phase::DataWait), Some(5.0), "the device had nothing else to do meanwhile");
    }

    #[test]
    fn a_recorded_script_books_every_launch_of_it_with_marks_of_its_own() {
        let device = FakeDevice::default();
        let clock = PhaseClock::with_marks(Box::new(device.clone()));
        let block = || {
            {
                let _phase = clock.enter(Phase::Attention, Pass::Forward, Some(0));
                device.work(3.0);
            }
            // Work between two phases is not attributed; it is no wait for the host.
            device.work(0.5);
            let _phase = clock.enter(Phase::Mlp, Pass::Forward, Some(0));
            device.work(5.0);
        };
        let mut graph = None;
        let mut step = |slower: &[f64]| {
            clock.begin_step(true, 0.0);
            drop(clock.enter(Phase::Metadata, Pass::Forward, None));
            device.work(1.0);
            let (recorded, script) = graph.get_or_insert_with(|| device.record(&clock, block));
            for &slower in slower {
                device.idle(0.25);
                clock.replay(script, |_| device.launch(recorded, slower));
            }
            {
                let _phase = clock.enter(Phase::Optimizer, Pass::Step, None);
                device.work(2.0);
            }
            clock.end_step()
        };
        // The first step records, and is one in which two micro-batches launch the graph; the next one is queued before it is read.
        let closed = [step(&[1.0, 2.0]), step(&[4.0])];
        let read = closed.map(|closed| clock.read(closed));
        for (times, factor, launches) in [(&read[0], 3.0, 2.0), (&read[1], 4.0, 1.0)] {
            assert_eq!(total(times, Phase::Attention), Some(3.0 * factor));
            assert_eq!(total(times, Phase::Mlp), Some(5.0 * factor));
            assert_eq!(total(times, Phase::Optimizer), Some(2.0));
            assert_eq!(times.step_ms, 1.0 + 8.5 * factor + 0.25 * launches + 2.0);
        }
        let spans = |times: &StepTimes| times.spans.iter().map(|s| (s.phase, s.start_ms)).collect::<Vec<_>>();
        let (attention, mlp) = (Phase::Attention, Phase::Mlp);
        assert_eq!(
            spans(&read[0])[1..],
            [(attention, 1.25), (mlp, 4.75), (attention, 10.0), (mlp, 17.0), (Phase::Optimizer, 27.0)],
        );
        // Between the two launches, and nowhere else, there was nothing to do.
        assert_eq!([0, 1].map(|step| total(&read[step], Phase::HostWait)), [Some(0.25), Some(0.0)]);
    }
}
