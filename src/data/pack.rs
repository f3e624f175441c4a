//! Packing: examples into batches of at most `pack_len` tokens, and the padded form for comparison.

/// Several documents one after another, with what keeps them apart. Stop 3 of the walk.
///
/// `total_tokens` is `input_ids.len()`. Trailing padding, if any, is the last sequence of `cu_seqlens`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PackedBatch {
    /// Token ids, i32 [total_tokens].
    pub input_ids: Vec<i32>,
    /// Targets, i32 [total_tokens], already shifted inside each document; −100 where nothing is trained.
    pub labels: Vec<i32>,
    /// Position inside its document, i32 [total_tokens]; restarts at 0 in every document.
    pub position_ids: Vec<i32>,
    /// Cumulative document starts, i32 [num_seqs + 1], first 0, last total_tokens.
    pub cu_seqlens: Vec<i32>,
    /// Length of the longest document in this batch.
    pub max_seqlen: usize,
    /// How many labels are not −100.
    pub num_label_tokens: usize,
    /// How many of the tokens are padding.
    pub num_padding_tokens: usize,
}
