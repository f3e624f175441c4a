//! The memory tile: bytes by category over the steps, now and at their peak, beside what the system counts.

use egui::accesskit::Role;
use egui::{Align2, Color32, Mesh, Painter, Pos2, Rect, Sense, Shape, Stroke, Ui, WidgetInfo, lerp, pos2, vec2};

use super::loss::step_point;
use super::marks::{self, Mark};
use super::series::{decimals, ticks};
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::widgets::bars::budget_bar;
use crate::gui::widgets::{Tile, describe, rule, swatch, text};
use crate::gui::{figures, fonts};
use crate::session::machine::Machine;
use crate::session::run_view::{RunView, StepPoint};
use crate::session::{MemoryCategory, MemoryReport, StepReport};

const GIB: f64 = (1u64 << 30) as f64;
/// Areas thinner than this have no edge of their own.
const EDGE_BYTES: f64 = 0.05 * GIB;

/// Draws the tile. `marked` is the step under the pointer in the last frame; `hovered` gets this frame's.
pub fn show(
    ui: &mut Ui,
    rect: Rect,
    view: &RunView,
    machine: Option<&Machine>,
    marks: &[Mark],
    marked: Option<u64>,
    hovered: &mut Option<u64>,
) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        let peak = view.last_step().map_or(0, |s| s.report.memory.peak_bytes);
        let mut words = format!("peak {} GiB", figures::gib(peak));
        if let Some((name, bytes)) = view.last_step().and_then(|step| host_copies(&step.report)) {
            words = format!("{words} · {name} {} GiB", figures::gib(bytes));
        }
        crate::gui::widgets::label(ui, &words, fonts::small(), theme.t3);
    };
    Tile::new("Memory").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let table_width = (area.width() * 0.36).clamp(190.0, 230.0);
        areas(ui, area.with_max_x(area.right() - table_width - 20.0), view, marks, marked, hovered);
        let shown = marked.and_then(|step| step_point(view, step)).or(view.last_step());
        if let Some(step) = shown {
            table(ui, area.with_min_x(area.right() - table_width), &step.report, machine);
        }
    });
}

/// Page-locked host memory; of the CPU, that in which offloaded activations wait. Old runs say only the latter of a GPU, too.
fn host_copies(report: &StepReport) -> Option<(&'static str, u64)> {
    if let Some(pinned) = report.memory.pinned {
        return Some(("pinned", pinned.now));
    }
    let bytes = report.copies.as_ref()?.host_bytes;
    Some((if report.counters.is_some() { "pinned" } else { "host copies" }, bytes))
}

fn bytes_of(report: &MemoryReport, category: MemoryCategory) -> (u64, u64) {
    report.categories.iter().find(|c| c.category == category).map_or((0, 0), |c| (c.now_bytes, c.peak_bytes))
}

fn areas(ui: &mut Ui, area: Rect, view: &RunView, marks: &[Mark], marked: Option<u64>, hovered: &mut Option<u64>) {
    let theme = Theme::of(ui);
    let plot = Rect::from_min_max(area.min + vec2(36.0, 18.0), area.max - vec2(0.0, 20.0));
    let Some((first, last)) = view.steps.first().zip(view.steps.last()) else { return };
    let most = |s: &StepPoint| s.report.memory.now_bytes.max(s.report.memory.process_bytes.unwrap_or(0));
    let highest = view.steps.iter().map(most).max().unwrap_or(0).max(last.report.memory.peak_bytes);
    let max = (highest as f64 / GIB * 1.15).max(1e-3);
    let painter = ui.painter().with_clip_rect(area.expand(8.0).intersect(ui.clip_rect()));
    let y_of = |gib: f64| lerp(plot.bottom()..=plot.top(), (gib / max) as f32);
    let levels = ticks(0.0, max, (plot.height() / 44.0).clamp(2.0, 6.0) as usize);
    let digits = decimals(&levels);
    for level in &levels {
        let y = painter.round_to_pixel_center(y_of(*level));
        painter.hline(plot.x_range(), y, Stroke::new(1.0, theme.grid));
        let figure = figures::grouped(*level, digits);
        text(&painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, &figure, fonts::small(), theme.t3, 36.0);
    }
    // One sample a point at most; a single step is drawn over the whole width.
    let stride = view.steps.len().div_ceil(plot.width().max(1.0) as usize).max(1);
    let mut samples: Vec<&StepPoint> = view.steps.iter().step_by(stride).collect();
    if samples.last().map(|s| s.report.step) != Some(last.report.step) {
        samples.push(last);
    }
    let (low, high) = (first.report.step as f32, last.report.step as f32);
    let x_of = |step: u64| {
        let share = if high > low { (step as f32 - low) / (high - low) } else { 1.0 };
        lerp(plot.left()..=plot.right(), share)
    };
    let mut xs: Vec<f32> = samples.iter().map(|s| x_of(s.report.step)).collect();
    if samples.len() == 1 {
        samples.push(last);
        xs = vec![plot.left(), plot.right()];
    }
    stack(&painter, theme, &samples, &xs, &y_of);
    process_line(&painter, theme, plot, &samples, &xs, &y_of);
    peak_line(&painter, theme, plot, &last.report.memory, &y_of);
    for mark in marks.iter().filter(|mark| (low..=high).contains(&(mark.step as f32))) {
        marks::line(&painter, theme, x_of(mark.step), plot.y_range());
    }

    let y = plot.bottom() + 14.0;
    text(&painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, "step", fonts::small(), theme.t3, 36.0);
    let left = text(
        &painter,
        pos2(plot.left(), y),
        Align2::LEFT_CENTER,
        &units::count(first.report.step),
        fonts::small(),
        theme.t3,
        60.0,
    );
    if plot.right() - left.right() > 60.0 && high > low {
        text(
            &painter,
            pos2(plot.right(), y),
            Align2::RIGHT_CENTER,
            &units::count(last.report.step),
            fonts::small(),
            theme.t3,
            60.0,
        );
    }
    text(
        &painter,
        pos2(plot.left() - 8.0, area.top() + 4.0),
        Align2::RIGHT_CENTER,
        "GiB",
        fonts::small(),
        theme.t3,
        30.0,
    );

    let response = ui.interact(plot, ui.scope_id().with("areas"), Sense::hover());
    let words = format!("Memory of steps {} to {} by category", first.report.step, last.report.step);
    response.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    if let Some(pointer) = response.hover_pos() {
        let share = ((pointer.x - plot.left()) / plot.width()).clamp(0.0, 1.0);
        *hovered = Some((low + share * (high - low)).round() as u64);
    }
    if let Some(step) = marked.filter(|step| (low..=high).contains(&(*step as f32))) {
        painter.vline(painter.round_to_pixel_center(x_of(step)), plot.y_range(), Stroke::new(1.0, theme.t2));
    }
}

/// Stacked areas at 60 %, each with its upper edge in full colour.
fn stack(painter: &Painter, theme: &Theme, samples: &[&StepPoint], xs: &[f32], y_of: &dyn Fn(f64) -> f32) {
    let mut base = vec![0.0f64; samples.len()];
    let mut edges: Vec<(Vec<Pos2>, Color32)> = Vec::new();
    for category in MemoryCategory::ALL {
        let color = theme.memory(category);
        let values: Vec<f64> = samples.iter().map(|s| bytes_of(&s.report.memory, category).0 as f64).collect();
        let largest = values.iter().copied().fold(0.0, f64::max);
        if largest == 0.0 {
            continue;
        }
        let mut mesh = Mesh::default();
        let fill = color.gamma_multiply(0.6);
        let mut edge = Vec::with_capacity(xs.len());
        for (i, (x, value)) in xs.iter().zip(&values).enumerate() {
            let bottom = pos2(*x, y_of(base[i] / GIB));
            base[i] += value;
            let top = pos2(*x, y_of(base[i] / GIB));
            mesh.colored_vertex(bottom, fill);
            mesh.colored_vertex(top, fill);
            edge.push(top);
            if i > 0 {
                let at = 2 * i as u32;
                mesh.add_triangle(at - 2, at - 1, at);
                mesh.add_triangle(at - 1, at, at + 1);
            }
        }
        painter.add(Shape::mesh(mesh));
        if largest >= EDGE_BYTES {
            edges.push((edge, color));
        }
    }
    for (edge, color) in edges {
        painter.add(Shape::line(edge, Stroke::new(1.5, color)));
    }
}

/// What the system counts for the whole process, dotted.
fn process_line(
    painter: &Painter,
    theme: &Theme,
    plot: Rect,
    samples: &[&StepPoint],
    xs: &[f32],
    y_of: &dyn Fn(f64) -> f32,
) {
    let points: Vec<Pos2> = samples
        .iter()
        .zip(xs)
        .filter_map(|(s, x)| Some(pos2(*x, y_of(s.report.memory.process_bytes? as f64 / GIB))))
        .collect();
    if points.is_empty() {
        return;
    }
    painter.extend(Shape::dotted_line(&points, theme.t1, 4.0, 0.7));
    let bytes = samples.last().and_then(|s| s.report.memory.process_bytes).unwrap_or(0);
    let words = format!("process {}", figures::gib(bytes));
    // Above the part of the line that runs over the label.
    let highest = points.iter().filter(|p| p.x < plot.left() + 90.0).map(|p| p.y).fold(plot.bottom(), f32::min);
    let at = pos2(plot.left() + 4.0, highest - 3.0);
    text(painter, at, Align2::LEFT_BOTTOM, &words, fonts::small(), theme.t2, 120.0);
}

/// The peak so far, dashed: what a step keeps for its backward pass is gone at its end, where the areas are taken. Its name gives way to the line of the
/// process; the title bar has the figure.
fn peak_line(painter: &Painter, theme: &Theme, plot: Rect, memory: &MemoryReport, y_of: &dyn Fn(f64) -> f32) {
    let y = painter.round_to_pixel_center(y_of(memory.peak_bytes as f64 / GIB));
    let ends = [pos2(plot.left(), y), pos2(plot.right(), y)];
    painter.extend(Shape::dashed_line(&ends, Stroke::new(1.0, theme.t2), 6.0, 4.0));
    let process_y = memory.process_bytes.map(|bytes| y_of(bytes as f64 / GIB));
    if process_y.is_none_or(|process_y| process_y > y || y - process_y > 18.0) {
        let words = format!("peak within a step {}", figures::gib(memory.peak_bytes));
        text(painter, pos2(plot.left() + 4.0, y - 2.0), Align2::LEFT_BOTTOM, &words, fonts::small(), theme.t2, 160.0);
    }
}

fn table(ui: &mut Ui, rect: Rect, step: &StepReport, machine: Option<&Machine>) {
    let theme = Theme::of(ui);
    let report = &step.memory;
    let painter = ui.painter().clone();
    let row_height = ((rect.height() - 34.0) / 12.0).clamp(15.0, 24.0);
    let mut y = rect.top() + row_height / 2.0;
    let (now_x, peak_x) = (rect.right() - 52.0, rect.right());
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, "GiB", fonts::small(), theme.t3, 60.0);
    text(&painter, pos2(now_x, y), Align2::RIGHT_CENTER, "now", fonts::small(), theme.t3, 60.0);
    text(&painter, pos2(peak_x, y), Align2::RIGHT_CENTER, "peak", fonts::small(), theme.t3, 60.0);
    let used: Vec<_> = MemoryCategory::ALL
        .into_iter()
        .map(|category| (category, bytes_of(report, category)))
        .filter(|(_, (_, peak))| *peak > 0)
        .collect();
    for (category, (now, peak)) in &used {
        y += row_height;
        swatch(&painter, rect.left(), y).fill(&painter, theme.memory(*category));
        let at = pos2(rect.left() + 18.0, y);
        text(&painter, at, Align2::LEFT_CENTER, category.name(), fonts::table(), theme.t1, now_x - at.x - 40.0);
        text(&painter, pos2(now_x, y), Align2::RIGHT_CENTER, &figures::gib(*now), fonts::medium(12.0), theme.t1, 60.0);
        text(&painter, pos2(peak_x, y), Align2::RIGHT_CENTER, &figures::gib(*peak), fonts::table(), theme.t3, 50.0);
        let words =
            format!("{} {} GiB now, {} GiB at its peak", category.name(), figures::gib(*now), figures::gib(*peak));
        let row = Rect::from_center_size(pos2(rect.center().x, y), vec2(rect.width(), row_height));
        let response = ui.interact(row, ui.scope_id().with(category.name()), Sense::hover());
        response.widget_info(|| WidgetInfo::labeled(Role::Label, true, &words));
    }
    y += row_height;
    rule(&painter, rect.x_range(), y - row_height / 2.0, theme.line2);
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, "Tandem", fonts::medium(12.0), theme.t1, 110.0);
    text(
        &painter,
        pos2(now_x, y),
        Align2::RIGHT_CENTER,
        &figures::gib(report.now_bytes),
        fonts::medium(12.0),
        theme.t1,
        60.0,
    );
    text(
        &painter,
        pos2(peak_x, y),
        Align2::RIGHT_CENTER,
        &figures::gib(report.peak_bytes),
        fonts::table(),
        theme.t3,
        50.0,
    );
    if let Some(bytes) = report.process_bytes {
        y += row_height;
        for i in 0..3 {
            painter.circle_filled(pos2(rect.left() + 1.5 + 3.5 * i as f32, y), 0.8, theme.t1);
        }
        text(&painter, pos2(rect.left() + 18.0, y), Align2::LEFT_CENTER, "process", fonts::table(), theme.t1, 90.0);
        text(&painter, pos2(now_x, y), Align2::RIGHT_CENTER, &figures::gib(bytes), fonts::table(), theme.t1, 60.0);
    }
    if let Some((name, bytes)) = host_copies(step) {
        y += row_height;
        let bytes = figures::gib(bytes);
        text(&painter, pos2(rect.left() + 18.0, y), Align2::LEFT_CENTER, name, fonts::table(), theme.t1, 90.0);
        text(&painter, pos2(now_x, y), Align2::RIGHT_CENTER, &bytes, fonts::table(), theme.t1, 60.0);
        let row = Rect::from_center_size(pos2(rect.center().x, y), vec2(rect.width(), row_height));
        describe(ui, row, name, &format!("{name} {bytes} GiB"));
    }
    let Some(ram) = machine.and_then(|machine| machine.ram) else { return };
    let y = y + row_height + 6.0;
    if y + 24.0 > rect.bottom() {
        return;
    }
    let mut segments: Vec<(f64, Color32)> = used.iter().map(|(c, (now, _))| (*now as f64, theme.memory(*c))).collect();
    let used_bytes = ram.total_bytes.saturating_sub(ram.free_bytes);
    segments.push((used_bytes.saturating_sub(report.now_bytes) as f64, theme.bg4));
    let words = format!("RAM {} of {} GiB used", figures::gib(used_bytes), figures::gib(ram.total_bytes));
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, &words, fonts::small(), theme.t3, rect.width());
    let bar = Rect::from_min_size(pos2(rect.left(), y + 10.0), vec2(rect.width(), 12.0));
    budget_bar(ui, bar, &segments, ram.total_bytes as f64);
}
