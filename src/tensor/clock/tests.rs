//! The clock by the host's time, by a device whose time the tests set, and by recorded scripts.

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

    fn mark(&mut self, _: LaneKind) -> Option<Mark> {
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
    let device =
        |times: &StepTimes| times.spans.iter().filter(|s| s.lane != LaneKind::Host).copied().collect::<Vec<_>>();
    let spans = |times: &StepTimes| device(times).iter().map(|s| (s.phase, s.start_ms)).collect::<Vec<_>>();
    let (attention, mlp) = (Phase::Attention, Phase::Mlp);
    assert_eq!(
        spans(&read[0])[1..],
        [(attention, 1.25), (mlp, 4.75), (attention, 10.0), (mlp, 17.0), (Phase::Optimizer, 27.0)],
    );
    // Between the two launches, and nowhere else, there was nothing to do.
    assert_eq!([0, 1].map(|step| total(&read[step], Phase::HostWait)), [Some(0.25), Some(0.0)]);
}

#[test]
fn copies_beside_compute_are_spans_of_their_lanes_and_no_phase() {
    let device = FakeDevice::default();
    let clock = PhaseClock::with_marks(Box::new(device.clone()));
    let copy = |lane, layer| clock.copy(Copying { lane, pass: Pass::Forward, layer, bytes: 10 }, || device.work(2.0));
    copy(LaneKind::D2h, 9);
    let mut graph = None;
    let mut step = || {
        clock.begin_step(true, 0.0);
        copy(LaneKind::D2h, 0);
        let both = || {
            copy(LaneKind::H2d, 1);
            copy(LaneKind::D2h, 2);
        };
        let (recorded, script) = graph.get_or_insert_with(|| device.record(&clock, both));
        clock.replay(script, |_| device.launch(recorded, 2.0));
        clock.end_step()
    };
    let closed = [step(), step()];
    for closed in closed {
        let times = clock.read(closed);
        assert_eq!(times.copied, CopiedBytes { d2h: 20, h2d: 10 });
        let spans: Vec<_> = times.spans.iter().map(|s| (s.lane, s.layer, s.start_ms, s.end_ms)).collect();
        let (d2h, h2d) = (LaneKind::D2h, LaneKind::H2d);
        assert_eq!(spans, [(d2h, Some(0), 0.0, 2.0), (h2d, Some(1), 2.0, 6.0), (d2h, Some(2), 6.0, 10.0)]);
        assert_eq!(total(&times, Phase::ExposedCopy), None, "what compute did not wait for");
    }
}

#[test]
fn what_the_host_queues_is_a_lane_of_its_own_on_the_axis_of_the_device() {
    let device = FakeDevice::default();
    let clock = PhaseClock::with_marks(Box::new(device.clone()));
    let closed = [1.0, 1.0, 1.0].map(|ms| queue(&clock, &device, 0.0, ms));
    let read = closed.map(|closed| clock.read(closed));
    let host = |times: &StepTimes| -> Vec<Span> {
        times.spans.iter().filter(|span| span.lane == LaneKind::Host).copied().collect()
    };
    for (number, times) in read.iter().enumerate() {
        let spans = host(times);
        assert_eq!(spans.iter().map(|s| s.phase).collect::<Vec<_>>(), [Phase::Mlp, Phase::Metadata, Phase::Optimizer]);
        assert!(spans.iter().all(|s| s.start_ms <= s.end_ms) && spans.is_sorted_by_key(|s| s.start_ms));
        // The device takes 8 ms a step and queueing takes no time: the host is ahead by as many steps as it queued before.
        let ahead = 8.0 * number as f64;
        assert!(spans[0].start_ms >= -ahead && spans[0].start_ms < 8.0 - ahead, "step {number}: {spans:?}");
    }
}
