//! The plots of the HTML report, as SVG.

use std::fmt::Write as _;

use super::report::{CompareReport, Difference, Effect};
use super::text::{phases, with_sign};

/// Size of the larger plots, in units of their own; the page scales them.
const WIDTH: f64 = 680.0;
const HEIGHT: f64 = 240.0;
/// Room for figures at the left, the right and the bottom.
const LEFT: f64 = 72.0;
const RIGHT: f64 = 72.0;
const BOTTOM: f64 = 28.0;
const TOP: f64 = 10.0;

/// Draws into `svg`; writing to a string cannot fail.
macro_rules! draw {
    ($svg:expr, $($arguments:tt)*) => {
        let _ = write!($svg, $($arguments)*);
    };
}

fn open(width: f64, height: f64, label: &str) -> String {
    format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">")
}

/// A row's difference in percent with its interval, on an axis from −100 to +100 %; nothing where there is no ratio.
pub(super) fn interval_bar(row: &Difference) -> String {
    let Some((percent, b)) = row.percent.zip(row.b).filter(|(_, b)| *b != 0.0) else { return String::new() };
    let x = |percent: f64| 70.0 + 0.66 * percent.clamp(-100.0, 100.0);
    let class = match row.effect() {
        Effect::Gain => "gain",
        Effect::Cost => "cost",
        Effect::None => "same",
    };
    let (from, to) = (x(percent.min(0.0)), x(percent.max(0.0)));
    let mut svg = open(140.0, 16.0, "difference in percent");
    draw!(svg, "<rect class=\"{class}\" x=\"{from:.2}\" y=\"5\" width=\"{:.2}\" height=\"6\"/>", (to - from).max(0.5));
    draw!(svg, "<line class=\"axis\" x1=\"70\" x2=\"70\" y1=\"0\" y2=\"16\"/>");
    if let Some(interval) = row.interval {
        let [low, high] = interval.map(|end| x(100.0 * end / b));
        draw!(svg, "<path class=\"whisker\" d=\"M{low:.2} 4v8M{low:.2} 8H{high:.2}M{high:.2} 4v8\"/>");
    }
    svg + "</svg>"
}

/// Name of a phase as a class of the style sheet.
pub(super) fn phase_class(name: &str) -> String {
    format!("phase-{}", name.replace(' ', "-"))
}

/// The mean step of both arms, a bar of phases each.
pub(super) fn phase_bars(report: &CompareReport) -> String {
    let longest = report.step_ms[0].max(report.step_ms[1]).max(f64::MIN_POSITIVE);
    let scale = (WIDTH - 40.0 - 96.0) / longest;
    let mut svg = open(WIDTH, 96.0, "phases of the mean step");
    svg += "<defs><pattern id=\"hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
            <line class=\"hatch\" x1=\"0\" x2=\"0\" y1=\"0\" y2=\"5\"/></pattern></defs>";
    for (arm, name) in ["A", "B"].into_iter().enumerate() {
        let (y, mut x) = (8.0 + 44.0 * arm as f64, 40.0);
        draw!(svg, "<text x=\"8\" y=\"{}\">{name}</text>", y + 20.0);
        for (phase, times) in phases(report) {
            let width = times[arm].unwrap_or(0.0) * scale;
            let class = phase_class(phase);
            let shown = times[arm].unwrap_or(0.0);
            draw!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"32\"><title>{phase}: {shown:.3} ms</title></rect>",
                (width - 0.5).max(0.0)
            );
            x += width;
        }
        let end = (x + 6.0).max(46.0);
        draw!(svg, "<text class=\"value\" x=\"{end:.2}\" y=\"{}\">{:.1} ms</text>", y + 20.0, report.step_ms[arm]);
    }
    svg + "</svg>"
}

/// Where values of a plot lie.
struct Axes {
    low: f64,
    high: f64,
    num: usize,
}

impl Axes {
    /// Axes for values at places 0 to `num` − 1; `None` when none is finite.
    fn around(values: impl Iterator<Item = f64>, num: usize) -> Option<Self> {
        let finite = values.filter(|value| value.is_finite());
        let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            return None;
        }
        // Values that are all the same still need a height.
        let room = (0.08 * (high - low)).max(1e-6 * high.abs()).max(1e-9);
        Some(Self { low: low - room, high: high + room, num })
    }

    fn x(&self, at: usize) -> f64 {
        let steps = self.num.saturating_sub(1).max(1) as f64;
        LEFT + 8.0 + at as f64 / steps * (WIDTH - LEFT - RIGHT - 16.0)
    }

    fn y(&self, value: f64) -> f64 {
        TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
    }

    /// Grid, and figures at both axes.
    fn frame(&self, svg: &mut String, across: &str) {
        let decimals = (2.0 - (self.high - self.low).log10().floor()).clamp(0.0, 8.0) as usize;
        for i in 0..=4 {
            let value = self.low + (self.high - self.low) * f64::from(i) / 4.0;
            let y = self.y(value);
            draw!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.2}\" y2=\"{y:.2}\"/>", WIDTH - RIGHT);
            draw!(svg, "<text x=\"{}\" y=\"{:.2}\" text-anchor=\"end\">{value:.decimals$}</text>", LEFT - 8.0, y + 4.0);
        }
        let y = HEIGHT - 8.0;
        draw!(svg, "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{across}</text>", LEFT - 8.0);
        let mut places = vec![0, self.num / 2, self.num.saturating_sub(1)];
        places.dedup();
        for at in places {
            draw!(svg, "<text x=\"{:.2}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", self.x(at), at + 1);
        }
    }
}

/// Losses of both arms over the steps of a block.
pub(super) fn losses(report: &CompareReport) -> String {
    let [a, b] = &report.losses;
    let Some(axes) = Axes::around(a.iter().chain(b).copied(), a.len().max(b.len())) else { return String::new() };
    let mut svg = open(WIDTH, HEIGHT, "losses of both arms");
    axes.frame(&mut svg, "step");
    for (class, losses) in [("line-a", a), ("line-b", b)] {
        let points: Vec<String> =
            losses.iter().enumerate().map(|(at, loss)| format!("{:.2},{:.2}", axes.x(at), axes.y(*loss))).collect();
        draw!(svg, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    }
    if let Some(last) = a.last() {
        draw!(
            svg,
            "<text class=\"value\" x=\"{}\" y=\"{:.2}\">{last:.4}</text>",
            WIDTH - RIGHT + 8.0,
            axes.y(*last) + 4.0
        );
    }
    svg + "</svg>"
}

/// A − B of every pair, with mean and interval.
pub(super) fn pairs(report: &CompareReport) -> String {
    let differences = &report.pair_differences;
    let ends = differences.interval_ms.into_iter().flatten();
    let values = differences.ms.iter().copied().chain(ends);
    let Some(axes) = Axes::around(values, differences.ms.len()) else { return String::new() };
    let mut svg = open(WIDTH, HEIGHT, "difference of every pair");
    let width = WIDTH - LEFT - RIGHT;
    if let Some([low, high]) = differences.interval_ms {
        let (y, end) = (axes.y(high), axes.y(low));
        draw!(svg, "<rect class=\"band\" x=\"{LEFT}\" y=\"{y:.2}\" width=\"{width}\" height=\"{:.2}\"/>", end - y);
    }
    axes.frame(&mut svg, "pair");
    let y = axes.y(differences.mean_ms);
    draw!(svg, "<line class=\"mean\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.2}\" y2=\"{y:.2}\"/>", LEFT + width);
    for (at, ms) in differences.ms.iter().enumerate() {
        draw!(
            svg,
            "<circle class=\"point\" cx=\"{:.2}\" cy=\"{:.2}\" r=\"3.5\"><title>pair {}: {} ms</title></circle>",
            axes.x(at),
            axes.y(*ms),
            at + 1,
            with_sign(Some(*ms), 3)
        );
    }
    let mean = with_sign(Some(differences.mean_ms), 2);
    draw!(svg, "<text class=\"value\" x=\"{}\" y=\"{:.2}\">{mean}</text>", WIDTH - RIGHT + 8.0, y + 4.0);
    svg + "</svg>"
}
