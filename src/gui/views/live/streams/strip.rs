//! The stream strip: the whole step in thin lanes with a window, and what the window shows in high ones.

use egui::accesskit::Role;
use egui::{Align2, Painter, Rect, Response, Sense, Shape, Stroke, StrokeKind, Ui, WidgetInfo, lerp, pos2, remap};

use super::lanes::{LANES, Window, busy, exposed};
use crate::gui::theme::Theme;
use crate::gui::views::live::intervals::Intervals;
use crate::gui::views::live::series::{decimals, ticks};
use crate::gui::widgets::text;
use crate::gui::{figures, fonts};
use crate::session::run_view::StepSpans;
use crate::session::{LaneKind, Phase, Span};

/// Room for the names of the lanes.
const NAMES: f32 = 56.0;
/// Height of a lane in the overview.
const THIN: f32 = 9.0;
const GAP: f32 = 2.0;
/// Height of a row of times.
const AXIS: f32 = 15.0;

/// A stretch of the step over the width of a rectangle.
#[derive(Clone, Copy)]
struct Scale {
    rect: Rect,
    window: Window,
}

impl Scale {
    fn x(self, ms: f64) -> f32 {
        let share = (ms - self.window.start) / self.window.length().max(f64::MIN_POSITIVE);
        lerp(self.rect.left()..=self.rect.right(), share as f32)
    }

    fn ms(self, x: f32) -> f64 {
        let range = f64::from(self.rect.left())..=f64::from(self.rect.right());
        remap(f64::from(x), range, self.window.start..=self.window.end)
    }

    /// A point in milliseconds.
    fn ms_per_point(self) -> f64 {
        self.window.length() / f64::from(self.rect.width().max(1.0))
    }

    /// A stretch as pixels of `lane`, at least one wide; `None` outside of the window.
    fn part(self, lane: Rect, start: f64, end: f64, pixels_per_point: f32) -> Option<Rect> {
        let snap = |x: f32| (x * pixels_per_point).round() / pixels_per_point;
        let (left, right) = (self.x(start).max(lane.left()), self.x(end).min(lane.right()));
        (right > left).then(|| {
            let left = snap(left);
            lane.with_min_x(left).with_max_x(snap(right).max(left + 1.0 / pixels_per_point))
        })
    }
}

/// A step to draw.
pub struct Strip<'a> {
    /// The step with its spans.
    pub step: &'a StepSpans,
    /// How long it took, in milliseconds.
    pub total: f64,
    /// What of it is looked at.
    pub window: Window,
    /// Why there are no copies, where there are none.
    pub no_copies: Option<&'a str>,
    /// Whether the wheel zooms; else it is left to the page, and zooming takes a pinch or Ctrl.
    pub wheel_zooms: bool,
}

/// Draws the strip in `area`. Returns the new window when the user moved it.
pub fn show(ui: &mut Ui, area: Rect, strip: &Strip<'_>) -> Option<Window> {
    let &Strip { step, total, window, no_copies, wheel_zooms } = strip;
    let theme = Theme::of(ui);
    let (left, right) = (area.left() + NAMES, area.right());
    let overview_height = LANES.len() as f32 * (THIN + GAP) - GAP;
    let overview = Rect::from_min_max(pos2(left, area.top()), pos2(right, area.top() + overview_height));
    let detail = Rect::from_min_max(pos2(left, overview.bottom() + AXIS + 5.0), pos2(right, area.bottom() - AXIS));
    let whole = Scale { rect: overview, window: Window { start: 0.0, end: total } };
    let near = Scale { rect: detail, window };

    let painter = ui.painter().clone();
    connect(&painter, theme, whole, near);
    lanes(&painter, theme, whole, &step.spans, false);
    lanes(&painter, theme, near, &step.spans, true);
    axis(&painter, theme, whole, overview.bottom() + AXIS / 2.0 + 1.0, true);
    axis(&painter, theme, near, detail.bottom() + AXIS / 2.0 + 1.0, false);
    if let Some(none) = no_copies {
        let lane = lane_rects(detail)[1];
        text(&painter, lane.center(), Align2::CENTER_CENTER, none, fonts::small(), theme.t3, lane.width() - 8.0);
    }
    let frame = Rect::from_x_y_ranges(whole.x(window.start)..=whole.x(window.end), overview.y_range()).expand(2.0);
    painter.rect_stroke(frame, 0, Stroke::new(1.0, theme.t1), StrokeKind::Middle);

    let over = ui.interact(overview, ui.scope_id().with("overview"), Sense::click_and_drag());
    let near_response = ui.interact(detail, ui.scope_id().with("detail"), Sense::click_and_drag());
    let words = format!("Streams of step {}, {} ms", step.step, figures::ms(total));
    over.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    let words = format!("Streams from {} to {} ms", figures::grouped(window.start, 1), figures::grouped(window.end, 1));
    near_response.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    let moved = moved(ui, (&over, whole), (&near_response, near), total, wheel_zooms);
    tooltip(near_response, near, &step.spans);
    moved
}

/// Where the user took the window in this frame.
fn moved(
    ui: &Ui,
    (over, whole): (&Response, Scale),
    (near, near_scale): (&Response, Scale),
    total: f64,
    wheel_zooms: bool,
) -> Option<Window> {
    let window = near_scale.window;
    if let Some(pointer) = over.interact_pointer_pos().filter(|_| over.dragged() || over.clicked()) {
        let middle = (window.start + window.end) / 2.0;
        return Some(window.panned(whole.ms(pointer.x) - middle, total));
    }
    if near.dragged() {
        return Some(window.panned(-f64::from(near.drag_delta().x) * near_scale.ms_per_point(), total));
    }
    let (hovered, scale) = if near.hovered() { (near, near_scale) } else { (over, whole) };
    let pointer = hovered.hover_pos()?;
    let (wheel, pinch) = ui.input(|input| (input.smooth_scroll_delta(), input.zoom_delta()));
    let scrolled = if wheel_zooms { wheel } else { egui::Vec2::ZERO };
    if scrolled.x != 0.0 {
        return Some(window.panned(-f64::from(scrolled.x) * near_scale.ms_per_point(), total));
    }
    let factor = f64::from(pinch) * (f64::from(scrolled.y) / 200.0).exp();
    (factor != 1.0).then(|| window.zoomed(factor, scale.ms(pointer.x), total))
}

/// The lanes of `area` from above.
fn lane_rects(area: Rect) -> [Rect; LANES.len()] {
    let height = (area.height() + GAP) / LANES.len() as f32;
    std::array::from_fn(|i| {
        let top = area.top() + i as f32 * height;
        area.with_min_y(top.round()).with_max_y((top + height - GAP).round())
    })
}

fn lanes(painter: &Painter, theme: &Theme, scale: Scale, spans: &[Span], detailed: bool) {
    let pixels_per_point = painter.pixels_per_point();
    let busy = busy(spans);
    for ((kind, name), lane) in LANES.into_iter().zip(lane_rects(scale.rect)) {
        let at = pos2(lane.left() - 6.0, lane.center().y);
        text(painter, at, Align2::RIGHT_CENTER, name, fonts::small(), theme.t3, NAMES);
        painter.rect_filled(lane, 0, theme.bg2);
        for span in spans.iter().filter(|span| span.lane == kind) {
            let Some(part) = scale.part(lane, span.start_ms, span.end_ms, pixels_per_point) else { continue };
            if kind == LaneKind::Compute {
                compute_span(painter, theme, part, span, detailed);
            } else {
                copy_span(painter, theme, scale, lane, span, &busy);
            }
        }
    }
    if detailed {
        exposed_stretches(painter, theme, scale, spans);
    }
}

fn compute_span(painter: &Painter, theme: &Theme, mut part: Rect, span: &Span, detailed: bool) {
    if detailed && part.width() > 3.0 {
        part.max.x -= 1.0;
    }
    painter.rect_filled(part, 0, theme.phase(span.phase));
    if !detailed || part.height() < 12.0 {
        return;
    }
    let words = painter.layout_no_wrap(span.phase.name().into(), fonts::small(), theme.on_phase(span.phase));
    if words.size().x + 6.0 <= part.width() {
        painter.galley(part.center() - words.size() / 2.0, words, theme.on_phase(span.phase));
    }
}

fn copy_span(painter: &Painter, theme: &Theme, scale: Scale, lane: Rect, span: &Span, busy: &Intervals) {
    for piece in busy.split(span.start_ms, span.end_ms) {
        let Some(mut part) = scale.part(lane, piece.start, piece.end, painter.pixels_per_point()) else { continue };
        // Two copies that follow each other stay two.
        if piece.end == span.end_ms && part.width() > 3.0 {
            part.max.x -= 1.0;
        }
        painter.rect_filled(part, 0, if piece.covered { theme.acc } else { theme.phase(Phase::ExposedCopy) });
    }
}

/// The empty slots that exposed copies leave in the compute lane, and how long the longest one in sight is.
fn exposed_stretches(painter: &Painter, theme: &Theme, scale: Scale, spans: &[Span]) {
    let rects = lane_rects(scale.rect);
    let in_sight = |&(start, end): &(f64, f64)| end > scale.window.start && start < scale.window.end;
    let exposed = exposed(spans);
    let stretches = || exposed.iter().filter(in_sight);
    for (start, end) in stretches() {
        let Some(slot) = scale.part(rects[0], start, end, painter.pixels_per_point()) else { continue };
        if slot.width() >= 3.0 {
            let slot = slot.shrink(0.5);
            let corners = [slot.left_top(), slot.right_top(), slot.right_bottom(), slot.left_bottom(), slot.left_top()];
            painter.extend(Shape::dashed_line(&corners, Stroke::new(1.0, theme.hot), 2.0, 2.0));
        }
    }
    let length = |stretch: &(f64, f64)| stretch.1 - stretch.0;
    let Some((start, end)) = stretches().max_by(|a, b| length(a).total_cmp(&length(b))) else { return };
    // Beside the copy, in its own lane.
    let copies = |kind| spans.iter().any(|s| s.lane == kind && s.start_ms < end && s.end_ms > start);
    let lane = if copies(LaneKind::H2d) { rects[1] } else { rects[2] };
    let words = format!("exposed {} ms", figures::ms(end - start));
    let galley = painter.layout_no_wrap(words, fonts::small(), theme.hot);
    let left = scale.x(start) - 6.0 - galley.size().x;
    let right = scale.x(end) + 6.0;
    let fits_right = right + galley.size().x <= lane.right();
    let x = if left >= lane.left() { left } else { right };
    if left >= lane.left() || fits_right {
        let at = pos2(x, lane.center().y - galley.size().y / 2.0);
        // On a ground of its own where other copies lie.
        let ground = Rect::from_min_size(at, galley.size()).expand2(egui::vec2(3.0, 0.0));
        painter.rect_filled(ground.intersect(lane), 0, theme.bg2);
        painter.galley(at, galley, theme.hot);
    }
}

fn axis(painter: &Painter, theme: &Theme, scale: Scale, y: f32, with_unit: bool) {
    let Window { start, end } = scale.window;
    let marks = ticks(start, end, (scale.rect.width() / 110.0).clamp(2.0, 8.0) as usize);
    let digits = decimals(&marks);
    let mut free = scale.rect.left() - 1.0;
    for (i, mark) in marks.iter().enumerate() {
        let unit = if with_unit && i == 0 { " ms" } else { "" };
        let words = format!("{}{unit}", figures::grouped(*mark, digits));
        let galley = painter.layout_no_wrap(words, fonts::small(), theme.t3);
        let room = scale.rect.left()..=(scale.rect.right() - galley.size().x).max(scale.rect.left());
        let x = (scale.x(*mark) - galley.size().x / 2.0).clamp(*room.start(), *room.end());
        if x >= free {
            free = x + galley.size().x + 8.0;
            painter.galley(pos2(x, y - galley.size().y / 2.0), galley, theme.t3);
        }
    }
}

/// A wedge from the window in the overview to the lanes that it opens.
fn connect(painter: &Painter, theme: &Theme, whole: Scale, near: Scale) {
    let top = whole.rect.bottom() + 2.0;
    let corners = vec![
        pos2(whole.x(near.window.start), top),
        pos2(whole.x(near.window.end), top),
        near.rect.right_top(),
        near.rect.left_top(),
    ];
    painter.add(Shape::convex_polygon(corners, theme.bg2.gamma_multiply(0.6), Stroke::NONE));
}

/// What is under the pointer, in words.
fn tooltip(response: Response, scale: Scale, spans: &[Span]) {
    let Some(pointer) = response.hover_pos() else { return };
    let ms = scale.ms(pointer.x);
    let lane = lane_rects(scale.rect).iter().position(|lane| lane.y_range().contains(pointer.y));
    let Some((kind, name)) = lane.map(|lane| LANES[lane]) else { return };
    let here = |span: &&Span| span.lane == kind && (span.start_ms..span.end_ms).contains(&ms);
    if let Some(span) = spans.iter().find(here) {
        response.on_hover_text_at_pointer(describe_span(span, name));
    }
}

fn describe_span(span: &Span, lane: &str) -> String {
    let what = if span.lane == LaneKind::Compute { span.phase.name() } else { lane };
    let layer = span.layer.map_or_else(String::new, |layer| format!(", block {layer}"));
    let ms = |value| figures::grouped(value, 2);
    let (start, end) = (span.start_ms, span.end_ms);
    format!("{what}{layer}: {} ms, from {} to {} ms", ms(end - start), ms(start), ms(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Pass;
    use egui::vec2;

    #[test]
    fn a_point_is_found_where_it_was_drawn() {
        let rect = Rect::from_min_size(pos2(100.0, 0.0), vec2(400.0, 30.0));
        let scale = Scale { rect, window: Window { start: 20.0, end: 60.0 } };
        assert_eq!((scale.x(20.0), scale.x(30.0), scale.x(60.0)), (100.0, 200.0, 500.0));
        assert_eq!(scale.ms(200.0), 30.0);
        assert_eq!(scale.ms_per_point(), 0.1);
    }

    #[test]
    fn a_short_span_stays_visible_and_one_outside_is_not_drawn() {
        let lane = Rect::from_min_size(pos2(0.0, 0.0), vec2(100.0, 9.0));
        let scale = Scale { rect: lane, window: Window { start: 0.0, end: 1000.0 } };
        assert_eq!(scale.part(lane, 500.0, 500.1, 2.0).map(|part| part.width()), Some(0.5));
        assert_eq!(scale.part(lane, 1100.0, 1200.0, 1.0), None);
        assert_eq!(scale.part(lane, -50.0, 2000.0, 1.0), Some(lane));
    }

    #[test]
    fn lanes_share_the_height() {
        let area = Rect::from_min_size(pos2(0.0, 0.0), vec2(10.0, 31.0));
        let tops = lane_rects(area).map(|lane| (lane.top(), lane.bottom()));
        assert_eq!(tops, [(0.0, 9.0), (11.0, 20.0), (22.0, 31.0)]);
    }

    #[test]
    fn a_span_is_told_with_its_block_and_times() {
        let span = Span {
            lane: LaneKind::Compute,
            phase: Phase::Mlp,
            pass: Pass::Backward,
            layer: Some(3),
            start_ms: 10.0,
            end_ms: 12.5,
        };
        assert_eq!(describe_span(&span, "compute"), "mlp, block 3: 2.50 ms, from 10.00 to 12.50 ms");
        let copy = Span { lane: LaneKind::H2d, ..span };
        assert!(describe_span(&copy, "H2D").starts_with("H2D, block 3"));
    }
}
