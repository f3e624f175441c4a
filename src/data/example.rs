//! One training example: a record after its template and tokenizer.

/// Label value of a position that is not trained (the convention of PyTorch's cross-entropy).
pub const IGNORE_INDEX: i32 = -100;

/// One document ready to be packed. Stop 2 of the walk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Example {
    /// Token ids, i32 [tokens].
    pub input_ids: Vec<i32>,
    /// Targets, i32 [tokens], shifted: `labels[t]` is the token after `t`, or −100; the last one is always −100.
    pub labels: Vec<i32>,
}
