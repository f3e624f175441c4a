//! The Compare screen: an optimization on against off, in pairs. A form to start, progress, and what was found.

mod differences;
mod export;
mod form;
mod layout;
mod losses;
mod pairs;
mod phases;
mod predictions;
mod settings;
mod verdict;

use std::path::PathBuf;

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Margin, Rect, ScrollArea, Sense, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use self::form::Form;
use super::setup::Subject;
use super::welcome::progress_bar;
use super::{Request, ViewContext};
use crate::gui::app::take_ready;
use crate::gui::current_comparison::{CurrentComparison, Findings, Stage};
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, Tile, describe, label, rule, segmented, text};
use crate::gui::{fonts, icons};
use crate::session::compare::CompareReport;
use crate::session::runtime::Task;

/// Height of the screen's header.
const HEADER: f32 = 52.0;

/// State of the screen. The comparisons themselves are the app's.
#[derive(Default)]
pub struct CompareView {
    form: Form,
    /// Whether the form is shown although there are results.
    asks: bool,
    /// Which of several comparisons is shown; the last one until the user chose.
    shown: Option<usize>,
    exporting: Option<Task<PathBuf>>,
}

impl CompareView {
    /// Goes from the form to what is found, from the first comparison on.
    pub fn show_results(&mut self) {
        self.asks = false;
        self.shown = None;
    }

    /// Draws the screen. `subject` gives what Set up holds.
    pub fn ui(
        &mut self,
        ui: &mut Ui,
        comparison: Option<&CurrentComparison>,
        subject: impl FnOnce() -> Subject,
        context: &mut ViewContext<'_>,
    ) {
        match take_ready(&mut self.exporting) {
            Some(Ok(path)) => context.ask(Request::Say(format!("Wrote {}", path.display()))),
            Some(Err(error)) => context.ask(Request::Complain(format!("{error:#}"))),
            None => {}
        }
        let theme = Theme::of(ui);
        let body = ui.max_rect();
        ui.painter().rect_filled(body, 0, theme.bg1);
        let (top, rest) = body.split_top_bottom_at_y(body.top() + HEADER);
        let Some(comparison) = comparison.filter(|comparison| comparison.is_running() || !self.asks) else {
            self.ask(ui, top, rest, comparison.is_some(), subject, context);
            return;
        };
        let found = &comparison.found;
        let reports: Vec<&CompareReport> = found.reports().collect();
        let shown = self.shown.unwrap_or(usize::MAX).min(reports.len().saturating_sub(1));
        let report = reports.get(shown).copied();
        self.header(ui, top, comparison, report, shown, context);
        let top = trouble(ui, rest, found).unwrap_or(rest.top());
        let rest = rest.with_min_y(top);
        match report {
            Some(report) => results(ui, rest, report, &found.notes),
            None => preparing(ui, rest, comparison),
        }
    }

    /// The form that starts comparisons.
    fn ask(
        &mut self,
        ui: &mut Ui,
        top: Rect,
        rest: Rect,
        has_results: bool,
        subject: impl FnOnce() -> Subject,
        context: &mut ViewContext<'_>,
    ) {
        titles(
            ui,
            top,
            "Compare",
            "An optimization on against off: same weights, same batches, same seed, block by block in turns",
        );
        let mut buttons = header_buttons(ui, top);
        if has_results && buttons.add(Button::new("Show results").icon(icons::GIT_DIFF)).clicked() {
            self.asks = false;
        }
        self.form.show(ui, rest, subject(), context);
    }

    fn header(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        comparison: &CurrentComparison,
        report: Option<&CompareReport>,
        shown: usize,
        context: &mut ViewContext<'_>,
    ) {
        let found = &comparison.found;
        let mut buttons = header_buttons(ui, rect);
        if comparison.is_running() {
            let words = if comparison.is_stopping() { "Stopping" } else { "Stop" };
            let stop = buttons.add_enabled(!comparison.is_stopping(), Button::new(words).icon(icons::STOP));
            context.probe.rect("stop comparison", &stop);
            if stop.clicked() {
                context.ask(Request::StopComparison);
            }
        } else {
            if buttons.add(Button::new("New comparison").icon(icons::ARROWS_CLOCKWISE)).clicked() {
                self.asks = true;
            }
            let exporting = self.exporting.is_some();
            let button = Button::new("Export…").icon(icons::EXPORT);
            if buttons.add_enabled(!found.done.is_empty() && !exporting, button).clicked() {
                self.exporting = Some(export::ask_and_write(found.done.clone(), context.waker.clone()));
            }
        }
        let mut left = buttons.min_rect().left();
        let reports: Vec<&CompareReport> = found.reports().collect();
        if reports.len() > 1 {
            let words: Vec<(usize, &str)> = reports.iter().enumerate().map(|(i, r)| (i, r.variation.word())).collect();
            let mut choice = shown;
            buttons.add_space(8.0);
            if segmented(&mut buttons, "Comparison shown", &mut choice, &words, 26.0).changed() {
                self.shown = Some(choice);
            }
            left = buttons.min_rect().left();
        }
        let mut titles_rect = rect.with_max_x(left - 12.0);
        // Before the first pair the tile below tells it.
        if comparison.is_running() && report.is_some() {
            let bar =
                Rect::from_min_max(pos2(left - 232.0, rect.top() + 14.0), pos2(left - 12.0, rect.bottom() - 14.0));
            progress(ui, bar, &found.stage);
            titles_rect.max.x = bar.left() - 12.0;
        }
        match report {
            Some(report) => titles(ui, titles_rect, &report.title, &subtitle(report)),
            None => titles(ui, titles_rect, "Compare", &found.model),
        }
    }
}

/// Title and subtitle of the screen.
fn titles(ui: &mut Ui, rect: Rect, title: &str, subtitle: &str) {
    let theme = Theme::of(ui);
    rule(ui.painter(), ui.max_rect().x_range(), rect.bottom() - 0.5, theme.line);
    let at = rect.left_top() + vec2(12.0, 8.0);
    let room = rect.width() - 24.0;
    let title_rect = text(ui.painter(), at, Align2::LEFT_TOP, title, fonts::semibold(15.0), theme.t1, room);
    let at = at + vec2(0.0, 21.0);
    let line = text(ui.painter(), at, Align2::LEFT_TOP, subtitle, fonts::small(), theme.t2, room);
    let heading = ui.interact(title_rect, ui.scope_id().with("title"), Sense::hover());
    heading.widget_info(|| WidgetInfo::labeled(Role::Heading, true, title));
    describe(ui, line, "subtitle", subtitle).on_hover_text(subtitle);
}

fn subtitle(report: &CompareReport) -> String {
    let CompareReport { pairs, pairs_planned, steps_per_block, .. } = report;
    let of = if pairs < pairs_planned { format!(" of {pairs_planned}") } else { String::new() };
    let plural = if *pairs == 1 { "" } else { "s" };
    format!(
        "{} · {} · {pairs}{of} pair{plural} of {steps_per_block} steps, order A B B A · {}",
        report.model, report.workload, report.device
    )
}

/// A place for buttons, from the right.
fn header_buttons(ui: &mut Ui, rect: Rect) -> Ui {
    let builder = UiBuilder::new()
        .id_salt("compare header")
        .max_rect(rect.shrink2(vec2(12.0, 0.0)))
        .layout(Layout::right_to_left(Align::Center));
    ui.new_child(builder)
}

fn progress(ui: &mut Ui, rect: Rect, stage: &Stage) {
    let mut ui = ui.new_child(UiBuilder::new().id_salt("progress").max_rect(rect));
    match stage {
        Stage::Preparing { stage, done, total } => {
            let share = (*total > 0).then(|| (*done as f32 / *total as f32).min(1.0));
            progress_bar(&mut ui, &super::capitalized(stage), share, *done, *total);
        }
        Stage::Pairs { variation, done, pairs } => {
            let share = *done as f32 / (*pairs).max(1) as f32;
            progress_bar(&mut ui, &format!("Pairs, {}", variation.word()), Some(share), *done as u64, *pairs as u64);
        }
    }
}

/// The error that ended comparisons, and what can be done; returns where the banner ends.
fn trouble(ui: &mut Ui, rest: Rect, found: &Findings) -> Option<f32> {
    let failure = found.failure.as_ref()?;
    let theme = Theme::of(ui);
    let remedy = if found.done.is_empty() {
        "Nothing was measured. Change what the message names, in Set up or in what is compared, and start again."
    } else {
        "What was measured before stays true. Change what the message names, and compare the rest again."
    };
    let mut area = ui.new_child(UiBuilder::new().max_rect(rest).layout(Layout::top_down(Align::Min)));
    let shown = egui::Frame::NONE.fill(theme.err_bg).inner_margin(Margin::symmetric(12, 10)).show(&mut area, |ui| {
        ui.set_width(ui.available_width());
        ui.horizontal_top(|ui| {
            ui.label(egui::RichText::new(icons::X_CIRCLE).font(fonts::icon_fill(20.0)).color(theme.err));
            ui.vertical(|ui| {
                let words = egui::RichText::new(failure).font(fonts::medium(13.0)).color(theme.t1);
                let response = ui.add(egui::Label::new(words).wrap().selectable(true));
                response.widget_info(|| WidgetInfo::labeled(Role::Alert, true, failure));
                ui.add(egui::Label::new(egui::RichText::new(remedy).font(fonts::table()).color(theme.t2)).wrap());
            });
        });
    });
    Some(shown.response.rect.bottom().round())
}

/// Before the first pair.
fn preparing(ui: &mut Ui, rest: Rect, comparison: &CurrentComparison) {
    let theme = Theme::of(ui);
    let column = Rect::from_min_max(rest.min, pos2(rest.left() + 520.0_f32.min(rest.width()), rest.bottom()));
    if !comparison.is_running() {
        if comparison.found.failure.is_none() {
            let mut area = ui.new_child(UiBuilder::new().max_rect(column.shrink(16.0)));
            label(
                &mut area,
                "Stopped before the first pair was done: there is nothing to show.",
                fonts::body(),
                theme.t2,
            );
        }
        return;
    }
    let title = match comparison.found.stage {
        Stage::Preparing { .. } => "Preparing",
        Stage::Pairs { .. } => "First pair",
    };
    Tile::new(title).show(
        ui,
        column,
        |_| {},
        |ui| {
            progress(
                ui,
                Rect::from_min_size(ui.max_rect().min, vec2(ui.max_rect().width(), 24.0)),
                &comparison.found.stage,
            );
            ui.add_space(36.0);
            for note in &comparison.found.notes {
                ui.add(egui::Label::new(egui::RichText::new(note).font(fonts::table()).color(theme.t3)).wrap());
            }
        },
    );
}

/// The tiles of a report, in a page that scrolls where the window is small.
fn results(ui: &mut Ui, rest: Rect, report: &CompareReport, notes: &[String]) {
    let layout = layout::Layout::of(rest.size(), report);
    if !layout.scrolls {
        tiles(ui, rest, &layout, report, notes);
        return;
    }
    let mut page = ui.new_child(UiBuilder::new().max_rect(rest));
    ScrollArea::vertical().id_salt("compare tiles").auto_shrink(false).show(&mut page, |ui| {
        let (page, _) = ui.allocate_exact_size(vec2(rest.width(), layout.height), Sense::hover());
        tiles(ui, page, &layout, report, notes);
    });
}

fn tiles(ui: &mut Ui, page: Rect, layout: &layout::Layout, report: &CompareReport, notes: &[String]) {
    ui.painter().rect_filled(page, 0, Theme::of(ui).line);
    let at = |tile: Rect| tile.translate(page.min.to_vec2());
    verdict::show(ui, at(layout.verdict), report, notes);
    differences::show(ui, at(layout.differences), report);
    losses::show(ui, at(layout.losses), report);
    phases::show(ui, at(layout.phases), report);
    pairs::show(ui, at(layout.pairs), report);
    predictions::show(ui, at(layout.predictions), report);
    settings::show(ui, at(layout.settings), report);
}
