//! The table of differences: both arms, A − B with its interval, and a bar in percent.

use egui::{Align2, Color32, Painter, Rangef, Rect, Stroke, Ui, pos2, vec2};

use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, describe, label, text, tile};
use crate::gui::{figures, fonts};
use crate::session::compare::{Better, CompareReport, Difference, Effect};

/// Height of the head, and the least of a row.
const HEAD: f32 = 18.0;
const ROW: f32 = 15.0;
/// Ends that the axis of the bars may have, in percent.
const SCALES: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

/// Height that the tile needs.
pub fn height(report: &CompareReport) -> f32 {
    tile::TITLE_HEIGHT + 16.0 + HEAD + ROW * report.rows.len() as f32
}

/// Draws the tile.
pub fn show(ui: &mut Ui, rect: Rect, report: &CompareReport) {
    let theme = Theme::of(ui);
    let note = |ui: &mut Ui| {
        let words = format!("paired t over {} pairs; green is better, amber is a cost", report.pairs);
        label(ui, &words, fonts::small(), theme.t3);
    };
    Tile::new("Differences").show(ui, rect, note, |ui| {
        let area = ui.max_rect();
        let columns = Columns::of(area);
        let scale = scale(&report.rows);
        head(ui, area, &columns, report, scale);
        let height = ((area.height() - HEAD) / report.rows.len().max(1) as f32).clamp(ROW, 24.0);
        let painter = ui.painter().clone();
        let top = area.top() + HEAD;
        let zero = painter.round_to_pixel_center(columns.bar.center());
        let bottom = top + height * report.rows.len() as f32;
        painter.vline(zero, top..=bottom, Stroke::new(1.0, theme.line2));
        for (i, row) in report.rows.iter().enumerate() {
            let line = Rect::from_min_size(pos2(area.left(), top + i as f32 * height), vec2(area.width(), height));
            self::row(ui, line, &columns, row, scale);
        }
    });
}

/// Right edges of the figures, and where the bars are.
struct Columns {
    a: f32,
    b: f32,
    difference: f32,
    interval: f32,
    percent: f32,
    bar: Rangef,
}

impl Columns {
    fn of(area: Rect) -> Self {
        let bar = (area.width() * 0.16).clamp(84.0, 150.0);
        let spread = ((area.width() - 660.0) / 6.0).clamp(0.0, 24.0);
        let percent = area.right() - bar - 12.0;
        let interval = percent - 44.0 - spread;
        let difference = interval - 121.0 - spread;
        let b = difference - 58.0 - spread;
        let a = b - 54.0 - spread;
        Self { a, b, difference, interval, percent, bar: Rangef::new(area.right() - bar, area.right()) }
    }
}

/// Where the axis of the bars ends, in percent: a round value that holds every bar, and the interval of the first row, which is the step's. An interval
/// of little moment that reaches farther ends with the axis; the figures beside it tell where it ends.
fn scale(rows: &[Difference]) -> f64 {
    let interval = rows.first().and_then(percent_interval).unwrap_or_default();
    let ends = rows.iter().filter_map(|row| row.percent).chain(interval);
    let most = ends.map(f64::abs).filter(|end| end.is_finite()).fold(0.0, f64::max);
    SCALES.into_iter().find(|scale| most <= *scale).unwrap_or(SCALES[SCALES.len() - 1])
}

/// The interval of a row in percent of B; `None` where there is no ratio.
fn percent_interval(row: &Difference) -> Option<[f64; 2]> {
    row.percent?;
    let b = row.b.filter(|b| *b != 0.0)?;
    row.interval.map(|interval| interval.map(|end| 100.0 * end / b))
}

/// The change in percent, in a word where it cannot be told from none.
fn change(row: &Difference) -> String {
    let same = match row.interval {
        Some([low, high]) => low <= 0.0 && high >= 0.0,
        None => row.exact && row.difference == Some(0.0),
    };
    match row.percent {
        _ if same => "same".into(),
        Some(percent) => figures::signed(percent, 1),
        None => figures::NONE.into(),
    }
}

/// Decimals of a row's value: fewer than the row's where there are many digits before them.
fn decimals(row: &Difference, value: f64) -> usize {
    let most = match value.abs() {
        size if size >= 10_000.0 => 0,
        size if size >= 1_000.0 => 1,
        size if size >= 10.0 => 4,
        _ => row.decimals,
    };
    row.decimals.min(most)
}

fn interval(row: &Difference) -> String {
    match row.interval {
        Some([low, high]) => {
            // The two ends share the room of one column.
            let most = low.abs().max(high.abs());
            let digits = if most >= 1_000.0 { 0 } else { decimals(row, most) };
            format!("{} to {}", figures::signed(low, digits), figures::signed(high, digits))
        }
        None if row.exact && row.difference.is_some() => "exact".into(),
        None => figures::NONE.into(),
    }
}

fn head(ui: &Ui, area: Rect, columns: &Columns, report: &CompareReport, scale: f64) {
    let theme = Theme::of(ui);
    let painter = ui.painter();
    let y = area.top() + 6.0;
    let put = |x: f32, anchor: Align2, words: &str| {
        text(painter, pos2(x, y), anchor, words, fonts::small(), theme.t3, 100.0);
    };
    let steps = format!("mean of {} steps each", report.pairs * report.steps_per_block);
    let room = columns.a - 40.0 - area.left();
    text(painter, pos2(area.left(), y), Align2::LEFT_CENTER, &steps, fonts::small(), theme.t3, room);
    let [a, b] = [0, 1].map(|arm| report.arms[arm].label.as_str());
    for (x, words) in [
        (columns.a, a),
        (columns.b, b),
        (columns.difference, "A − B"),
        (columns.interval, "95 % interval"),
        (columns.percent, "%"),
    ] {
        put(x, Align2::RIGHT_CENTER, words);
    }
    let end = figures::grouped(scale, 0);
    put(columns.bar.min, Align2::LEFT_CENTER, &format!("−{end}"));
    put(columns.bar.center(), Align2::CENTER_CENTER, "0 %");
    put(columns.bar.max, Align2::RIGHT_CENTER, &format!("+{end}"));
}

fn row(ui: &mut Ui, rect: Rect, columns: &Columns, row: &Difference, scale: f64) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let y = rect.center().y;
    let put = |x: f32, words: &str, font, color, room: f32| {
        text(&painter, pos2(x, y), Align2::RIGHT_CENTER, words, font, color, room);
    };
    let name = if row.unit.is_empty() { row.name.clone() } else { format!("{}, {}", row.name, row.unit) };
    let room = columns.a - 50.0 - rect.left();
    text(&painter, rect.left_center(), Align2::LEFT_CENTER, &name, fonts::table(), theme.t1, room);
    let value =
        |value: Option<f64>| value.map_or(figures::NONE.into(), |value| figures::grouped(value, decimals(row, value)));
    let known = |value: Option<f64>, color: Color32| if value.is_some() { color } else { theme.tdis };
    let (a, b) = (value(row.a), value(row.b));
    let difference = row.difference.map_or(figures::NONE.into(), |value| figures::signed(value, decimals(row, value)));
    let (interval, change) = (interval(row), change(row));
    put(columns.a, &a, fonts::medium(12.0), known(row.a, theme.t1), 70.0);
    put(columns.b, &b, fonts::table(), known(row.b, theme.t2), 70.0);
    put(columns.difference, &difference, fonts::medium(12.0), known(row.difference, theme.t1), 70.0);
    put(columns.interval, &interval, fonts::table(), theme.t3, 134.0);
    let color = match change.as_str() {
        figures::NONE => theme.tdis,
        // Better or worse by less than is shown.
        "0.0" => theme.t2,
        _ => color(theme, row.effect()),
    };
    put(columns.percent, &change, fonts::table(), color, 60.0);
    bar(&painter, theme, columns.bar, rect, row, scale);
    let verdict = match row.effect() {
        Effect::Gain => ", better",
        Effect::Cost => ", a cost",
        Effect::None => "",
    };
    let change = match change.as_str() {
        "same" => change,
        figures::NONE => "no ratio".into(),
        _ => format!("{change} %"),
    };
    let words = format!("{name}: {a} against {b}, A − B {difference}, 95 % interval {interval}, {change}{verdict}");
    describe(ui, rect, &row.name, &words);
}

fn color(theme: &Theme, effect: Effect) -> Color32 {
    match effect {
        Effect::Gain => theme.ok,
        Effect::Cost => theme.warn,
        Effect::None => theme.t2,
    }
}

/// From zero to the change, with the ends of its interval.
fn bar(painter: &Painter, theme: &Theme, x: Rangef, rect: Rect, row: &Difference, scale: f64) {
    let y = rect.center().y;
    let Some(percent) = row.percent else {
        if row.better != Better::Neither && row.difference.is_some_and(|difference| difference != 0.0) {
            let at = pos2(x.center() + 6.0, y);
            text(painter, at, Align2::LEFT_CENTER, "no ratio", fonts::small(), theme.t3, 60.0);
        }
        return;
    };
    let at = |percent: f64| x.center() + x.span() / 2.0 * (percent / scale).clamp(-1.0, 1.0) as f32;
    let color = color(theme, row.effect());
    let (from, to) = (at(percent.min(0.0)), at(percent.max(0.0)));
    let part = Rect::from_x_y_ranges(from..=to.max(from + 1.0), (y - 3.0)..=(y + 3.0));
    painter.rect_filled(part, 0, color);
    if let Some([low, high]) = percent_interval(row) {
        let (low, high) = (at(low.min(high)), at(low.max(high)));
        painter.hline(low..=high, painter.round_to_pixel_center(y), Stroke::new(1.0, theme.t1));
        for end in [low, high] {
            painter.vline(painter.round_to_pixel_center(end), (y - 5.0)..=(y + 5.0), Stroke::new(1.0, color));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(percent: Option<f64>, interval: Option<[f64; 2]>) -> Difference {
        Difference {
            name: "Step".into(),
            unit: "ms".into(),
            decimals: 1,
            a: Some(90.0),
            b: Some(200.0),
            difference: Some(-110.0),
            interval,
            exact: interval.is_none(),
            percent,
            better: Better::Lower,
        }
    }

    #[test]
    fn the_axis_holds_every_bar_and_the_interval_of_the_step() {
        assert_eq!(scale(&[difference(Some(-0.3), None)]), 1.0);
        // −110 to 8 ms of 200 ms.
        let row = difference(Some(-30.0), Some([-110.0, 8.0]));
        assert_eq!(percent_interval(&row), Some([-55.0, 4.0]));
        assert_eq!(scale(&[row.clone(), difference(Some(-0.3), None)]), 100.0);
        assert_eq!(scale(&[difference(Some(-0.3), None), row]), 50.0);
        assert_eq!(scale(&[difference(None, Some([-1e9, 1e9]))]), 1.0, "without a ratio there is no bar");
        assert_eq!(scale(&[difference(Some(1e6), None)]), 1000.0);
    }

    #[test]
    fn what_may_be_nothing_is_called_the_same() {
        assert_eq!(change(&difference(Some(-3.0), Some([-7.0, 1.0]))), "same");
        assert_eq!(change(&difference(Some(-33.9), Some([-7.0, -1.0]))), "−33.9");
        assert_eq!(change(&difference(None, Some([1.0, 2.0]))), "—");
        assert_eq!(change(&Difference { difference: Some(0.0), ..difference(None, None) }), "same");
        assert_eq!(interval(&difference(None, Some([-363.94, 8.06]))), "−363.9 to +8.1");
        assert_eq!(interval(&difference(None, Some([-8_183.02, 3_217.15]))), "−8,183 to +3,217");
        assert_eq!(interval(&difference(None, None)), "exact");
    }
}
