//! The fields of `run.toml` in which the arms differ.

use egui::{Align2, Rect, Ui, pos2, vec2};

use crate::gui::fonts;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, describe, label, text, tile};
use crate::session::compare::CompareReport;

const HEAD: f32 = 18.0;
const ROW: f32 = 22.0;

/// Height that the tile needs.
pub fn height(report: &CompareReport) -> f32 {
    tile::TITLE_HEIGHT + 16.0 + HEAD + ROW * report.settings.len().max(1) as f32
}

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        let words = if report.settings.len() == 1 { "1 field" } else { &format!("{} fields", report.settings.len()) };
        label(ui, words, fonts::small(), theme.t3);
    };
    Tile::new("Settings that differ").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let painter = ui.painter().clone();
        let columns = [0.0, 0.46, 0.74].map(|share| area.left() + area.width() * share);
        let heads = ["run.toml", report.arms[0].label.as_str(), report.arms[1].label.as_str()];
        for (x, words) in columns.into_iter().zip(heads) {
            let at = pos2(x, area.top() + 6.0);
            text(&painter, at, Align2::LEFT_CENTER, words, fonts::small(), theme.t3, 120.0);
        }
        for (i, setting) in report.settings.iter().enumerate() {
            let corner = pos2(area.left(), area.top() + HEAD + i as f32 * ROW);
            let line = Rect::from_min_size(corner, vec2(area.width(), ROW));
            let cells = [(&setting.field, theme.t2), (&setting.a, theme.t1), (&setting.b, theme.t1)];
            for (x, (words, color)) in columns.into_iter().zip(cells) {
                let at = pos2(x, line.center().y);
                text(&painter, at, Align2::LEFT_CENTER, words, fonts::mono(), color, area.width() * 0.44);
            }
            describe(ui, line, &setting.field, &format!("{} = {} against {}", setting.field, setting.a, setting.b));
        }
    });
}
