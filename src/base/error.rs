//! Errors that some caller branches on. Everything else travels as `anyhow::Error` with context.

use std::path::PathBuf;

/// Result with context, the default of the crate.
pub type Result<T, E = anyhow::Error> = std::result::Result<T, E>;

/// One row of a dataset that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {reason}", path.display())]
pub struct BadRecord {
    /// File the row came from.
    pub path: PathBuf,
    /// 1-based line of the row in that file.
    pub line: usize,
    /// What is wrong with it, and what would make it right.
    pub reason: String,
}

/// A compute device that was asked for and cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {device} device: {reason}")]
pub struct NoDevice {
    /// The device kind that was asked for, for example `cuda`.
    pub device: &'static str,
    /// Why it cannot be had.
    pub reason: String,
}

/// An allocation that did not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {wanted_bytes} bytes wanted for {category}, {free_bytes} bytes free")]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub wanted_bytes: u64,
    /// Bytes that were free at that time.
    pub free_bytes: u64,
    /// What the memory was for (the spelling of `MemoryCategory`).
    pub category: &'static str,
}

/// A NaN or an infinity where training cannot go on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "step {step}: {tensor} holds {value}; lower the learning rate or max_grad_norm, or check the data of this step"
)]
pub struct NonFinite {
    /// Step (1-based) whose result is not finite.
    pub step: u64,
    /// Name of the first tensor found with such a value: `loss`, or a parameter whose gradient it is.
    pub tensor: String,
    /// The value found.
    pub value: f32,
}
