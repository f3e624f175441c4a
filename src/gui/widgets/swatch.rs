//! The square before a name in a legend.

use egui::{Color32, Painter, Rect, pos2, vec2};

use super::hatch::hatch;
use crate::gui::theme::Theme;

/// A square that wants its fill.
#[must_use = "fill it"]
pub struct Swatch(Rect);

/// A swatch of 10×10 at `left`, centred on `y`.
pub fn swatch(painter: &Painter, left: f32, y: f32) -> Swatch {
    let scale = painter.pixels_per_point();
    let snap = |v: f32| (v * scale).round() / scale;
    Swatch(Rect::from_min_size(pos2(snap(left), snap(y - 5.0)), vec2(10.0, 10.0)))
}

impl Swatch {
    /// In one colour.
    pub fn fill(self, painter: &Painter, color: Color32) {
        painter.rect_filled(self.0, 2, color);
    }

    /// Hatched: not measured, or not attributed.
    pub fn hatch(self, painter: &Painter, theme: &Theme) {
        hatch(painter, self.0, theme.t3, theme.bg3);
    }
}
