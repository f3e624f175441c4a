//! Packs of a step joined into passes: few tokens a pass leave a GPU idle, and weights in 4 bits are made anew for each.

use std::borrow::Cow;

use super::Trainer;
use crate::data::pack::PackedBatch;
use crate::train::plan::Workload;
use crate::train::switches::joining;

impl Trainer {
    /// Neighbouring packs of a step joined as its switches ask, in their order: losses and gradients are those of the packs one by one, up to the order
    /// of sums.
    pub(super) fn passes<'a>(&self, packs: &'a [PackedBatch]) -> Vec<Cow<'a, PackedBatch>> {
        joined(packs, self.pass_tokens())
    }

    /// The largest step that packs of at most `work.tokens` tokens give: of passes, where packs are joined.
    pub fn passes_of(&self, work: Workload) -> Workload {
        let tokens = work.tokens.max(self.pass_tokens().min(work.tokens * work.batches.max(1)));
        Workload { tokens, batches: (work.tokens * work.batches).div_ceil(tokens.max(1)).max(1), ..work }
    }

    /// Most tokens of a pass into which packs are joined; 0 where they are not.
    pub(super) fn pass_tokens(&self) -> usize {
        joining(&self.setup.switches, &self.model).unwrap_or(0)
    }
}

/// Runs of neighbours that have at most `pass_tokens` tokens together, each as one batch; one that has more is left alone.
fn joined(packs: &[PackedBatch], pass_tokens: usize) -> Vec<Cow<'_, PackedBatch>> {
    let (mut passes, mut first, mut tokens) = (Vec::new(), 0, 0);
    for end in 1..=packs.len() {
        tokens += packs[end - 1].total_tokens();
        if packs.get(end).is_some_and(|next| tokens + next.total_tokens() <= pass_tokens) {
            continue;
        }
        passes.push(match &packs[first..end] {
            [alone] => Cow::Borrowed(alone),
            several => Cow::Owned(PackedBatch::joined(several)),
        });
        (first, tokens) = (end, 0);
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::example::Example;

    #[test]
    fn neighbours_are_joined_as_far_as_they_fit() {
        let pack = |tokens: i32| {
            PackedBatch::from_examples(&[Example {
                input_ids: (0..tokens).collect(),
                labels: vec![-100; tokens as usize],
            }])
        };
        let packs = [3, 4, 2, 9, 1, 1, 5].map(pack);
        let lengths = |pass_tokens| joined(&packs, pass_tokens).iter().map(|p| p.total_tokens()).collect::<Vec<_>>();
        assert_eq!(lengths(0), [3, 4, 2, 9, 1, 1, 5]);
        assert_eq!(lengths(7), [7, 2, 9, 7]);
        assert_eq!(lengths(8), [7, 2, 9, 7]);
        assert_eq!(lengths(9), [9, 9, 7]);
        assert_eq!(lengths(100), [25]);
        assert!(joined(&[], 9).is_empty());
        assert_eq!(joined(&packs, 100)[0].cu_seqlens, [0, 3, 7, 9, 18, 19, 20, 25]);
        assert!(matches!(joined(&packs, 7)[2], Cow::Borrowed(_)), "what is alone is not copied");
    }
}
