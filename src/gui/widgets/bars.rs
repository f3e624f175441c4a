//! Stacked bars, painted as rectangles so that gaps stay whole pixels: steps side by side, and one budget bar.

use egui::{Color32, Painter, Rect, Stroke, Ui, lerp, pos2, vec2};

use super::hatch::hatch;
use crate::gui::theme::Theme;

/// Segments thinner than this are not drawn; the table beside has them.
const THINNEST: f32 = 0.4;

/// How a segment is filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// In one colour.
    Solid(Color32),
    /// Hatched: not measured, or not attributed.
    Hatched,
}

/// A part of a bar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// Its size in the unit of the axis.
    pub value: f64,
    /// Its look.
    pub fill: Fill,
}

/// One bar: groups of segments from the bottom up, a cut of 2 px between the groups.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bar {
    /// The groups; empty ones leave no cut.
    pub groups: Vec<Vec<Segment>>,
}

impl Bar {
    /// Its whole height in the unit of the axis.
    pub fn total(&self) -> f64 {
        self.groups.iter().flatten().map(|s| s.value).sum()
    }

    /// Where each group begins and ends in the unit of the axis.
    pub fn group_ranges(&self) -> Vec<(f64, f64)> {
        let mut low = 0.0;
        self.groups
            .iter()
            .map(|group| {
                let high = low + group.iter().map(|s| s.value).sum::<f64>();
                let range = (low, high);
                low = high;
                range
            })
            .collect()
    }
}

/// Width and gap of bars, in whole pixels, so that `count` of them fit into `width` points.
pub fn bar_layout(width: f32, count: usize, pixels_per_point: f32) -> (f32, f32) {
    let pixels = (width * pixels_per_point).floor();
    let pitch = (pixels / count.max(1) as f32).floor().clamp(1.0, 24.0 * pixels_per_point);
    let gap = if pitch >= 4.0 { 1.0_f32.max((pitch / 8.0).floor()) } else { 0.0 };
    ((pitch - gap) / pixels_per_point, gap / pixels_per_point)
}

/// Paints bars side by side from the left of `rect`; `max` is the value at its top. Returns the rectangle (full height)
/// of each bar, for hovering and marks.
pub fn step_bars(painter: &Painter, theme: &Theme, rect: Rect, bars: &[Bar], max: f64) -> Vec<Rect> {
    let pixels_per_point = painter.pixels_per_point();
    let snap = |y: f32| (y * pixels_per_point).round() / pixels_per_point;
    let (width, gap) = bar_layout(rect.width(), bars.len(), pixels_per_point);
    let left = snap(rect.left());
    let y_of = |value: f64| lerp(rect.bottom()..=rect.top(), if max > 0.0 { (value / max) as f32 } else { 0.0 });
    let mut columns = Vec::with_capacity(bars.len());
    for (i, bar) in bars.iter().enumerate() {
        let x = left + i as f32 * (width + gap);
        let column = Rect::from_min_max(pos2(x, rect.top()), pos2(x + width, rect.bottom()));
        columns.push(column);
        let mut value = 0.0;
        let mut cuts = Vec::new();
        for group in &bar.groups {
            for segment in group {
                let bottom = y_of(value);
                value += segment.value;
                let top = y_of(value);
                if bottom - top < THINNEST {
                    continue;
                }
                let mut part = column.with_min_y(snap(top)).with_max_y(snap(bottom));
                if part.height() <= 0.0 {
                    continue;
                }
                // Parted by one pixel of the tile, where there is room for it.
                if part.height() > 3.0 {
                    part.min.y += 1.0;
                }
                match segment.fill {
                    Fill::Solid(color) => {
                        painter.rect_filled(part, 0, color);
                    }
                    Fill::Hatched => hatch(painter, part, theme.t3, theme.bg3),
                }
            }
            if !group.is_empty() {
                cuts.push(snap(y_of(value)));
            }
        }
        // The cut covers, it does not add height; there is none above the last group.
        for &y in cuts.iter().rev().skip(1) {
            painter.rect_filled(column.with_min_y(y - 1.0).with_max_y(y + 1.0), 0, theme.bg1);
        }
    }
    columns
}

/// Paints a horizontal bar of segments, 12 high: `limit` is the value at its right end. What lies beyond the limit is
/// hatched in the colour of an error.
pub fn budget_bar(ui: &Ui, rect: Rect, segments: &[(f64, Color32)], limit: f64) {
    let theme = Theme::of(ui);
    let painter = ui.painter();
    painter.rect_filled(rect, 0, theme.bg3);
    let total: f64 = segments.iter().map(|s| s.0).sum();
    let scale = f64::from(rect.width()) / limit.max(total).max(f64::MIN_POSITIVE);
    let mut x = rect.left();
    for (value, color) in segments {
        let width = (value * scale) as f32;
        if width >= THINNEST {
            let part = Rect::from_min_size(pos2(x, rect.top()), vec2(width, rect.height()));
            painter.rect_filled(part.with_max_x((part.right() - 1.0).max(part.left() + 0.5)), 0, *color);
        }
        x += width;
    }
    let limit_x = painter.round_to_pixel_center(rect.left() + (limit * scale) as f32 - 0.5);
    if total > limit {
        hatch(painter, rect.with_min_x(limit_x), theme.err, theme.bg3);
    }
    painter.vline(limit_x, rect.y_range().expand(2.0), Stroke::new(2.0, theme.err));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fit_and_gaps_are_whole_pixels() {
        for pixels_per_point in [1.0, 1.5, 2.0] {
            for count in [1, 7, 40, 130, 400] {
                let (width, gap) = bar_layout(400.0, count, pixels_per_point);
                assert!(width > 0.0);
                assert!((width + gap) * count as f32 <= 400.0 + 1e-3, "{count} at {pixels_per_point}");
                let pixels = gap * pixels_per_point;
                assert!((pixels - pixels.round()).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn groups_stack_without_gaps() {
        let part = |value| Segment { value, fill: Fill::Hatched };
        let bar = Bar { groups: vec![vec![part(1.0), part(2.0)], vec![], vec![part(4.0)]] };
        assert_eq!(bar.total(), 7.0);
        assert_eq!(bar.group_ranges(), [(0.0, 3.0), (3.0, 3.0), (3.0, 7.0)]);
    }
}
