//! The spans of a step by lane, and the window through which they are looked at.

use crate::gui::views::live::intervals::Intervals;
use crate::session::{LaneKind, Pass, Phase, Span};

/// The lanes from above, with their names.
pub const LANES: [(LaneKind, &str); 3] =
    [(LaneKind::Compute, "compute"), (LaneKind::H2d, "H2D"), (LaneKind::D2h, "D2H")];

/// Whether the device computes in a span, and does not wait.
fn computes(span: &Span) -> bool {
    span.lane == LaneKind::Compute && !matches!(span.phase, Phase::ExposedCopy | Phase::HostWait | Phase::DataWait)
}

/// When compute ran.
pub fn busy(spans: &[Span]) -> Intervals {
    Intervals::union(spans.iter().filter(|span| computes(span)).map(|span| (span.start_ms, span.end_ms)))
}

/// When a copy ran with nothing computed beside it: in pieces.
pub fn exposed(spans: &[Span]) -> Intervals {
    let busy = busy(spans);
    let copies = spans.iter().filter(|span| matches!(span.lane, LaneKind::H2d | LaneKind::D2h));
    let pieces = copies.flat_map(|span| busy.split(span.start_ms, span.end_ms));
    Intervals::union(pieces.filter(|piece| !piece.covered).map(|piece| (piece.start, piece.end)))
}

/// When the last of what the lanes show ended, in milliseconds after the start of the step.
pub fn end(spans: &[Span]) -> f64 {
    let shown = spans.iter().filter(|span| LANES.iter().any(|(lane, _)| *lane == span.lane));
    shown.map(|span| span.end_ms).fold(0.0, f64::max)
}

/// What of a step is looked at, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Begin.
    pub start: f64,
    /// End.
    pub end: f64,
}

impl Window {
    /// A sixth of the step around the end of its forward pass, where the first copy back is waited for.
    pub fn initial(spans: &[Span], total: f64) -> Self {
        let backward = spans.iter().filter(|span| span.pass == Pass::Backward).map(|span| span.start_ms);
        let middle = backward.reduce(f64::min).unwrap_or(total / 2.0);
        Self { start: middle - total / 12.0, end: middle + total / 12.0 }.within(total)
    }

    /// How much it shows.
    pub fn length(self) -> f64 {
        self.end - self.start
    }

    /// Moved and, where it is too long, shortened so that it lies in `0..total`.
    pub fn within(self, total: f64) -> Self {
        let length = self.length().min(total);
        let start = self.start.clamp(0.0, total - length);
        Self { start, end: start + length }
    }

    /// Moved by `ms`.
    pub fn panned(self, ms: f64, total: f64) -> Self {
        Self { start: self.start + ms, end: self.end + ms }.within(total)
    }

    /// `factor` times as near, with the moment `around` staying where it is; never nearer than a thousandth of the step.
    pub fn zoomed(self, factor: f64, around: f64, total: f64) -> Self {
        let length = (self.length() / factor).clamp(total / 1000.0, total);
        let share = if self.length() > 0.0 { (around - self.start) / self.length() } else { 0.5 };
        let start = around - share * length;
        Self { start, end: start + length }.within(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(lane: LaneKind, phase: Phase, pass: Pass, start_ms: f64, end_ms: f64) -> Span {
        Span { lane, phase, pass, layer: None, start_ms, end_ms }
    }

    #[test]
    fn a_copy_beside_nothing_but_a_wait_is_exposed() {
        let spans = [
            span(LaneKind::Compute, Phase::Mlp, Pass::Forward, 0.0, 4.0),
            span(LaneKind::Compute, Phase::ExposedCopy, Pass::Backward, 4.0, 6.0),
            span(LaneKind::D2h, Phase::Attention, Pass::Forward, 1.0, 3.0),
            span(LaneKind::H2d, Phase::Attention, Pass::Backward, 3.0, 6.0),
            span(LaneKind::Host, Phase::Attention, Pass::Backward, 5.0, 9.0),
        ];
        assert_eq!((busy(&spans).length(), end(&spans)), (4.0, 6.0));
        assert_eq!(exposed(&spans).iter().collect::<Vec<_>>(), [(4.0, 6.0)]);
    }

    #[test]
    fn the_window_opens_where_backward_begins_and_stays_inside() {
        let spans = [
            span(LaneKind::Compute, Phase::Mlp, Pass::Forward, 0.0, 40.0),
            span(LaneKind::Compute, Phase::Mlp, Pass::Backward, 40.0, 120.0),
        ];
        let window = Window::initial(&spans, 120.0);
        assert_eq!((window.start, window.end), (30.0, 50.0));
        assert_eq!(window.panned(-100.0, 120.0), Window { start: 0.0, end: 20.0 });
        assert_eq!(window.panned(100.0, 120.0), Window { start: 100.0, end: 120.0 });
    }

    #[test]
    fn zooming_keeps_the_moment_under_the_pointer() {
        let window = Window { start: 20.0, end: 40.0 };
        assert_eq!(window.zoomed(2.0, 25.0, 100.0), Window { start: 22.5, end: 32.5 });
        assert_eq!(window.zoomed(0.01, 25.0, 100.0), Window { start: 0.0, end: 100.0 });
        assert!((window.zoomed(1e9, 25.0, 100.0).length() - 0.1).abs() < 1e-12);
    }
}
