//! The Compare screen: the form and its refusals, a comparison from its start to its tiles, a failure, and a report as it is drawn.

use egui::accesskit::{Role, Toggled};
use egui_kittest::kittest::{NodeT as _, Queryable as _};
use tandem::gui::current_comparison::Findings;
use tandem::gui::views::Screen;
use tandem::session::Optimization;
use tandem::session::compare::{CompareOptions, Variation};
use tandem::session::config::RunConfig;

use super::fixture::offload;
use super::fixture::reports::{findings, slower, two_buffers};
use super::{App, app, build, builder, click, support, wait_for, with_run};

const START: &str = "Start comparison";

fn with_findings(found: Findings) -> App {
    let mut harness = build(builder());
    app(&mut harness).show_comparison(found);
    harness.run_steps(3);
    harness
}

fn is_disabled(harness: &App, role: Role, label: &str) -> bool {
    harness.get_by_role_and_label(role, label).accesskit_node().is_disabled()
}

#[test]
fn the_form_says_why_nothing_can_be_compared_yet() {
    let mut harness = build(builder());
    click(&mut harness, Role::Tab, "Compare");
    assert_eq!(app(&mut harness).screen(), Screen::Compare);
    assert!(is_disabled(&harness, Role::Button, START), "there is no model yet");
    harness.get_by_label("It is not complete yet.");
    let all = harness.get_by_role_and_label(Role::Switch, "All optimizations");
    assert_eq!(all.accesskit_node().toggled(), Some(Toggled::True));
    harness.get_by_label("1 comparison: 120 steps, and a warm-up");
    click(&mut harness, Role::Switch, "Packing metadata cache");
    harness.get_by_label("2 comparisons: 240 steps, and a warm-up");
    click(&mut harness, Role::Link, "Change it in Set up");
    assert_eq!(app(&mut harness).screen(), Screen::SetUp);
}

#[test]
fn a_comparison_runs_from_the_form_to_its_tiles() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = RunConfig::default();
    config.model.path = support::tiny_model(folder.path());
    config.data.path = support::dataset(folder.path(), 40);
    config.packing.pack_len = 64;
    let file = folder.path().join("run.toml");
    std::fs::write(&file, config.to_toml().unwrap()).unwrap();
    let mut harness = build(builder());
    app(&mut harness).set_up(&file);
    click(&mut harness, Role::Tab, "Compare");
    click(&mut harness, Role::Switch, "All optimizations");
    harness.get_by_label("choose at least one thing to vary");
    click(&mut harness, Role::Switch, "Packing metadata cache");
    click(&mut harness, Role::Switch, "Variable-length attention");
    for (field, text) in [("Pairs of blocks", "2"), ("Counted steps in a block", "1")] {
        harness.get_by_role_and_label(Role::TextInput, field).focus();
        harness.run_steps(2);
        harness.key_press_modifiers(egui::Modifiers::COMMAND, egui::Key::A);
        harness.run_steps(2);
        harness.get_by_role_and_label(Role::TextInput, field).type_text(text);
        harness.run_steps(2);
    }
    assert!(!is_disabled(&harness, Role::Button, START));
    click(&mut harness, Role::Button, START);
    wait_for(&mut harness, "both comparisons", |h| h.query_by_label("New comparison").is_some());

    let done = app(&mut harness).comparison().unwrap().done.clone();
    let varied: Vec<_> = done.iter().map(|report| (report.variation, report.pairs)).collect();
    assert_eq!(varied, [(Variation::Cache, 2), (Variation::Attention, 2)]);
    harness.get_by_role_and_label(Role::Heading, "Variable-length attention, on against off");
    harness.get_by_label(&done[1].verdict.sentence);
    click(&mut harness, Role::RadioButton, "cache");
    harness.get_by_role_and_label(Role::Heading, "Packing metadata cache, on against off");
    harness.get_by_label("Losses of both arms have the same bits");
    harness.get_by_label("optimizations.metadata_cache = \"on\" against \"off\"");
    harness.get_by_label_contains("2 pairs, mean of A − B ");
    assert!(!is_disabled(&harness, Role::Button, "Export…"));
    click(&mut harness, Role::Button, "New comparison");
    harness.get_by_role_and_label(Role::Button, START);
    click(&mut harness, Role::Button, "Show results");
    harness.get_by_role_and_label(Role::Button, "New comparison");
}

#[test]
fn a_running_comparison_keeps_runs_away_and_stops_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = RunConfig::default();
    config.model.path = support::tiny_model(folder.path());
    config.data.path = support::dataset(folder.path(), 40);
    config.packing.pack_len = 64;
    let mut harness = build(builder());
    let ctx = harness.ctx.clone();
    let options = CompareOptions { vary: vec![Variation::Cache], pairs: 100_000, steps_per_block: 2 };
    app(&mut harness).start_comparison(config.clone(), options, &ctx);
    wait_for(&mut harness, "the first pair", |h| h.query_by_role_and_label(Role::Heading, "Differences").is_some());
    harness.get_by_label_contains("Pairs, cache ");
    app(&mut harness).start_run(config, &ctx);
    harness.run_steps(3);
    harness.get_by_label("Nothing was started: a comparison is running; stop it first.");
    assert!(app(&mut harness).shown_run().is_none());
    click(&mut harness, Role::Button, "Stop");
    wait_for(&mut harness, "the end", |h| h.query_by_label("New comparison").is_some());
    let report = app(&mut harness).comparison().unwrap().done[0].clone();
    assert!(report.pairs >= 1 && report.pairs < report.pairs_planned, "what was done stays");
}

#[test]
fn a_failure_shows_its_reason_and_what_to_do() {
    let mut harness = build(builder());
    let folder = tempfile::tempdir().unwrap();
    let mut config = RunConfig::default();
    config.model.path = support::tiny_model(folder.path());
    config.data.path = support::dataset(folder.path(), 40);
    let ctx = harness.ctx.clone();
    // There is no GPU in a run on the CPU.
    config.train.device = tandem::session::DeviceChoice::Cpu;
    let options = CompareOptions { vary: vec![Variation::Graphs], ..CompareOptions::default() };
    app(&mut harness).start_comparison(config, options, &ctx);
    let reason = "CUDA graphs cannot be compared: there is no GPU in this run";
    wait_for(&mut harness, "the failure", |h| h.query_by_role_and_label(Role::Alert, reason).is_some());
    harness.get_by_label_contains("Nothing was measured.");
    harness.get_by_role_and_label(Role::Button, "New comparison");
    assert!(is_disabled(&harness, Role::Button, "Export…"));
}

#[test]
fn a_report_is_told_in_full() {
    let harness = with_findings(findings(vec![two_buffers()]));
    for tile in [
        "Differences",
        "Loss, overlaid",
        "Phases of the mean step",
        "Every pair, A − B in ms",
        "Predicted against measured",
        "Settings that differ",
    ] {
        harness.get_by_role_and_label(Role::Heading, tile);
    }
    harness.get_by_label("On is 1.21 times as fast, takes 86.00 MiB more memory, and learns the same.");
    harness.get_by_label_contains("40 pairs of 5 steps, order A B B A");
    harness.get_by_label(
        "Step, ms: 697.31 against 840.84, A − B −143.53, 95 % interval −144.71 to −142.35, −17.1 %, better",
    );
    harness.get_by_label("Forward, ms: 172.71 against 172.73, A − B −0.02, 95 % interval −0.11 to +0.07, same");
    harness
        .get_by_label("Copy hidden, %: 98.6 against 50.0, A − B +48.6, 95 % interval +48.4 to +48.8, no ratio, better");
    harness.get_by_label("Peak memory, GiB: 9.03 against 8.95, A − B +0.08, 95 % interval exact, +0.9 %, a cost");
    harness.get_by_label("Loss: 0.91421 against 0.91421, A − B 0.00000, 95 % interval exact, same");
    harness.get_by_label("exposed copy: A − B −143.5 ms");
    harness.get_by_label("Overlapped copies: predicted −143.5 ms, measured −143.5 ms ±1.18. as predicted; published: steps/s +8.40 % (8B), +6.70 % (14B), +4.61 % (32B) on a B200");
    harness.get_by_label("A on: two buffers: copies beside compute");
}

#[test]
fn the_tiles_lie_in_two_columns_without_a_scroll_bar_in_a_small_laptop_window() {
    let mut harness = build(builder().with_size([1280.0, 720.0]));
    app(&mut harness).show_comparison(findings(vec![two_buffers()]));
    harness.run_steps(3);
    let at = |tile: &str| harness.get_by_role_and_label(Role::Heading, tile).rect();
    let [differences, losses] = ["Differences", "Loss, overlaid"].map(at);
    let [phases, pairs] = ["Phases of the mean step", "Every pair, A − B in ms"].map(at);
    let [predictions, settings] = ["Predicted against measured", "Settings that differ"].map(at);
    for (left, right) in [(differences, losses), (phases, pairs), (predictions, settings)] {
        assert_eq!((left.top(), left.left()), (right.top(), differences.left()));
        assert!(right.left() > 640.0 && right.left() == losses.left());
    }
    assert!(differences.top() < phases.top() && phases.top() < predictions.top());
    let last_row = harness.get_by_label_contains("optimizations.offload_buffers = ").rect();
    assert!(last_row.bottom() <= 720.0 - 24.0, "{last_row:?}");
}

#[test]
fn what_was_measured_in_pairs_stands_beside_the_switch() {
    let mut harness = with_run(offload::run(40));
    app(&mut harness).show_comparison(findings(vec![two_buffers()]));
    click(&mut harness, Role::Tab, "Live");
    let name = Optimization::DoubleBuffer.name();
    harness.get_by_label_contains(&format!(
        "{name}: on, 1 more activation on the device: 86.00 MiB, predicted −144 ms, measured in pairs −144 ms"
    ));
    let mut other = findings(vec![two_buffers()]);
    other.pack_len = 2048;
    app(&mut harness).show_comparison(other);
    click(&mut harness, Role::Tab, "Live");
    assert!(harness.query_by_label_contains("measured in pairs").is_none(), "other packs, other times");
}

#[test]
fn reports_draw_in_both_themes_and_small_windows() {
    for theme in [egui::Theme::Dark, egui::Theme::Light] {
        for size in [[1440.0, 900.0], [1280.0, 720.0], [1024.0, 700.0], [960.0, 600.0]] {
            let mut harness = build(builder().with_size(size).with_theme(theme));
            let mut found = findings(vec![two_buffers(), slower()]);
            app(&mut harness).show_comparison(found.clone());
            harness.run_steps(3);
            harness.get_by_role_and_label(Role::RadioButton, "buffers").click();
            harness.run_steps(3);
            found.failure = Some("step 6: out of memory".into());
            found.done.clear();
            app(&mut harness).show_comparison(found);
            harness.run_steps(3);
        }
    }
}
