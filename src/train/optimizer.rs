//! AdamW over a model's trainable parameters, with 32-bit state.

use super::config::OptimizerConfig;
use crate::layers::parameter::{Grads, ParamId, Parameter};
use crate::model::transformer::Transformer;
use crate::ops::adamw::{self, AdamWParams, GradScale};
use crate::ops::cross_entropy::LossSum;
use crate::ops::norm::{self, ClipState, ClipValues};
use crate::tensor::{Device, MemoryCategory, Tensor};

/// Optimizer state of one parameter.
#[derive(Debug)]
struct Slot {
    id: ParamId,
    m: Tensor,
    v: Tensor,
}

/// AdamW for all trainable parameters of a model.
#[derive(Debug)]
pub struct Optimizer {
    slots: Vec<Slot>,
    updates: u64,
}

/// A gradient that is not finite.
#[derive(Debug, Clone, PartialEq)]
pub struct BadGradient {
    /// Parameter it belongs to.
    pub name: String,
    /// The value.
    pub value: f32,
}

impl Optimizer {
    /// State for every trainable parameter.
    pub fn new(model: &Transformer) -> Self {
        let device = model.device();
        let slot = |id, parameter: &Parameter| {
            let zeros = || device.zeros_f32(MemoryCategory::Optimizer, parameter.value.shape());
            Slot { id, m: zeros(), v: zeros() }
        };
        let slots = model.params().iter().filter(|(_, p)| p.trainable).map(|(id, p)| slot(id, p)).collect();
        Self { slots, updates: 0 }
    }

    /// Updates done.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// One update with learning rate `lr`, the gradients scaled to at most `max_grad_norm`. Weight decay spares parameters of one
    /// dimension (norms and biases), as Transformers' Trainer does. Nothing is updated when the loss or a gradient is not finite.
    ///
    /// # Errors
    /// Names the first parameter whose gradient is NaN or infinite. A loss that is not finite shows in the result.
    pub fn step(
        &mut self,
        model: &mut Transformer,
        grads: &Grads,
        loss: &LossSum,
        config: &OptimizerConfig,
        lr: f64,
    ) -> Result<ClipValues, BadGradient> {
        let device = model.device().clone();
        let values = match (&device, loss) {
            (Device::Cuda(gpu), LossSum::Device(loss)) => {
                let all = self.slots.iter().filter_map(|slot| grads.get(slot.id));
                let state = ClipState::new(&device, gpu, all, loss, config.max_grad_norm);
                self.update(model, grads, config, lr, GradScale::Device(&state));
                state.read()
            }
            _ => {
                let all = self.slots.iter().filter_map(|slot| grads.get(slot.id));
                let norm = all.map(|grad| norm::sum_of_squares(grad.f32s())).sum::<f64>().sqrt();
                let (scale, loss_sum) = (norm::clip_coefficient(norm, config.max_grad_norm), loss.read());
                let finite = norm.is_finite() && loss_sum.is_finite();
                if finite {
                    self.update(model, grads, config, lr, GradScale::Host(scale));
                }
                ClipValues { norm, scale, finite, loss_sum }
            }
        };
        if values.finite {
            self.updates += 1;
            return Ok(values);
        }
        match self.first_bad_gradient(model, grads) {
            Some(bad) if values.loss_sum.is_finite() => Err(bad),
            _ => Ok(values),
        }
    }

    fn update(
        &mut self,
        model: &mut Transformer,
        grads: &Grads,
        config: &OptimizerConfig,
        lr: f64,
        scale: GradScale<'_>,
    ) {
        let device = model.device().clone();
        for Slot { id, m, v } in &mut self.slots {
            let Some(grad) = grads.get(*id) else { continue };
            let Parameter { value, working, .. } = model.params_mut().get_mut(*id);
            let weight_decay = if value.shape().len() > 1 { config.weight_decay } else { 0.0 };
            let params = AdamWParams {
                lr,
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.eps,
                weight_decay,
                step: self.updates + 1,
            };
            adamw::update(&device, &params, scale, value, working.as_mut(), grad, m, v);
        }
    }

    fn first_bad_gradient(&self, model: &Transformer, grads: &Grads) -> Option<BadGradient> {
        self.slots.iter().find_map(|slot| {
            let value = norm::first_non_finite(grads.get(slot.id)?)?;
            Some(BadGradient { name: model.params().name(slot.id).to_owned(), value })
        })
    }
}
