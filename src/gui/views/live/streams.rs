//! The streams tile: how much of the copying was hidden, and what ran when on each lane of the last step.

pub mod lanes;
mod save;
mod strip;

use std::path::PathBuf;

use egui::{Align2, Rect, Stroke, Ui, UiBuilder, pos2, vec2};

use self::lanes::Window;
use self::strip::Strip;
use super::loss::step_point;
use crate::base::units;
use crate::gui::app::take_ready;
use crate::gui::current_run::CurrentRun;
use crate::gui::theme::Theme;
use crate::gui::views::{Request, ViewContext};
use crate::gui::widgets::{Tile, describe, icon_button, swatch, text};
use crate::gui::{figures, fonts, icons};
use crate::session::run_view::RunView;
use crate::session::runtime::Task;
use crate::session::{CopyReport, Optimization, Phase, StepReport};

/// Width of the figures at the left.
const FIGURES: f32 = 200.0;

/// The tile's state.
#[derive(Default)]
pub struct StreamsTile {
    /// What of the step is looked at, once the user chose.
    window: Option<Window>,
    /// The dialog for a trace, and the writing of it.
    saving: Option<Task<PathBuf>>,
}

impl StreamsTile {
    /// Draws the tile; on a page that scrolls the wheel does not zoom.
    pub fn show(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        run: &CurrentRun,
        (compact, scrolls): (bool, bool),
        context: &mut ViewContext<'_>,
    ) {
        match take_ready(&mut self.saving) {
            Some(Ok(path)) => context.ask(Request::Say(format!("Wrote {}", path.display()))),
            Some(Err(error)) => context.ask(Request::Complain(format!("{error:#}"))),
            None => {}
        }
        let view = &run.view;
        let Some((last, step)) = view.last_spans.as_ref().and_then(|last| Some((last, step_point(view, last.step)?)))
        else {
            nothing_measured(ui, rect);
            return;
        };
        let copies = step.report.copies.as_ref();
        let none = (copies.is_none()).then(|| no_copies(view));
        let saving = &mut self.saving;
        let note = |ui: &mut Ui| {
            let button = ui.add_enabled_ui(saving.is_none(), |ui| icon_button(ui, icons::EXPORT, "Save for Perfetto…"));
            if button.inner.clicked() {
                let report = StepReport { spans: last.spans.clone(), ..step.report.clone() };
                *saving = Some(save::ask_and_write(run.name().to_owned(), report, context.waker.clone()));
            }
            legend(ui, button.response.rect.left(), last.step, copies.is_some(), scrolls);
        };
        Tile::new("Streams, last step").flush().show(ui, rect, note, |ui| {
            let area = ui.max_rect();
            let split = ui.painter().round_to_pixel_center(area.left() + FIGURES);
            ui.painter().vline(split, area.y_range(), Stroke::new(1.0, Theme::of(ui).line));
            let left = Rect::from_min_max(area.min + vec2(12.0, 6.0), pos2(split - 12.0, area.bottom() - 4.0));
            match copies {
                Some(copies) => figures_of(ui, left, copies, compact),
                None => no_figures(ui, left, none.as_deref().unwrap_or_default()),
            }
            let right = Rect::from_min_max(pos2(split + 4.0, area.top() + 6.0), area.max - vec2(12.0, 6.0));
            let total = lanes::end(&last.spans).max(step.report.step_ms);
            let window = self.window.unwrap_or_else(|| Window::initial(&last.spans, total)).within(total);
            let strip = Strip { step: last, total, window, no_copies: none.as_deref(), wheel_zooms: !scrolls };
            self.window = strip::show(ui, right, &strip).or(self.window);
        });
    }
}

fn nothing_measured(ui: &mut Ui, rect: Rect) {
    Tile::new("Streams, last step").show(
        ui,
        rect,
        |_| {},
        |ui| {
            let theme = Theme::of(ui);
            crate::gui::widgets::label(ui, "No step has left its spans yet.", fonts::table(), theme.t3);
        },
    );
}

/// Why a run makes no copies, in its own words.
fn no_copies(view: &RunView) -> String {
    let offload = view.choices.iter().find(|choice| choice.optimization == Optimization::ActivationOffload);
    match offload {
        Some(choice) if !choice.on => format!("Nothing is offloaded: {}", choice.why),
        _ => "Nothing was copied in this step".into(),
    }
}

fn legend(ui: &Ui, right: f32, step: u64, copies: bool, scrolls: bool) {
    let theme = Theme::of(ui);
    let painter = ui.painter();
    let y = ui.max_rect().center().y;
    let mut x = right - 8.0;
    let mut entry = |words: &str, mark: &dyn Fn(f32)| {
        x = text(painter, pos2(x, y), Align2::RIGHT_CENTER, words, fonts::small(), theme.t3, 200.0).left() - 16.0;
        mark(x);
        x -= 14.0;
    };
    let square = |color| move |x: f32| swatch(painter, x, y).fill(painter, color);
    entry(&format!("step {}", units::count(step)), &|_| {});
    if copies {
        entry("copy exposed", &square(theme.phase(Phase::ExposedCopy)));
        entry("copy hidden", &square(theme.acc));
    }
    let mouse = |x: f32| {
        painter.text(pos2(x + 5.0, y), Align2::CENTER_CENTER, icons::MOUSE_SIMPLE, fonts::icon(14.0), theme.t3);
    };
    entry(if scrolls { "Ctrl and scroll to zoom, drag to pan" } else { "scroll to zoom, drag to pan" }, &mouse);
}

/// A run without copies says so, and why.
fn no_figures(ui: &mut Ui, rect: Rect, words: &str) {
    let theme = Theme::of(ui);
    let mut area = ui.new_child(UiBuilder::new().max_rect(rect));
    area.set_clip_rect(rect.intersect(ui.clip_rect()));
    crate::gui::widgets::label(&mut area, "No copies", fonts::stat(), theme.t1);
    let words = egui::RichText::new(words).font(fonts::table()).color(theme.t2);
    area.add(egui::Label::new(words).wrap());
}

fn figures_of(ui: &mut Ui, rect: Rect, copies: &CopyReport, compact: bool) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let percent = figures::grouped(100.0 * copies.overlap(), 1);
    let (font, bar_y) = if compact { (fonts::medium(20.0), 24.0) } else { (fonts::medium(24.0), 32.0) };
    let hero = text(&painter, rect.min, Align2::LEFT_TOP, &percent, font, theme.t1, rect.width());
    let at = pos2(hero.right() + 6.0, hero.bottom() - 4.0);
    let unit = "% of copy time hidden";
    let shown = text(&painter, at, Align2::LEFT_BOTTOM, unit, fonts::small(), theme.t3, rect.right() - at.x);
    describe(ui, hero.union(shown), "overlap", &format!("{percent} {unit}"));

    let bar = Rect::from_min_size(pos2(rect.left(), rect.top() + bar_y), vec2(rect.width(), 8.0));
    overlap_bar(&painter, theme, bar, copies);
    let rate = |bytes: u64, ms: f64| {
        if ms > 0.0 {
            format!("{}, {:.1} GB/s", units::bytes(bytes), bytes as f64 / ms / 1e6)
        } else {
            units::bytes(bytes)
        }
    };
    let rows = [
        ("copy", format!("{} ms", figures::ms(copies.copy_ms)), theme.t1),
        ("exposed", format!("{} ms", figures::ms(copies.exposed_ms())), theme.hot),
        ("D2H", rate(copies.d2h_bytes, copies.d2h_ms), theme.t1),
        ("H2D", rate(copies.h2d_bytes, copies.h2d_ms), theme.t1),
        ("buffers", format!("{} × {}", copies.buffers, units::bytes(copies.buffer_bytes)), theme.t1),
    ];
    let top = bar.bottom() + if compact { 4.0 } else { 8.0 };
    let height = ((rect.bottom() - top) / rows.len() as f32).clamp(13.0, 19.0);
    for (i, (name, value, color)) in rows.iter().enumerate() {
        let y = top + (i as f32 + 0.5) * height;
        text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, name, fonts::table(), theme.t2, 60.0);
        let room = rect.width() - 50.0;
        text(&painter, pos2(rect.right(), y), Align2::RIGHT_CENTER, value, fonts::table(), *color, room);
        let row = Rect::from_center_size(pos2(rect.center().x, y), vec2(rect.width(), height));
        describe(ui, row, *name, &format!("{name} {value}"));
    }
}

/// Hidden and exposed copies; what is exposed is seen, however little it is.
fn overlap_bar(painter: &egui::Painter, theme: &Theme, bar: Rect, copies: &CopyReport) {
    let exposed = (1.0 - copies.overlap()) as f32 * bar.width();
    let exposed = if copies.exposed_ms() > 0.0 { exposed.max(2.0) } else { 0.0 };
    let split = bar.right() - exposed;
    painter.rect_filled(bar.with_max_x(split), 0, theme.acc);
    if exposed > 0.0 {
        let rest = Rect::from_min_max(pos2(split, bar.top() - 1.0), pos2(bar.right(), bar.bottom() + 1.0));
        painter.rect_filled(rest, 0, theme.phase(Phase::ExposedCopy));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Choice;

    #[test]
    fn a_run_without_copies_says_why() {
        let mut view = RunView::default();
        assert_eq!(no_copies(&view), "Nothing was copied in this step");
        let why = "activations fit on the device".to_owned();
        view.choices = vec![Choice { optimization: Optimization::ActivationOffload, on: false, available: true, why }];
        assert_eq!(no_copies(&view), "Nothing is offloaded: activations fit on the device");
    }
}
