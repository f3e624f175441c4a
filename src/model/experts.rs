//! Routed experts of a model: how rows get to them, what is noted of their choices, the auxiliary loss.

use std::sync::Mutex;

use super::batch::DeviceBatch;
use super::transformer::{PassOptions, Transformer};
use crate::layers::moe::{Choices, Routing};
use crate::ops::cross_entropy::LossSum;
use crate::tensor::Tensor;

impl Transformer {
    /// Whether it trains with an auxiliary loss over all tokens of a pass: padding would take part in it.
    pub fn has_auxiliary_loss(&self) -> bool {
        self.balance.is_some()
    }

    /// Sets how rows get to their experts, in every pass from now on. No result changes but by the order of sums in products.
    pub fn set_routing(&mut self, routing: Routing) {
        self.routing = routing;
    }

    /// How rows get to their experts; `None` in a model without any.
    pub fn routing(&self) -> Option<Routing> {
        self.config.moe.as_ref().map(|_| self.routing)
    }

    /// Notes which experts are chosen in forward passes from now on, or takes those that are given. With `None` neither.
    pub fn set_choices(&mut self, choices: Option<Choices>) {
        self.choices = choices;
    }

    /// What [`Self::set_choices`] set.
    pub fn choices(&self) -> Option<&Choices> {
        self.choices.as_ref()
    }

    /// How often experts were chosen since that was cleared: f32 [layers with experts, E].
    pub(crate) fn expert_counts(&self) -> Option<&Mutex<Tensor>> {
        self.expert_counts.as_ref()
    }

    /// Adds the auxiliary loss of a forward pass, where the model trains with one, and makes its gradient for the backward pass.
    pub(super) fn add_auxiliary_loss(&self, batch: &DeviceBatch, options: PassOptions<'_>, loss: &mut LossSum) {
        if let Some((balance, (coef, moe))) = self.balance.as_ref().zip(self.config.auxiliary_loss()) {
            let layers = moe.layers.iter().filter(|has_experts| **has_experts).count();
            let share = coef as f32 * options.share;
            balance.close(&self.device, batch.total_tokens() * layers, share, options.weight, loss);
        }
    }
}
