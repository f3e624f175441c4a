//! Memory accounting: every allocation belongs to a category, and every category has a now and a peak.

use serde::{Deserialize, Serialize};

/// What an allocation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCategory {
    /// Base weights of the model.
    Weights,
    /// LoRA matrices.
    Adapters,
    /// Gradients of trainable parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// What the forward pass keeps for the backward pass.
    Activations,
    /// Buffers that carry activations to host memory and back.
    OffloadBuffers,
    /// Scratch that lives no longer than one operation or one block.
    Workspace,
    /// Boundaries, positions, tile lists and masks of packed batches.
    Metadata,
}

impl MemoryCategory {
    /// All categories in the order in which they are shown.
    pub const ALL: [Self; 8] = [
        Self::Weights,
        Self::Activations,
        Self::Workspace,
        Self::Optimizer,
        Self::OffloadBuffers,
        Self::Adapters,
        Self::Gradients,
        Self::Metadata,
    ];

    /// The name shown to people and written to files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Adapters => "adapters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::OffloadBuffers => "offload buffers",
            Self::Workspace => "workspace",
            Self::Metadata => "metadata",
        }
    }
}

/// Bytes of one category at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CategoryBytes {
    /// The category.
    pub category: MemoryCategory,
    /// Bytes allocated now.
    pub now_bytes: u64,
    /// Most bytes allocated at any time so far.
    pub peak_bytes: u64,
}

/// Memory by category, with the whole and its peak (the peak of the sum, not the sum of the peaks).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// One entry a category, in the order of [`MemoryCategory::ALL`].
    pub categories: Vec<CategoryBytes>,
    /// Bytes allocated now over all categories.
    pub now_bytes: u64,
    /// Most bytes allocated at one time.
    pub peak_bytes: u64,
    /// Resident memory of the process as the system reports it, when it does.
    pub process_bytes: Option<u64>,
}
