//! A run of a model with experts as test data: most tokens go to few of them, and routing is switched in its middle.

use tandem::session::event::{NoteLevel, RunEvent, TimedEvent};
use tandem::session::run_view::RunView;
use tandem::session::{Choice, MoeReport, Optimization, Phase, PhaseTime, Routing, Span, StepReport};
use tandem::tensor::cuda::CounterValues;

use super::{apply, choices, info, noise, step_report};

/// Step from which on routing is grouped.
pub const SWITCHED: u64 = 25;
/// Tokens of a step.
const TOKENS: u64 = 8_192;

/// A model with experts, and how its layers have them.
#[derive(Debug, Clone, Copy)]
pub struct Sparse {
    pub name: &'static str,
    pub layers: usize,
    pub experts: usize,
    pub per_token: usize,
    /// Whether the first layer has none.
    pub dense_first: bool,
}

/// 32 experts in 24 layers.
pub const SMALL: Sparse = Sparse { name: "gpt-oss-20b", layers: 24, experts: 32, per_token: 4, dense_first: false };
/// 128 experts in 48 layers, after one without.
pub const LARGE: Sparse = Sparse { name: "Qwen3-30B-A3B", layers: 48, experts: 128, per_token: 8, dense_first: true };

/// Such a run of `steps` steps.
pub fn run(model: Sparse, steps: u64) -> RunView {
    apply(events(model, steps))
}

fn events(model: Sparse, steps: u64) -> Vec<TimedEvent> {
    let mut info = info();
    info.name = "support-tickets r16".into();
    info.model = model.name.into();
    info.device = "NVIDIA H200, bf16".into();
    info.total_steps = 4_800;
    info.num_hidden_layers = model.layers + usize::from(model.dense_first);
    let mut events = vec![RunEvent::Started(info), on(1, false)];
    for step in 1..=steps {
        if step == SWITCHED {
            let text = format!("Grouped MoE routing switched on by you, from step {SWITCHED} on");
            events.push(RunEvent::Note { level: NoteLevel::Info, text });
            events.push(on(step, true));
        }
        let report = report(model, step, step >= SWITCHED);
        events.push(RunEvent::Step {
            epoch: step as f64 / 1600.0,
            elapsed_s: step as f64 * report.step_ms / 1e3,
            tokens_seen: step * TOKENS,
            eta_s: Some((4_800 - step) as f64 * 0.4),
            report: Box::new(report),
        });
    }
    let timed = |(i, event)| TimedEvent { unix_ms: 1_790_000_000_000 + 400 * i as i64, event };
    events.into_iter().enumerate().map(timed).collect()
}

fn on(step: u64, grouped: bool) -> RunEvent {
    let why = if grouped {
        "the host reads nothing, one product for all experts"
    } else {
        "a search and a read an expert, as published"
    };
    let mut choices = choices();
    let routing = Choice { optimization: Optimization::GroupedRouting, on: grouped, available: true, why: why.into() };
    choices.push(routing);
    RunEvent::Choices { step, choices }
}

/// Tokens of each expert of each layer: some experts are liked more than others, and late layers are less even.
fn tokens(model: Sparse, step: u64) -> Vec<Vec<u64>> {
    let layer = |layer: usize| {
        let liking = |expert: usize| {
            let wanted = noise((layer * model.experts + expert) as u64, 11);
            let skew = 1.0 + 3.0 * layer as f64 / model.layers as f64;
            (wanted - 0.08).max(0.0).powf(skew) * (0.9 + 0.2 * noise(step, expert as u64))
        };
        let all: Vec<f64> = (0..model.experts).map(liking).collect();
        let share = (TOKENS * model.per_token as u64) as f64 / all.iter().sum::<f64>();
        all.into_iter().map(|liking| (liking * share) as u64).collect()
    };
    (0..model.layers).map(layer).collect()
}

fn report(model: Sparse, step: u64, grouped: bool) -> StepReport {
    let pace = 0.99 + 0.02 * noise(step, 7);
    let routing = if grouped { [1.1, 0.8] } else { [41.0, 1.9] };
    let times: Vec<PhaseTime> = Phase::ALL
        .into_iter()
        .map(|phase| {
            let both = |forward: f64, backward: f64| (Some(forward * pace), Some(backward * pace), None);
            let (forward_ms, backward_ms, step_ms) = match phase {
                Phase::Attention => both(24.0, 52.0),
                Phase::Mlp if model.dense_first => both(1.2, 2.5),
                Phase::Moe => both(61.0, 118.0),
                Phase::Routing => both(routing[0], routing[1]),
                Phase::HeadLoss => both(19.0, 37.0),
                Phase::Recompute => (None, Some(80.0 * pace), None),
                Phase::Metadata => (Some(0.4), None, None),
                Phase::Optimizer => (None, None, Some(2.0)),
                Phase::HostWait => (None, None, Some(0.6)),
                Phase::DataWait => (None, None, Some(0.05)),
                Phase::Mlp | Phase::ExposedCopy => (None, None, None),
            };
            PhaseTime { phase, forward_ms, backward_ms, step_ms }
        })
        .collect();
    let sum: f64 = times.iter().filter_map(PhaseTime::total_ms).sum();
    let tokens = tokens(model, step);
    // A read for each expert of each layer, forward and computed again.
    let host_syncs = if grouped { 0 } else { 2 * (model.layers * model.experts) as u64 };
    let mut report = step_report(step);
    report.spans.iter_mut().for_each(as_routed);
    StepReport {
        step_ms: sum + 2.0,
        phases: times,
        not_attributed_ms: 2.0,
        counters: Some(CounterValues { launches: 2_310, host_syncs, allocations: 0 }),
        moe: Some(MoeReport {
            routing: if grouped { Routing::Grouped } else { Routing::PerExpert },
            experts_per_token: model.per_token,
            layers: (0..model.layers).map(|layer| layer + usize::from(model.dense_first)).collect(),
            tokens_per_expert: tokens,
            routing_ms: Some(routing.iter().sum::<f64>() * pace),
        }),
        ..report
    }
}

/// The spans of a dense step as those of a sparse one: every third layer shows its routing.
fn as_routed(span: &mut Span) {
    if span.phase == Phase::Mlp {
        span.phase = if span.layer.is_some_and(|layer| layer % 3 == 0) { Phase::Routing } else { Phase::Moe };
    }
}
