//! The largest batch before the first step: a run that has no room for it ends before it begins.

use std::sync::atomic::AtomicBool;

use super::Trainer;
use crate::base::error::Result;
use crate::data::pack::PackedBatch;
use crate::layers::DropoutState;
use crate::model::transformer::PassOptions;
use crate::ops::cross_entropy::LossSum;
use crate::train::batch::upload;

impl Trainer {
    /// Runs the passes over a batch and takes nothing from them: steps give the same as without it. What steps of that size allocate is allocated from
    /// then on, and their products are timed. `false` when `stop` was raised on the way.
    ///
    /// # Errors
    /// As [`Self::step`]: out of memory, above all.
    pub fn rehearse(&mut self, batch: &PackedBatch, stop: &AtomicBool) -> Result<bool> {
        self.again_with_one_buffer(|trainer| trainer.try_rehearse(batch, stop))
    }

    fn try_rehearse(&mut self, batch: &PackedBatch, stop: &AtomicBool) -> Result<bool> {
        let device = self.model.device().clone();
        self.model.begin_offload_step();
        self.optimizer.clear_gradients(&self.model, &mut self.grads);
        let mut loss = LossSum::new(&device);
        let uploaded = upload(&self.model, batch)?;
        let options = PassOptions {
            weight: 1.0 / batch.num_label_tokens.max(1) as f32,
            share: 1.0,
            activations: self.setup.switches.activations,
            // Step 0 is none of the run's.
            dropout: Some(DropoutState { seed: self.setup.seed, step: 0, micro_batch: 0 }),
            stop,
        };
        let Self { model, recordings, grads, .. } = self;
        let done = model.forward_backward_recorded(recordings, grads, &mut loss, &uploaded, options);
        // Both errors are taken off, whichever is told.
        let carried = self.model.check_offload();
        device.synchronize();
        device.check()?;
        carried?;
        Ok(done.is_some())
    }
}
