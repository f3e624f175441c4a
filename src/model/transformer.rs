//! The model: parameters, and the passes over one packed batch. Stop 6 of the walk.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use rayon::prelude::*;

use super::batch::{DeviceBatch, SequenceMetadata};
use super::block::{Block, BlockSaved};
use super::config::ModelConfig;
use super::loading::Checkpoint;
use super::names::Names;
use super::policy::Activations;
use super::rotary;
use crate::base::error::Result;
use crate::base::rng::{Philox, unit_f32};
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, Supervised};
use crate::layers::parameter::{Grads, Parameter, Params};
use crate::layers::{Context, DropoutState};
use crate::ops::cross_entropy::LossSum;
use crate::ops::rope::RopeTable;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, MemoryCategory, Tensor};

/// A dense decoder-only transformer on one device.
#[derive(Debug)]
pub struct Transformer {
    pub(super) device: Device,
    pub(super) config: ModelConfig,
    pub(super) params: Params,
    pub(super) embed_tokens: Embedding,
    pub(super) blocks: Vec<Block>,
    pub(super) head: Head,
    inv_freq: Vec<f32>,
    /// Grown when a batch has a longer document; shared by the batches that use it.
    rope: Mutex<Option<Arc<RopeTable>>>,
}

/// What a training pass over one micro-batch needs besides the batch.
#[derive(Debug, Clone, Copy)]
pub struct PassOptions<'a> {
    /// Factor on the gradient of each supervised token: 1 / supervised tokens of the whole step.
    pub weight: f32,
    /// What blocks keep.
    pub activations: Activations,
    /// Dropout of this micro-batch.
    pub dropout: Option<DropoutState>,
    /// Raised to stop between blocks.
    pub stop: &'a AtomicBool,
}

/// What a block left for its backward pass.
struct Kept {
    x: Tensor,
    saved: Option<BlockSaved>,
}

impl Transformer {
    /// Loads a model's weights onto `device`. `progress` gets bytes done and bytes in all (as f32).
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(checkpoint: &Checkpoint, device: &Device, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let never = AtomicBool::new(false);
        Self::load_unless_stopped(checkpoint, device, progress, &never)?.context("loading was stopped")
    }

    /// As [`Transformer::load`]; `None` when `stop` was raised on the way (it is looked at before every block).
    ///
    /// # Errors
    /// As [`Transformer::load`].
    pub fn load_unless_stopped(
        checkpoint: &Checkpoint,
        device: &Device,
        progress: &mut dyn FnMut(u64, u64),
        stop: &AtomicBool,
    ) -> Result<Option<Self>> {
        let config = checkpoint.config();
        let mut params = Params::default();
        let (mut done_bytes, total_bytes) = (0, checkpoint.num_parameters() * 4);
        for (name, shape) in config.expected_tensors() {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let mut data = checkpoint.tensor_f32(&name)?;
            device.precision().round_slice(&mut data);
            done_bytes += size_of_val(data.as_slice()) as u64;
            let value = device.tensor(MemoryCategory::Weights, &shape, data);
            device.check().with_context(|| format!("loading {name}"))?;
            params.push(Parameter::frozen(&name, value));
            progress(done_bytes, total_bytes);
        }
        Self::from_params(config.clone(), device, params).map(Some)
    }

    /// A model of that shape with random weights: uniform with the standard deviation of GPT-2's start, 0.02; norms 1, biases 0.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn random(config: &ModelConfig, device: &Device, seed: u64) -> Result<Self> {
        let mut params = Params::default();
        for (number, (name, shape)) in config.expected_tensors().into_iter().enumerate() {
            let len: usize = shape.iter().product();
            let data = match shape.len() {
                1 => vec![if name.ends_with("bias") { 0.0 } else { 1.0 }; len],
                _ => {
                    let generator = Philox::new(seed, number as u64);
                    let bound = 0.02 * 3f32.sqrt();
                    let mut data = vec![0.0f32; len];
                    data.par_chunks_mut(4).enumerate().with_min_len(1 << 14).for_each(|(block, values)| {
                        let words = generator.block(block as u64);
                        values.iter_mut().zip(words).for_each(|(x, word)| *x = (2.0 * unit_f32(word) - 1.0) * bound);
                    });
                    device.precision().round_slice(&mut data);
                    data
                }
            };
            let value = device.tensor(MemoryCategory::Weights, &shape, data);
            device.check().with_context(|| format!("making {name}"))?;
            params.push(Parameter::frozen(&name, value));
        }
        Self::from_params(config.clone(), device, params)
    }

    /// A model over the parameters of `config.expected_tensors()`.
    fn from_params(config: ModelConfig, device: &Device, params: Params) -> Result<Self> {
        let names = Names::new(&params);
        let embed_tokens = Embedding { weight: names.id("model.embed_tokens.weight")? };
        let blocks = (0..config.num_hidden_layers).map(|i| names.block(&config, i)).collect::<Result<Vec<_>>>()?;
        let weight = if config.tie_word_embeddings { embed_tokens.weight } else { names.id("lm_head.weight")? };
        let head = Head { norm: names.norm("model.norm", &config, config.hidden_size)?, weight };
        let inv_freq = rotary::inv_freq(&config);
        Ok(Self {
            device: device.clone(),
            config,
            params,
            embed_tokens,
            blocks,
            head,
            inv_freq,
            rope: Mutex::default(),
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device that holds it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All parameters.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// All parameters, to update.
    pub fn params_mut(&mut self) -> &mut Params {
        &mut self.params
    }

    /// Makes every base parameter trainable (full fine-tuning).
    pub fn train_everything(&mut self) {
        let device = self.device.clone();
        self.params.iter_mut().for_each(|(_, p)| p.train(&device));
    }

    /// Forward and backward over one micro-batch: adds its token losses to `loss` and its gradients to `grads`; `None` when stopped on the way.
    pub fn forward_backward(
        &self,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        self.device.run(|| self.forward_backward_here(grads, loss, batch, options))
    }

    fn forward_backward_here(
        &self,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        let stopped = || options.stop.load(Ordering::Relaxed);
        if batch.rows.is_empty() {
            // No supervised token: no loss and no gradient.
            return (!stopped()).then_some(());
        }
        let ctx = self.context(options.dropout);
        let clock = self.device.clock();
        let metadata = self.metadata(batch);
        let first = self.first_trained_block();
        let mut x = {
            let _phase = clock.enter(Phase::HeadLoss, Pass::Forward, None);
            self.embed_tokens.forward(&ctx, &batch.input_ids)
        };
        let mut kept = Vec::with_capacity(self.blocks.len() - first);
        for (i, block) in self.blocks.iter().enumerate() {
            if stopped() {
                return None;
            }
            let (out, saved) = block.forward(&ctx, batch, &metadata, &x);
            let input = std::mem::replace(&mut x, out);
            if i >= first {
                let saved = (options.activations == Activations::Keep).then_some(saved);
                kept.push(Kept { x: input, saved });
            }
        }
        let supervised = Supervised { rows: &batch.rows, targets: &batch.targets };
        let mut dx = {
            let _phase = clock.enter(Phase::HeadLoss, Pass::Forward, None);
            let (losses, dx) = self.head.forward_backward(&ctx, grads, &x, supervised, options.weight);
            loss.add(&self.device, &losses);
            dx
        };
        drop(x);
        let embedding_trains = self.params.is_trainable(self.embed_tokens.weight);
        for (block, Kept { x, saved }) in self.blocks[first..].iter().zip(kept).rev() {
            if stopped() {
                return None;
            }
            let saved = saved.unwrap_or_else(|| {
                let _phase = clock.enter(Phase::Recompute, Pass::Backward, Some(block.index));
                block.recompute(&ctx, batch, &metadata, &x)
            });
            let need_dx = embedding_trains || block.index as usize > first;
            dx = block.backward(&ctx, grads, batch, &metadata, &x, saved, dx, need_dx);
        }
        if embedding_trains {
            let _phase = clock.enter(Phase::HeadLoss, Pass::Backward, None);
            self.embed_tokens.backward(&ctx, grads, &batch.input_ids, &dx);
        }
        Some(())
    }

    /// Loss in nats of each supervised row of a batch [R], f32, in the order of the rows; `None` when stopped on the way.
    pub fn losses(&self, batch: &DeviceBatch, stop: &AtomicBool) -> Option<Tensor> {
        self.device.run(|| {
            let ctx = self.context(None);
            let x = self.hidden(&ctx, batch, stop)?;
            let _phase = self.device.clock().enter(Phase::HeadLoss, Pass::Forward, None);
            Some(self.head.losses(&ctx, &x, Supervised { rows: &batch.rows, targets: &batch.targets }))
        })
    }

    /// Logits [rows, vocabulary] of the given rows of a batch; `None` when stopped on the way.
    pub fn logits(&self, batch: &DeviceBatch, rows: &[i32], stop: &AtomicBool) -> Option<Tensor> {
        let rows = self.device.indices(MemoryCategory::Metadata, rows.to_vec());
        self.device.run(|| {
            let ctx = self.context(None);
            let x = self.hidden(&ctx, batch, stop)?;
            Some(self.head.logits(&ctx, &x, &rows))
        })
    }

    /// Output of the last block [T, hidden], keeping nothing.
    fn hidden(&self, ctx: &Context<'_>, batch: &DeviceBatch, stop: &AtomicBool) -> Option<Tensor> {
        let metadata = self.metadata(batch);
        let mut x = self.embed_tokens.forward(ctx, &batch.input_ids);
        for block in &self.blocks {
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            x = block.forward(ctx, batch, &metadata, &x).0;
        }
        Some(x)
    }

    fn context(&self, dropout: Option<DropoutState>) -> Context<'_> {
        Context { device: &self.device, params: &self.params, dropout }
    }

    fn metadata(&self, batch: &DeviceBatch) -> SequenceMetadata {
        let _phase = self.device.clock().enter(Phase::Metadata, Pass::Forward, None);
        let rope = {
            let mut rope = self.rope.lock().unwrap_or_else(PoisonError::into_inner);
            match rope.as_ref().filter(|table| table.num_positions() >= batch.num_positions) {
                Some(table) => Arc::clone(table),
                None => {
                    // Room to grow: documents that are longer bit by bit, as in generation, need few tables.
                    let num_positions = batch.num_positions.next_power_of_two();
                    let table = Arc::new(RopeTable::new(&self.device, &self.inv_freq, num_positions));
                    Arc::clone(rope.insert(table))
                }
            }
        };
        SequenceMetadata::new(&self.device, batch, &self.config.sliding_window, rope)
    }

    /// The lowest block whose backward pass is needed: below it nothing trains.
    fn first_trained_block(&self) -> usize {
        if self.params.is_trainable(self.embed_tokens.weight) {
            return 0;
        }
        let trains = |block: &Block| {
            let mut block = *block;
            let adapters = block.linears_mut().iter().any(|(_, linear)| {
                linear.lora.is_some_and(|lora| self.params.is_trainable(lora.a) || self.params.is_trainable(lora.b))
            });
            adapters || self.params.is_trainable(block.input_layernorm.weight)
        };
        self.blocks.iter().position(trains).unwrap_or(self.blocks.len())
    }
}
