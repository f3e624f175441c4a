//! What models predicted beside what was measured, and beside what was published.

use egui::{Align2, Rect, Ui, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, describe, label, rule, text, tile};
use crate::gui::{figures, fonts};
use crate::session::compare::{CompareReport, Prediction, Quantities};

const HEAD: f32 = 18.0;
const ROW: f32 = 35.0;
/// What is published takes a line of its own.
const PUBLISHED: f32 = 13.0;
/// Distance of the right edges of the figures from the table's right edge.
const PREDICTED: f32 = 184.0;
const MEASURED: f32 = 118.0;
const INTERVAL: f32 = 62.0;

/// Height that the tile needs.
pub fn height(report: &CompareReport) -> f32 {
    tile::TITLE_HEIGHT + 16.0 + HEAD + report.predictions.iter().map(row_height).sum::<f32>()
}

fn row_height(prediction: &Prediction) -> f32 {
    if prediction.published.is_some() { ROW + PUBLISHED } else { ROW }
}

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let quantities = quantities(&report.quantities);
    let note = |ui: &mut Ui| {
        label(ui, &quantities, fonts::small(), theme.t3);
    };
    Tile::new("Predicted against measured").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let painter = ui.painter().clone();
        let y = area.top() + 6.0;
        let formula = area.left() + (area.width() * 0.27).max(150.0);
        text(&painter, pos2(area.left(), y), Align2::LEFT_CENTER, "ms a step", fonts::small(), theme.t3, 90.0);
        text(&painter, pos2(formula, y), Align2::LEFT_CENTER, "model", fonts::small(), theme.t3, 90.0);
        for (distance, words) in
            [(PREDICTED, "predicted"), (MEASURED, "measured"), (INTERVAL, "95 %"), (0.0, "steps/s, %")]
        {
            let at = pos2(area.right() - distance, y);
            text(&painter, at, Align2::RIGHT_CENTER, words, fonts::small(), theme.t3, 80.0);
        }
        let mut top = area.top() + HEAD;
        for (i, prediction) in report.predictions.iter().enumerate() {
            let line = Rect::from_min_size(pos2(area.left(), top), vec2(area.width(), row_height(prediction)));
            top = line.bottom();
            if i > 0 {
                rule(&painter, line.x_range(), line.top() - 0.5, theme.line);
            }
            row(ui, line, formula, prediction);
        }
    });
}

fn row(ui: &mut Ui, rect: Rect, formula: f32, prediction: &Prediction) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let (y, below) = (rect.top() + 10.0, rect.top() + 25.0);
    let Prediction { name, predicted_ms, measured_ms, half_interval_ms, gain_percent, published, why, .. } = prediction;
    let room = formula - rect.left() - 8.0;
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, name, fonts::medium(12.0), theme.t1, room);
    let room = rect.right() - PREDICTED - 62.0 - formula;
    text(&painter, pos2(formula, y), Align2::LEFT_CENTER, &prediction.formula, fonts::small(), theme.t3, room);
    let put = |distance: f32, words: Option<&str>, font, color| {
        let (words, color) = words.map_or((figures::NONE, theme.tdis), |words| (words, color));
        let at = pos2(rect.right() - distance, y);
        text(&painter, at, Align2::RIGHT_CENTER, words, font, color, 64.0);
    };
    let change = |ms: Option<f64>| ms.map(|ms| figures::signed(ms, digits(ms)));
    let (predicted, measured) = (change(*predicted_ms), change(*measured_ms));
    let half = half_interval_ms.map(|half| format!("±{}", figures::grouped(half, digits(half))));
    let gain = gain_percent.map(|gain| figures::signed(gain, 1));
    put(PREDICTED, predicted.as_deref(), fonts::table(), theme.t2);
    put(MEASURED, measured.as_deref(), fonts::medium(12.0), theme.t1);
    put(INTERVAL, half.as_deref(), fonts::table(), theme.t3);
    put(0.0, gain.as_deref(), fonts::table(), theme.t2);
    let published = published.as_ref().map(|published| format!("published: {published}"));
    let lines: Vec<&str> = [why.as_str()].into_iter().chain(published.as_deref()).filter(|w| !w.is_empty()).collect();
    for (i, line) in lines.iter().enumerate() {
        let at = pos2(rect.left(), below + i as f32 * PUBLISHED);
        text(&painter, at, Align2::LEFT_CENTER, line, fonts::small(), theme.t3, rect.width());
    }
    let words = format!(
        "{name}: predicted {} ms, measured {} ms {}. {}",
        predicted.as_deref().unwrap_or("no"),
        measured.as_deref().unwrap_or("no"),
        half.as_deref().unwrap_or_default(),
        lines.join("; "),
    );
    describe(ui, rect, name, &words).on_hover_text(&words);
}

/// Decimals worth showing of so many milliseconds.
fn digits(ms: f64) -> usize {
    if ms.abs() < 10.0 { 2 } else { 1 }
}

/// The run's own numbers in a line.
fn quantities(q: &Quantities) -> String {
    let mut parts = vec![match q.num_offloaded {
        Some(travel) => format!("L {travel} of {}", q.num_blocks),
        None => format!("L {}", q.num_blocks),
    }];
    for (name, ms) in [("c", q.reload_ms), ("g", q.block_backward_ms), ("s", q.build_ms)] {
        parts.extend(ms.map(|ms| format!("{name} {} ms", figures::grouped(ms, digits(ms)))));
    }
    parts.push(format!("T {} ms", figures::grouped(q.step_ms, 1)));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_measured_is_listed() {
        let mut q = Quantities { num_blocks: 36, step_ms: 703.04, build_ms: Some(0.19), ..Quantities::default() };
        assert_eq!(quantities(&q), "L 36, s 0.19 ms, T 703.0 ms");
        (q.num_offloaded, q.reload_ms) = (Some(35), Some(14.25));
        assert_eq!(quantities(&q), "L 35 of 36, c 14.2 ms, s 0.19 ms, T 703.0 ms");
    }
}
