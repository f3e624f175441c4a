//! AdamW over a model's trainable parameters, with 32-bit state.

use super::config::OptimizerConfig;
use crate::layers::parameter::{Grads, ParamId, Parameter};
use crate::model::transformer::Transformer;
use crate::ops::adamw::{self, AdamWParams};
use crate::ops::{elementwise, norm};
use crate::tensor::{MemoryCategory, Precision, Tensor};

/// Optimizer state of one parameter.
#[derive(Debug)]
struct Slot {
    id: ParamId,
    m: Tensor,
    v: Tensor,
    /// f32 value of a parameter whose working copy is rounded to bf16; `None` where the working copy is f32 itself.
    master: Option<Tensor>,
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
    /// State for every trainable parameter. Adapters are f32; base weights that train in bf16 get an f32 master.
    pub fn new(model: &Transformer) -> Self {
        let device = model.device();
        let slot = |id, parameter: &Parameter| {
            let shape = parameter.value.shape();
            let needs_master =
                device.precision() == Precision::Bf16 && parameter.value.category() == MemoryCategory::Weights;
            Slot {
                id,
                m: device.zeros(MemoryCategory::Optimizer, shape),
                v: device.zeros(MemoryCategory::Optimizer, shape),
                master: needs_master
                    .then(|| device.tensor(MemoryCategory::Optimizer, shape, parameter.value.f32s().to_vec())),
            }
        };
        let slots = model.params().iter().filter(|(_, p)| p.trainable).map(|(id, p)| slot(id, p)).collect();
        Self { slots, updates: 0 }
    }

    /// Updates done.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Global norm of the gradients.
    ///
    /// # Errors
    /// Names the first parameter whose gradient is NaN or infinite.
    pub fn grad_norm(&self, model: &Transformer, grads: &Grads) -> Result<f64, BadGradient> {
        let device = model.device();
        let mut sum = 0.0;
        for (grad, parameter) in self.slots.iter().filter_map(|slot| Some((grads.get(slot.id)?, slot.id))) {
            let squares = norm::sum_of_squares(device, grad);
            if !squares.is_finite() {
                let value = norm::first_non_finite(device, grad).unwrap_or(f32::INFINITY);
                return Err(BadGradient { name: model.params().name(parameter).to_owned(), value });
            }
            sum += squares;
        }
        Ok(sum.sqrt())
    }

    /// One update with learning rate `lr` and gradients scaled by `grad_scale`. Weight decay spares parameters of one dimension
    /// (norms and biases), as Transformers' Trainer does.
    pub fn update(
        &mut self,
        model: &mut Transformer,
        grads: &Grads,
        config: &OptimizerConfig,
        lr: f64,
        grad_scale: f32,
    ) {
        self.updates += 1;
        let device = model.device().clone();
        for slot in &mut self.slots {
            let (Some(grad), value) = (grads.get(slot.id), model.params_mut().value_mut(slot.id)) else { continue };
            let weight_decay = if value.shape().len() > 1 { config.weight_decay } else { 0.0 };
            let params = AdamWParams {
                lr,
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.eps,
                weight_decay,
                step: self.updates,
                grad_scale,
            };
            match &mut slot.master {
                None => adamw::update(&device, &params, value, grad, &mut slot.m, &mut slot.v),
                Some(master) => {
                    adamw::update(&device, &params, master, grad, &mut slot.m, &mut slot.v);
                    elementwise::copy(&device, master, value);
                    elementwise::round(&device, value);
                }
            }
        }
    }
}
