//! The Live screen: one run, training now or read from its folder. Plots over its steps, what ran when in the last one,
//! and its optimizations: switched, predicted and measured.

mod anatomy;
mod cache;
mod experts;
mod formulas;
mod header;
mod intervals;
mod layout;
mod log;
mod loss;
mod marks;
mod memory;
mod predicted;
pub(super) mod series;
mod streams;
mod switchboard;

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Margin, Rect, ScrollArea, Sense, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use self::formulas::Figures;
use self::switchboard::Worth;
use super::welcome::progress_bar;
use super::{Request, ViewContext, capitalized};
use crate::gui::actions::Action;
use crate::gui::current_comparison::Findings;
use crate::gui::current_run::CurrentRun;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, Tile, label, rule, text};
use crate::gui::{fonts, icons};
use crate::session::Optimization;
use crate::session::event::Outcome;
use crate::session::run_view::{RunState, RunView};

/// Height of the screen's header.
const HEADER: f32 = 52.0;

/// What the user chose on the screen. The run itself is the app's.
#[derive(Default)]
pub struct LiveView {
    loss: loss::LossTile,
    anatomy: anatomy::AnatomyTile,
    streams: streams::StreamsTile,
    switchboard: switchboard::Switchboard,
    cache: cache::CacheTile,
    log: log::LogTile,
    /// The step under the pointer, shared by the tiles.
    hovered_step: Option<u64>,
}

impl LiveView {
    /// Draws the screen.
    pub fn ui(
        &mut self,
        ui: &mut Ui,
        run: Option<&CurrentRun>,
        found: Option<&Findings>,
        context: &mut ViewContext<'_>,
    ) {
        let theme = Theme::of(ui);
        let body = ui.max_rect();
        ui.painter().rect_filled(body, 0, theme.bg1);
        let Some(run) = run else {
            nothing_open(ui, context);
            return;
        };
        let top = body.with_max_y(body.top() + HEADER);
        header::show(ui, top, run, context);
        let mut rest = body.with_min_y(top.bottom());
        if let Some(trouble) = trouble(&run.view) {
            rest.min.y = banner(ui, rest, &trouble, run);
        }
        if run.view.steps.is_empty() {
            preparing(ui, rest, &run.view);
        } else {
            let paired = found.zip(run.view.info.as_ref()).map(|(found, info)| found.paired(info)).unwrap_or_default();
            self.tiles(ui, rest, run, &paired, context);
        }
    }

    fn tiles(
        &mut self,
        ui: &mut Ui,
        rest: Rect,
        run: &CurrentRun,
        paired: &[(Optimization, f64)],
        context: &mut ViewContext<'_>,
    ) {
        let layout = layout::Layout::of(rest.size(), switchboard::switches(&run.view).count());
        if !layout.scrolls {
            self.place(ui, rest, &layout, (run, paired), context);
            return;
        }
        let mut page = ui.new_child(UiBuilder::new().max_rect(rest));
        ScrollArea::vertical().id_salt("live tiles").auto_shrink(false).show(&mut page, |ui| {
            let (page, _) = ui.allocate_exact_size(vec2(rest.width(), layout.height), Sense::hover());
            self.place(ui, page, &layout, (run, paired), context);
        });
    }

    fn place(
        &mut self,
        ui: &mut Ui,
        page: Rect,
        layout: &layout::Layout,
        (run, paired): (&CurrentRun, &[(Optimization, f64)]),
        context: &mut ViewContext<'_>,
    ) {
        let view = &run.view;
        // Gaps of one pixel show this colour: the lines between the tiles.
        ui.painter().rect_filled(page, 0, Theme::of(ui).line);
        let at = |tile: Rect| tile.translate(page.min.to_vec2());
        let marks = marks::marks(&view.switched);
        let figures = Figures::of(view);
        let compact = layout.compact;
        let marked = self.hovered_step;
        let mut hovered = None;
        self.loss.show(ui, at(layout.loss), view, &marks, marked, &mut hovered);
        self.anatomy.show(ui, at(layout.anatomy), view, &marks, marked, &mut hovered);
        self.streams.show(ui, at(layout.streams), run, (compact, layout.scrolls), context);
        memory::show(ui, at(layout.memory), view, context.machine, &marks, marked, &mut hovered);
        self.log.show(ui, at(layout.log), view);
        self.switchboard.show(
            ui,
            at(layout.optimizations),
            run,
            &Worth { figures: &figures, paired },
            compact,
            context,
        );
        predicted::show(ui, at(layout.predicted), view, &figures, compact);
        self.cache.show(ui, at(layout.cache), view, marked, compact);
        if hovered != self.hovered_step {
            self.hovered_step = hovered;
            ui.ctx().request_repaint();
        }
    }
}

/// Why a run ended without being done, and what became of it.
struct Trouble {
    reason: String,
    rest: &'static str,
    error: bool,
}

fn trouble(view: &RunView) -> Option<Trouble> {
    let rest =
        if view.saved.is_empty() { "Nothing was saved." } else { "What was saved before is still in the run folder." };
    match &view.state {
        RunState::Finished { outcome: Outcome::Failed(reason), .. } => {
            Some(Trouble { reason: reason.clone(), rest, error: true })
        }
        RunState::Interrupted => {
            let reason =
                "The process that trained this run ended without a word: a crash, a power cut, or it was killed.";
            Some(Trouble { reason: reason.into(), rest, error: false })
        }
        _ => None,
    }
}

/// Draws the banner at the top of `rest`; returns where it ends.
fn banner(ui: &mut Ui, rest: Rect, trouble: &Trouble, run: &CurrentRun) -> f32 {
    let theme = Theme::of(ui);
    let (fill, color, icon) = if trouble.error {
        (theme.err_bg, theme.err, icons::X_CIRCLE)
    } else {
        (theme.warn_bg, theme.warn, icons::WARNING)
    };
    let mut area = ui.new_child(UiBuilder::new().max_rect(rest).layout(Layout::top_down(Align::Min)));
    let shown = egui::Frame::NONE.fill(fill).inner_margin(Margin::symmetric(12, 10)).show(&mut area, |ui| {
        ui.set_width(ui.available_width());
        ui.horizontal_top(|ui| {
            ui.label(egui::RichText::new(icon).font(fonts::icon_fill(20.0)).color(color));
            ui.vertical(|ui| {
                let words = egui::RichText::new(&trouble.reason).font(fonts::medium(13.0)).color(theme.t1);
                let response = ui.add(egui::Label::new(words).wrap().selectable(true));
                response.widget_info(|| WidgetInfo::labeled(Role::Alert, true, &trouble.reason));
                let rest = format!("{} {}", trouble.rest, run.folder().display());
                ui.add(egui::Label::new(egui::RichText::new(rest).font(fonts::table()).color(theme.t2)).wrap());
            });
        });
    });
    let bottom = shown.response.rect.bottom();
    rule(ui.painter(), rest.x_range(), bottom - 0.5, theme.line);
    bottom.round()
}

fn nothing_open(ui: &mut Ui, context: &mut ViewContext<'_>) {
    let theme = Theme::of(ui);
    ui.vertical_centered(|ui| {
        ui.add_space(ui.available_height() * 0.36);
        label(ui, "No run is open", fonts::semibold(15.0), theme.t1);
        label(ui, "Start one on the welcome screen, or open an old one from the list.", fonts::body(), theme.t2);
        ui.add_space(12.0);
        if ui.add(Button::new("Show runs").icon(icons::ROWS)).clicked() {
            context.ask(Request::Do(Action::Runs));
        }
    });
}

/// Stages before the first step, with the progress of the current one.
fn preparing(ui: &mut Ui, rest: Rect, view: &RunView) {
    let theme = Theme::of(ui);
    ui.painter().rect_filled(rest, 0, theme.line);
    let split = (rest.left() + rest.width() * 0.5).round();
    Tile::new("Preparing").show(
        ui,
        rest.with_max_x(split),
        |_| {},
        |ui| {
            ui.spacing_mut().item_spacing.y = 2.0;
            let over = view.state.is_over();
            let waiting = matches!(view.state, RunState::Running | RunState::Stopping);
            let last = view.stages.len().saturating_sub(1);
            for (i, stage) in view.stages.iter().enumerate() {
                let current = i == last && !waiting && !over;
                if current {
                    ui.add_space(4.0);
                    let (done, total) = match view.state {
                        RunState::Preparing { done, total, .. } => (done, total),
                        _ => (0, 0),
                    };
                    let share = (total > 0).then(|| (done as f32 / total as f32).min(1.0));
                    progress_bar(ui, &capitalized(stage), share, done, total);
                } else {
                    stage_row(
                        ui,
                        theme,
                        &capitalized(stage),
                        over && i == last
                            && !matches!(view.state, RunState::Finished { outcome: Outcome::Completed, .. }),
                    );
                }
            }
            if waiting {
                let words = if view.state == RunState::Stopping { "Stopping" } else { "First step is being computed" };
                ui.add_space(4.0);
                progress_bar(ui, words, None, 0, 0);
            }
            if view.stages.is_empty() && !over {
                progress_bar(ui, "Starting", None, 0, 0);
            }
        },
    );
    let mut log = log::LogTile::default();
    log.show(ui, rest.with_min_x(split + 1.0), view);
}

fn stage_row(ui: &mut Ui, theme: &Theme, stage: &str, failed: bool) {
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 24.0), egui::Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, stage));
    let (icon, font, color) = if failed {
        (icons::X_CIRCLE, fonts::icon_fill(14.0), theme.err)
    } else {
        (icons::CHECK, fonts::icon(14.0), theme.ok)
    };
    let y = rect.center().y;
    ui.painter().text(pos2(rect.left() + 7.0, y), Align2::CENTER_CENTER, icon, font, color);
    text(ui.painter(), pos2(rect.left() + 24.0, y), Align2::LEFT_CENTER, stage, fonts::table(), theme.t1, rect.width());
}

/// A step for tests, as `change` wants it.
#[cfg(test)]
fn test_step(step: u64, change: impl FnOnce(&mut crate::session::StepReport)) -> crate::session::event::TimedEvent {
    use crate::session::StepReport;
    let mut report = StepReport::plain(step);
    change(&mut report);
    let report = Box::new(report);
    let event =
        crate::session::event::RunEvent::Step { report, epoch: 0.0, elapsed_s: 0.0, tokens_seen: 0, eta_s: None };
    crate::session::event::TimedEvent { unix_ms: 0, event }
}
