//! Marks at steps from which on something was switched: a dotted line through every plot over steps, with words.

use egui::{Align2, Painter, Rangef, Rect, Shape, Stroke, pos2};

use crate::gui::fonts;
use crate::gui::theme::Theme;
use crate::gui::widgets::text;
use crate::session::run_view::Switched;

/// A step from which on something was switched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// First step that ran so.
    pub step: u64,
    /// What was switched: `Overlapped copies on`.
    pub words: String,
}

/// One mark a step; of several things that were switched at once the first is named.
pub fn marks(switched: &[Switched]) -> Vec<Mark> {
    switched
        .chunk_by(|a, b| a.step == b.step)
        .map(|together| {
            let Switched { step, optimization, on } = together[0];
            let more = if together.len() > 1 { format!(", {} more", together.len() - 1) } else { String::new() };
            Mark { step, words: format!("{} {}{more}", optimization.name(), if on { "on" } else { "off" }) }
        })
        .collect()
}

/// Paints the line of a mark at `x`.
pub fn line(painter: &Painter, theme: &Theme, x: f32, y: Rangef) {
    let x = painter.round_to_pixel_center(x);
    let ends = [pos2(x, y.min), pos2(x, y.max)];
    painter.extend(Shape::dashed_line(&ends, Stroke::new(1.0, theme.t1), 2.0, 3.0));
}

/// Writes what a mark stands for beside its line at `x`, inside `area`: left of it, or right where that has more room.
pub fn words(painter: &Painter, theme: &Theme, x: f32, y: f32, area: Rect, words: &str) {
    let (left, right) = (x - area.left(), area.right() - x);
    let (at, anchor, room) =
        if left >= right { (x - 5.0, Align2::RIGHT_CENTER, left) } else { (x + 5.0, Align2::LEFT_CENTER, right) };
    text(painter, pos2(at, y), anchor, words, fonts::small(), theme.t2, room - 8.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Optimization;

    #[test]
    fn what_is_switched_at_one_step_shares_a_mark() {
        let at = |step, optimization, on| Switched { step, optimization, on };
        let marks = marks(&[
            at(7, Optimization::ActivationOffload, true),
            at(7, Optimization::DoubleBuffer, true),
            at(9, Optimization::MetadataCache, false),
        ]);
        let words: Vec<_> = marks.iter().map(|mark| (mark.step, mark.words.as_str())).collect();
        assert_eq!(words, [(7, "Activation offload on, 1 more"), (9, "Packing metadata cache off")]);
    }
}
