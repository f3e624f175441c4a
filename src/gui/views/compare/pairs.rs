//! A − B of every pair as a dot, with their mean and its interval.

use egui::accesskit::Role;
use egui::{Align2, Rect, Sense, Stroke, Ui, WidgetInfo, lerp, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::views::live::series::{decimals, ticks};
use crate::gui::widgets::{Tile, label, text};
use crate::gui::{figures, fonts};
use crate::session::compare::{CompareReport, PairDifferences};

const LEFT: f32 = 52.0;
const RIGHT: f32 = 64.0;

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        label(ui, "line: mean, band: 95 % interval", fonts::small(), theme.t3);
    };
    Tile::new("Every pair, A − B in ms").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let plot = Rect::from_min_max(area.min + vec2(LEFT, 4.0), pos2(area.right() - RIGHT, area.bottom() - 20.0));
        let pairs = &report.pair_differences;
        let (low, high) = range(pairs);
        let painter = ui.painter().clone();
        let y_of = |ms: f64| lerp(plot.bottom()..=plot.top(), ((ms - low) / (high - low)) as f32);
        let levels = ticks(low, high, (plot.height() / 34.0).clamp(3.0, 6.0) as usize);
        let digits = decimals(&levels);
        for level in &levels {
            let y = painter.round_to_pixel_center(y_of(*level));
            let color = if *level == 0.0 { theme.line2 } else { theme.grid };
            painter.hline(plot.x_range(), y, Stroke::new(1.0, color));
            let figure = figures::grouped(*level, digits);
            text(&painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, &figure, fonts::small(), theme.t3, LEFT);
        }
        if let Some([from, to]) = pairs.interval_ms {
            painter.rect_filled(Rect::from_x_y_ranges(plot.x_range(), y_of(to)..=y_of(from)), 0, theme.acc_bg);
        }
        let mean = painter.round_to_pixel_center(y_of(pairs.mean_ms));
        painter.hline(plot.x_range(), mean, Stroke::new(1.0, theme.acc));
        let words = figures::signed(pairs.mean_ms, if pairs.mean_ms.abs() < 10.0 { 2 } else { 1 });
        let at = pos2(plot.right() + 6.0, mean);
        text(&painter, at, Align2::LEFT_CENTER, &words, fonts::medium(12.0), theme.acc, RIGHT);
        let count = pairs.ms.len();
        let x_of = |i: usize| lerp(plot.left() + 8.0..=plot.right() - 8.0, (i as f32 + 0.5) / count.max(1) as f32);
        for (i, ms) in pairs.ms.iter().enumerate() {
            painter.circle_filled(pos2(x_of(i), y_of(*ms)), 3.0, theme.t2);
        }
        let y = plot.bottom() + 12.0;
        text(&painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, "pair", fonts::small(), theme.t3, LEFT);
        for i in (0..count).filter(|i| labelled(*i, count)) {
            let words = (i + 1).to_string();
            text(&painter, pos2(x_of(i), y), Align2::CENTER_CENTER, &words, fonts::small(), theme.t3, 40.0);
        }
        let words = format!("{count} pairs, mean of A − B {words} ms");
        let image = ui.interact(plot, ui.scope_id().with("pairs"), Sense::hover());
        image.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    });
}

/// What the axis shows: all pairs and the interval of their mean, with room around.
fn range(pairs: &PairDifferences) -> (f64, f64) {
    let interval = pairs.interval_ms.unwrap_or([pairs.mean_ms; 2]);
    let values = || pairs.ms.iter().copied().chain(interval).filter(|ms| ms.is_finite());
    let (low, high) = values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (-1.0, 1.0);
    }
    let room = (0.12 * (high - low)).max(0.02 * high.abs().max(low.abs())).max(1e-3);
    (low - room, high + room)
}

/// Whether pair `i` of `count` has its number on the axis: the first, the last, and round ones.
fn labelled(i: usize, count: usize) -> bool {
    let every = if count <= 12 { 1 } else { count.div_ceil(60) * 10 };
    let number = i + 1;
    let far = count - number >= every.div_ceil(2);
    number == 1 || number == count || number.is_multiple_of(every) && (far || every == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_holds_all_pairs_and_the_interval() {
        let pairs = PairDifferences { ms: vec![-3.0, -5.0], mean_ms: -4.0, interval_ms: Some([-9.0, 1.0]) };
        let (low, high) = range(&pairs);
        assert!(low < -9.0 && high > 1.0);
        let one = PairDifferences { ms: vec![2.0], mean_ms: 2.0, interval_ms: None };
        let (low, high) = range(&one);
        assert!(low < 2.0 && high > 2.0);
    }

    #[test]
    fn round_pairs_have_numbers() {
        let labels = |count| (0..count).filter(|i| labelled(*i, count)).map(|i| i + 1).collect::<Vec<_>>();
        assert_eq!(labels(3), [1, 2, 3]);
        assert_eq!(labels(40), [1, 10, 20, 30, 40]);
        assert_eq!(labels(42), [1, 10, 20, 30, 42]);
    }
}
