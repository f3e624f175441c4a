//! Series over a run: what the x axis counts, thinning to the pixels there are, and ticks.

use std::ops::RangeInclusive;

use crate::session::run_view::{RunView, StepPoint};

/// What the x axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum XAxis {
    /// Optimizer steps.
    #[default]
    Step,
    /// Seconds since training began.
    Time,
    /// Tokens of documents.
    Tokens,
    /// Passes over the data.
    Epoch,
}

impl XAxis {
    /// All axes with their names.
    pub const ALL: [(Self, &'static str); 4] =
        [(Self::Step, "step"), (Self::Time, "time"), (Self::Tokens, "tokens"), (Self::Epoch, "epoch")];

    /// The name of the axis.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(axis, _)| *axis == self).map_or("", |(_, name)| name)
    }

    /// Where a step is on the axis.
    pub fn of(self, step: &StepPoint) -> f64 {
        match self {
            Self::Step => step.report.step as f64,
            Self::Time => step.elapsed_s,
            Self::Tokens => step.tokens_seen as f64,
            Self::Epoch => step.epoch,
        }
    }

    /// Where a step number is on the axis: 0 before the first step; `None` for a step that is not there.
    pub fn of_step(self, view: &RunView, step: u64) -> Option<f64> {
        if step == 0 {
            return Some(0.0);
        }
        let i = view.steps.binary_search_by_key(&step, |s| s.report.step).ok()?;
        Some(self.of(&view.steps[i]))
    }

    /// A tick as written on the axis.
    pub fn tick(self, value: f64) -> String {
        match self {
            Self::Step => crate::gui::figures::grouped(value, 0),
            Self::Time => crate::base::units::clock(value),
            Self::Tokens if value >= 1e6 => format!("{} M", trimmed(value / 1e6)),
            Self::Tokens if value >= 1e3 => format!("{} k", trimmed(value / 1e3)),
            Self::Tokens | Self::Epoch => trimmed(value),
        }
    }
}

/// At most two decimals, without zeros at the end.
fn trimmed(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Thins a series (x rising) to the lowest and the highest point of each of `columns` columns over `range`, in their
/// order, so that no spike is lost. Points outside the range are left out, but for the nearest on either side.
pub fn thin(points: impl Iterator<Item = [f64; 2]>, range: RangeInclusive<f64>, columns: usize) -> Vec<[f64; 2]> {
    let (low, high) = (*range.start(), *range.end());
    let scale = columns as f64 / (high - low).max(f64::MIN_POSITIVE);
    let mut out: Vec<[f64; 2]> = Vec::new();
    let mut before = None;
    let mut bucket: Option<(i64, [f64; 2], [f64; 2])> = None;
    let flush = |out: &mut Vec<[f64; 2]>, bucket: Option<(i64, [f64; 2], [f64; 2])>| {
        if let Some((_, a, b)) = bucket {
            let (first, second) = if a[0] <= b[0] { (a, b) } else { (b, a) };
            out.push(first);
            if first != second {
                out.push(second);
            }
        }
    };
    for point in points.filter(|p| p[1].is_finite()) {
        if point[0] < low {
            before = Some(point);
            continue;
        }
        if let Some(point) = before.take() {
            out.push(point);
        }
        if point[0] > high {
            flush(&mut out, bucket.take());
            out.push(point);
            return out;
        }
        let column = ((point[0] - low) * scale) as i64;
        bucket = match bucket {
            Some((same, a, b)) if same == column => {
                Some((same, if point[1] < a[1] { point } else { a }, if point[1] > b[1] { point } else { b }))
            }
            other => {
                flush(&mut out, other);
                Some((column, point, point))
            }
        };
    }
    flush(&mut out, bucket);
    out
}

/// Round values inside `low..=high`, about `wanted` of them; steps are 1, 2, 2.5 or 5 times a power of ten.
pub fn ticks(low: f64, high: f64, wanted: usize) -> Vec<f64> {
    let span = high - low;
    if !(span > 0.0 && span.is_finite()) {
        return vec![low];
    }
    let rough = span / wanted.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(power * 10.0);
    let first = (low / step - 1e-9).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|i| i as f64 * step).collect()
}

/// Ticks of a time axis in seconds: round in seconds, minutes and hours.
pub fn time_ticks(high: f64, wanted: usize) -> Vec<f64> {
    const STEPS: [f64; 16] =
        [1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0];
    let rough = high / wanted.max(1) as f64;
    let step = STEPS.into_iter().find(|s| *s >= rough).unwrap_or((rough / 86_400.0).ceil() * 86_400.0);
    (0..=(high / step) as i64).map(|i| i as f64 * step).collect()
}

/// Decimals needed to tell `ticks` apart.
pub fn decimals(ticks: &[f64]) -> usize {
    let step = ticks.windows(2).map(|w| w[1] - w[0]).fold(f64::INFINITY, f64::min);
    if !step.is_finite() {
        return 2;
    }
    (0..=6)
        .find(|&d| {
            let scaled = step * 10f64.powi(d);
            (scaled - scaled.round()).abs() < 1e-6 * scaled.max(1.0)
        })
        .unwrap_or(6) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_every_spike() {
        let mut points: Vec<[f64; 2]> = (0..10_000).map(|i| [f64::from(i), 1.0]).collect();
        points[4_321][1] = 9.0;
        points[7_000][1] = -3.0;
        let thin = thin(points.iter().copied(), 0.0..=9_999.0, 200);
        assert!(thin.len() <= 400, "{}", thin.len());
        assert!(thin.contains(&[4321.0, 9.0]) && thin.contains(&[7000.0, -3.0]));
        assert!(thin.windows(2).all(|w| w[0][0] <= w[1][0]), "x still rises");
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let points = [[1.0, 3.0], [2.0, f64::NAN], [3.0, 1.0]];
        assert_eq!(thin(points.into_iter(), 1.0..=3.0, 500), [[1.0, 3.0], [3.0, 1.0]]);
    }

    #[test]
    fn a_zoomed_range_keeps_its_neighbours() {
        let points = (0..10).map(|i| [f64::from(i), f64::from(i)]);
        let thin = thin(points, 3.5..=5.5, 100);
        assert_eq!(thin, [[3.0, 3.0], [4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]);
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.61, 1.8, 5), [0.75, 1.0, 1.25, 1.5, 1.75]);
        assert_eq!(decimals(&ticks(0.61, 1.8, 5)), 2);
        assert_eq!(decimals(&ticks(0.0, 100.0, 5)), 0);
        assert_eq!(time_ticks(400.0, 4), [0.0, 120.0, 240.0, 360.0]);
    }

    #[test]
    fn ticks_of_an_axis_read_well() {
        assert_eq!(XAxis::Tokens.tick(1_250_000.0), "1.25 M");
        assert_eq!(XAxis::Tokens.tick(20_000.0), "20 k");
        assert_eq!(XAxis::Time.tick(90.0), "1:30");
        assert_eq!(XAxis::Epoch.tick(0.5), "0.5");
    }
}
