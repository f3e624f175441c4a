//! Tests of the run store: what goes in comes out, and a view of the file equals a view of the events.

use crate::model::metadata::{CacheCounts, CacheEntry};
use crate::train::config::Routing;
use crate::train::config::{AttentionPath, Metadata};
use crate::train::report::{CacheReport, CopyReport, MoeReport};
use proptest::prelude::*;

use super::*;
use crate::session::event::{Outcome, RunInfo};
use crate::session::run_view::{RunState, RunView};
use crate::tensor::cuda::{CounterValues, PinnedBytes};
use crate::tensor::memory::{CategoryBytes, MemoryCategory, MemoryReport};
use crate::tensor::phase::{LaneKind, Pass, Phase, PhaseTime, Span};
use crate::train::report::{EvalReport, StepReport};

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![-1e6..1e6, Just(0.0), Just(1.0 / 3.0), Just(f64::MIN_POSITIVE), Just(1e300)]
}

fn phase() -> impl Strategy<Value = Phase> {
    prop::sample::select(Phase::ALL.to_vec())
}

fn phase_time() -> impl Strategy<Value = PhaseTime> {
    let maybe = || prop::option::of(number());
    (phase(), maybe(), maybe(), maybe()).prop_map(|(phase, forward_ms, backward_ms, step_ms)| PhaseTime {
        phase,
        forward_ms,
        backward_ms,
        step_ms,
    })
}

fn span() -> impl Strategy<Value = Span> {
    let lane = prop::sample::select(vec![LaneKind::Compute, LaneKind::D2h, LaneKind::H2d, LaneKind::Host]);
    let pass = prop::sample::select(vec![Pass::Forward, Pass::Backward, Pass::Step]);
    (lane, phase(), pass, prop::option::of(0..200_u32), number(), number())
        .prop_map(|(lane, phase, pass, layer, start_ms, end_ms)| Span { lane, phase, pass, layer, start_ms, end_ms })
}

fn memory() -> impl Strategy<Value = MemoryReport> {
    let category = (prop::sample::select(MemoryCategory::ALL.to_vec()), any::<u64>(), any::<u64>())
        .prop_map(|(category, now_bytes, peak_bytes)| CategoryBytes { category, now_bytes, peak_bytes });
    let pinned = prop::option::of((any::<u64>(), any::<u64>()).prop_map(|(now, peak)| PinnedBytes { now, peak }));
    let process_bytes = prop::option::of(any::<u64>());
    (prop::collection::vec(category, 0..9), any::<u64>(), any::<u64>(), process_bytes, pinned).prop_map(
        |(categories, now_bytes, peak_bytes, process_bytes, pinned)| MemoryReport {
            categories,
            now_bytes,
            peak_bytes,
            process_bytes,
            pinned,
        },
    )
}

fn cache(step: u64) -> CacheReport {
    let counts = CacheCounts { lookups: step, hits: step - 1, builds: 1, evictions: 0, built_bytes: 7 * step };
    let entry = |window| CacheEntry { window, path: AttentionPath::Masked, bytes: step, hits: 3 };
    let metadata_ms = step.is_multiple_of(2).then_some(step as f64 / 7.0);
    CacheReport { metadata: Metadata::Cached, counts, metadata_ms, entries: vec![entry(None), entry(Some(128))] }
}

fn experts(step: u64) -> MoeReport {
    MoeReport {
        routing: Routing::Sorted,
        experts_per_token: 2,
        layers: vec![0, 3],
        tokens_per_expert: vec![vec![step, 0, 7], vec![1, 2, 3]],
        routing_ms: step.is_multiple_of(2).then_some(0.25),
    }
}

fn copies(step: u64) -> CopyReport {
    CopyReport {
        buffers: 2,
        buffer_bytes: 1 << 20,
        blocks: 3,
        host_bytes: 3 << 20,
        d2h_bytes: step << 20,
        h2d_bytes: step << 20,
        d2h_ms: step as f64 / 3.0,
        h2d_ms: 0.25,
        copy_ms: 0.5,
        hidden_ms: 0.375,
        reloads: 6,
        block_backward_ms: step.is_multiple_of(2).then_some(1.5),
    }
}

fn step() -> impl Strategy<Value = RunEvent> {
    let report = (
        (1..1_000_000_u64, number(), number(), any::<bool>(), number(), number(), number()),
        (any::<u32>(), any::<u32>(), any::<u32>()),
        prop::collection::vec(phase_time(), 0..11),
        memory(),
        prop::collection::vec(span(), 0..6),
    )
        .prop_map(|((step, loss, grad_norm, clipped, lr, step_ms, rest), tokens, phases, memory, spans)| StepReport {
            step,
            loss,
            grad_norm,
            clipped,
            lr,
            total_tokens: tokens.0.into(),
            document_tokens: tokens.1.into(),
            num_label_tokens: tokens.2.into(),
            step_ms,
            phases,
            not_attributed_ms: rest,
            memory,
            counters: step.is_multiple_of(2).then_some(CounterValues { launches: step, host_syncs: 1, allocations: 0 }),
            cache: step.is_multiple_of(3).then(|| cache(step)),
            copies: step.is_multiple_of(5).then(|| copies(step)),
            moe: step.is_multiple_of(7).then(|| experts(step)),
            spans,
        });
    (report, number(), number(), any::<u64>(), prop::option::of(number())).prop_map(
        |(report, epoch, elapsed_s, tokens_seen, eta_s)| RunEvent::Step {
            report: Box::new(report),
            epoch,
            elapsed_s,
            tokens_seen,
            eta_s,
        },
    )
}

fn info() -> impl Strategy<Value = RunInfo> {
    (".*", ".*", number(), any::<u64>()).prop_map(|(name, model, steps_per_epoch, total_steps)| RunInfo {
        folder: format!("/runs/{name}").into(),
        name,
        model,
        method: "LoRA r16".into(),
        device: "CPU".into(),
        total_steps,
        steps_per_epoch,
        pack_len: 1024,
        num_parameters: 1,
        num_trainable: 2,
        num_hidden_layers: 3,
        num_train_records: 4,
        num_eval_records: 5,
    })
}

fn event() -> impl Strategy<Value = RunEvent> {
    let level = prop::sample::select(vec![NoteLevel::Info, NoteLevel::Warning, NoteLevel::Error]);
    prop_oneof![
        1 => (".*", any::<u64>(), any::<u64>())
            .prop_map(|(stage, done, total)| RunEvent::Preparing { stage, done, total }),
        1 => info().prop_map(RunEvent::Started),
        4 => step(),
        1 => (any::<u32>(), number(), any::<u64>(), any::<u64>(), number()).prop_map(
            |(step, loss, num_label_tokens, num_documents, eval_ms)| {
                RunEvent::Eval(EvalReport { step: step.into(), loss, num_label_tokens, num_documents, eval_ms })
            }
        ),
        1 => Just(RunEvent::Stopping),
        1 => (any::<u64>(), ".*").prop_map(|(step, path)| RunEvent::Saved { step, path: path.into() }),
        1 => (level, ".*").prop_map(|(level, text)| RunEvent::Note { level, text }),
        1 => (".*", any::<u64>())
            .prop_map(|(text, steps)| RunEvent::Finished { outcome: Outcome::Failed(text), steps }),
        1 => any::<u64>().prop_map(|steps| RunEvent::Finished { outcome: Outcome::Completed, steps }),
    ]
}

fn timed() -> impl Strategy<Value = TimedEvent> {
    (any::<i64>(), event()).prop_map(|(unix_ms, event)| TimedEvent { unix_ms, event })
}

fn write_all(folder: &Path, events: &[TimedEvent]) {
    let store = Store::create(folder).unwrap();
    for event in events {
        store.push(event.clone());
    }
    store.close(Duration::from_secs(60)).unwrap();
}

fn view_of(events: &[TimedEvent]) -> RunView {
    let mut view = RunView::default();
    for event in events {
        view.apply(event);
    }
    view
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_stored_run_loads_into_the_view_that_its_events_made(events in prop::collection::vec(timed(), 0..40)) {
        let folder = tempfile::tempdir().unwrap();
        write_all(folder.path(), &events);
        prop_assert_eq!(&read(folder.path()).unwrap(), &events);
        let mut expected = view_of(&events);
        if !expected.state.is_over() {
            // Nobody holds the folder.
            expected.state = RunState::Interrupted;
        }
        prop_assert_eq!(RunView::load(folder.path()).unwrap(), expected);
    }

    #[test]
    fn json_lines_read_back_the_same(event in timed()) {
        let line = serde_json::to_string(&event).unwrap();
        prop_assert_eq!(serde_json::from_str::<TimedEvent>(&line).unwrap(), event);
    }
}

fn plain_step(step: u64, loss: f64, spans: Vec<Span>) -> TimedEvent {
    let report = StepReport { loss, num_label_tokens: 4, step_ms: 2.0, spans, ..StepReport::plain(step) };
    let event = RunEvent::Step { report: Box::new(report), epoch: 0.5, elapsed_s: 1.0, tokens_seen: 8, eta_s: None };
    TimedEvent { unix_ms: 1_000 + step.cast_signed(), event }
}

#[test]
fn spans_are_kept_for_the_last_steps_only() {
    let span = Span {
        lane: LaneKind::Compute,
        phase: Phase::Mlp,
        pass: Pass::Forward,
        layer: Some(1),
        start_ms: 0.0,
        end_ms: 1.0,
    };
    let events: Vec<TimedEvent> = (1..=100).map(|step| plain_step(step, 1.0, vec![span, span])).collect();
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path(), &events);
    let with_spans: Vec<u64> = read(folder.path())
        .unwrap()
        .iter()
        .filter_map(|e| match &e.event {
            RunEvent::Step { report, .. } if !report.spans.is_empty() => Some(report.step),
            _ => None,
        })
        .collect();
    assert_eq!(with_spans, (69..=100).collect::<Vec<u64>>());
    assert_eq!(RunView::load(folder.path()).unwrap().last_spans.unwrap().step, 100);
}

#[test]
fn a_loss_that_is_not_a_number_comes_back_as_such() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path(), &[plain_step(1, f64::NAN, Vec::new())]);
    assert!(RunView::load(folder.path()).unwrap().steps[0].report.loss.is_nan());
    assert_eq!(summary(folder.path()).unwrap().last_loss, None);
}

#[test]
fn a_run_can_be_read_while_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    store.push(plain_step(1, 2.0, Vec::new()));
    let seen = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        read(folder.path()).unwrap().len() == 1
    });
    assert!(seen);
    store.close(Duration::from_secs(60)).unwrap();
    let summary = summary(folder.path()).unwrap();
    assert_eq!((summary.steps, summary.last_loss, summary.outcome), (1, Some(2.0), None));
    assert_eq!(summary.began_unix_ms, Some(1_001));
}

#[test]
fn a_copied_folder_needs_nothing_but_the_one_file() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path(), &[plain_step(1, 2.0, Vec::new())]);
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join(STORE_FILE), copy.path().join(STORE_FILE)).unwrap();
    assert_eq!(read(copy.path()).unwrap(), read(folder.path()).unwrap());
}

#[test]
fn a_store_of_the_version_before_is_read_without_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    write_all(folder.path(), &[plain_step(1, 2.0, Vec::new())]);
    let connection = Connection::open(folder.path().join(STORE_FILE)).unwrap();
    connection
        .execute_batch(
            "ALTER TABLE steps DROP COLUMN cache; ALTER TABLE steps DROP COLUMN copies; \
         ALTER TABLE steps DROP COLUMN pinned; ALTER TABLE steps DROP COLUMN moe;",
        )
        .unwrap();
    connection.pragma_update(None, "user_version", 2).unwrap();
    drop(connection);
    assert_eq!(read(folder.path()).unwrap(), [plain_step(1, 2.0, Vec::new())]);
}

#[test]
fn a_store_is_never_written_over_and_foreign_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(read(folder.path()).unwrap_err().to_string().ends_with("it has no run.sqlite"));
    write_all(folder.path(), &[]);
    assert!(Store::create(folder.path()).is_err());
    let path = folder.path().join(STORE_FILE);
    let connection = Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 7).unwrap();
    drop(connection);
    let message = read(folder.path()).unwrap_err().to_string();
    assert!(message.ends_with("has version 7; this Tandem reads versions 2 to 5"), "{message}");
    std::fs::write(&path, "not a database at all, only text").unwrap();
    assert!(read(folder.path()).is_err());
}
