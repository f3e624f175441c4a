//! Where the tiles of Compare lie: two columns under the verdict, or one to scroll through in a narrow window.

use egui::{Rect, Vec2, pos2};

use super::{differences, phases, predictions, settings};
use crate::session::compare::CompareReport;

/// Below this width there is one column.
const WIDE: f32 = 1130.0;

/// The place of every tile, from the upper left corner of the area; a pixel of line parts them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Layout {
    /// Height of all.
    pub height: f32,
    /// Whether that is more than the area has.
    pub scrolls: bool,
    /// The verdict.
    pub verdict: Rect,
    /// Differences.
    pub differences: Rect,
    /// Losses.
    pub losses: Rect,
    /// Phases.
    pub phases: Rect,
    /// Pairs.
    pub pairs: Rect,
    /// Predictions.
    pub predictions: Rect,
    /// Settings.
    pub settings: Rect,
}

impl Layout {
    /// The layout for a report in an area of `size`.
    pub fn of(size: Vec2, report: &CompareReport) -> Self {
        let tables = predictions::height(report).max(settings::height(report));
        let needs = [differences::height(report), phases::height(report), tables];
        if size.x >= WIDE { two_columns(size, needs) } else { one_column(size, report) }
    }
}

fn two_columns(size: Vec2, [differences, phases, tables]: [f32; 3]) -> Layout {
    let roomy = size.y >= 720.0;
    let (verdict, middle): (f32, f32) = if roomy { (84.0, 196.0) } else { (72.0, 142.0) };
    let middle = middle.max(phases);
    let needed = verdict + differences + middle + tables + 3.0;
    let height = needed.round().max(size.y);
    // Plots have more of the room that is left than tables.
    let left = height - needed;
    let upper = (differences + 0.5 * left).round();
    let middle = (middle + 0.25 * left).round();
    let half = (size.x / 2.0).round();
    let tops = [0.0, verdict + 1.0, verdict + upper + 2.0, verdict + upper + middle + 3.0];
    let cell = |column: usize, top: f32, bottom: f32| {
        let x = if column == 0 { (0.0, half) } else { (half + 1.0, size.x) };
        Rect::from_min_max(pos2(x.0, top), pos2(x.1, bottom))
    };
    Layout {
        height,
        scrolls: height > size.y,
        verdict: Rect::from_min_max(pos2(0.0, 0.0), pos2(size.x, verdict)),
        differences: cell(0, tops[1], tops[2] - 1.0),
        losses: cell(1, tops[1], tops[2] - 1.0),
        phases: cell(0, tops[2], tops[3] - 1.0),
        pairs: cell(1, tops[2], tops[3] - 1.0),
        predictions: cell(0, tops[3], height),
        settings: cell(1, tops[3], height),
    }
}

fn one_column(size: Vec2, report: &CompareReport) -> Layout {
    let heights =
        [84.0, differences::height(report), 260.0, 206.0, 200.0, predictions::height(report), settings::height(report)];
    let mut top = 0.0;
    let [verdict, differences, losses, phases, pairs, predictions, settings] = heights.map(|height: f32| {
        let tile = Rect::from_min_max(pos2(0.0, top), pos2(size.x, top + height.round()));
        top = tile.bottom() + 1.0;
        tile
    });
    let height = (top - 1.0).max(size.y);
    let settings = settings.with_max_y(height);
    let scrolls = height > size.y;
    Layout { height, scrolls, verdict, differences, losses, phases, pairs, predictions, settings }
}
