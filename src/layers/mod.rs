//! Layers made of operations: linear with adapters, attention, MLP, norm, embedding, head.
//!
//! A layer holds the ids of its parameters, not their values. `forward` returns what `backward` needs; `backward` consumes it.

pub mod attention;
pub mod embedding;
pub mod feed_forward;
pub mod head;
pub mod held;
pub mod matrix;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod parameter;
pub mod projection;

use crate::ops::dropout::DropoutKey;
use crate::tensor::{Device, MemoryCategory, Tensor};
use moe::MoeRun;
use parameter::Params;

/// What every layer needs to run: the device, the parameters' values, and the state of dropout.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Device that holds the parameters.
    pub device: &'a Device,
    /// Values of all parameters.
    pub params: &'a Params,
    /// Dropout of this micro-batch; `None` in evaluation.
    pub dropout: Option<DropoutState>,
    /// Number of the first row in its pass: 0, but in a tile of rows.
    pub first_row: usize,
    /// How routed experts run.
    pub moe: MoeRun<'a>,
}

/// What a forward pass keeps for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Nothing: there is none, or it begins with the block's input.
    Nothing,
    /// All that is dear to make again, until the backward pass comes to this block. What a product reads is a norm or a SwiGLU away.
    Longest,
    /// What products read as well: the backward pass follows at once.
    Inputs,
}

/// What the dropout masks of one micro-batch depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutState {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the step.
    pub step: u64,
    /// Number of the micro-batch in its step.
    pub micro_batch: u32,
}

impl DropoutState {
    /// The key of one layer's mask. The parts have their own bits, so that no two masks of a run share a stream
    /// (2²⁸ steps of 2¹⁶ micro-batches over 2²⁰ layers).
    pub fn key(self, layer: u32) -> DropoutKey {
        let stream = (self.step << 36) | (u64::from(self.micro_batch & 0xFFFF) << 20) | u64::from(layer & 0xF_FFFF);
        DropoutKey { seed: self.seed, stream, first: 0 }
    }
}

impl<'a> Context<'a> {
    /// For the rows of a pass from the first one on.
    pub fn new(device: &'a Device, params: &'a Params, dropout: Option<DropoutState>) -> Self {
        Self { device, params, dropout, first_row: 0, moe: MoeRun::default() }
    }

    /// For a tile of rows that begins at row `first` of these: dropout drops there what it would drop in the whole.
    pub fn tile(&self, first: usize) -> Self {
        Self { first_row: self.first_row + first, ..*self }
    }

    /// A tensor that lives no longer than a block's pass; its values are not set.
    pub fn scratch(&self, shape: &[usize]) -> Tensor {
        self.device.empty(MemoryCategory::Workspace, shape)
    }

    /// A tensor that is kept for the backward pass; its values are not set.
    pub fn saved(&self, shape: &[usize]) -> Tensor {
        self.device.empty(MemoryCategory::Activations, shape)
    }

    /// As [`Self::saved`], in f32 on every device: statistics of rows.
    pub fn saved_f32(&self, shape: &[usize]) -> Tensor {
        self.device.empty_f32(MemoryCategory::Activations, shape)
    }
}
