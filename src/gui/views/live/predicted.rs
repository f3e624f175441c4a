//! The tile that holds formulas of copies and cache against what the last step measured.

use egui::{Align2, Rect, Ui, pos2, vec2};

use super::formulas::{Figures, Row};
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, describe, label, text};
use crate::gui::{figures, fonts};
use crate::session::run_view::RunView;

/// Distance of the right edges of the figures from the table's right edge.
const PREDICTED: f32 = 89.0;
const MEASURED: f32 = 40.0;
/// Where the formulas begin.
const FORMULA: f32 = 84.0;

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, view: &RunView, figures: &Figures, compact: bool) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        label(ui, "last step", fonts::small(), theme.t3);
    };
    Tile::new("Predicted against measured").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let height = if compact { 20.0 } else { 24.0 };
        let mut y = area.top() + 8.0;
        let painter = ui.painter().clone();
        let right = |distance: f32| area.right() - distance;
        for (x, anchor, words) in [
            (area.left(), Align2::LEFT_CENTER, "ms"),
            (area.left() + FORMULA, Align2::LEFT_CENTER, "model"),
            (right(PREDICTED), Align2::RIGHT_CENTER, "pred."),
            (right(MEASURED), Align2::RIGHT_CENTER, "meas."),
            (right(0.0), Align2::RIGHT_CENTER, "%"),
        ] {
            text(&painter, pos2(x, y), anchor, words, fonts::small(), theme.t3, 80.0);
        }
        y -= height / 2.0 - 9.0;
        for row in &figures.rows() {
            y += height;
            row_of(ui, Rect::from_center_size(pos2(area.center().x, y), vec2(area.width(), height)), row);
        }
        let line = figures.describe(view.info.as_ref().map(|info| info.num_hidden_layers));
        let at = pos2(area.left(), y + height / 2.0 + 8.0);
        let shown = text(&painter, at, Align2::LEFT_CENTER, &line, fonts::small(), theme.t3, area.width());
        describe(ui, shown, "inputs", &line).on_hover_text(
            "L: blocks whose inputs travel; c: a copy back; g: the backward pass of a block; s: a build of metadata",
        );
    });
}

fn row_of(ui: &mut Ui, rect: Rect, row: &Row) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let y = rect.center().y;
    let put = |distance: f32, words: &str, font, color| {
        let at = pos2(rect.right() - distance, y);
        text(&painter, at, Align2::RIGHT_CENTER, words, font, color, 80.0)
    };
    let predicted = row.predicted.map(figure);
    let color = if predicted.is_some() { theme.t2 } else { theme.tdis };
    let shown = put(PREDICTED, predicted.as_deref().unwrap_or(figures::NONE), fonts::table(), color);
    let name = if row.unit == "ms" { row.name.to_owned() } else { format!("{}, {}", row.name, row.unit) };
    let named = text(&painter, rect.left_center(), Align2::LEFT_CENTER, &name, fonts::table(), theme.t1, 140.0);
    let from = named.right().max(rect.left() + FORMULA - 8.0) + 8.0;
    let room = shown.left() - 6.0 - from;
    text(&painter, pos2(from, y), Align2::LEFT_CENTER, row.formula, fonts::small(), theme.t3, room);
    let measured = row.measured.map(figure);
    match &measured {
        Some(measured) => {
            put(MEASURED, measured, fonts::medium(12.0), theme.t1);
            let deviation = row.deviation().map(deviation);
            let color = if deviation.is_some() { theme.t2 } else { theme.tdis };
            put(0.0, deviation.as_deref().unwrap_or(figures::NONE), fonts::table(), color);
        }
        None => {
            put(0.0, "not measured", fonts::small(), theme.t3);
        }
    }
    let predicted =
        predicted.map_or_else(|| "nothing predicted".into(), |value| format!("predicted {value} {}", row.unit));
    let measured = match measured {
        Some(value) => format!("measured {value} {}", row.unit),
        None => format!("not measured: {}", row.missing),
    };
    let words = format!("{} {}: {predicted}, {measured}", row.name, row.formula);
    describe(ui, rect, row.name, &words).on_hover_text(&words);
}

/// One decimal, and none from a thousand on.
fn figure(value: f64) -> String {
    figures::grouped(value, if value.abs() < 1_000.0 { 1 } else { 0 })
}

/// Per cent, or how many times as much where that says more.
fn deviation(percent: f64) -> String {
    match percent {
        percent if percent >= 900.0 => format!("{}×", figures::grouped(percent / 100.0 + 1.0, 0)),
        percent if percent.abs() >= 100.0 => figures::signed(percent, 0),
        percent => figures::signed(percent, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_fit_their_columns() {
        assert_eq!([figure(12_492.2), figure(482.94), figure(0.2)], ["12,492", "482.9", "0.2"]);
        assert_eq!([deviation(1_468.6), deviation(-104.2), deviation(3.71)], ["16×", "−104", "+3.7"]);
    }
}
