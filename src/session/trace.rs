//! Steps as a trace that Perfetto and chrome://tracing open: a lane for compute, one for copies each way, one for the host.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use crate::base::error::Result;
use crate::base::files;
use crate::tensor::phase::{LaneKind, Pass, Span};
use crate::train::report::StepReport;

/// Steps that are kept when none are chosen: the last ones.
const LAST_STEPS: usize = 3;

/// Steps to trace, by their numbers: `5-8`, or `5`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSteps(RangeInclusive<u64>);

impl FromStr for TraceSteps {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<u64>().ok().filter(|step| *step >= 1);
        match number(first).zip(number(last)) {
            Some((first, last)) if first <= last => Ok(Self(first..=last)),
            _ => Err(format!("`{text}` is no range of steps; write it as 5-8, or 5 for a single one")),
        }
    }
}

/// Collects steps, and writes their spans. Each process of the trace is a run, or a row of a benchmark.
#[derive(Debug, Clone)]
pub struct Trace {
    steps: Option<TraceSteps>,
    processes: Vec<(String, VecDeque<TracedStep>)>,
}

/// What a trace needs of a step.
#[derive(Debug, Clone)]
struct TracedStep {
    step: u64,
    step_ms: f64,
    spans: Vec<Span>,
}

/// An event of the trace-event format; times are in microseconds.
#[derive(Debug, Serialize)]
struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: usize,
    args: Args,
}

/// What an event says beside its times.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Args {
    Name { name: String },
    SortIndex { sort_index: usize },
    Span { pass: &'static str, layer: Option<u32>, step: u64 },
}

/// The whole file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct File {
    display_time_unit: &'static str,
    trace_events: Vec<Event>,
}

impl Trace {
    /// A trace of these steps, or of the last few.
    pub fn new(steps: Option<TraceSteps>) -> Self {
        Self { steps, processes: Vec::new() }
    }

    /// Says that the steps that follow belong to something else, with a name.
    pub fn begin(&mut self, name: &str) {
        self.processes.push((name.to_owned(), VecDeque::new()));
    }

    /// Takes in a step, in the order in which they were done, if it is one to trace.
    pub fn add(&mut self, report: &StepReport) {
        if self.steps.as_ref().is_some_and(|TraceSteps(steps)| !steps.contains(&report.step)) {
            return;
        }
        let Some((_, steps)) = self.processes.last_mut() else { return };
        if self.steps.is_none() && steps.len() == LAST_STEPS {
            steps.pop_front();
        }
        let StepReport { step, step_ms, spans, .. } = report;
        steps.push_back(TracedStep { step: *step, step_ms: *step_ms, spans: spans.clone() });
    }

    /// Number of steps that it holds.
    pub fn num_steps(&self) -> usize {
        self.processes.iter().map(|(_, steps)| steps.len()).sum()
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let trace = File { display_time_unit: "ms", trace_events: self.events() };
        files::write_atomic(path, |out| Ok(serde_json::to_writer(out, &trace)?))
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (pid, (name, steps)) in (1..).zip(&self.processes) {
            events.push(metadata(pid, 0, "process_name", Args::Name { name: name.clone() }));
            for (tid, (_, lane)) in (1..).zip(LANES) {
                events.push(metadata(pid, tid, "thread_name", Args::Name { name: lane.into() }));
                events.push(metadata(pid, tid, "thread_sort_index", Args::SortIndex { sort_index: tid }));
            }
            // Each step begins where the one before it ends.
            let mut start_ms = 0.0;
            for TracedStep { step, step_ms, spans } in steps {
                let mut spans: Vec<&Span> = spans.iter().collect();
                spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
                events.extend(spans.into_iter().map(|span| complete(pid, *step, start_ms, span)));
                start_ms += step_ms;
            }
        }
        events
    }
}

/// The lanes in the order in which they are shown.
const LANES: [(LaneKind, &str); 4] = [
    (LaneKind::Compute, "compute"),
    (LaneKind::D2h, "D2H copies"),
    (LaneKind::H2d, "H2D copies"),
    (LaneKind::Host, "host"),
];

fn metadata(pid: usize, tid: usize, name: &str, args: Args) -> Event {
    Event { name: name.into(), cat: "__metadata", ph: "M", ts: 0.0, dur: None, pid, tid, args }
}

fn complete(pid: usize, step: u64, step_start_ms: f64, span: &Span) -> Event {
    let Span { lane, phase, pass, layer, start_ms, end_ms } = *span;
    let pass = match pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
        Pass::Step => "step",
    };
    let name = layer.map_or_else(|| phase.name().into(), |layer| format!("{} {layer}", phase.name()));
    Event {
        name,
        cat: phase.name(),
        ph: "X",
        ts: 1e3 * (step_start_ms + start_ms),
        dur: Some(1e3 * (end_ms - start_ms).max(0.0)),
        pid,
        tid: 1 + LANES.iter().position(|(known, _)| *known == lane).unwrap_or(0),
        args: Args::Span { pass, layer, step },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tensor::phase::Phase;

    fn span(lane: LaneKind, layer: Option<u32>, start_ms: f64, end_ms: f64) -> Span {
        Span { lane, phase: Phase::Attention, pass: Pass::Backward, layer, start_ms, end_ms }
    }

    fn step(step: u64, spans: Vec<Span>) -> StepReport {
        StepReport { spans, ..StepReport::plain(step) }
    }

    fn read_back(trace: &Trace) -> Vec<Value> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        trace.write(&path).unwrap();
        let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        trace["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn spans_lie_in_their_lanes_in_order_one_step_after_another() {
        let mut trace = Trace::new(None);
        trace.begin("a run");
        for number in 1..=5 {
            // Out of order, and one that ends before it starts, as marks of two clocks may have it.
            let spans = vec![
                span(LaneKind::H2d, Some(2), 6.0, 9.0),
                span(LaneKind::Compute, Some(3), 1.0, 4.0),
                span(LaneKind::Host, None, 0.5, 0.4),
                span(LaneKind::D2h, Some(2), 4.0, 5.0),
            ];
            trace.add(&step(number, spans));
        }
        assert_eq!(trace.num_steps(), 3, "the last three");
        let events = read_back(&trace);
        let lanes: Vec<(&str, u64)> = events
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| (event["args"]["name"].as_str().unwrap(), event["tid"].as_u64().unwrap()))
            .collect();
        assert_eq!(lanes, [("compute", 1), ("D2H copies", 2), ("H2D copies", 3), ("host", 4)]);
        let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), 12);
        assert!(spans.iter().all(|span| span["dur"].as_f64().unwrap() >= 0.0));
        let starts: Vec<f64> = spans.iter().map(|span| span["ts"].as_f64().unwrap()).collect();
        assert!(starts.is_sorted(), "{starts:?}");
        assert_eq!(starts[4..6], [10_500.0, 11_000.0], "the second step begins after the first one's 10 ms");
        let compute = spans.iter().find(|span| span["tid"] == 1).unwrap();
        assert_eq!((compute["name"].as_str(), compute["dur"].as_f64()), (Some("attention 3"), Some(3000.0)));
        assert_eq!(compute["args"], json!({ "pass": "backward", "layer": 3, "step": 3 }));
    }

    #[test]
    fn chosen_steps_are_kept_and_no_others() {
        let mut trace = Trace::new(Some("2-3".parse().unwrap()));
        for name in ["one", "two"] {
            trace.begin(name);
            (1..=5).for_each(|number| trace.add(&step(number, vec![span(LaneKind::Compute, None, 0.0, 1.0)])));
        }
        let spans = read_back(&trace).into_iter().filter(|event| event["ph"] == "X");
        let steps: Vec<(u64, u64)> =
            spans.map(|event| (event["pid"].as_u64().unwrap(), event["args"]["step"].as_u64().unwrap())).collect();
        assert_eq!(steps, [(1, 2), (1, 3), (2, 2), (2, 3)]);
        for wrong in ["", "a", "0", "3-2", "1-2-3", "-4"] {
            assert!(wrong.parse::<TraceSteps>().unwrap_err().contains("5-8"), "{wrong}");
        }
        assert_eq!("7".parse(), Ok(TraceSteps(7..=7)));
    }
}
