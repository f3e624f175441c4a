//! A spark line: the shape of a series without axes.

use egui::{Color32, Painter, Pos2, Rect, Shape, Stroke, pos2, remap};

/// Paints `values` (oldest first) as a line over the whole of `rect`, scaled to their own range.
pub fn spark(painter: &Painter, rect: Rect, values: &[f64], color: Color32) {
    let points = points(rect, values);
    if points.len() > 1 {
        painter.add(Shape::line(points, Stroke::new(1.2, color)));
    }
}

fn points(rect: Rect, values: &[f64]) -> Vec<Pos2> {
    let finite = || values.iter().copied().filter(|v| v.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    let last = values.len().saturating_sub(1).max(1) as f32;
    values
        .iter()
        .enumerate()
        .filter(|(_, v)| v.is_finite())
        .map(|(i, &v)| {
            let x = rect.left() + rect.width() * i as f32 / last;
            let y = if high > low {
                remap(v, low..=high, f64::from(rect.bottom())..=f64::from(rect.top())) as f32
            } else {
                rect.center().y
            };
            pos2(x, y)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use egui::vec2;

    #[test]
    fn the_range_fills_the_height_and_gaps_are_left_out() {
        let rect = Rect::from_min_size(pos2(0.0, 0.0), vec2(10.0, 4.0));
        let points = points(rect, &[2.0, f64::NAN, 1.0]);
        assert_eq!(points, [pos2(0.0, 0.0), pos2(10.0, 4.0)]);
    }

    #[test]
    fn a_flat_series_is_a_line_in_the_middle() {
        let rect = Rect::from_min_size(pos2(0.0, 0.0), vec2(10.0, 4.0));
        assert!(points(rect, &[3.0, 3.0]).iter().all(|p| p.y == 2.0));
    }
}
