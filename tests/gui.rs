//! The window without a window: views, commands and keyboard through the accessibility tree.

#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "gui/compare.rs"]
mod compare;
#[path = "gui/fixture.rs"]
mod fixture;
#[path = "gui/live.rs"]
mod live;
#[path = "gui/moe.rs"]
mod moe;
#[path = "gui/setup.rs"]
mod setup;
mod support;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use egui::accesskit::Role;
use egui::{Key, Modifiers};
use egui_kittest::kittest::{NodeT as _, Queryable as _};
use egui_kittest::{Harness, HarnessBuilder};
use tandem::gui::app::{TandemApp, install};
use tandem::gui::probe::Probe;
use tandem::gui::views::Screen;
use tandem::session::config::RunConfig;
use tandem::session::event::{Outcome, RunEvent, TimedEvent};
use tandem::session::run_folder::RunFolder;
use tandem::session::run_view::RunView;
use tandem::session::store::Store;

/// A data folder of our own, so that no test sees or touches the user's.
static HOME: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: every test comes here before it does anything else, and nothing else in this program writes the
    // environment.
    unsafe { std::env::set_var("TANDEM_HOME", home.path()) };
    home
});

type App = Harness<'static, Option<TandemApp>>;

fn builder() -> HarnessBuilder<Option<TandemApp>> {
    LazyLock::force(&HOME);
    Harness::builder().with_size([1440.0, 900.0]).with_accessibility_check(true).with_context_setup(install)
}

fn build(builder: HarnessBuilder<Option<TandemApp>>) -> App {
    let draw = |ui: &mut egui::Ui, app: &mut Option<TandemApp>| {
        let app = app.get_or_insert_with(|| TandemApp::new(ui.ctx(), Probe::default()));
        app.logic(ui.ctx());
        app.draw(ui);
    };
    let mut harness = builder.build_ui_state(draw, None);
    harness.run_steps(3);
    harness
}

fn with_run(view: RunView) -> App {
    let mut harness = build(builder());
    app(&mut harness).show_run(PathBuf::from("/runs/starter"), view);
    harness.run_steps(3);
    harness
}

fn app(harness: &mut App) -> &mut TandemApp {
    harness.state_mut().as_mut().unwrap()
}

/// Draws until `found`, for what background jobs bring.
fn wait_for(harness: &mut App, what: &str, found: impl Fn(&App) -> bool) {
    let began = Instant::now();
    while !found(harness) {
        assert!(began.elapsed() < Duration::from_secs(20), "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
        harness.step();
    }
}

fn press(harness: &mut App, modifiers: Modifiers, key: Key) {
    harness.key_press_modifiers(modifiers, key);
    harness.run_steps(3);
}

fn click(harness: &mut App, role: Role, label: &str) {
    harness.get_by_role_and_label(role, label).click();
    harness.run_steps(4);
}

#[test]
fn welcome_says_where_the_starter_model_stands_and_what_this_machine_is() {
    let mut harness = build(builder());
    harness.get_by_label("Fine-tune a model on this machine");
    harness.get_by_role_and_label(Role::Button, "Fetch and start");
    harness.get_by_label_contains("from the Python package index");
    wait_for(&mut harness, "this machine", |h| h.query_by_label_contains("RAM: ").is_some());
    harness.get_by_label_contains("GPU: ");
    harness.get_by_label_contains("Cores: ");
    assert!(harness.get_by_role_and_label(Role::Tab, "Live").accesskit_node().is_disabled(), "no run is open yet");
}

#[test]
fn the_list_opens_old_runs() {
    let mut harness = build(builder());
    let mut config: RunConfig = tandem::session::starter::run_config().unwrap();
    config.name = "사전 r16 辞書".into();
    let folder = RunFolder::create(&config).unwrap();
    let store = Store::create(folder.path()).unwrap();
    for event in fixture::events(60) {
        store.push(event);
    }
    store.close(Duration::from_secs(20)).unwrap();
    drop(folder);

    press(&mut harness, Modifiers::COMMAND, Key::Num4);
    assert_eq!(app(&mut harness).screen(), Screen::Runs);
    let name = "Open run 사전 r16 辞書, completed";
    wait_for(&mut harness, "the list", |h| h.query_by_label(name).is_some());
    harness.get_by_label(name).click();
    wait_for(&mut harness, "the run", |h| h.query_by_label("Step 60 of 60").is_some());
    assert_eq!(app(&mut harness).screen(), Screen::Live);
    harness.get_by_role_and_label(Role::Label, "Completed");
}

#[test]
fn live_shows_where_time_and_memory_go() {
    let mut harness = with_run(fixture::run(37));
    harness.get_by_role_and_label(Role::Heading, "Loss");
    harness.get_by_role_and_label(Role::Heading, "Step anatomy");
    harness.get_by_role_and_label(Role::ProgressIndicator, "Step 37 of 60");
    harness.get_by_label("Tokens/s 162");
    harness.get_by_label_contains("mlp ");
    harness.get_by_label_contains("weights 0.50 GiB now");
    harness.get_by_label_contains("Loss 4");
    click(&mut harness, Role::RadioButton, "mean");
    let mean = harness.get_by_role_and_label(Role::RadioButton, "mean");
    assert_eq!(mean.accesskit_node().toggled(), Some(egui::accesskit::Toggled::True));
    for axis in ["time", "tokens", "epoch", "step"] {
        click(&mut harness, Role::RadioButton, axis);
    }
}

#[test]
fn arrow_keys_move_a_segmented_choice() {
    let mut harness = with_run(fixture::run(12));
    harness.get_by_role_and_label(Role::RadioButton, "step").focus();
    harness.run_steps(2);
    press(&mut harness, Modifiers::NONE, Key::ArrowRight);
    let time = harness.get_by_role_and_label(Role::RadioButton, "time");
    assert_eq!(time.accesskit_node().toggled(), Some(egui::accesskit::Toggled::True));
    assert!(time.is_focused());
}

#[test]
fn the_log_can_show_warnings_only() {
    let mut harness = with_run(fixture::run(37));
    harness.get_by_label_contains("2,692 records train");
    harness.get_by_label_contains("Eval at step 20");
    click(&mut harness, Role::RadioButton, "1 warning");
    harness.get_by_label_contains("warning: training on the CPU");
    assert!(harness.query_by_label_contains("2,692 records train").is_none());
}

#[test]
fn stages_show_before_the_first_step() {
    let harness = with_run(fixture::run(0));
    harness.get_by_role_and_label(Role::Label, "Preparing");
    harness.get_by_role_and_label(Role::Label, "Reading the dataset");
    harness.get_by_label_contains("Loading weights 50 of 98, 51 %");
}

#[test]
fn a_failure_shows_its_reason() {
    let mut view = fixture::run(5);
    let reason = "step 6: loss holds NaN; lower the learning rate";
    let event = RunEvent::Finished { outcome: Outcome::Failed(reason.into()), steps: 5 };
    view.apply(&TimedEvent { unix_ms: 1_790_000_100_000, event });
    let harness = with_run(view);
    harness.get_by_role_and_label(Role::Alert, reason);
    harness.get_by_role_and_label(Role::Label, "Failed");
    harness.get_by_label_contains("Nothing was saved.");
}

#[test]
fn no_run_can_be_stopped_where_none_trains() {
    let mut harness = with_run(fixture::run(60));
    assert!(harness.query_by_label("Stop").is_none(), "an old run has nothing to stop");
    press(&mut harness, Modifiers::COMMAND, Key::Period);
    harness.get_by_role_and_label(Role::Status, "No run is training");
}

#[test]
fn the_palette_finds_and_runs_commands() {
    let mut harness = build(builder());
    press(&mut harness, Modifiers::COMMAND, Key::P);
    harness.get_by_role_and_label(Role::TextInput, "Find a command").type_text("light");
    harness.run_steps(3);
    harness.get_by_role_and_label(Role::MenuItem, "Light theme");
    press(&mut harness, Modifiers::NONE, Key::Enter);
    assert_eq!(harness.ctx.theme(), egui::Theme::Light);
    assert!(harness.query_by_role(Role::TextInput).is_none(), "the palette closed");
    press(&mut harness, Modifiers::COMMAND, Key::P);
    press(&mut harness, Modifiers::NONE, Key::Escape);
    assert!(harness.query_by_role(Role::TextInput).is_none(), "Escape closes it");
}

#[test]
fn shortcuts_switch_theme_zoom_and_help() {
    let mut harness = build(builder());
    let preference = |h: &App| h.ctx.options(|options| options.theme_preference);
    let before = preference(&harness);
    press(&mut harness, Modifiers::COMMAND, Key::T);
    assert_ne!(preference(&harness), before);
    let zoom = harness.ctx.zoom_factor();
    press(&mut harness, Modifiers::COMMAND, Key::Plus);
    assert!(harness.ctx.zoom_factor() > zoom);
    press(&mut harness, Modifiers::COMMAND, Key::Num0);
    assert_eq!(harness.ctx.zoom_factor(), 1.0);
    press(&mut harness, Modifiers::NONE, Key::F1);
    harness.get_by_role_and_label(Role::Button, "Close");
    click(&mut harness, Role::Button, "Close");
    assert!(harness.query_by_role_and_label(Role::Button, "Close").is_none());
}

#[test]
fn menus_hold_the_commands_with_their_shortcuts() {
    let mut harness = build(builder());
    click(&mut harness, Role::Button, "View");
    harness.get_by_label_contains("Ctrl+4").click();
    harness.run_steps(4);
    assert_eq!(app(&mut harness).screen(), Screen::Runs);
}

#[test]
fn every_screen_draws_in_both_themes_and_small_windows() {
    for theme in [egui::Theme::Dark, egui::Theme::Light] {
        for size in [[1440.0, 900.0], [1280.0, 720.0], [1024.0, 700.0], [960.0, 600.0]] {
            let mut harness = build(builder().with_size(size).with_theme(theme));
            for steps in [0, 1, 2, 60] {
                app(&mut harness).show_run(PathBuf::from("/runs/한국어"), fixture::offload::run(steps));
                harness.run_steps(2);
                app(&mut harness).show_run(PathBuf::from("/runs/한국어"), fixture::run(steps));
                harness.run_steps(2);
                app(&mut harness)
                    .show_run(PathBuf::from("/runs/한국어"), fixture::experts::run(fixture::experts::LARGE, steps));
                harness.run_steps(2);
                if steps > 0 {
                    click(&mut harness, Role::RadioButton, "MoE");
                }
                harness.hover_at(egui::pos2(size[0] * 0.3, size[1] * 0.3));
                harness.run_steps(2);
            }
            press(&mut harness, Modifiers::COMMAND, Key::Num4);
            press(&mut harness, Modifiers::COMMAND, Key::Num1);
        }
    }
}

#[test]
fn an_idle_window_asks_for_no_repaint() {
    let mut harness = with_run(fixture::run(60));
    wait_for(&mut harness, "this machine", |h| h.query_by_label_contains("RAM ").is_some());
    harness.run_steps(10);
    let delay = harness.output().viewport_output[&egui::ViewportId::ROOT].repaint_delay;
    assert!(delay > Duration::from_secs(1), "repaint asked for in {delay:?}");
}

#[test]
fn nothing_of_the_tests_lands_outside_their_folder() {
    LazyLock::force(&HOME);
    assert_eq!(tandem::base::paths::home().unwrap(), Path::new(HOME.path()));
}
