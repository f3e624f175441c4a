//! Hatching: what is not measured, or not attributed to a phase.

use egui::{Color32, Painter, Pos2, Rect, Stroke, pos2};

/// Distance between lines, across.
const PITCH: f32 = 5.0;

/// Fills `rect` with 45° lines of `color` on `ground`, each line cut at the edges.
pub fn hatch(painter: &Painter, rect: Rect, color: Color32, ground: Color32) {
    painter.rect_filled(rect, 0, ground);
    for [a, b] in lines(rect) {
        painter.line_segment([a, b], Stroke::new(1.6, color));
    }
}

/// The 45° lines (rising to the right) that cross `rect`, clipped to it. Lines start from a grid of the whole window,
/// so neighbouring rectangles join without a seam.
fn lines(rect: Rect) -> Vec<[Pos2; 2]> {
    if !rect.is_positive() {
        return Vec::new();
    }
    // On a line x + y = c; the rectangle sees c from left + top to right + bottom.
    let step = PITCH * std::f32::consts::SQRT_2;
    let mut c = ((rect.left() + rect.top()) / step).ceil() * step;
    let mut lines = Vec::new();
    while c < rect.right() + rect.bottom() {
        let left = (c - rect.bottom()).max(rect.left());
        let right = (c - rect.top()).min(rect.right());
        if right > left {
            lines.push([pos2(left, c - left), pos2(right, c - right)]);
        }
        c += step;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use egui::vec2;

    #[test]
    fn lines_stay_inside() {
        let rect = Rect::from_min_size(pos2(13.0, 7.5), vec2(40.0, 9.0));
        let all = lines(rect);
        assert!(all.len() >= 5, "{}", all.len());
        for [a, b] in all {
            assert!(rect.expand(1e-3).contains(a) && rect.expand(1e-3).contains(b), "{a:?} {b:?}");
            assert!(((b.x - a.x) + (b.y - a.y)).abs() < 1e-3, "45 degrees");
        }
    }

    #[test]
    fn nothing_in_an_empty_rectangle() {
        assert!(lines(Rect::from_min_size(pos2(1.0, 1.0), vec2(0.0, 5.0))).is_empty());
    }
}
