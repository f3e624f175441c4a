//! A run as test data: losses that fall, phases that sum up, memory by category, a cache that answers.

pub mod experts;
pub mod offload;
pub mod reports;

use std::path::PathBuf;

use tandem::session::event::{NoteLevel, Outcome, RunEvent, RunInfo, TimedEvent};
use tandem::session::run_view::RunView;
use tandem::session::{
    AttentionPath, CacheCounts, CacheEntry, CacheReport, CategoryBytes, Choice, EvalReport, LaneKind, MemoryCategory,
    MemoryReport, Metadata, Optimization, Pass, Phase, PhaseTime, Span, StepReport,
};

const MIB: u64 = 1 << 20;
const BEGAN: i64 = 1_790_000_000_000;

/// A run of `steps` of 60 steps; it ends when all are done.
pub fn run(steps: u64) -> RunView {
    apply(events(steps))
}

fn apply(events: Vec<TimedEvent>) -> RunView {
    let mut view = RunView::default();
    for event in &events {
        view.apply(event);
    }
    view
}

/// The events of such a run.
pub fn events(steps: u64) -> Vec<TimedEvent> {
    let mut events = Vec::new();
    let mut at = BEGAN;
    let mut tell = |ms: i64, event: RunEvent| {
        at += ms;
        events.push(TimedEvent { unix_ms: at, event });
    };
    for (stage, done, total) in
        [("opening the model", 0, 0), ("reading the dataset", 2834, 2834), ("loading weights", 50, 98)]
    {
        tell(900, RunEvent::Preparing { stage: stage.into(), done, total });
    }
    let note = |level, text: &str| RunEvent::Note { level, text: text.into() };
    tell(10, note(NoteLevel::Info, "2,692 records train, 142 are held out"));
    tell(10, note(NoteLevel::Warning, "training on the CPU, because there is no cuda device: no NVIDIA driver found"));
    if steps == 0 {
        return events;
    }
    tell(1200, RunEvent::Started(info()));
    tell(1, RunEvent::Choices { step: 1, choices: choices() });
    for step in 1..=steps {
        let report = step_report(step);
        let ms = report.step_ms as i64;
        let event = RunEvent::Step {
            epoch: step as f64 / 130.0,
            elapsed_s: step as f64 * 6.3,
            tokens_seen: step * 1_004,
            eta_s: Some((60 - step) as f64 * 6.3),
            report: Box::new(report),
        };
        tell(ms, event);
        if step % 20 == 0 {
            let loss = 3.2 + 0.9 * (-(step as f64) / 25.0).exp();
            let eval = EvalReport { step, loss, num_label_tokens: 3_900, num_documents: 142, eval_ms: 9_400.0 };
            tell(9_400, RunEvent::Eval(eval));
        }
    }
    if steps == 60 {
        let path = PathBuf::from("/data/tandem/runs/starter/adapter");
        tell(300, RunEvent::Saved { step: 60, path });
        tell(5, RunEvent::Finished { outcome: Outcome::Completed, steps: 60 });
    }
    events
}

fn info() -> RunInfo {
    RunInfo {
        name: "starter".into(),
        folder: PathBuf::from("/data/tandem/runs/starter"),
        model: "SmolLM2-135M-Instruct.Q4_1.gguf".into(),
        method: "LoRA r16".into(),
        device: "CPU, 2 threads, f32".into(),
        total_steps: 60,
        steps_per_epoch: 130.0,
        pack_len: 1024,
        num_parameters: 134_515_008,
        num_trainable: 4_884_480,
        num_hidden_layers: 30,
        num_train_records: 2_692,
        num_eval_records: 142,
    }
}

/// What is on in a run on a CPU, with reasons.
fn choices() -> Vec<Choice> {
    let choice = |optimization| {
        let (on, available, why) = match optimization {
            Optimization::MetadataCache => (true, true, "one build for each pack and window"),
            Optimization::DoubleBuffer => (false, false, "no activations are offloaded"),
            Optimization::ActivationOffload => (false, true, "host memory is where a CPU keeps them anyway"),
            Optimization::KeepActivations => (false, true, "set in the configuration"),
            Optimization::VarlenAttention => (true, true, "no T×T mask"),
            Optimization::GroupedRouting => (false, false, "the model has no experts"),
            Optimization::CudaGraphs => (false, false, "there is no GPU in this run"),
            Optimization::HostEmbedding | Optimization::HostOptimizerState => (false, true, "as set"),
            Optimization::MlpTiles => (true, false, "set before the run: at most 2,048 tokens at one time"),
            Optimization::JoinedPacks => (true, false, "set before the run: at most 16,384 tokens in a pass"),
        };
        Choice { optimization, on, available, why: why.into() }
    };
    Optimization::ALL.into_iter().map(choice).collect()
}

fn cache() -> CacheReport {
    CacheReport {
        metadata: Metadata::Cached,
        counts: CacheCounts { lookups: 60, hits: 59, builds: 1, evictions: 0, built_bytes: 24_576 },
        metadata_ms: Some(0.6),
        entries: vec![CacheEntry { window: None, path: AttentionPath::Varlen, bytes: 24_576, hits: 59 }],
    }
}

/// Spans of 30 blocks, one after the other.
fn spans(step_ms: f64) -> Vec<Span> {
    let layers = (0..30).map(|layer| (layer, Pass::Forward)).chain((0..30).rev().map(|layer| (layer, Pass::Backward)));
    let ms = step_ms / 60.0;
    let span = |(i, (layer, pass))| {
        let start_ms = f64::from(i) * ms;
        let layer = Some(layer);
        [(Phase::Attention, 0.0, 0.4), (Phase::Mlp, 0.4, 1.0)].map(|(phase, from, to)| Span {
            lane: LaneKind::Compute,
            phase,
            pass,
            layer,
            start_ms: start_ms + from * ms,
            end_ms: start_ms + to * ms,
        })
    };
    (0..).zip(layers).flat_map(span).collect()
}

/// A number between 0 and 1 that looks random and is the same every time.
fn noise(step: u64, salt: u64) -> f64 {
    let mut x = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (x >> 11) as f64 / (1u64 << 53) as f64
}

fn step_report(step: u64) -> StepReport {
    let scale = 0.97 + 0.06 * noise(step, 1);
    let phases: Vec<PhaseTime> = Phase::ALL
        .into_iter()
        .map(|phase| {
            let (forward_ms, backward_ms, step_ms) = match phase {
                Phase::Attention => (Some(520.0 * scale), Some(980.0 * scale), None),
                Phase::Mlp => (Some(890.0 * scale), Some(1_650.0 * scale), None),
                Phase::HeadLoss => (Some(310.0 * scale), Some(420.0 * scale), None),
                Phase::Recompute => (None, Some(1_390.0 * scale), None),
                Phase::Metadata => (Some(0.6), None, None),
                Phase::Optimizer => (None, None, Some(34.0)),
                Phase::DataWait => (None, None, Some(0.02)),
                Phase::Moe | Phase::Routing | Phase::ExposedCopy | Phase::HostWait => (None, None, None),
            };
            PhaseTime { phase, forward_ms, backward_ms, step_ms }
        })
        .collect();
    let sum: f64 = phases.iter().filter_map(PhaseTime::total_ms).sum();
    let now = [514 * MIB, 210 * MIB, 96 * MIB, 38 * MIB, 0, 19 * MIB, 19 * MIB, MIB / 8];
    let categories: Vec<CategoryBytes> = MemoryCategory::ALL
        .into_iter()
        .zip(now)
        .map(|(category, now_bytes)| CategoryBytes { category, now_bytes, peak_bytes: now_bytes + now_bytes / 10 })
        .collect();
    let total: u64 = now.iter().sum();
    StepReport {
        step,
        loss: 3.1 + 1.2 * (-(step as f64) / 18.0).exp() + 0.35 * (noise(step, 2) - 0.5),
        grad_norm: 0.8 + 1.9 * noise(step, 3).powi(3),
        clipped: noise(step, 3) > 0.9,
        lr: 2e-4 * (0.5 + 0.5 * (std::f64::consts::PI * step as f64 / 60.0).cos()),
        total_tokens: 1_024,
        document_tokens: 1_004,
        num_label_tokens: 830,
        step_ms: sum + 21.0,
        phases,
        not_attributed_ms: 21.0,
        memory: MemoryReport {
            categories,
            now_bytes: total,
            peak_bytes: total + total / 12,
            process_bytes: Some(total + 160 * MIB),
            pinned: None,
        },
        counters: None,
        cache: Some(cache()),
        copies: None,
        moe: None,
        spans: spans(sum),
    }
}
