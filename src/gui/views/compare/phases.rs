//! The mean step of both arms by phase: a bar each, and what every phase gains or costs.

use egui::accesskit::Role;
use egui::{Align2, Painter, Rect, Sense, Stroke, Ui, WidgetInfo, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::views::live::series::{decimals, ticks};
use crate::gui::widgets::hatch::hatch;
use crate::gui::widgets::{Tile, describe, label, rule, swatch, text, tile};
use crate::gui::{figures, fonts};
use crate::session::Phase;
use crate::session::compare::CompareReport;

const LEFT: f32 = 48.0;
const RIGHT: f32 = 60.0;
/// Entries of the legend in a row.
const IN_A_ROW: usize = 4;

/// Height of a bar and of an entry of the legend, at least.
const BAR: f32 = 17.0;
const ENTRY: f32 = 18.0;
/// Height of the axis and the gaps around the bars.
const AXIS: f32 = 36.0;
/// Phases shorter than this in both arms would be listed without a figure.
const SHORTEST_MS: f64 = 0.05;

/// Height that the tile needs.
pub fn height(report: &CompareReport) -> f32 {
    let rows = known_phases(report).len().div_ceil(IN_A_ROW).max(1);
    tile::TITLE_HEIGHT + 16.0 + 2.0 * BAR + AXIS + rows as f32 * ENTRY
}

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        label(ui, "A − B in ms below; hatched is not attributed", fonts::small(), theme.t3);
    };
    Tile::new("Phases of the mean step").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let known = known_phases(report);
        let rows = known.len().div_ceil(IN_A_ROW).max(1);
        let entry = if area.height() > 165.0 { 22.0 } else { ENTRY };
        let legend_top = area.bottom() - rows as f32 * entry;
        let bars = Rect::from_min_max(area.min + vec2(LEFT, 2.0), pos2(area.right() - RIGHT, legend_top - 26.0));
        self::bars(ui, bars, report);
        rule(ui.painter(), area.x_range(), legend_top - 4.0, theme.line);
        for (i, (phase, difference)) in known.into_iter().enumerate() {
            let width = (area.width() + 16.0) / IN_A_ROW as f32;
            let corner = pos2(area.left() + (i % IN_A_ROW) as f32 * width, legend_top + (i / IN_A_ROW) as f32 * entry);
            legend(ui, Rect::from_min_size(corner, vec2(width - 16.0, entry)), phase, difference);
        }
    });
}

fn total(report: &CompareReport, arm: usize, phase: Phase) -> Option<f64> {
    report.phases[arm].iter().find(|time| time.phase == phase)?.total_ms()
}

/// Phases that take time in an arm, with A − B in milliseconds; what an arm does not have counts as nothing there.
fn known_phases(report: &CompareReport) -> Vec<(Phase, f64)> {
    let of = |phase| {
        let [a, b] = [0, 1].map(|arm| total(report, arm, phase).unwrap_or_default());
        (a.max(b) >= SHORTEST_MS).then_some((phase, a - b))
    };
    Phase::ALL.into_iter().filter_map(of).collect()
}

fn bars(ui: &mut Ui, area: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let longest = report.step_ms[0].max(report.step_ms[1]).max(f64::MIN_POSITIVE);
    let scale = f64::from(area.width()) / longest;
    let levels = ticks(0.0, longest, (area.width() / 120.0).clamp(2.0, 6.0) as usize);
    let digits = decimals(&levels);
    for (i, level) in levels.iter().enumerate() {
        let x = painter.round_to_pixel_center(area.left() + (level * scale) as f32);
        painter.vline(x, area.y_range(), Stroke::new(1.0, theme.grid));
        let words = format!("{}{}", figures::grouped(*level, digits), if i == 0 { " ms" } else { "" });
        let (at, anchor) = if i == 0 { (area.left(), Align2::LEFT_CENTER) } else { (x, Align2::CENTER_CENTER) };
        text(&painter, pos2(at, area.bottom() + 9.0), anchor, &words, fonts::small(), theme.t3, 60.0);
    }
    let height = ((area.height() - 8.0) / 2.0).min(30.0);
    let gap = (area.height() - 2.0 * height) / 3.0;
    for arm in 0..2 {
        let top = area.top() + gap + arm as f32 * (height + gap);
        let bar = Rect::from_min_size(pos2(area.left(), top.round()), vec2(area.width(), height.round()));
        let at = pos2(bar.left() - 8.0, bar.center().y);
        text(&painter, at, Align2::RIGHT_CENTER, &report.arms[arm].label, fonts::table(), theme.t1, LEFT - 8.0);
        let end = segments(&painter, theme, bar, report, arm, scale);
        let words = figures::grouped(report.step_ms[arm], 1);
        text(
            &painter,
            pos2(end + 6.0, bar.center().y),
            Align2::LEFT_CENTER,
            &words,
            fonts::medium(12.0),
            theme.t1,
            60.0,
        );
        let words = format!("Phases of {}: {words} ms", report.arms[arm].label);
        let image = ui.interact(bar, ui.scope_id().with(("phases", arm)), Sense::hover());
        image.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    }
}

/// The parts of a bar, with their milliseconds where they fit; returns where it ends.
fn segments(painter: &Painter, theme: &Theme, bar: Rect, report: &CompareReport, arm: usize, scale: f64) -> f32 {
    let mut ms = 0.0;
    let part_to = |from: f64, to: f64| {
        let x = |ms: f64| bar.left() + (ms * scale) as f32;
        let part = Rect::from_x_y_ranges(x(from)..=x(to), bar.y_range());
        // A pixel of the tile parts what is broad enough.
        if part.width() > 2.0 { part.with_max_x(part.right() - 1.0) } else { part }
    };
    for phase in Phase::ALL {
        let Some(total) = total(report, arm, phase).filter(|ms| *ms > 0.0) else { continue };
        let part = part_to(ms, ms + total);
        ms += total;
        painter.rect_filled(part, 0, theme.phase(phase));
        let color = theme.on_phase(phase);
        let words =
            painter.layout_no_wrap(figures::grouped(total, if total < 10.0 { 1 } else { 0 }), fonts::small(), color);
        if words.size().x + 6.0 <= part.width() {
            painter.galley(part.center() - words.size() / 2.0, words, color);
        }
    }
    let rest = report.not_attributed_ms[arm].max(0.0);
    let part = part_to(ms, ms + rest);
    if part.width() >= 1.0 {
        hatch(painter, part, theme.t3, theme.bg3);
    }
    bar.left() + ((ms + rest) * scale) as f32
}

fn legend(ui: &mut Ui, rect: Rect, phase: Phase, difference: f64) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let y = rect.center().y;
    swatch(&painter, rect.left(), y).fill(&painter, theme.phase(phase));
    let words = figures::signed(difference, 1);
    let value = text(&painter, rect.right_center(), Align2::RIGHT_CENTER, &words, fonts::medium(12.0), theme.t1, 70.0);
    let at = pos2(rect.left() + 16.0, y);
    text(&painter, at, Align2::LEFT_CENTER, phase.name(), fonts::table(), theme.t2, value.left() - at.x - 4.0);
    describe(ui, rect, phase.name(), &format!("{}: A − B {words} ms", phase.name()));
}
