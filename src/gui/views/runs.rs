//! The list of runs; any of them opens in Live.

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Rect, Response, Sense, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use super::welcome::banner;
use super::{Request, ViewContext};
use crate::base::units;
use crate::gui::actions::Action;
use crate::gui::app::take_ready;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, focus_ring, label, rule, text};
use crate::gui::{figures, fonts, icons};
use crate::session::event::Outcome;
use crate::session::runs::{self, RunList, RunStatus, RunSummary};
use crate::session::runtime::{Task, Waker};

/// Reads the list in the background.
pub fn list(waker: &Waker) -> Task<RunList> {
    Task::blocking(Some(waker.clone()), |_| runs::list().map(Some))
}

/// State of the screen.
#[derive(Default)]
pub struct RunsView {
    list: Option<RunList>,
    reading: Option<Task<RunList>>,
    trouble: Option<String>,
}

impl RunsView {
    /// Reads the list again.
    pub fn refresh(&mut self, waker: &Waker) {
        self.reading = Some(list(waker));
    }

    /// Draws the screen.
    pub fn ui(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        match take_ready(&mut self.reading) {
            Some(Ok(list)) => (self.list, self.trouble) = (Some(list), None),
            Some(Err(error)) => self.trouble = Some(format!("{error:#}")),
            None => {}
        }
        let theme = Theme::of(ui);
        let body = ui.max_rect();
        ui.painter().rect_filled(body, 0, theme.bg1);
        let header = body.with_max_y(body.top() + 52.0);
        rule(ui.painter(), header.x_range(), header.bottom() - 0.5, theme.line);
        let painter = ui.painter();
        text(
            painter,
            header.left_top() + vec2(12.0, 8.0),
            Align2::LEFT_TOP,
            "Runs",
            fonts::semibold(15.0),
            theme.t1,
            200.0,
        );
        let (runs, skipped) = self.list.as_ref().map_or((0, 0), |list| (list.runs.len(), list.skipped.len()));
        let mut subtitle = if runs == 1 { "1 run".into() } else { format!("{runs} runs") };
        if skipped > 0 {
            subtitle += &format!(", {skipped} folders that hold none");
        }
        text(
            painter,
            header.left_top() + vec2(12.0, 29.0),
            Align2::LEFT_TOP,
            &subtitle,
            fonts::small(),
            theme.t2,
            400.0,
        );
        let corner = header.shrink2(vec2(12.0, 0.0));
        let mut corner = ui.new_child(UiBuilder::new().max_rect(corner).layout(Layout::right_to_left(Align::Center)));
        if corner.add(Button::new("New run").icon(icons::PLUS).primary()).clicked() {
            context.ask(Request::Do(Action::SetUp));
        }
        let area = Rect::from_min_max(pos2(body.left(), header.bottom()), body.max);
        let mut below = ui.new_child(UiBuilder::new().max_rect(area).layout(Layout::top_down(Align::Min)));
        below.spacing_mut().item_spacing.y = 0.0;
        if let Some(trouble) = &self.trouble {
            banner(&mut below, theme, trouble);
        }
        let Some(list) = &self.list else { return };
        if list.runs.is_empty() {
            below.add_space(16.0);
            below.horizontal(|ui| {
                ui.add_space(12.0);
                label(ui, "No runs yet.", fonts::body(), theme.t3);
            });
        }
        egui::ScrollArea::vertical().auto_shrink(false).show(&mut below, |ui| {
            table(ui, &list.runs, false, context);
            for (folder, reason) in &list.skipped {
                ui.add_space(4.0);
                ui.horizontal(|ui| {
                    ui.add_space(12.0);
                    let line = format!("{}: {reason}", folder.display());
                    super::super::widgets::label_cut(ui, &line, fonts::small(), theme.t3);
                });
            }
        });
    }
}

/// Left and right edges of the columns, as shares of the width.
struct Columns {
    name: f32,
    state: f32,
    model: f32,
    data: Option<f32>,
    step: f32,
    loss: f32,
    when: f32,
    open: f32,
}

impl Columns {
    fn of(rect: Rect, compact: bool) -> Self {
        let x = |share: f32| rect.left() + rect.width() * share;
        if compact {
            // Name, model, step, eval loss, last.
            Self {
                name: rect.left() + 24.0,
                state: x(0.71),
                model: x(0.28),
                data: None,
                step: x(0.59),
                loss: x(0.685),
                when: x(0.71),
                open: rect.right(),
            }
        } else {
            Self {
                name: rect.left() + 40.0,
                state: x(0.25),
                model: x(0.35),
                data: Some(x(0.55)),
                step: x(0.74),
                loss: x(0.82),
                when: x(0.85),
                open: rect.right() - 12.0,
            }
        }
    }
}

/// A table of runs; the whole row opens the run. `compact` leaves out columns for the welcome screen.
pub fn table(ui: &mut Ui, runs: &[RunSummary], compact: bool, context: &mut ViewContext<'_>) {
    let theme = Theme::of(ui);
    let (head, _) = ui.allocate_exact_size(vec2(ui.available_width(), 28.0), Sense::hover());
    let columns = Columns::of(head, compact);
    let painter = ui.painter();
    let y = head.center().y;
    let caption = |x: f32, anchor: Align2, words: &str| {
        text(painter, pos2(x, y), anchor, words, fonts::small(), theme.t3, 160.0);
    };
    caption(columns.name, Align2::LEFT_CENTER, "run");
    caption(columns.model, Align2::LEFT_CENTER, "model");
    caption(columns.step, Align2::RIGHT_CENTER, "step");
    caption(columns.loss, Align2::RIGHT_CENTER, "eval loss");
    caption(columns.when, Align2::LEFT_CENTER, if compact { "last" } else { "when" });
    if let Some(data) = columns.data {
        caption(columns.state, Align2::LEFT_CENTER, "state");
        caption(data, Align2::LEFT_CENTER, "data");
    }
    rule(painter, head.x_range(), head.bottom() - 0.5, theme.line);
    let now = figures::now_ms();
    for run in runs {
        let response = row(ui, run, compact, now);
        if response.clicked() {
            context.ask(Request::OpenRun(run.folder.clone()));
        }
    }
}

fn row(ui: &mut Ui, run: &RunSummary, compact: bool, now: i64) -> Response {
    let theme = Theme::of(ui);
    let (rect, response) =
        ui.allocate_exact_size(vec2(ui.available_width(), if compact { 34.0 } else { 42.0 }), Sense::click());
    let name = format!("Open run {}, {}", run.name, run.status.describe());
    response.widget_info(|| WidgetInfo::labeled(Role::Button, true, &name));
    if !ui.is_rect_visible(rect) {
        return response;
    }
    let columns = Columns::of(rect, compact);
    if response.hovered() {
        ui.painter().rect_filled(rect, 0, theme.bg3);
    }
    let painter = ui.painter();
    let y = rect.center().y;
    let (icon, filled, color) = status_icon(theme, &run.status);
    let font = if filled { fonts::icon_fill(16.0) } else { fonts::icon(16.0) };
    painter.text(pos2(columns.name - 16.0, y), Align2::CENTER_CENTER, icon, font, color);
    let put = |x: f32, anchor: Align2, words: &str, font, color, room| {
        text(painter, pos2(x, y), anchor, words, font, color, room);
    };
    let name_end = if compact { columns.model } else { columns.state };
    put(columns.name, Align2::LEFT_CENTER, &run.name, fonts::medium(12.0), theme.t1, name_end - columns.name - 12.0);
    let model_end = columns.data.unwrap_or(columns.step - 70.0);
    put(columns.model, Align2::LEFT_CENTER, &run.model, fonts::table(), theme.t2, model_end - columns.model - 12.0);
    let steps = match run.total_steps {
        Some(total) => format!("{} of {}", units::count(run.steps), units::count(total)),
        None => figures::NONE.into(),
    };
    put(columns.step, Align2::RIGHT_CENTER, &steps, fonts::table(), theme.t1, 110.0);
    let (loss, loss_color) =
        run.last_eval_loss.map_or((figures::NONE.into(), theme.tdis), |l| (figures::loss(l), theme.t1));
    put(columns.loss, Align2::RIGHT_CENTER, &loss, fonts::table(), loss_color, 80.0);
    let when = run.last_unix_ms.map_or_else(|| figures::NONE.into(), |last| figures::ago(last, now));
    let state_color = if matches!(run.status, RunStatus::Ended(Outcome::Failed(_))) { theme.err } else { theme.t3 };
    if compact {
        let words = match run.status {
            RunStatus::Ended(Outcome::Completed) => when,
            _ => format!("{}, {when}", run.status.describe()),
        };
        put(columns.when, Align2::LEFT_CENTER, &words, fonts::table(), state_color, columns.open - columns.when - 44.0);
    } else {
        put(columns.state, Align2::LEFT_CENTER, run.status.describe(), fonts::table(), state_color, 120.0);
        put(columns.when, Align2::LEFT_CENTER, &when, fonts::table(), theme.t3, columns.open - columns.when - 44.0);
    }
    if let Some(data) = columns.data {
        put(data, Align2::LEFT_CENTER, &run.data, fonts::table(), theme.t2, columns.step - 110.0 - data);
    }
    put(columns.open, Align2::RIGHT_CENTER, "Open", fonts::medium(12.0), theme.acc, 60.0);
    rule(painter, rect.x_range(), rect.bottom() - 0.5, theme.line);
    focus_ring(ui, &response, 0);
    response
}

fn status_icon(theme: &Theme, status: &RunStatus) -> (&'static str, bool, egui::Color32) {
    match status {
        RunStatus::Live => (icons::PULSE, false, theme.acc),
        RunStatus::Ended(Outcome::Completed) => (icons::CHECK, false, theme.ok),
        RunStatus::Ended(Outcome::Stopped) => (icons::STOP, true, theme.t3),
        RunStatus::Ended(Outcome::Failed(_)) => (icons::X_CIRCLE, true, theme.err),
        RunStatus::Interrupted => (icons::WARNING_CIRCLE, true, theme.warn),
    }
}
