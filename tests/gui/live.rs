//! The tiles of Live: switches and their reasons, formulas, cache and streams; and that all of them have their place.

use std::path::PathBuf;

use egui::accesskit::{Role, Toggled};
use egui::{Rect, pos2, vec2};
use egui_kittest::kittest::{NodeT as _, Queryable as _};
use tandem::gui::views::Screen;
use tandem::session::run_view::{RunState, RunView};
use tandem::session::{ActivationsChoice, Optimization};

use super::fixture::{self, offload};
use super::{App, app, build, builder, click, support, wait_for, with_run};

const TILES: [&str; 8] = [
    "Loss",
    "Step anatomy",
    "Streams, last step",
    "Memory",
    "Log",
    "Optimizations",
    "Predicted against measured",
    "Packing metadata cache",
];

fn title(harness: &App, tile: &str) -> Rect {
    harness.get_by_role_and_label(Role::Heading, tile).rect()
}

/// Turns the wheel by `points`.
fn scroll(harness: &App, points: f32) {
    harness.event(egui::Event::MouseWheel {
        unit: egui::MouseWheelUnit::Point,
        delta: vec2(0.0, points),
        phase: egui::TouchPhase::Move,
        source: egui::MouseWheelSource::Unknown,
        modifiers: egui::Modifiers::NONE,
    });
}

#[test]
fn the_tiles_lie_in_three_columns() {
    let harness = with_run(fixture::run(37));
    let [loss, anatomy, streams, memory, log, switches, predicted, cache] = TILES.map(|tile| title(&harness, tile));
    assert!(TILES.map(|tile| title(&harness, tile)).iter().all(|title| title.width() > 15.0));
    assert_eq!((loss.top(), memory.top()), (anatomy.top(), log.top()));
    assert_eq!((loss.left(), anatomy.left()), (streams.left(), log.left()));
    assert!(loss.top() < streams.top() && streams.top() < memory.top());
    assert_eq!((switches.left(), switches.left()), (predicted.left(), cache.left()));
    assert!(switches.top() < predicted.top() && predicted.top() < cache.top());
    assert!(anatomy.left() > 500.0 && switches.left() > 1050.0);
    let bars = harness.get_by_label_contains(" to 37 by phase").rect();
    assert!(bars.left() > 500.0 && bars.width() > 100.0, "{bars:?}");
}

#[test]
fn a_small_window_scrolls_to_every_tile() {
    let mut harness = build(builder().with_size([1024.0, 700.0]));
    app(&mut harness).show_run(PathBuf::from("/runs/starter"), offload::run(40));
    harness.run_steps(3);
    assert!(title(&harness, "Log").top() > 700.0, "it lies below the window");
    harness.hover_at(pos2(600.0, 200.0));
    for _ in 0..20 {
        scroll(&harness, -200.0);
        harness.run_steps(4);
    }
    assert!(title(&harness, "Log").bottom() < 700.0);
}

fn switch_is(harness: &App, optimization: Optimization) -> (bool, bool) {
    let node = harness.get_by_role_and_label(Role::Switch, optimization.name());
    let node = node.accesskit_node();
    (node.toggled() == Some(Toggled::True), node.is_disabled())
}

#[test]
fn every_switch_has_its_reason_and_none_moves_in_a_run_that_is_over() {
    let harness = with_run(fixture::run(60));
    for optimization in Optimization::ALL {
        let on = matches!(optimization, Optimization::MetadataCache | Optimization::VarlenAttention);
        assert_eq!(switch_is(&harness, optimization), (on, true), "{optimization:?}");
    }
    harness.get_by_label("CUDA graphs: off, there is no GPU in this run");
    harness.get_by_label("Variable-length attention: on, no T×T mask; this run is over");
    // 59 hits at the 0.6 ms of the one build.
    harness.get_by_label(
        "Packing metadata cache: on, one build for each pack and window, predicted −35.4 ms; this run is over",
    );
}

#[test]
fn a_switch_is_thrown_between_two_steps_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let model = support::tiny_model(folder.path());
    let data = support::dataset(folder.path(), 40);
    let mut config = tandem::session::config::RunConfig::default();
    (config.model.path, config.data.path) = (model, data);
    config.packing.pack_len = 64;
    config.train.max_steps = 100_000;
    let mut harness = build(builder());
    let ctx = harness.ctx.clone();
    app(&mut harness).start_run(config, &ctx);
    harness.run_steps(3);
    assert_eq!(app(&mut harness).screen(), Screen::Live);
    let name = Optimization::VarlenAttention.name();
    wait_for(&mut harness, "the switches", |h| h.query_by_role_and_label(Role::Switch, name).is_some());
    assert_eq!(switch_is(&harness, Optimization::VarlenAttention), (true, false));
    assert_eq!(switch_is(&harness, Optimization::CudaGraphs), (false, true), "there is no GPU");

    click(&mut harness, Role::Switch, name);
    assert_eq!(switch_is(&harness, Optimization::VarlenAttention), (false, false), "it stays where it was put");
    let off = "Variable-length attention: off, a T×T mask for each window";
    wait_for(&mut harness, "the answer", |h| h.query_by_label(off).is_some());
    let view = |harness: &mut App| app(harness).shown_run().unwrap().view.clone();
    let switched = view(&mut harness).switched;
    assert_eq!(
        switched.iter().map(|s| (s.optimization, s.on)).collect::<Vec<_>>(),
        [(Optimization::VarlenAttention, false)]
    );
    assert!(
        view(&mut harness)
            .notes
            .iter()
            .any(|note| note.text.starts_with("Variable-length attention switched off by you"))
    );

    click(&mut harness, Role::Button, "Stop");
    click(&mut harness, Role::Button, "Stop and save");
    wait_for(&mut harness, "the end", |h| h.query_by_role_and_label(Role::Label, "Stopped").is_some());
    assert_eq!(switch_is(&harness, Optimization::VarlenAttention), (false, true), "nothing to switch any more");
}

#[test]
fn a_run_that_offloads_fills_the_formulas_and_the_lanes() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = tandem::session::config::RunConfig::default();
    config.model.path = support::tiny_model(folder.path());
    config.data.path = support::dataset(folder.path(), 40);
    config.packing.pack_len = 64;
    config.train.max_steps = 3;
    config.train.activations = ActivationsChoice::Offload;
    // Its blocks are too small to offload them for any other purpose than this.
    config.optimizations.offload_force = true;
    let mut harness = build(builder());
    let ctx = harness.ctx.clone();
    app(&mut harness).start_run(config, &ctx);
    wait_for(&mut harness, "the end", |h| h.query_by_role_and_label(Role::Label, "Completed").is_some());
    // One of two blocks travels; the last one stays.
    harness.get_by_label_contains("L 1 of 2, c ");
    for row in ["Backward", "Copy hidden", "Copy exposed", "Host memory"] {
        let label = harness.query_all_by_label_contains(&format!("{row} ")).find_map(|node| {
            node.accesskit_node()
                .value()
                .filter(|words| words.contains(": predicted ") && words.contains(", measured "))
        });
        assert!(label.is_some(), "{row} was not measured");
    }
    harness.get_by_label_contains(" % of copy time hidden");
    harness.get_by_label("host copies <0.01 GiB");
}

#[test]
fn formulas_stand_beside_what_was_measured() {
    let harness = with_run(offload::run(40));
    // 35 · 4.1 ms; the first copy alone is waited for.
    harness.get_by_label("Copy hidden (L−1)·min(c,g): predicted 143.5 ms, measured 143.5 ms");
    harness.get_by_label("Copy exposed c+(L−1)·max(c−g,0): predicted 4.1 ms, measured 4.1 ms");
    harness.get_by_label_contains("Backward c+(L−1)·max(c,g)+g: predicted 482.9 ms, measured ");
    harness.get_by_label_contains(
        "Cache saves (lookups−builds)·s: predicted 13.3 ms, not measured: no steps with the cache off",
    );
    harness.get_by_label("Host memory L·activation: predicted 3,096 MiB, measured 3,096 MiB");
    harness.get_by_label("L 36 of 36, c 4.10 ms, g 13.30 ms, s 0.19 ms");
    harness
        .get_by_label_contains("Overlapped copies: on, 1 more activation on the device: 86.00 MiB, predicted −144 ms");
    harness.get_by_label("98.6 % of copy time hidden");
    harness.get_by_label("pinned 3.02 GiB");
    harness.get_by_label("D2H 3.02 GiB, 22.0 GB/s");
}

#[test]
fn without_offload_the_formulas_say_so() {
    let harness = with_run(fixture::run(12));
    harness.get_by_label_contains(
        "Copy hidden (L−1)·min(c,g): nothing predicted, not measured: nothing is offloaded in this run",
    );
    harness.get_by_label("Nothing is offloaded: host memory is where a CPU keeps them anyway");
    harness.get_by_label("30 blocks, s 0.60 ms; nothing is offloaded in this run");
    harness.get_by_role_and_label(Role::Image, "60 lookups: 1 built, 59 hit");
    harness.get_by_label("full attention, tile lists, 24.00 KiB, 59 hits");
    for figure in ["Lookups 60", "Hits 59", "Builds 1", "Size 24.00 KiB", "Avoided 35.4 ms"] {
        harness.get_by_label(figure);
    }
}

#[test]
fn the_streams_can_be_zoomed_and_panned() {
    let mut harness = with_run(offload::run(40));
    let window = |harness: &App| {
        let node = harness.get_by_label_contains("Streams from ");
        let words = node.accesskit_node().label().unwrap();
        let numbers: Vec<f64> = words.split(' ').filter_map(|word| word.parse().ok()).collect();
        (numbers[0], numbers[1], node.rect())
    };
    let (start, end, place) = window(&harness);
    harness.hover_at(place.center());
    harness.run_steps(2);
    scroll(&harness, 100.0);
    harness.run_steps(20);
    let (zoomed_start, zoomed_end, _) = window(&harness);
    assert!(zoomed_start > start && zoomed_end < end, "{start} to {end} became {zoomed_start} to {zoomed_end}");

    harness.drag_at(place.center());
    harness.run_steps(2);
    harness.hover_at(place.center() - vec2(80.0, 0.0));
    harness.run_steps(2);
    harness.drop_at(place.center() - vec2(80.0, 0.0));
    harness.run_steps(2);
    let (panned_start, panned_end, _) = window(&harness);
    assert!(panned_start > zoomed_start && panned_end > zoomed_end, "later parts came in from the right");
}

#[test]
fn a_run_without_its_new_figures_still_shows() {
    let mut view: RunView = fixture::run(5);
    view.choices.clear();
    view.last_spans = None;
    view.state = RunState::Interrupted;
    for step in &mut view.steps {
        step.report.cache = None;
    }
    let harness = with_run(view);
    harness.get_by_label("This run did not say which optimizations are on.");
    harness.get_by_label("No step has left its spans yet.");
    harness.get_by_label("Not measured in this step.");
}
