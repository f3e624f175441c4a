//! The loss tile: raw and smoothed loss, held-out losses as diamonds, learning rate and gradient norm below.

use std::ops::RangeInclusive;

use egui::{Align2, Color32, Painter, Pos2, Rect, Sense, Shape, Stroke, Ui, UiBuilder, Vec2b, pos2, vec2};
use egui_plot::{Line, Plot, PlotPoints, PlotTransform};

use super::marks::{self, Mark};
use super::series::{XAxis, decimals, thin, ticks, time_ticks};
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, rule, segmented, text};
use crate::gui::{figures, fonts};
use crate::session::run_view::{RunView, StepPoint};

/// Room for the figures left of the plot.
const LEFT: f32 = 44.0;
/// Room for the last values right of it.
const RIGHT: f32 = 60.0;
const LEGEND: f32 = 20.0;
const AXIS: f32 = 18.0;

/// The tile's state.
#[derive(Default)]
pub struct LossTile {
    axis: XAxis,
}

impl LossTile {
    /// Draws the tile. `marked` is the step under the pointer in the last frame; `hovered` gets this frame's.
    pub fn show(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        view: &RunView,
        marks: &[Mark],
        marked: Option<u64>,
        hovered: &mut Option<u64>,
    ) {
        let mut axis = self.axis;
        Tile::new("Loss").show(
            ui,
            rect,
            |ui| {
                segmented(ui, "Horizontal axis", &mut axis, &XAxis::ALL, 20.0);
            },
            |ui| body(ui, self.axis, view, marks, marked, hovered),
        );
        self.axis = axis;
    }
}

fn body(ui: &mut Ui, axis: XAxis, view: &RunView, marks: &[Mark], marked: Option<u64>, hovered: &mut Option<u64>) {
    let theme = Theme::of(ui);
    let area = ui.max_rect();
    let strip = if area.height() < 260.0 { 30.0 } else { 44.0 };
    let plot = Rect::from_min_max(
        area.min + vec2(LEFT, LEGEND + 4.0),
        pos2(area.right() - RIGHT, area.bottom() - AXIS - 2.0 * strip),
    );
    legend(ui, Rect::from_min_max(pos2(plot.left(), area.top()), pos2(area.right(), area.top() + LEGEND)), view);
    let grid = ui.painter().add(Shape::Noop);
    let response = plot_lines(ui, plot, axis, view, theme);
    let transform = response.transform;
    let range = transform.bounds().range_x();
    ui.painter().set(grid, y_axis(ui.painter(), theme, plot, &transform));
    diamonds(ui.painter(), theme, plot, axis, view, &transform);
    if let Some(last) = view.last_step() {
        let y = transform.position_from_point_y(last.smoothed_loss).clamp(plot.top() + 6.0, plot.bottom() - 6.0);
        let figure = figures::loss(last.smoothed_loss);
        text(
            ui.painter(),
            pos2(plot.right() + 10.0, y),
            Align2::LEFT_CENTER,
            &figure,
            fonts::table(),
            theme.acc,
            RIGHT,
        );
    }
    let strips = Rect::from_min_max(pos2(area.left(), plot.bottom()), pos2(area.right(), area.bottom() - AXIS));
    let (upper, lower) = strips.split_top_bottom_at_y(strips.top() + strip);
    let rate = |s: &StepPoint| s.report.lr;
    let norm = |s: &StepPoint| s.report.grad_norm;
    let painter = ui.painter();
    curve_strip(painter, theme, upper, plot, "lr", axis, view, &range, rate, figures::rate);
    curve_strip(painter, theme, lower, plot, "grad", axis, view, &range, norm, |v| figures::grouped(v, 2));
    x_axis(painter, theme, plot, strips.bottom(), axis, &transform);

    let whole = Rect::from_min_max(plot.min, pos2(plot.right(), strips.bottom()));
    switch_marks(painter, theme, whole, axis, view, marks, &transform);
    if let Some(pointer) =
        ui.input(|input| input.pointer.hover_pos()).filter(|p| whole.contains(*p) && ui.clip_rect().contains(*p))
    {
        *hovered = nearest(view, axis, transform.value_from_position(pointer).x).map(|s| s.report.step);
    }
    if let Some(step) = marked.and_then(|step| step_point(view, step)) {
        let x = transform.position_from_point_x(axis.of(step));
        if plot.x_range().contains(x) {
            let x = ui.painter().round_to_pixel_center(x);
            ui.painter().vline(x, whole.y_range(), Stroke::new(1.0, theme.t2));
            if *hovered == marked {
                readout(ui.painter(), theme, plot, x, view, step);
            }
        }
    }
    describe_curve(ui, plot, view);
}

fn describe_curve(ui: &mut Ui, plot: Rect, view: &RunView) {
    let words = match (view.steps.first(), view.last_step()) {
        (Some(first), Some(last)) => format!(
            "Loss {} at step {}, smoothed {} at step {}",
            figures::loss(first.report.loss),
            first.report.step,
            figures::loss(last.smoothed_loss),
            last.report.step
        ),
        _ => "Loss, no step yet".into(),
    };
    // Hover only, so that the plot below keeps its own drags.
    let response = ui.interact(plot.with_max_y(plot.top()), ui.scope_id().with("loss words"), Sense::hover());
    response.widget_info(|| egui::WidgetInfo::labeled(egui::accesskit::Role::Label, true, &words));
}

fn plot_lines(ui: &mut Ui, rect: Rect, axis: XAxis, view: &RunView, theme: &Theme) -> egui_plot::PlotResponse<()> {
    // An evaluation before the first step begins every axis at zero.
    let from_zero = axis != XAxis::Step || view.evals.first().is_some_and(|eval| eval.step == 0);
    let first = if from_zero { 0.0 } else { view.steps.first().map_or(0.0, |s| axis.of(s)) };
    let last = view.last_step().map_or(1.0, |s| axis.of(s));
    // Loss of one step: a little room on both sides, so that the axis has a length.
    let last = if last > first { last } else { first + 1.0 };
    let values = || {
        let steps = view.steps.iter().map(|s| s.report.loss);
        steps.chain(view.evals.iter().map(|e| e.loss)).filter(|v| v.is_finite())
    };
    let low = values().fold(f64::INFINITY, f64::min);
    let high = values().fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    let pad = ((high - low) * 0.08).max(0.02 * high.abs()).max(1e-6);
    let mut child = ui.new_child(UiBuilder::new().max_rect(rect));
    Plot::new(("loss", axis.name()))
        .width(rect.width())
        .height(rect.height())
        .show_axes(Vec2b::FALSE)
        .show_grid(Vec2b::FALSE)
        .show_background(false)
        .show_x(false)
        .show_y(false)
        .allow_scroll(Vec2b::FALSE)
        .set_margin_fraction(vec2(0.0, 0.0))
        .label_formatter(|_| None)
        .include_x(first)
        .include_x(last)
        .include_y((low - pad).max(if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY }))
        .include_y(high + pad)
        .show(&mut child, |plot| {
            let bounds = plot.plot_bounds();
            let range = if bounds.width() > 0.0 { bounds.range_x() } else { first..=last };
            let columns = rect.width() as usize;
            let points = |value: fn(&StepPoint) -> f64| {
                let all = view.steps.iter().map(move |s| [axis.of(s), value(s)]);
                PlotPoints::new(thin(all, range.clone(), columns))
            };
            // A dense curve is drawn thin, so that the smoothed one stands out; a sparse one would vanish.
            let (alpha, width) = if view.steps.len() > columns / 4 { (0.38, 0.8) } else { (0.55, 1.2) };
            let raw = Line::new("raw", points(|s| s.report.loss)).color(theme.acc.gamma_multiply(alpha)).width(width);
            plot.line(raw.allow_hover(false));
            let smoothed = Line::new("smoothed", points(|s| s.smoothed_loss)).color(theme.acc).width(2.0);
            plot.line(smoothed.allow_hover(false));
        })
}

fn legend(ui: &mut Ui, rect: Rect, view: &RunView) {
    let theme = Theme::of(ui);
    let painter = ui.painter();
    let y = rect.top() + 7.0;
    let mut x = rect.left();
    let mut entry = |mark: &dyn Fn(&Painter, Pos2), words: &str| {
        mark(painter, pos2(x + 7.0, y));
        x = text(painter, pos2(x + 20.0, y), Align2::LEFT_CENTER, words, fonts::small(), theme.t2, 200.0).right()
            + 16.0;
    };
    let line = |color: Color32, width: f32| {
        move |painter: &Painter, c: Pos2| {
            painter.hline((c.x - 7.0)..=(c.x + 7.0), painter.round_to_pixel_center(c.y), Stroke::new(width, color));
        }
    };
    if let Some(last) = view.last_step() {
        entry(&line(theme.acc.gamma_multiply(0.5), 1.0), &format!("raw {}", figures::loss(last.report.loss)));
        entry(&line(theme.acc, 2.0), &format!("smoothed {}", figures::loss(last.smoothed_loss)));
    }
    if let Some(eval) = view.evals.last() {
        let words = format!("eval {} at step {}", figures::loss(eval.loss), crate::base::units::count(eval.step));
        entry(&|painter, c| diamond(painter, theme, c), &words);
    }
}

fn diamond(painter: &Painter, theme: &Theme, c: Pos2) {
    let r = 5.0;
    let corners = vec![c - vec2(0.0, r), c + vec2(r, 0.0), c + vec2(0.0, r), c - vec2(r, 0.0)];
    painter.add(Shape::convex_polygon(corners, theme.bg1, Stroke::new(1.5, theme.t1)));
}

fn diamonds(painter: &Painter, theme: &Theme, plot: Rect, axis: XAxis, view: &RunView, transform: &PlotTransform) {
    for eval in &view.evals {
        let Some(x) = axis.of_step(view, eval.step) else { continue };
        let at = pos2(transform.position_from_point_x(x), transform.position_from_point_y(eval.loss));
        if plot.expand(1.0).contains(at) {
            diamond(painter, theme, at);
        }
    }
}

/// A line at every step that changed a setting; the last one in sight says what.
fn switch_marks(
    painter: &Painter,
    theme: &Theme,
    area: Rect,
    axis: XAxis,
    view: &RunView,
    marks: &[Mark],
    transform: &PlotTransform,
) {
    let mut last = None;
    for mark in marks {
        let Some(x) = axis.of_step(view, mark.step) else { continue };
        let x = transform.position_from_point_x(x);
        if area.x_range().contains(x) {
            marks::line(painter, theme, x, area.y_range());
            last = Some((x, mark));
        }
    }
    if let Some((x, mark)) = last {
        marks::words(painter, theme, x, area.top() + 6.0, area, &mark.words);
    }
}

/// Grid lines and figures of the y axis.
fn y_axis(painter: &Painter, theme: &Theme, plot: Rect, transform: &PlotTransform) -> Shape {
    let bounds = transform.bounds().range_y();
    let marks = ticks(*bounds.start(), *bounds.end(), (plot.height() / 44.0).clamp(2.0, 6.0) as usize);
    let digits = decimals(&marks).max(1);
    let mut shapes = Vec::new();
    for mark in marks {
        let y = painter.round_to_pixel_center(transform.position_from_point_y(mark));
        shapes.push(Shape::hline(plot.x_range(), y, Stroke::new(1.0, theme.grid)));
        let figure = figures::grouped(mark, digits);
        text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, &figure, fonts::small(), theme.t3, LEFT);
    }
    Shape::Vec(shapes)
}

fn x_axis(painter: &Painter, theme: &Theme, plot: Rect, top: f32, axis: XAxis, transform: &PlotTransform) {
    let y = top + 10.0;
    text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, axis.name(), fonts::small(), theme.t3, LEFT);
    let range = transform.bounds().range_x();
    let wanted = (plot.width() / 90.0).clamp(2.0, 8.0) as usize;
    let marks = match axis {
        XAxis::Time => time_ticks(*range.end(), wanted),
        XAxis::Step => ticks(*range.start(), *range.end(), wanted).into_iter().filter(|v| v.fract() == 0.0).collect(),
        _ => ticks(*range.start(), *range.end(), wanted),
    };
    let mut free = plot.left() - 4.0;
    for mark in marks {
        let x = transform.position_from_point_x(mark);
        let galley = painter.layout_no_wrap(axis.tick(mark), fonts::small(), theme.t3);
        let left = (x - galley.size().x / 2.0).max(plot.left());
        if x < plot.left() - 0.5 || x > plot.right() + 0.5 || left < free {
            continue;
        }
        free = left + galley.size().x + 12.0;
        painter.galley(pos2(left, y - galley.size().y / 2.0), galley, theme.t3);
    }
}

/// A strip below the plot with a curve of its own scale.
#[expect(clippy::too_many_arguments, reason = "one call draws one strip; a struct would only rename the arguments")]
fn curve_strip(
    painter: &Painter,
    theme: &Theme,
    rect: Rect,
    plot: Rect,
    name: &str,
    axis: XAxis,
    view: &RunView,
    range: &RangeInclusive<f64>,
    value: fn(&StepPoint) -> f64,
    figure: impl Fn(f64) -> String,
) {
    rule(painter, plot.x_range(), rect.top() + 0.5, theme.line);
    let inner = Rect::from_x_y_ranges(plot.x_range(), (rect.top() + 8.0)..=(rect.bottom() - 7.0));
    let y = inner.center().y;
    text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, name, fonts::small(), theme.t3, LEFT);
    let all = view.steps.iter().map(|s| [axis.of(s), value(s)]);
    let points = thin(all, range.clone(), inner.width() as usize);
    let high = points.iter().map(|p| p[1]).fold(f64::MIN_POSITIVE, f64::max);
    let width = (range.end() - range.start()).max(f64::MIN_POSITIVE);
    let line: Vec<Pos2> = points
        .iter()
        .map(|p| {
            let x = inner.left() + inner.width() * ((p[0] - range.start()) / width) as f32;
            pos2(x, inner.bottom() - inner.height() * (p[1] / high) as f32)
        })
        .collect();
    painter.with_clip_rect(inner.expand(2.0)).add(Shape::line(line, Stroke::new(1.2, theme.t2)));
    if let Some(last) = view.last_step() {
        let at = pos2(plot.right() + 10.0, y);
        text(painter, at, Align2::LEFT_CENTER, &figure(value(last)), fonts::small(), theme.t2, RIGHT - 6.0);
    }
}

fn nearest(view: &RunView, axis: XAxis, x: f64) -> Option<&StepPoint> {
    let right = view.steps.partition_point(|s| axis.of(s) < x);
    let candidates = [right.checked_sub(1), Some(right)];
    let distance = |s: &StepPoint| (axis.of(s) - x).abs();
    candidates
        .into_iter()
        .flatten()
        .filter_map(|i| view.steps.get(i))
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
}

/// The step with this number.
pub(super) fn step_point(view: &RunView, step: u64) -> Option<&StepPoint> {
    view.steps.binary_search_by_key(&step, |s| s.report.step).ok().map(|i| &view.steps[i])
}

/// The figures of one step in a box beside the crosshair.
fn readout(painter: &Painter, theme: &Theme, plot: Rect, x: f32, view: &RunView, step: &StepPoint) {
    let mut rows = vec![
        ("step", crate::base::units::count(step.report.step)),
        ("loss", figures::loss(step.report.loss)),
        ("smoothed", figures::loss(step.smoothed_loss)),
        ("lr", figures::rate(step.report.lr)),
        ("grad norm", figures::grouped(step.report.grad_norm, 2)),
    ];
    if let Some(eval) = view.evals.iter().find(|eval| eval.step == step.report.step) {
        rows.push(("eval loss", figures::loss(eval.loss)));
    }
    if step.report.clipped {
        rows.push(("clipped", "yes".into()));
    }
    box_of_rows(painter, theme, plot, x, &rows);
}

/// A box of names and figures, 8 px from `x`, inside `area`.
pub(super) fn box_of_rows(painter: &Painter, theme: &Theme, area: Rect, x: f32, rows: &[(&str, String)]) {
    let size = vec2(136.0, rows.len() as f32 * 16.0 + 12.0);
    let left = if x + 8.0 + size.x <= area.right() { x + 8.0 } else { x - 8.0 - size.x };
    let rect = Rect::from_min_size(pos2(left, area.top() + 4.0), size);
    painter.rect(rect, 4, theme.bg3, Stroke::new(1.0, theme.line2), egui::StrokeKind::Inside);
    for (i, (name, value)) in rows.iter().enumerate() {
        let y = rect.top() + 6.0 + (i as f32 + 0.5) * 16.0;
        text(painter, pos2(rect.left() + 8.0, y), Align2::LEFT_CENTER, name, fonts::small(), theme.t2, 80.0);
        text(painter, pos2(rect.right() - 8.0, y), Align2::RIGHT_CENTER, value, fonts::small(), theme.t1, 80.0);
    }
}
