//! CUDA graphs of training passes: what is recorded of a pass, when, and what a recording needs to be run again.
//!
//! A pass has two recorded parts, the blocks forward (with the embedding) and the blocks backward. The head between them has as many rows as the batch
//! has supervised tokens, so the host queues it in every pass, as it does uploads, the embedding's gradient and the optimizer.
//!
//! A recording serves every batch of as many tokens: on a GPU batches are padded to few sizes, and what differs between two batches of one size
//! (ids, positions, work lists, masks) is copied to where the recorded kernels read it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Context as _;

use super::batch::DeviceBatch;
use super::block::Block;
use super::metadata::SequenceMetadata;
use super::policy::{Activations, AttentionPath, KeptParts, OffloadPolicy, Routing};
use super::transformer::{BlockRun, PassOptions, Transformer};
use crate::base::error::Result;
use crate::layers::parameter::Grads;
use crate::ops::cross_entropy::LossSum;
use crate::tensor::cuda::PassMemory;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, Gpu, Segment, Tensor};

/// Recordings that are kept at one time.
const MAX_RECORDINGS: usize = 8;

/// The passes of one model that were recorded, for one set of gradients. Parameters and gradients must stay where they are.
#[derive(Debug)]
pub struct Recordings {
    enabled: bool,
    /// Why no pass is recorded although it was asked for.
    unused: Option<String>,
    /// Kinds of passes that have run, the one that ran last at the end.
    kinds: Vec<(Kind, Option<Recording>)>,
}

/// What passes of one recording have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    total_tokens: usize,
    activations: Activations,
    attention: AttentionPath,
    mlp_rows: usize,
    /// What is kept of blocks beside their input.
    beside: KeptParts,
    /// With offload: how, and with which memory.
    offload: Option<(OffloadPolicy, u64)>,
}

/// What layers of one window read of a batch.
#[derive(Debug)]
struct Documents {
    window: Option<usize>,
    metadata: Arc<SequenceMetadata>,
    /// Times that they asked for it.
    lookups: Cell<u64>,
}

/// A recorded pass.
#[derive(Debug)]
struct Recording {
    forward: Segment,
    backward: Segment,
    /// What the graphs read of a batch, its documents by window.
    batch: DeviceBatch,
    metadata: Vec<Documents>,
    /// Output of the last block and the room for its gradient, in the memory of passes.
    x: Tensor,
    dx: Tensor,
    /// The memory of passes between the graphs: those two and all that is kept for the backward pass are in use.
    between: PassMemory,
    /// Device buffers for offloaded activations, and why as many.
    buffers: Option<(usize, String)>,
}

impl Recordings {
    /// No recordings yet. Unless `enabled` there will be none.
    pub fn new(enabled: bool) -> Self {
        Self { enabled, unused: None, kinds: Vec::new() }
    }

    /// Why no pass is recorded although it was asked for.
    pub fn unused(&self) -> Option<&str> {
        self.unused.as_deref()
    }

    /// Forgets what was recorded: parameters may lie elsewhere from now on, or others may train.
    pub fn forget(&mut self) {
        self.kinds.iter_mut().for_each(|(_, recording)| *recording = None);
    }

    /// Forgets everything, so that a kind of pass is queued launch by launch again at its first time: only such passes are charged for their memory.
    pub fn clear(&mut self) {
        self.kinds.clear();
    }

    /// Lets passes be recorded from now on, or not. What was recorded stays.
    pub fn enable(&mut self, enabled: bool) {
        (self.enabled, self.unused) = (enabled, None);
    }

    fn give_up(&mut self, why: String) {
        tracing::warn!("CUDA graphs are not used: {why}");
        self.unused = Some(why);
    }

    /// The place for the recording of a kind that has run before. A kind that is new is noted, and has none yet: its first pass lets the matrix library
    /// time its products, which cannot be recorded. When there are too many kinds, the one that has not run for longest is forgotten.
    fn place(&mut self, kind: Kind) -> Option<&mut Option<Recording>> {
        match self.kinds.iter().position(|(known, _)| *known == kind) {
            Some(at) => {
                self.kinds[at..].rotate_left(1);
                self.kinds.last_mut().map(|(_, recording)| recording)
            }
            None => {
                if self.kinds.len() == MAX_RECORDINGS {
                    self.kinds.remove(0);
                }
                self.kinds.push((kind, None));
                None
            }
        }
    }
}

impl Transformer {
    /// As [`Transformer::forward_backward`], recorded on a GPU: passes over batches of as many tokens are launched as graphs from their second time on.
    /// `recordings` are of this model and of `grads`. What cannot be recorded is queued launch by launch, and [`Recordings::unused`] says why.
    pub fn forward_backward_recorded(
        &self,
        recordings: &mut Recordings,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        match &self.device {
            Device::Cuda(gpu) if recordings.enabled && recordings.unused.is_none() && !batch.rows.is_empty() => {
                gpu.bind();
                self.recorded_pass(gpu, recordings, grads, loss, batch, options)
            }
            _ => self.forward_backward(grads, loss, batch, options),
        }
    }

    fn recorded_pass(
        &self,
        gpu: &Gpu,
        recordings: &mut Recordings,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        self.prepare_metadata(batch);
        let offloads = options.activations == Activations::Offload && self.prepare_offload(batch.total_tokens());
        if options.dropout.is_some() && self.drops() {
            recordings.give_up("with lora_dropout above 0 every step drops other inputs".into());
        } else if !self.metadata_cache().holds_all() {
            recordings.give_up("layers build what they know of the documents anew, for which the host must act".into());
        } else if self.routing().is_some_and(|routing| routing != Routing::Grouped) {
            recordings.give_up("the host reads how many tokens each expert gets".into());
        } else if self.choices().is_some() {
            recordings.give_up("choices of experts are noted or given".into());
        } else if offloads && self.offload().needs_thread() {
            recordings.give_up("a thread carries activations, as not all could be page-locked".into());
        }
        let attention = self.attention_path();
        let offload = offloads.then(|| {
            let offload = self.offload();
            (offload.policy(), offload.generation())
        });
        let (total_tokens, mlp_rows) = (batch.total_tokens(), self.mlp_rows());
        let beside = self.keeps_beside();
        let kind = Kind { total_tokens, activations: options.activations, attention, mlp_rows, beside, offload };
        // A device that has failed does nothing until the step ends, whichever way.
        let usable = recordings.unused.is_none() && !gpu.has_failed();
        let Some(place) = usable.then(|| recordings.place(kind)).flatten() else {
            return self.eager_pass(grads, loss, batch, options);
        };
        // Without the memory it was recorded with it is worth nothing.
        let recorded = match place.take().filter(|recording| gpu.is_current(&recording.between)) {
            Some(recording) => Ok(recording),
            None => self.record(gpu, grads, batch, options.activations),
        };
        match recorded {
            Ok(recording) => {
                let recording = place.insert(recording);
                self.replay(gpu, recording, grads, loss, batch, options)
            }
            Err(error) => {
                recordings.give_up(format!("recording a pass failed: {error:#}"));
                self.eager_pass(grads, loss, batch, options)
            }
        }
    }

    /// Records a pass over batches like this one. Nothing is done yet but what the graphs do not hold.
    fn record(&self, gpu: &Gpu, grads: &mut Grads, batch: &DeviceBatch, activations: Activations) -> Result<Recording> {
        // A later batch may be one document, so that every position occurs.
        let rope = self.rope_table(batch.total_tokens());
        let cache = self.metadata_cache();
        let metadata = self.config.windows().into_iter().map(|window| {
            let kept = cache.kept(batch, window, self.attention_path());
            let kept = kept.context("a cache that holds all has lost something")?;
            Ok(Documents {
                window,
                metadata: Arc::new(kept.twin(&self.device, Arc::clone(&rope))),
                lookups: Cell::new(0),
            })
        });
        let metadata = metadata.collect::<Result<Vec<_>>>()?;
        let batch = batch.twin(&self.device);
        let lookup = |block: &Block, _: Pass| {
            let Some(found) = metadata.iter().find(|documents| documents.window == block.window) else {
                unreachable!("the window of a block is one of the model's")
            };
            found.lookups.set(found.lookups.get() + 1);
            Arc::clone(&found.metadata)
        };
        gpu.check()?;
        let _scope = gpu.pass_scope();
        let ctx = self.context(None);
        let mut travel = self.travel(&batch, activations);
        let run = BlockRun { ctx: &ctx, batch: &batch, metadata: &lookup, stopped: &|| false };
        let (forwarded, forward) = gpu.record(|| self.forward_blocks(run, activations, travel.as_mut()))?;
        let (x, kept) = forwarded.ok_or_else(|| anyhow::anyhow!("nobody stops a recording"))?;
        let mut dx = ctx.scratch(&self.gradient_shape(&ctx, &x));
        let (between, x_between, dx_between) = (gpu.pass_memory(), x.alias(), dx.alias());
        drop(x);
        let (_, backward) = gpu.record(|| self.backward_blocks(run, grads, kept, travel.as_mut(), &mut dx))?;
        drop(travel);
        let buffers = self.offload().state().buffers;
        Ok(Recording { forward, backward, batch, metadata, x: x_between, dx: dx_between, between, buffers })
    }

    /// A pass whose blocks were recorded. It charges no memory: passes that were queued launch by launch have set the peaks of the same allocations.
    fn replay(
        &self,
        gpu: &Gpu,
        recording: &mut Recording,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        let stopped = || options.stop.load(Ordering::Relaxed);
        if stopped() {
            return None;
        }
        {
            let _phase = self.device.clock().enter(Phase::Metadata, Pass::Step, None);
            recording.batch.copy_from(batch);
            for Documents { window, metadata, lookups } in &mut recording.metadata {
                let kept = self.metadata_cache().kept(batch, *window, self.attention_path());
                let Some((to, from)) = Arc::get_mut(metadata).zip(kept) else {
                    unreachable!("it was built before the pass, and no layer holds it between passes")
                };
                to.copy_from(&from);
                self.metadata_cache().count_recorded(*window, lookups.get());
            }
        }
        self.offload().resume(recording.buffers.clone());
        gpu.replay(&mut recording.forward);
        if stopped() {
            return None;
        }
        let ctx = self.context(options.dropout);
        let _held = gpu.hold_pass(&recording.between);
        let _scope = gpu.pass_scope();
        let dx = &mut recording.dx;
        self.head_pass(&ctx, grads, loss, batch, options, &recording.x, dx);
        if stopped() {
            return None;
        }
        gpu.replay(&mut recording.backward);
        self.embedding_gradient(&ctx, grads, batch, dx);
        Some(())
    }

    /// Whether an adapter drops inputs in training.
    pub fn drops(&self) -> bool {
        let projections = self.blocks.iter().flat_map(Block::projections);
        let mut adapters = projections.flat_map(|(_, projection)| &projection.linears).filter_map(|linear| linear.lora);
        adapters.any(|lora| lora.dropout > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(total_tokens: usize) -> Kind {
        Kind {
            total_tokens,
            activations: Activations::Keep,
            attention: AttentionPath::Varlen,
            beside: KeptParts::default(),
            mlp_rows: 0,
            offload: None,
        }
    }

    #[test]
    fn a_kind_has_a_place_from_its_second_pass_on_and_the_longest_unused_goes_first() {
        let mut recordings = Recordings::new(true);
        for total_tokens in 0..MAX_RECORDINGS {
            assert!(recordings.place(kind(total_tokens)).is_none(), "a new kind runs once before it is recorded");
            assert!(recordings.place(kind(total_tokens)).is_some());
        }
        let other = Kind { activations: Activations::Recompute, ..kind(1) };
        assert!(recordings.place(kind(0)).is_some(), "used again, so that 1 is now the longest unused");
        assert!(recordings.place(other).is_none(), "as many tokens, but another pass");
        assert_eq!(recordings.kinds.len(), MAX_RECORDINGS);
        assert!(recordings.place(kind(0)).is_some() && recordings.place(kind(2)).is_some());
        assert!(recordings.place(kind(1)).is_none(), "forgotten, so that it is new again");
        recordings.forget();
        assert!(recordings.place(kind(1)).is_some_and(|recording| recording.is_none()), "what was timed stays timed");
        recordings.give_up("no reason".into());
        assert_eq!((recordings.unused(), recordings.kinds.len()), (Some("no reason"), MAX_RECORDINGS));
        recordings.enable(true);
        assert_eq!(recordings.unused(), None);
        recordings.clear();
        assert!(recordings.place(kind(1)).is_none(), "new again");
    }
}
