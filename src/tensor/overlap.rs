//! How much of the copying of a step ran beside compute: unions and intersections of spans.

use super::phase::{LaneKind, Phase, Span};

/// Times of copies in a step, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CopyTimes {
    /// To the host.
    pub d2h_ms: f64,
    /// To the device.
    pub h2d_ms: f64,
    /// In which a copy ran, whichever way.
    pub copy_ms: f64,
    /// In which compute ran beside a copy.
    pub hidden_ms: f64,
}

/// Measures the copies of a step by its spans: `hidden = |∪copy ∩ ∪compute|`. While compute waits for a copy it does not run.
pub fn copy_times(spans: &[Span]) -> CopyTimes {
    let lane = |lane| union(spans.iter().filter(|span| span.lane == lane).map(ends).collect());
    let (d2h, h2d) = (lane(LaneKind::D2h), lane(LaneKind::H2d));
    let copies = union(d2h.iter().chain(&h2d).copied().collect());
    let runs = |span: &&Span| {
        span.lane == LaneKind::Compute && !matches!(span.phase, Phase::ExposedCopy | Phase::HostWait | Phase::DataWait)
    };
    let compute = union(spans.iter().filter(runs).map(ends).collect());
    CopyTimes {
        d2h_ms: length(&d2h),
        h2d_ms: length(&h2d),
        copy_ms: length(&copies),
        hidden_ms: length(&intersection(&copies, &compute)),
    }
}

/// Start and end.
type Interval = (f64, f64);

fn ends(span: &Span) -> Interval {
    (span.start_ms, span.end_ms)
}

/// The same points as intervals that rise and do not touch.
fn union(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.retain(|(start, end)| end > start);
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut merged: Vec<Interval> = Vec::with_capacity(intervals.len());
    for (start, end) in intervals {
        match merged.last_mut().filter(|last| start <= last.1) {
            Some(last) => last.1 = last.1.max(end),
            None => merged.push((start, end)),
        }
    }
    merged
}

/// The points of both, which are unions.
fn intersection(a: &[Interval], b: &[Interval]) -> Vec<Interval> {
    let (mut i, mut j, mut common) = (0, 0, Vec::new());
    while let Some((a, b)) = a.get(i).zip(b.get(j)) {
        let (start, end) = (a.0.max(b.0), a.1.min(b.1));
        if start < end {
            common.push((start, end));
        }
        if a.1 < b.1 { i += 1 } else { j += 1 }
    }
    common
}

fn length(intervals: &[Interval]) -> f64 {
    intervals.iter().map(|(start, end)| end - start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::phase::Pass;

    fn span(lane: LaneKind, phase: Phase, start_ms: f64, end_ms: f64) -> Span {
        Span { lane, phase, pass: Pass::Backward, layer: Some(0), start_ms, end_ms }
    }

    #[test]
    fn copies_beside_compute_are_hidden_and_waiting_is_not_compute() {
        let spans = [
            span(LaneKind::Compute, Phase::Mlp, 0.0, 4.0),
            // Compute waits from 4 to 6.
            span(LaneKind::Compute, Phase::ExposedCopy, 4.0, 6.0),
            span(LaneKind::Compute, Phase::Attention, 6.0, 9.0),
            span(LaneKind::H2d, Phase::ExposedCopy, 2.0, 6.0),
            span(LaneKind::D2h, Phase::ExposedCopy, 3.0, 5.0),
            span(LaneKind::H2d, Phase::ExposedCopy, 8.0, 10.0),
        ];
        let want = CopyTimes { d2h_ms: 2.0, h2d_ms: 6.0, copy_ms: 6.0, hidden_ms: 3.0 };
        assert_eq!(copy_times(&spans), want);
        assert_eq!(copy_times(&spans[..3]), CopyTimes::default(), "nothing was copied");
    }

    #[test]
    fn unions_merge_what_touches_and_intersections_are_what_both_have() {
        let merged = union(vec![(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (7.0, 7.0)]);
        assert_eq!(merged, [(0.0, 4.0), (5.0, 6.0)]);
        assert_eq!(intersection(&merged, &[(1.0, 2.0), (3.5, 5.5), (9.0, 10.0)]), [(1.0, 2.0), (3.5, 4.0), (5.0, 5.5)]);
    }
}
