//! The verdict: one sentence, the figures behind it, and which line is which arm.

use egui::{Align2, Rect, Shape, Stroke, Ui, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::widgets::{describe, text};
use crate::gui::{fonts, icons};
use crate::session::compare::{CompareReport, VerdictKind};

/// Width of the legend at the right.
const LEGEND: f32 = 290.0;

/// Draws the band; `notes` are lines of the comparison beside those of the report.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport, notes: &[String]) {
    let theme = Theme::of(ui);
    ui.painter().rect_filled(rect, 0, theme.bg1);
    let (icon, color) = match report.verdict.kind {
        VerdictKind::Faster => (icons::CHECK_CIRCLE, theme.ok),
        VerdictKind::Slower => (icons::WARNING, theme.warn),
        VerdictKind::NoDifference => (icons::INFO, theme.t2),
        VerdictKind::ResultsDiffer => (icons::X_CIRCLE, theme.err),
    };
    let lines: Vec<&str> = report.notes.iter().chain(notes).map(String::as_str).collect();
    let noted = !lines.is_empty();
    let middle = rect.center().y;
    let (first, second) = if noted { (middle - 19.0, middle + 4.0) } else { (middle - 11.0, middle + 14.0) };
    let icon_at = pos2(rect.left() + 30.0, middle);
    ui.painter().text(icon_at, Align2::CENTER_CENTER, icon, fonts::icon_fill(26.0), color);
    let left = rect.left() + 58.0;
    let room = rect.right() - LEGEND - 24.0 - left;
    let sentence = &report.verdict.sentence;
    let large = ui.painter().layout_no_wrap(sentence.clone(), fonts::medium(18.0), theme.t1).size().x <= room;
    let font = if large { fonts::medium(18.0) } else { fonts::stat() };
    let mut line = |y: f32, words: &str, font, color| {
        let shown = text(ui.painter(), pos2(left, y), Align2::LEFT_CENTER, words, font, color, room);
        describe(ui, shown, ("verdict", y as i32), words).on_hover_text(words);
    };
    line(first, sentence, font, theme.t1);
    line(second, &report.verdict.detail, fonts::table(), theme.t2);
    if noted {
        line(middle + 22.0, &lines.join("; "), fonts::small(), theme.t3);
    }
    legend(ui, rect, report);
}

/// The arms with their lines: A drawn through, B dashed.
fn legend(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let left = rect.right() - LEGEND;
    for (i, arm) in report.arms.iter().enumerate() {
        let y = painter.round_to_pixel_center(rect.center().y - 10.0 + 20.0 * i as f32);
        let ends = [pos2(left, y), pos2(left + 26.0, y)];
        let stroke = Stroke::new(1.8, theme.runs[i]);
        if i == 0 {
            painter.line_segment(ends, stroke);
        } else {
            painter.extend(Shape::dashed_line(&ends, stroke, 6.0, 4.0));
        }
        let words = format!("{}: {}", arm.label, arm.description);
        let at = pos2(left + 36.0, y);
        let shown =
            text(&painter, at, Align2::LEFT_CENTER, &words, fonts::small(), theme.t2, rect.right() - 12.0 - at.x);
        describe(ui, shown.expand2(vec2(0.0, 2.0)), ("arm", i), &words).on_hover_text(&words);
    }
}
