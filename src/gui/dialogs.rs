//! Dialogs: stopping, quitting while a run trains, shortcuts, about; and the native file pickers.

use std::path::PathBuf;

use egui::{Align, Context, Frame, Id, Layout, Margin, Modal, Stroke, Ui, vec2};

use super::actions::{self, COMMANDS};
use super::app::TandemApp;
use super::theme::Theme;
use super::views::Request;
use super::widgets::{Button, label};
use super::{fonts, icons};
use crate::session::runtime::{Task, Waker};

/// A dialog that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialog {
    /// Stop the run?
    Stop,
    /// Quit although a run trains?
    Quit,
    /// The list of shortcuts.
    Shortcuts,
    /// What this program is.
    About,
}

enum Answer {
    Close,
    StopRun,
    Quit,
}

/// Draws the dialog that is open.
pub fn show(app: &mut TandemApp, ctx: &Context, requests: &mut Vec<Request>) {
    let Some(dialog) = app.dialog else { return };
    // A run that ended by itself needs no question any more.
    let run_needed = matches!(dialog, Dialog::Stop | Dialog::Quit);
    let alive = app.active.as_ref().is_some_and(super::current_run::CurrentRun::has_thread);
    if run_needed && !alive {
        app.dialog = None;
        return;
    }
    let mut answer = None;
    let modal = Modal::new(Id::unique("dialog")).frame(Frame::NONE).show(ctx, |ui| {
        let theme = Theme::of(ui);
        Frame::NONE
            .fill(theme.bg1)
            .stroke(Stroke::new(1.0, theme.line2))
            .corner_radius(6)
            .inner_margin(Margin::same(20))
            .show(ui, |ui| {
                ui.set_width(420.0);
                answer = match dialog {
                    Dialog::Stop => stop(ui, theme, app),
                    Dialog::Quit => quit(ui, theme, app),
                    Dialog::Shortcuts => shortcuts(ui, theme),
                    Dialog::About => about(ui, theme),
                };
            });
    });
    match answer {
        Some(Answer::StopRun) => {
            requests.push(Request::StopRun);
            app.dialog = None;
        }
        Some(Answer::Quit) => app.quit_after_saving(),
        Some(Answer::Close) => app.dialog = None,
        None if modal.should_close() && !app.is_quitting() => app.dialog = None,
        None => {}
    }
}

fn heading(ui: &mut Ui, theme: &Theme, title: &str) {
    label(ui, title, fonts::semibold(15.0), theme.t1);
    ui.add_space(6.0);
}

fn prose(ui: &mut Ui, theme: &Theme, text: &str) {
    ui.add(egui::Label::new(egui::RichText::new(text).font(fonts::body()).color(theme.t2)).wrap());
}

fn buttons(ui: &mut Ui, add: impl FnOnce(&mut Ui)) {
    ui.add_space(16.0);
    let size = vec2(ui.available_width(), 28.0);
    ui.allocate_ui_with_layout(size, Layout::right_to_left(Align::Center), add);
}

/// What a stop leaves behind, in words.
fn what_is_saved(app: &TandemApp) -> String {
    let Some(run) = &app.active else { return String::new() };
    match run.view.steps_done() {
        0 => "No step is done yet, so there is nothing to save.".into(),
        steps => {
            let what = if run.view.info.as_ref().is_some_and(|info| info.method.to_lowercase().contains("full")) {
                "The model"
            } else {
                "The adapter"
            };
            format!("{what} as of step {steps} is saved in {}.", run.folder().display())
        }
    }
}

fn stop(ui: &mut Ui, theme: &Theme, app: &mut TandemApp) -> Option<Answer> {
    let mut answer = None;
    heading(ui, theme, "Stop this run?");
    prose(ui, theme, &format!("Training ends after the current micro-batch. {}", what_is_saved(app)));
    buttons(ui, |ui| {
        let stop = ui.add(Button::new("Stop and save").icon(icons::STOP).primary());
        app.probe.rect("Stop and save", &stop);
        if stop.clicked() {
            answer = Some(Answer::StopRun);
        }
        if ui.add(Button::new("Keep training")).clicked() {
            answer = Some(Answer::Close);
        }
    });
    answer
}

fn quit(ui: &mut Ui, theme: &Theme, app: &TandemApp) -> Option<Answer> {
    let mut answer = None;
    if app.is_quitting() {
        heading(ui, theme, "Saving…");
        prose(ui, theme, "The window closes as soon as the run has saved.");
        return None;
    }
    heading(ui, theme, "A run is training");
    prose(ui, theme, &format!("Quitting stops it. {}", what_is_saved(app)));
    buttons(ui, |ui| {
        if ui.add(Button::new("Stop, save and quit").primary()).clicked() {
            answer = Some(Answer::Quit);
        }
        if ui.add(Button::new("Keep training")).clicked() {
            answer = Some(Answer::Close);
        }
    });
    answer
}

fn shortcuts(ui: &mut Ui, theme: &Theme) -> Option<Answer> {
    heading(ui, theme, "Keyboard shortcuts");
    egui::Grid::new("shortcuts").num_columns(2).spacing(vec2(24.0, 6.0)).show(ui, |ui| {
        for command in COMMANDS.iter().filter(|command| command.shortcut.is_some()) {
            label(ui, command.name, fonts::body(), theme.t1);
            label(ui, &actions::shortcut_text(ui.ctx(), command.action), fonts::mono(), theme.t2);
            ui.end_row();
        }
    });
    close_button(ui)
}

fn about(ui: &mut Ui, theme: &Theme) -> Option<Answer> {
    heading(ui, theme, concat!("Tandem ", env!("CARGO_PKG_VERSION")));
    prose(ui, theme, env!("CARGO_PKG_DESCRIPTION"));
    ui.add_space(8.0);
    prose(
        ui,
        theme,
        "Licence: MIT or Apache-2.0. Fonts: IBM Plex and Noto Emoji (OFL 1.1), Droid Sans Fallback (Apache-2.0); icons: \
         Phosphor (MIT). Starter data: The Devil's Dictionary by Ambrose Bierce (public domain).",
    );
    close_button(ui)
}

fn close_button(ui: &mut Ui) -> Option<Answer> {
    let mut answer = None;
    buttons(ui, |ui| {
        if ui.add(Button::new("Close")).clicked() {
            answer = Some(Answer::Close);
        }
    });
    answer
}

/// The system's dialog for a `run.toml`. `None` when the user closes it, or the system has no such dialog: the window
/// takes dropped files and typed paths too.
pub fn pick_run_file(waker: Waker) -> Task<PathBuf> {
    Task::future(Some(waker), async {
        let picked = rfd::AsyncFileDialog::new()
            .set_title("Open run.toml")
            .add_filter("Run configuration", &["toml"])
            .pick_file();
        Ok(picked.await.map(|file| file.path().to_owned()))
    })
}
