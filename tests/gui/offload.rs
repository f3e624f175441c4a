//! A run on a GPU with offloaded activations as test data: a second buffer is switched on in its middle.

use tandem::session::event::{NoteLevel, RunEvent, TimedEvent};
use tandem::session::run_view::RunView;
use tandem::session::{
    AttentionPath, CacheCounts, CacheEntry, CacheReport, Choice, CopyReport, LaneKind, Metadata, Optimization, Pass,
    Phase, PhaseTime, Span, StepReport,
};

use tandem::tensor::cuda::CounterValues;

use super::{apply, info, noise, step_report};

const BLOCKS: u32 = 36;
/// Bytes of one activation.
const ACTIVATION: u64 = 86 << 20;
/// Time of one copy either way, in milliseconds.
const COPY: f64 = 4.1;
/// Step from which on two buffers are used.
pub const SWITCHED: u64 = 25;

/// Such a run of `steps` steps.
pub fn run(steps: u64) -> RunView {
    apply(events(steps))
}

/// The events of such a run.
pub fn events(steps: u64) -> Vec<TimedEvent> {
    let mut info = info();
    info.name = "support-tickets r16".into();
    info.model = "Qwen3-8B".into();
    info.device = "NVIDIA H200, bf16".into();
    info.total_steps = 4_800;
    info.num_hidden_layers = BLOCKS as usize;
    let mut events = vec![RunEvent::Started(info), choices(1, false)];
    for step in 1..=steps {
        if step == SWITCHED {
            let text = format!("Overlapped copies switched on by you, from step {SWITCHED} on");
            events.push(RunEvent::Note { level: NoteLevel::Info, text });
            events.push(choices(step, true));
        }
        let report = report(step, if step < SWITCHED { 1 } else { 2 });
        events.push(RunEvent::Step {
            epoch: step as f64 / 1600.0,
            elapsed_s: step as f64 * report.step_ms / 1e3,
            tokens_seen: step * 1_004,
            eta_s: Some((4_800 - step) as f64 * 0.7),
            report: Box::new(report),
        });
    }
    let timed = |(i, event)| TimedEvent { unix_ms: 1_790_000_000_000 + 700 * i as i64, event };
    events.into_iter().enumerate().map(timed).collect()
}

/// What is on, with reasons.
fn choices(step: u64, two_buffers: bool) -> RunEvent {
    let why = |optimization| match optimization {
        Optimization::MetadataCache => (true, true, "one build for each pack and window"),
        Optimization::DoubleBuffer if two_buffers => (true, true, "1 more activation on the device: 86.00 MiB"),
        Optimization::DoubleBuffer => (false, true, "one buffer: copy, then compute, in turns"),
        Optimization::ActivationOffload => (true, true, "switched by you"),
        Optimization::KeepActivations => (false, true, "keeping all would need 64.20 GiB, and 5.90 GiB are free"),
        Optimization::VarlenAttention => (true, true, "no T×T mask"),
        Optimization::GroupedRouting => (false, false, "the model has no experts"),
        Optimization::CudaGraphs => (false, false, "copies of offloaded activations are not recorded"),
        Optimization::HostEmbedding | Optimization::HostOptimizerState => (false, true, "as set"),
        Optimization::MlpTiles => (true, false, "set before the run: at most 2,048 tokens at one time"),
        Optimization::JoinedPacks => (true, false, "set before the run: at most 16,384 tokens in a pass"),
    };
    let choice = |optimization| {
        let (on, available, why) = why(optimization);
        Choice { optimization, on, available, why: why.into() }
    };
    RunEvent::Choices { step, choices: Optimization::ALL.into_iter().map(choice).collect() }
}

fn report(step: u64, buffers: usize) -> StepReport {
    let (spans, forward_exposed, backward_exposed) = spans(buffers, 0.99 + 0.02 * noise(step, 7));
    let sum = |phase: Phase, pass: Pass| {
        let of = spans.iter().filter(|s| s.lane == LaneKind::Compute && (s.phase, s.pass) == (phase, pass));
        of.map(|s| s.end_ms - s.start_ms).reduce(|a, b| a + b)
    };
    let phases = Phase::ALL
        .into_iter()
        .map(|phase| match phase {
            Phase::ExposedCopy => PhaseTime {
                phase,
                forward_ms: Some(forward_exposed),
                backward_ms: Some(backward_exposed),
                step_ms: None,
            },
            Phase::DataWait => PhaseTime { phase, forward_ms: None, backward_ms: None, step_ms: Some(0.1) },
            _ => PhaseTime {
                phase,
                forward_ms: sum(phase, Pass::Forward),
                backward_ms: sum(phase, Pass::Backward),
                step_ms: sum(phase, Pass::Step),
            },
        })
        .collect();
    let lane_ms = |kind| spans.iter().filter(|s| s.lane == kind).map(|s| s.end_ms - s.start_ms).sum::<f64>();
    let (d2h_ms, h2d_ms) = (lane_ms(LaneKind::D2h), lane_ms(LaneKind::H2d));
    let step_ms = spans.iter().map(|s| s.end_ms).fold(0.0, f64::max) + 0.8;
    let bytes = u64::from(BLOCKS) * ACTIVATION;
    let copies = CopyReport {
        buffers,
        buffer_bytes: ACTIVATION,
        blocks: BLOCKS as usize,
        host_bytes: bytes,
        d2h_bytes: bytes,
        h2d_bytes: bytes,
        d2h_ms,
        h2d_ms,
        copy_ms: d2h_ms + h2d_ms,
        hidden_ms: d2h_ms + h2d_ms - forward_exposed - backward_exposed,
        reloads: BLOCKS as usize,
        block_backward_ms: Some(13.3),
    };
    let lookups = 2 * u64::from(BLOCKS);
    let cache = CacheReport {
        metadata: Metadata::Cached,
        counts: CacheCounts { lookups, hits: lookups - 2, builds: 2, evictions: 0, built_bytes: 1_900_000 },
        metadata_ms: Some(0.38),
        entries: vec![
            CacheEntry { window: Some(512), path: AttentionPath::Varlen, bytes: 122_880, hits: 29 },
            CacheEntry { window: None, path: AttentionPath::Varlen, bytes: 1_887_436, hits: 41 },
        ],
    };
    StepReport {
        step_ms,
        phases,
        not_attributed_ms: 0.7,
        counters: Some(CounterValues { launches: 2_310, host_syncs: 0, allocations: 0 }),
        cache: Some(cache),
        copies: Some(copies),
        spans,
        ..step_report(step)
    }
}

/// The spans of a step whose copies and blocks follow each other as the engine orders them, and what of the copies is exposed in either pass.
fn spans(buffers: usize, pace: f64) -> (Vec<Span>, f64, f64) {
    let mut spans = Vec::new();
    let mut add = |lane, phase, pass, layer, start_ms: f64, ms: f64| {
        spans.push(Span { lane, phase, pass, layer, start_ms, end_ms: start_ms + ms });
        start_ms + ms
    };
    let compute = LaneKind::Compute;
    let mut now = add(compute, Phase::Metadata, Pass::Forward, None, 0.0, 0.38);
    let mut to_host: f64 = 0.0;
    for block in 0..BLOCKS {
        let layer = Some(block);
        to_host = add(LaneKind::D2h, Phase::ExposedCopy, Pass::Forward, layer, now.max(to_host), COPY);
        now = add(compute, Phase::Attention, Pass::Forward, layer, now, 0.95 * pace);
        now = add(compute, Phase::Mlp, Pass::Forward, layer, now, 3.3 * pace);
    }
    now = add(compute, Phase::HeadLoss, Pass::Forward, None, now, 20.0 * pace);
    now = add(compute, Phase::HeadLoss, Pass::Backward, None, now, 40.0 * pace);
    let mut exposed = 0.0;
    let mut back = now;
    for block in (0..BLOCKS).rev() {
        let layer = Some(block);
        // With two buffers the copy of a block began with the block before it.
        let begin = if buffers == 2 { back } else { now };
        let there = add(LaneKind::H2d, Phase::ExposedCopy, Pass::Backward, layer, begin, COPY);
        exposed += (there - now).max(0.0);
        now = now.max(there);
        back = now;
        now = add(compute, Phase::Recompute, Pass::Backward, layer, now, 3.6 * pace);
        now = add(compute, Phase::Mlp, Pass::Backward, layer, now, 7.3 * pace);
        now = add(compute, Phase::Attention, Pass::Backward, layer, now, 2.4 * pace);
    }
    add(compute, Phase::Optimizer, Pass::Step, None, now, 3.0);
    (spans, 0.0, exposed)
}
