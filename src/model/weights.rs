//! The weights of a model: read from a checkpoint or drawn at random, quantized on the way where that is asked for.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use half::bf16;
use rayon::prelude::*;

use super::block::Block;
use super::config::ModelConfig;
use super::loading::Checkpoint;
use super::transformer::{Form, Transformer};
use crate::base::error::Result;
use crate::base::rng::{Philox, unit_f32};
use crate::formats::mxfp4::Mxfp4;
use crate::formats::nf4::Nf4;
use crate::formats::safetensors::Dtype;
use crate::layers::parameter::ParamId;
use crate::tensor::{Device, Precision};

impl Transformer {
    /// Loads a model's weights onto `device`. `progress` gets bytes done and bytes in all (as f32).
    ///
    /// # Errors
    /// When a tensor cannot be read.
    pub fn load(checkpoint: &Checkpoint, device: &Device, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let never = AtomicBool::new(false);
        Self::load_unless_stopped(checkpoint, device, Form::default(), progress, &never)?.context("loading was stopped")
    }

    /// As [`Transformer::load`], in the form that is asked for; `None` when `stop` was raised on the way (it is looked at before every tensor).
    /// Weights are quantized one by one, so that no more than one of them is held unquantized at a time.
    ///
    /// # Errors
    /// As [`Transformer::load`], and when a weight that is to be quantized has a value that is not finite.
    pub fn load_unless_stopped(
        checkpoint: &Checkpoint,
        device: &Device,
        form: Form<'_>,
        progress: &mut dyn FnMut(u64, u64),
        stop: &AtomicBool,
    ) -> Result<Option<Self>> {
        let mut model = Self::zeros(checkpoint.config(), device, form)?;
        let (mut done_bytes, total_bytes) = (0, checkpoint.num_parameters() * 4);
        let linear = model.linear_weights();
        for (id, name) in model.names() {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let len = model.params.get(id).len();
            if let [experts, ..] = *model.params.get(id).shape
                && model.params.get(id).shape.len() == 3
            {
                model.load_experts(checkpoint, id, &name, experts)?;
                done_bytes += 4 * len as u64;
                device.check().with_context(|| format!("loading {name}"))?;
                progress(done_bytes, total_bytes);
                continue;
            }
            let quantize = form.weights.double_quant().filter(|_| linear.contains(&id));
            // What is quantized in the file is not quantized a second time.
            let stored = quantize.map(|_| checkpoint.tensor_nf4(&name)).transpose()?.flatten();
            let quantize = quantize.filter(|_| stored.is_none());
            if let Some(weight) = stored.filter(|_| model.params.is_nf4(id)) {
                model.params.set_nf4(id, &weight);
            } else if quantize.is_none()
                && let Some(bytes) = checkpoint.tensor_bf16(&name)?
            {
                // As it lies in the file: a GPU's engine computes with the same bits.
                model.params.set_bf16(id, bytes);
            } else {
                let mut data = checkpoint.tensor_f32(&name)?;
                device.precision().round_slice(&mut data);
                model.set_weight(id, data, quantize)?;
            }
            done_bytes += 4 * len as u64;
            device.check().with_context(|| format!("loading {name}"))?;
            progress(done_bytes, total_bytes);
        }
        Ok(Some(model))
    }

    /// A model of that shape with random weights: uniform with the standard deviation of GPT-2's start, 0.02; norms 1, biases and sinks 0. On a recording device
    /// no weights are made.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn random(config: &ModelConfig, device: &Device, form: Form<'_>, seed: u64) -> Result<Self> {
        let mut model = Self::zeros(config, device, form)?;
        if !device.keeps_values() {
            return Ok(model);
        }
        let (linear, precision) = (model.linear_weights(), device.precision());
        for (number, (id, name)) in model.names().into_iter().enumerate() {
            let parameter = model.params.get(id);
            let len = parameter.len();
            let is_vector = parameter.shape.len() == 1 || name.ends_with("_bias");
            let quantize = form.weights.double_quant().filter(|_| linear.contains(&id));
            if is_vector {
                model.params.set(id, &vec![if name.ends_with("norm.weight") { 1.0 } else { 0.0 }; len]);
            } else if model.params.is_mxfp4(id) {
                let (blocks, scales) = random_mxfp4(Philox::new(seed, number as u64), len);
                let shape = model.params.get(id).shape.clone();
                model.params.set_mxfp4(id, &Mxfp4::new(&shape, blocks, scales)?);
            } else if quantize.is_none() && precision == Precision::Bf16 {
                let mut bytes = vec![0; 2 * len];
                random_values(Philox::new(seed, number as u64), &mut bytes, 8, |pair: &mut [u8], x| {
                    pair.copy_from_slice(&bf16::from_f32(x).to_le_bytes());
                });
                model.params.set_bf16(id, &bytes);
            } else {
                let mut data = vec![0.0; len];
                random_values(Philox::new(seed, number as u64), &mut data, 4, |value: &mut [f32], x| {
                    value[0] = precision.round(x);
                });
                model.set_weight(id, data, quantize)?;
            }
            device.check().with_context(|| format!("making {name}"))?;
        }
        Ok(model)
    }

    /// Loads the weights of a block's experts, one expert after the other.
    fn load_experts(&mut self, checkpoint: &Checkpoint, id: ParamId, name: &str, experts: usize) -> Result<()> {
        if self.params.is_mxfp4(id) {
            let stored = checkpoint.tensor_mxfp4(name)?;
            self.params.set_mxfp4(id, &stored.with_context(|| format!("{name} is not stored in MXFP4"))?);
            return Ok(());
        }
        for expert in 0..experts {
            match checkpoint.expert_bf16(name, expert)? {
                Some(bytes) => self.params.set_expert_bf16(id, expert, &bytes),
                None => {
                    let mut values = checkpoint.expert_f32(name, expert)?;
                    self.device.precision().round_slice(&mut values);
                    self.params.set_expert(id, expert, &values);
                }
            }
        }
        Ok(())
    }

    /// The weights of the blocks' linear layers.
    fn linear_weights(&self) -> HashSet<ParamId> {
        let projections = self.blocks.iter().flat_map(Block::projections);
        projections.flat_map(|(_, projection)| &projection.linears).map(|linear| linear.weight).collect()
    }

    /// Sets a weight, quantized to NF4 on the way where `quantize` says whether its scales are, too.
    fn set_weight(&mut self, id: ParamId, values: Vec<f32>, quantize: Option<bool>) -> Result<()> {
        let Some(double) = quantize else {
            self.params.set(id, &values);
            return Ok(());
        };
        let dtype = match self.device.precision() {
            Precision::F32 => Dtype::F32,
            Precision::Bf16 => Dtype::BF16,
        };
        let parameter = self.params.get(id);
        let weight = Nf4::quantize(&parameter.name, &values, &parameter.shape, dtype, double)?;
        drop(values);
        if self.params.is_nf4(id) {
            self.params.set_nf4(id, &weight);
        } else {
            self.params.set(id, &weight.dequantize()?);
        }
        Ok(())
    }
}

/// Blocks and scales of `len` values in MXFP4: all sixteen codes alike, times 2⁻⁷, which gives a standard deviation of 0.022.
fn random_mxfp4(generator: Philox, len: usize) -> (Vec<u8>, Vec<u8>) {
    let mut blocks = vec![0; len / 2];
    blocks.par_chunks_mut(16).enumerate().with_min_len(1 << 12).for_each(|(block, bytes)| {
        let words = generator.block(block as u64);
        bytes
            .chunks_mut(4)
            .zip(words)
            .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]));
    });
    (blocks, vec![120; len / 32])
}

/// Fills `out` with values uniform in ±0.02·√3, `set` writes one; four values are `stride` items.
fn random_values<T: Send>(generator: Philox, out: &mut [T], stride: usize, set: impl Fn(&mut [T], f32) + Sync) {
    let bound = 0.02 * 3f32.sqrt();
    out.par_chunks_mut(stride).enumerate().with_min_len(1 << 14).for_each(|(block, values)| {
        let words = generator.block(block as u64);
        let each = values.chunks_mut(stride / 4).zip(words);
        each.for_each(|(value, word)| set(value, (2.0 * unit_f32(word) - 1.0) * bound));
    });
}
