//! The header of Live: name and state, progress, figures, and what can be done to the run.

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Rect, Sense, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use crate::base::units;
use crate::gui::actions::Action;
use crate::gui::current_run::CurrentRun;
use crate::gui::theme::Theme;
use crate::gui::views::{Request, ViewContext};
use crate::gui::widgets::{Button, Stat, describe, rule, text};
use crate::gui::{figures, fonts, icons};
use crate::session::event::Outcome;
use crate::session::run_view::RunState;

/// Draws the header in `rect`.
pub fn show(ui: &mut Ui, rect: Rect, run: &CurrentRun, context: &mut ViewContext<'_>) {
    let theme = Theme::of(ui);
    ui.painter().rect_filled(rect, 0, theme.bg1);
    rule(ui.painter(), rect.x_range(), rect.bottom() - 0.5, theme.line);
    let inner = rect.shrink2(vec2(12.0, 0.0));
    let buttons_left = buttons(ui, inner, run, context);
    let compact = rect.width() < 1250.0;
    let progress_width = if compact { 170.0 } else { 212.0 };
    // What the progress, six figures and the gaps leave.
    let name_width = (buttons_left - inner.left() - progress_width - 540.0).clamp(190.0, 330.0);
    name(ui, inner.with_max_x(inner.left() + name_width), run);
    let progress_left = inner.left() + name_width + 20.0;
    progress(ui, Rect::from_min_size(pos2(progress_left, rect.top()), vec2(progress_width, rect.height())), run);
    let figures_left = progress_left + progress_width + if compact { 16.0 } else { 24.0 };
    let area = Rect::from_min_max(pos2(figures_left, rect.top() + 8.0), pos2(buttons_left - 12.0, rect.bottom()));
    stats(ui, area, run);
}

/// Buttons from the right; returns where they begin.
fn buttons(ui: &mut Ui, rect: Rect, run: &CurrentRun, context: &mut ViewContext<'_>) -> f32 {
    let mut ui = ui.new_child(UiBuilder::new().max_rect(rect).layout(Layout::right_to_left(Align::Center)));
    if !run.has_thread() {
        let copy = ui.add(Button::new("Copy folder path").icon(icons::COPY));
        if copy.clicked() {
            context.ask(Request::Do(Action::CopyRunFolder));
        }
        return copy.rect.left();
    }
    let enabled = run.takes_commands();
    let stop = ui.add_enabled(enabled, Button::new("Stop").icon(icons::STOP));
    context.probe.rect("Stop", &stop);
    if stop.clicked() {
        context.ask(Request::Do(Action::Stop));
    }
    let save = ui.add_enabled(enabled, Button::new("Save now").icon(icons::FLOPPY_DISK));
    if save.clicked() {
        context.ask(Request::Do(Action::SaveNow));
    }
    save.rect.left()
}

fn name(ui: &mut Ui, rect: Rect, run: &CurrentRun) {
    let theme = Theme::of(ui);
    let (words, icon, color, fill) = chip(theme, &run.view.state);
    let painter = ui.painter();
    let words_galley = painter.layout_no_wrap(words.into(), fonts::table(), color);
    let chip_width = words_galley.size().x + 32.0;
    let title_at = pos2(rect.left(), rect.top() + 17.0);
    let room = rect.width() - chip_width - 8.0;
    let title = text(painter, title_at, Align2::LEFT_CENTER, run.name(), fonts::semibold(15.0), theme.t1, room);
    let chip = Rect::from_min_size(pos2(title.right() + 8.0, title_at.y - 10.0), vec2(chip_width, 20.0));
    painter.rect_filled(chip, 4, fill);
    painter.text(pos2(chip.left() + 14.0, chip.center().y), Align2::CENTER_CENTER, icon, fonts::icon(14.0), color);
    painter.galley(pos2(chip.left() + 24.0, chip.center().y - words_galley.size().y / 2.0), words_galley, color);
    let (short, line) = run.view.info.as_ref().map_or_else(
        || (String::new(), run.folder().display().to_string()),
        |info| {
            let short = format!("{} · {}", info.model, info.method);
            let long = format!("{short} · packs of {} tokens", units::count(info.pack_len as u64));
            (short, long)
        },
    );
    let fits = painter.layout_no_wrap(line.clone(), fonts::small(), theme.t2).size().x <= rect.width();
    let at = pos2(rect.left(), rect.top() + 38.0);
    let words_shown = if fits || short.is_empty() { &line } else { &short };
    let shown = text(painter, at, Align2::LEFT_CENTER, words_shown, fonts::small(), theme.t2, rect.width());
    describe(ui, title, "run name", run.name()).on_hover_text(run.folder().display().to_string());
    describe(ui, chip, "run state", words);
    describe(ui, shown, "run line", &line).on_hover_text(&line);
}

fn chip(theme: &Theme, state: &RunState) -> (&'static str, &'static str, egui::Color32, egui::Color32) {
    match state {
        RunState::Preparing { .. } => ("Preparing", icons::CLOCK, theme.acc, theme.acc_bg),
        RunState::Running => ("Training", icons::PULSE, theme.acc, theme.acc_bg),
        RunState::Stopping => ("Stopping", icons::STOP, theme.warn, theme.warn_bg),
        RunState::Finished { outcome: Outcome::Completed, .. } => ("Completed", icons::CHECK, theme.ok, theme.ok_bg),
        RunState::Finished { outcome: Outcome::Stopped, .. } => ("Stopped", icons::STOP, theme.t2, theme.bg3),
        RunState::Finished { outcome: Outcome::Failed(_), .. } => ("Failed", icons::X_CIRCLE, theme.err, theme.err_bg),
        RunState::Interrupted => ("Interrupted", icons::WARNING_CIRCLE, theme.warn, theme.warn_bg),
    }
}

fn progress(ui: &mut Ui, rect: Rect, run: &CurrentRun) {
    let theme = Theme::of(ui);
    let view = &run.view;
    let done = view.steps_done();
    let painter = ui.painter();
    let top = rect.top() + 8.0;
    text(painter, pos2(rect.left(), top), Align2::LEFT_TOP, "Step", fonts::small(), theme.t3, 60.0);
    let where_it_is = match (view.progress(), view.last_step()) {
        (Some(share), Some(step)) => format!("{:.1} %, epoch {:.2}", share * 100.0, step.epoch),
        _ => String::new(),
    };
    text(
        painter,
        pos2(rect.right(), top),
        Align2::RIGHT_TOP,
        &where_it_is,
        fonts::small(),
        theme.t3,
        rect.width() - 40.0,
    );
    let value = text(
        painter,
        pos2(rect.left(), top + 15.0),
        Align2::LEFT_TOP,
        &units::count(done),
        fonts::stat(),
        theme.t1,
        rect.width(),
    );
    let total = view.info.as_ref().map_or(0, |info| info.total_steps);
    if total > 0 {
        let of = format!("of {}", units::count(total));
        let at = pos2(value.right() + 4.0, value.bottom() - 2.5);
        text(painter, at, Align2::LEFT_BOTTOM, &of, fonts::small(), theme.t3, rect.right() - at.x);
    }
    let track = Rect::from_min_max(pos2(rect.left(), rect.bottom() - 9.0), pos2(rect.right(), rect.bottom() - 6.0));
    painter.rect_filled(track, 0, theme.bg4);
    let share = view.progress().unwrap_or(0.0) as f32;
    painter.rect_filled(track.with_max_x(track.left() + track.width() * share), 0, theme.acc);
    let response = ui.interact(rect, ui.scope_id().with("progress"), Sense::hover());
    let words = format!("Step {done} of {total}");
    response.widget_info(|| WidgetInfo::labeled(Role::ProgressIndicator, true, &words));
}

fn stats(ui: &mut Ui, area: Rect, run: &CurrentRun) {
    let view = &run.view;
    let last = view.last_step();
    let speed =
        view.tokens_per_sec().map_or(figures::NONE.into(), |v| figures::grouped(v, if v < 100.0 { 1 } else { 0 }));
    let (step, unit) = last.map_or((figures::NONE.into(), ""), |s| figures::duration(s.report.step_ms));
    let loss = last.map_or(figures::NONE.into(), |s| figures::loss(s.smoothed_loss));
    let eval = view.evals.last().map_or(figures::NONE.into(), |e| figures::loss(e.loss));
    let elapsed = last.map_or(figures::NONE.into(), |s| units::clock(s.elapsed_s));
    let eta = match (&view.state, last.and_then(|s| s.eta_s)) {
        (RunState::Running, Some(eta)) => units::clock(eta),
        _ => figures::NONE.into(),
    };
    let all = [
        ("Tokens/s", speed, ""),
        ("Step", step, unit),
        ("Loss", loss, ""),
        ("Eval loss", eval, ""),
        ("Elapsed", elapsed, ""),
        ("ETA", eta, ""),
    ];
    let width = (area.width() / all.len() as f32).floor().min(104.0);
    if width < 56.0 {
        return;
    }
    let mut ui = ui.new_child(UiBuilder::new().max_rect(area).layout(Layout::left_to_right(Align::Min)));
    ui.spacing_mut().item_spacing.x = 0.0;
    for (caption, value, unit) in &all {
        Stat::new(caption, value).unit(unit).show(&mut ui, width);
    }
}
