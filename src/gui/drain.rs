//! Taking in what a background job says without holding up a frame.

use std::time::{Duration, Instant};

/// Events taken at once; the clock is looked at in between.
const BATCH: usize = 16;

/// What [`drain`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Whether there were any events.
    pub changed: bool,
    /// Whether there is nothing more to come.
    pub ended: bool,
}

/// Gives events that have come to `apply`, for at most `budget`. `take` gets at most as many as asked for. `finished` is whether the job had ended
/// before this was called: what it said is all in the queue then.
pub fn drain<E>(budget: Duration, finished: bool, take: impl Fn(usize) -> Vec<E>, mut apply: impl FnMut(E)) -> Drained {
    let began = Instant::now();
    let mut changed = false;
    loop {
        let events = take(BATCH);
        let all = events.len() < BATCH;
        changed |= !events.is_empty();
        events.into_iter().for_each(&mut apply);
        if all || began.elapsed() > budget {
            return Drained { changed, ended: all && finished };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn all_is_taken_within_the_budget_and_the_end_comes_with_the_last_event() {
        let queue = RefCell::new((0..BATCH + 3).collect::<Vec<_>>());
        let take = |max: usize| {
            let mut queue = queue.borrow_mut();
            let count = max.min(queue.len());
            queue.drain(..count).collect::<Vec<_>>()
        };
        let mut seen = Vec::new();
        let first = drain(Duration::ZERO, true, take, |n| seen.push(n));
        assert_eq!(first, Drained { changed: true, ended: false }, "the budget was used up");
        let rest = drain(Duration::MAX, true, take, |n| seen.push(n));
        assert_eq!(rest, Drained { changed: true, ended: true });
        assert_eq!(seen, (0..BATCH + 3).collect::<Vec<_>>());
        assert_eq!(drain(Duration::MAX, false, take, drop), Drained { changed: false, ended: false });
    }
}
