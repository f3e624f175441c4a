//! Activation policy: what a block keeps between its forward and its backward pass.

use serde::{Deserialize, Serialize};

/// What a block keeps between its forward and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// Everything the backward pass needs: most memory, no extra work.
    Keep,
    /// The block's input only; the rest is computed again.
    #[default]
    Recompute,
}
