//! Losses of both arms over each other, and their difference below.

use egui::accesskit::Role;
use egui::{Align2, Painter, Pos2, Rect, Sense, Shape, Stroke, Ui, WidgetInfo, lerp, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::views::live::series::{decimals, ticks};
use crate::gui::widgets::{Tile, label, text};
use crate::gui::{figures, fonts};
use crate::session::compare::{CompareReport, Parity};

const LEFT: f32 = 52.0;
const RIGHT: f32 = 60.0;
/// Height of the strip of differences.
const STRIP: f32 = 46.0;

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        label(ui, "steps of one block; all blocks run the same", fonts::small(), theme.t3);
    };
    Tile::new("Loss, overlaid").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let plot =
            Rect::from_min_max(area.min + vec2(LEFT, 22.0), pos2(area.right() - RIGHT, area.bottom() - STRIP - 44.0));
        let strip =
            Rect::from_min_max(pos2(plot.left(), plot.bottom() + 26.0), pos2(plot.right(), area.bottom() - 18.0));
        let steps = report.losses[0].len().max(report.losses[1].len());
        let x_of = |i: usize| lerp(plot.x_range().shrink(6.0).min..=plot.x_range().shrink(6.0).max, share(i, steps));
        let painter = ui.painter().clone();
        legend(&painter, theme, pos2(plot.left(), area.top() + 7.0), report);
        curves(&painter, theme, plot, report, &x_of);
        let words = describe(report);
        difference(&painter, theme, strip, report, &x_of);
        axis(&painter, theme, strip, steps, &x_of);
        let image = ui.interact(Rect::from_min_max(plot.min, strip.max), ui.scope_id().with("losses"), Sense::hover());
        image.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    });
}

/// Where step `i` of `steps` is between the ends of the axis; a single one is in the middle.
fn share(i: usize, steps: usize) -> f32 {
    if steps > 1 { i as f32 / (steps - 1) as f32 } else { 0.5 }
}

fn describe(report: &CompareReport) -> String {
    let Parity { bit_equal, max_loss_difference, .. } = report.parity;
    if bit_equal {
        "Losses of both arms have the same bits".into()
    } else {
        format!("Losses of the arms differ by at most {max_loss_difference:.1e}")
    }
}

/// The arms in their lines: A broad, B thin over it.
fn legend(painter: &Painter, theme: &Theme, at: Pos2, report: &CompareReport) {
    let mut x = at.x;
    for (i, arm) in report.arms.iter().enumerate() {
        let y = painter.round_to_pixel_center(at.y);
        line(painter, theme, &[pos2(x, y), pos2(x + 22.0, y)], i);
        let from = pos2(x + 30.0, at.y);
        x = text(painter, from, Align2::LEFT_CENTER, &arm.label, fonts::small(), theme.t2, 120.0).right() + 20.0;
    }
}

fn line(painter: &Painter, theme: &Theme, points: &[Pos2], arm: usize) {
    if arm == 0 {
        painter.line(points.to_vec(), Stroke::new(3.2, theme.runs[0]));
    } else {
        painter.extend(Shape::dashed_line(points, Stroke::new(1.4, theme.runs[1]), 6.0, 4.0));
    }
}

fn curves(painter: &Painter, theme: &Theme, plot: Rect, report: &CompareReport, x_of: &dyn Fn(usize) -> f32) {
    let values = || report.losses.iter().flatten().copied().filter(|loss| loss.is_finite());
    let (low, high) = values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return;
    }
    let pad = ((high - low) * 0.12).max(0.01 * high.abs()).max(1e-6);
    let (low, high) = (low - pad, high + pad);
    let y_of = |loss: f64| lerp(plot.bottom()..=plot.top(), ((loss - low) / (high - low)) as f32);
    let levels = ticks(low, high, (plot.height() / 40.0).clamp(2.0, 5.0) as usize);
    let digits = decimals(&levels).max(2);
    for level in levels {
        let y = painter.round_to_pixel_center(y_of(level));
        painter.hline(plot.x_range(), y, Stroke::new(1.0, theme.grid));
        let figure = figures::grouped(level, digits);
        text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, &figure, fonts::small(), theme.t3, LEFT);
    }
    for (arm, losses) in report.losses.iter().enumerate() {
        let points: Vec<Pos2> = losses
            .iter()
            .enumerate()
            .filter(|(_, loss)| loss.is_finite())
            .map(|(i, loss)| pos2(x_of(i), y_of(*loss)))
            .collect();
        line(painter, theme, &points, arm);
    }
    if let Some(last) = report.losses[0].last().filter(|last| last.is_finite()) {
        let at = pos2(plot.right() + 6.0, y_of(*last));
        text(painter, at, Align2::LEFT_CENTER, &figures::loss(*last), fonts::table(), theme.t1, RIGHT);
    }
}

/// A − B of every step, with the band of what rounding explains where the arms sum in another order.
fn difference(painter: &Painter, theme: &Theme, strip: Rect, report: &CompareReport, x_of: &dyn Fn(usize) -> f32) {
    let differences: Vec<f64> = report.losses[0].iter().zip(&report.losses[1]).map(|(a, b)| a - b).collect();
    let band = if report.parity.must_be_bit_equal { 0.0 } else { Parity::TOLERANCE };
    let most = differences.iter().map(|d| d.abs()).filter(|d| d.is_finite()).fold(band, f64::max);
    let y_of = |value: f64| {
        let share = if most > 0.0 { value / (1.25 * most) } else { 0.0 };
        strip.center().y - strip.height() / 2.0 * share as f32
    };
    let caption = strip.top() - 9.0;
    text(painter, pos2(strip.left(), caption), Align2::LEFT_CENTER, "A − B", fonts::small(), theme.t3, 60.0);
    let words = if report.parity.bit_equal {
        "every loss and gradient norm has the same bits".into()
    } else if band > 0.0 {
        format!("band: ±{band:.4}, rounding in another order")
    } else {
        "the arms must have the same bits, and do not".to_owned()
    };
    let at = pos2(strip.right(), caption);
    text(painter, at, Align2::RIGHT_CENTER, &words, fonts::small(), theme.t3, strip.width() - 60.0);
    painter.rect_filled(strip, 0, theme.bg2);
    if band > 0.0 {
        let band = Rect::from_x_y_ranges(strip.x_range(), y_of(band)..=y_of(-band));
        painter.rect_filled(band, 0, theme.bg3);
    }
    let zero = painter.round_to_pixel_center(y_of(0.0));
    painter.hline(strip.x_range(), zero, Stroke::new(1.0, theme.line2));
    let figure = |y: f32, words: &str| {
        text(painter, pos2(strip.left() - 8.0, y), Align2::RIGHT_CENTER, words, fonts::small(), theme.t3, LEFT);
    };
    figure(zero, "0");
    if most > 0.0 {
        figure(y_of(most), &format!("+{most:.0e}").replace("e-", "e−"));
        figure(y_of(-most), &format!("−{most:.0e}").replace("e-", "e−"));
    }
    for (i, value) in differences.iter().enumerate().filter(|(_, value)| value.is_finite()) {
        let x = painter.round_to_pixel_center(x_of(i));
        if *value == 0.0 {
            painter.circle_filled(pos2(x, zero), 1.5, theme.t2);
        } else {
            painter.vline(x, y_of(value.max(0.0))..=y_of(value.min(0.0)), Stroke::new(2.0, theme.t2));
        }
    }
}

fn axis(painter: &Painter, theme: &Theme, strip: Rect, steps: usize, x_of: &dyn Fn(usize) -> f32) {
    let y = strip.bottom() + 10.0;
    text(painter, pos2(strip.left() - 8.0, y), Align2::RIGHT_CENTER, "step", fonts::small(), theme.t3, LEFT);
    let every = steps.div_ceil(12).max(1);
    for i in (0..steps).step_by(every) {
        let words = (i + 1).to_string();
        text(painter, pos2(x_of(i), y), Align2::CENTER_CENTER, &words, fonts::small(), theme.t3, 40.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_spread_over_the_axis() {
        assert_eq!([share(0, 3), share(1, 3), share(2, 3), share(0, 1)], [0.0, 0.5, 1.0, 0.5]);
    }
}
