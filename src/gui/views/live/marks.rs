//! Marks at steps from which on something was switched: a dotted line through every plot over steps, with words.

use egui::{Painter, Rangef, Rect, Shape, Stroke, pos2, vec2};

use crate::gui::fonts;
use crate::gui::theme::Theme;
use crate::session::Optimization;
use crate::session::run_view::Switched;

/// A step from which on something was switched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// First step that ran so.
    pub step: u64,
    /// What was switched: `Overlapped copies on`.
    pub words: String,
}

/// One mark a step; of several things that were switched at once one is named: two buffers and what is kept follow from others.
pub fn marks(switched: &[Switched]) -> Vec<Mark> {
    switched
        .chunk_by(|a, b| a.step == b.step)
        .map(|together| {
            let follows = |switched: &&Switched| {
                matches!(switched.optimization, Optimization::DoubleBuffer | Optimization::KeepActivations)
            };
            let named = together.iter().find(|switched| !follows(switched)).unwrap_or(&together[0]);
            let Switched { step, optimization, on } = *named;
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

/// Writes what a mark stands for beside its line at `x`, inside `area`: left of it, or right where that has more room. Nothing where it does not fit.
pub fn words(painter: &Painter, theme: &Theme, x: f32, y: f32, area: Rect, words: &str) {
    let galley = painter.layout_no_wrap(words.into(), fonts::small(), theme.t2);
    let on_left = x - area.left() >= area.right() - x;
    let left = if on_left { x - 6.0 - galley.size().x } else { x + 6.0 };
    let rect = Rect::from_min_size(pos2(left, y - galley.size().y / 2.0), galley.size());
    if rect.left() >= area.left() && rect.right() <= area.right() {
        // Curves below it stay out of the letters.
        painter.rect_filled(rect.expand2(vec2(3.0, 0.0)), 0, theme.bg1.gamma_multiply(0.8));
        painter.galley(rect.min, galley, theme.t2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn what_is_switched_at_one_step_shares_a_mark() {
        let at = |step, optimization, on| Switched { step, optimization, on };
        let marks = marks(&[
            at(7, Optimization::DoubleBuffer, true),
            at(7, Optimization::ActivationOffload, true),
            at(8, Optimization::DoubleBuffer, false),
            at(9, Optimization::MetadataCache, false),
        ]);
        let words: Vec<_> = marks.iter().map(|mark| (mark.step, mark.words.as_str())).collect();
        assert_eq!(
            words,
            [(7, "Activation offload on, 1 more"), (8, "Overlapped copies off"), (9, "Packing metadata cache off")]
        );
    }
}
