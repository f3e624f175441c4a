//! Time left, from tokens: steps hold different numbers of tokens, so counting steps would make it jump.

use std::collections::VecDeque;

/// Steps over which the speed is averaged.
const STEPS: usize = 20;

/// The speed of the last steps.
#[derive(Debug, Default)]
pub(super) struct Eta {
    /// Tokens and milliseconds of each.
    recent: VecDeque<(u64, f64)>,
}

impl Eta {
    /// Takes in a step of `tokens` that took `ms`, and gives the seconds that `tokens_left` will take; `None` while no
    /// speed is known.
    pub fn after_step(&mut self, tokens: u64, ms: f64, tokens_left: f64) -> Option<f64> {
        if self.recent.len() == STEPS {
            self.recent.pop_front();
        }
        self.recent.push_back((tokens, ms));
        let (tokens, ms) = self.recent.iter().fold((0, 0.0), |(t, m), (tokens, ms)| (t + tokens, m + ms));
        (tokens > 0 && ms > 0.0).then(|| tokens_left / tokens as f64 * ms / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_different_sizes_give_the_same_time_left() {
        let mut eta = Eta::default();
        // 1,000 tokens a second throughout.
        assert_eq!(eta.after_step(100, 100.0, 5_000.0), Some(5.0));
        let later = eta.after_step(900, 900.0, 4_100.0).unwrap();
        assert!((later - 4.1).abs() < 1e-9, "{later}");
    }

    #[test]
    fn old_steps_are_forgotten() {
        let mut eta = Eta::default();
        eta.after_step(10, 1e6, 0.0);
        let mut last = None;
        for _ in 0..STEPS {
            last = eta.after_step(10, 10.0, 1_000.0);
        }
        assert!((last.unwrap() - 1.0).abs() < 1e-9, "{last:?}");
    }

    #[test]
    fn nothing_is_promised_without_a_speed() {
        assert_eq!(Eta::default().after_step(0, 5.0, 10.0), None);
    }
}
