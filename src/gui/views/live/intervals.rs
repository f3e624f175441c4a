//! Stretches of time: what they cover together, and what of one is covered by others.

/// Stretches in order, none touching another, in milliseconds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Intervals(Vec<(f64, f64)>);

/// A piece of a stretch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Begin.
    pub start: f64,
    /// End.
    pub end: f64,
    /// Whether others cover it.
    pub covered: bool,
}

impl Intervals {
    /// What all `stretches` cover.
    pub fn union(stretches: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut sorted: Vec<(f64, f64)> = stretches.into_iter().filter(|(start, end)| end > start).collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut union: Vec<(f64, f64)> = Vec::new();
        for (start, end) in sorted {
            match union.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => union.push((start, end)),
            }
        }
        Self(union)
    }

    /// The stretches.
    pub fn iter(&self) -> impl Iterator<Item = (f64, f64)> {
        self.0.iter().copied()
    }

    /// How long they are together.
    pub fn length(&self) -> f64 {
        self.iter().map(|(start, end)| end - start).sum()
    }

    /// `start..end` in pieces that these cover and pieces that they do not.
    pub fn split(&self, start: f64, end: f64) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = start;
        let first = self.0.partition_point(|stretch| stretch.1 <= start);
        for &(from, to) in self.0[first..].iter().take_while(|stretch| stretch.0 < end) {
            if from > at {
                pieces.push(Piece { start: at, end: from, covered: false });
            }
            let from = from.max(at);
            at = to.min(end);
            pieces.push(Piece { start: from, end: at, covered: true });
        }
        if at < end {
            pieces.push(Piece { start: at, end, covered: false });
        }
        pieces
    }

    /// How much of these `others` cover.
    pub fn covered_by(&self, others: &Self) -> f64 {
        let pieces = self.iter().flat_map(|(start, end)| others.split(start, end));
        pieces.filter(|piece| piece.covered).map(|piece| piece.end - piece.start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_that_touch_become_one() {
        let union = Intervals::union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (7.0, 7.0)]);
        assert_eq!(union.iter().collect::<Vec<_>>(), [(0.0, 4.0), (5.0, 6.0)]);
        assert_eq!(union.length(), 5.0);
    }

    #[test]
    fn a_stretch_falls_into_covered_pieces_and_the_rest() {
        let busy = Intervals::union([(0.0, 2.0), (4.0, 6.0), (8.0, 9.0)]);
        let pieces: Vec<_> = busy.split(1.0, 8.5).into_iter().map(|p| (p.start, p.end, p.covered)).collect();
        assert_eq!(
            pieces,
            [(1.0, 2.0, true), (2.0, 4.0, false), (4.0, 6.0, true), (6.0, 8.0, false), (8.0, 8.5, true)]
        );
        assert_eq!(busy.split(2.0, 3.0), [Piece { start: 2.0, end: 3.0, covered: false }]);
        assert_eq!(busy.split(4.0, 6.0).len(), 1);
        let copies = Intervals::union([(1.0, 5.0), (9.0, 10.0)]);
        assert_eq!(copies.covered_by(&busy), 2.0);
        assert_eq!(copies.covered_by(&Intervals::default()), 0.0);
    }
}
