//! The model: parameters, and the passes over one packed batch. Stop 6 of the walk.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;

use super::batch::DeviceBatch;
use super::block::{Beside, Block, BlockSaved, Leave, Left, Tiling};
use super::config::ModelConfig;
use super::lora::LoraSpec;
use super::metadata::{CacheCounts, CacheEntry, MetadataCache, MetadataPolicy, SequenceMetadata};
use super::offload::{Activation, ActivationPart, Offload, Travel, arrive};
use super::policy::{Activations, AttentionPath, Dequantized, KeptParts, Placement, WeightFormat};
use super::rotary;
use super::skeleton::{Skeleton, TIED, skeleton};
use crate::base::error::Result;
use crate::layers::embedding::Embedding;
use crate::layers::head::{Head, Supervised};
use crate::layers::moe::{Balances, Choices, MoeRun, Routing};
use crate::layers::parameter::{Grads, ParamId, Params};
use crate::layers::{Context, DropoutState, Keep};
use crate::ops::cross_entropy::LossSum;
use crate::ops::rope::RopeTable;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, MemoryCategory, Tensor};

/// Rows of the embedding's table that are moved at once.
const ROWS_MOVED: usize = 4096;

/// A decoder-only transformer on one device.
#[derive(Debug)]
pub struct Transformer {
    pub(super) device: Device,
    pub(super) config: ModelConfig,
    pub(super) params: Params,
    pub(super) embed_tokens: Embedding,
    pub(super) blocks: Vec<Block>,
    pub(super) head: Head,
    /// Why the embedding's table is on the device although it was to be in host memory.
    embedding_refused: Option<String>,
    attention_path: AttentionPath,
    mlp_rows: usize,
    keeps_beside: KeptParts,
    metadata: MetadataCache,
    pub(super) routing: Routing,
    /// How often experts were chosen since that was cleared: f32 [layers with experts, E].
    pub(super) expert_counts: Option<Mutex<Tensor>>,
    pub(super) choices: Option<Choices>,
    /// Where the model trains with an auxiliary loss.
    pub(super) balance: Option<Balances>,
    pub(super) offload: Mutex<Offload>,
    inv_freq: Vec<f32>,
    /// Factor on cosines and sines.
    rope_factor: f32,
    /// Grown when a batch has a longer document; shared by the batches that use it.
    rope: Mutex<Option<Arc<RopeTable>>>,
}

/// In which form a model is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Form<'a> {
    /// Adapters that it has room for from the start.
    pub lora: Option<&'a LoraSpec>,
    /// How its linear layers are held.
    pub weights: WeightFormat,
    /// Where the embedding's table lies, if nothing stands against it.
    pub embedding: Placement,
    /// Where experts that the file has in MXFP4 are dequantized to.
    pub experts: Dequantized,
}

/// What a training pass over one micro-batch needs besides the batch.
#[derive(Debug, Clone, Copy)]
pub struct PassOptions<'a> {
    /// Factor on the gradient of each supervised token: 1 / supervised tokens of the whole step.
    pub weight: f32,
    /// What blocks keep.
    pub activations: Activations,
    /// Part of this pass in the auxiliary loss of a step, in a model that trains with one: 1 / passes of the step.
    pub share: f32,
    /// Dropout of this micro-batch.
    pub dropout: Option<DropoutState>,
    /// Raised to stop between blocks.
    pub stop: &'a AtomicBool,
}

/// Where a block gets what it needs to know about the documents of its batch.
pub(super) type Lookup<'a> = &'a dyn Fn(&Block, Pass) -> Arc<SequenceMetadata>;

/// What a pass over blocks needs besides what it changes.
#[derive(Clone, Copy)]
pub(super) struct BlockRun<'a> {
    pub ctx: &'a Context<'a>,
    pub batch: &'a DeviceBatch,
    pub metadata: Lookup<'a>,
    /// Asked before each block.
    pub stopped: &'a dyn Fn() -> bool,
}

/// What a block left for its backward pass.
pub(super) struct Kept {
    x: Activation,
    /// What is kept beside the input.
    beside: Beside<Activation>,
    /// With the metadata that it was made with.
    saved: Option<(BlockSaved, Arc<SequenceMetadata>)>,
}

impl Transformer {
    /// A model whose parameters are all zero, or, in NF4, not set.
    pub(super) fn zeros(config: &ModelConfig, device: &Device, form: Form<'_>) -> Result<Self> {
        let rank = |layer: usize, module: &str| form.lora.map_or(0, |lora| lora.rank_of(layer, module));
        let packed = match form.weights {
            WeightFormat::Nf4 { double_quant, dequantized: Dequantized::Scratch } => Some(double_quant),
            WeightFormat::Nf4 { dequantized: Dequantized::Resident, .. } | WeightFormat::Plain => None,
        };
        let Skeleton { params, embed_tokens, blocks, head, embedding_refused } =
            skeleton(config, device, &rank, packed, form.experts, form.embedding)?;
        Ok(Self {
            device: device.clone(),
            config: config.clone(),
            params,
            embed_tokens,
            blocks,
            head,
            embedding_refused,
            attention_path: AttentionPath::default(),
            mlp_rows: 0,
            keeps_beside: KeptParts::default(),
            metadata: MetadataCache::new(MetadataPolicy::default(), config.windows().len()),
            routing: Routing::default(),
            expert_counts: config.moe.as_ref().map(|moe| {
                let layers = moe.layers.iter().filter(|has_experts| **has_experts).count();
                Mutex::new(device.zeros_f32(MemoryCategory::Metadata, &[layers, moe.num_experts]))
            }),
            choices: None,
            balance: config.auxiliary_loss().map(|(_, moe)| Balances::new(device, moe.num_experts)),
            offload: Mutex::default(),
            inv_freq: rotary::inv_freq(config),
            rope_factor: rotary::attention_factor(config),
            rope: Mutex::default(),
        })
    }

    /// All parameters by id and name.
    pub(super) fn names(&self) -> Vec<(ParamId, String)> {
        self.params.iter().map(|(id, parameter)| (id, parameter.name.clone())).collect()
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

    /// Sets how attention knows the documents of a pack, in every pass from now on. A new model has the default.
    pub fn set_attention_path(&mut self, path: AttentionPath) {
        self.attention_path = path;
    }

    /// Moves the embedding's table to where it shall lie, unless something stands against it ([`Self::embedding_refused`]); whether it was moved.
    pub fn place_embedding(&mut self, place: Placement) -> bool {
        let id = self.embed_tokens.weight;
        let in_host = self.embedding_host_bytes().is_some();
        if place == Placement::Device {
            self.embedding_refused = None;
        }
        if in_host == (place == Placement::Host) || self.device.has_failed() {
            return false;
        }
        let table = self.params.operand(id);
        let (category, shape, dtype) = (table.category(), table.shape(), table.dtype());
        let moved = match place {
            _ if self.params.is_trainable(id) => Err("it trains".to_owned()),
            Placement::Host if id == self.head.weight => Err(TIED.to_owned()),
            Placement::Host => self.device.zeros_mapped(category, shape, dtype),
            Placement::Device => {
                let room = self.device.empty(category, shape);
                self.device.check().map(|()| room).map_err(|error| format!("{error:#}"))
            }
        };
        match moved {
            Ok(mut moved) => {
                let rows = if self.device.keeps_values() { table.rows() } else { 0 };
                for first in (0..rows).step_by(ROWS_MOVED) {
                    let count = ROWS_MOVED.min(rows - first);
                    let values = table.view().row_range(first, count).to_vec();
                    moved.view_mut().row_range(first, count).set(&values);
                }
                self.params.replace(id, moved);
                self.embedding_refused = None;
                true
            }
            Err(why) => {
                self.embedding_refused = Some(why);
                false
            }
        }
    }

    /// Bytes of the embedding's table, where it lies in host memory.
    pub fn embedding_host_bytes(&self) -> Option<u64> {
        let table = self.params.operand(self.embed_tokens.weight);
        table.is_mapped().then(|| (table.len() * table.dtype().num_bytes()) as u64)
    }

    /// Why the embedding's table does not lie where it was to lie.
    pub fn embedding_refused(&self) -> Option<&str> {
        self.embedding_refused.as_deref()
    }

    /// Sets how many rows the MLP of a block takes at most at one time where its activations are not kept, in every pass from now on. A new model
    /// takes all of them, which 0 means.
    pub fn set_mlp_rows(&mut self, mlp_rows: usize) {
        self.mlp_rows = mlp_rows;
    }

    /// Sets what blocks that are computed again keep beside their input, in every pass from now on: a product less for each activation. A new model's
    /// keep nothing more.
    pub fn set_keeps_beside(&mut self, keeps_beside: KeptParts) {
        self.keeps_beside = keeps_beside;
    }

    /// What [`Self::set_keeps_beside`] set.
    pub(super) fn keeps_beside(&self) -> KeptParts {
        self.keeps_beside
    }

    /// What [`Self::set_mlp_rows`] set.
    pub(super) fn mlp_rows(&self) -> usize {
        self.mlp_rows
    }

    /// Sets where layers get what they know of the documents, in every pass from now on. A new model keeps it in a cache.
    pub fn set_metadata_policy(&mut self, policy: MetadataPolicy) {
        if policy != self.metadata.policy() {
            self.metadata = MetadataCache::new(policy, self.config.windows().len());
        }
    }

    /// The metadata cache.
    pub(super) fn metadata_cache(&self) -> &MetadataCache {
        &self.metadata
    }

    /// What the metadata cache keeps at present.
    pub fn metadata_entries(&self) -> Vec<CacheEntry> {
        self.metadata.entries()
    }

    /// What the metadata cache did so far.
    pub fn metadata_counts(&self) -> CacheCounts {
        self.metadata.counts()
    }

    /// Makes every base parameter trainable (full fine-tuning).
    ///
    /// # Errors
    /// When weights are held in 4 bits, which have no gradient.
    pub fn train_everything(&mut self) -> Result<()> {
        self.train_everything_in(&mut |_, _| None)
    }

    /// As [`Self::train_everything`], with each f32 master in what `room(category, shape)` gives, where it gives something.
    ///
    /// # Errors
    /// As there.
    pub fn train_everything_in(
        &mut self,
        room: &mut dyn FnMut(MemoryCategory, &[usize]) -> Option<Tensor>,
    ) -> Result<()> {
        ensure!(
            !self.params.ids().any(|id| self.params.is_nf4(id)),
            "weights in 4 bits do not train: take kind = \"qlora\", which trains adapters on them"
        );
        self.params.ids().for_each(|id| self.params.train_in(id, room));
        Ok(())
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
        if batch.rows.is_empty() {
            // No supervised token: no loss and no gradient.
            return (!options.stop.load(Ordering::Relaxed)).then_some(());
        }
        self.prepare_metadata(batch);
        self.eager_pass(grads, loss, batch, options)
    }

    /// One pass whose every launch is queued by the host. `batch` has a supervised token.
    pub(super) fn eager_pass(
        &self,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
    ) -> Option<()> {
        let stopped = || options.stop.load(Ordering::Relaxed);
        let metadata = |block: &Block, pass| self.metadata(batch, block.window, pass);
        let _scope = self.device.pass_scope();
        let ctx = self.context(options.dropout);
        let mut travel = self.travel(batch, options.activations);
        let run = BlockRun { ctx: &ctx, batch, metadata: &metadata, stopped: &stopped };
        let (x, kept) = self.forward_blocks(run, options.activations, travel.as_mut())?;
        let mut dx = ctx.scratch(&self.gradient_shape(&ctx, &x));
        self.head_pass(&ctx, grads, loss, batch, options, &x, &mut dx);
        drop(x);
        self.backward_blocks(run, grads, kept, travel.as_mut(), &mut dx)?;
        self.embedding_gradient(&ctx, grads, batch, &dx);
        Some(())
    }

    /// Embedding and all blocks: the output of the last one [T, hidden], and what the backward pass needs; `None` when stopped on the way.
    pub(super) fn forward_blocks(
        &self,
        run: BlockRun<'_>,
        activations: Activations,
        mut travel: Option<&mut Travel<'_>>,
    ) -> Option<(Tensor, Vec<Kept>)> {
        let BlockRun { ctx, batch, metadata, stopped } = run;
        let first = self.first_trained_block();
        if let Some(balance) = &self.balance {
            balance.clear();
        }
        let mut x = {
            let _phase = self.device.clock().enter(Phase::HeadLoss, Pass::Forward, None);
            self.embed_tokens.forward(ctx, &batch.input_ids)
        };
        let mut kept = Vec::with_capacity(self.blocks.len() - first);
        for (i, block) in self.blocks.iter().enumerate() {
            let mut carrier = travel.as_deref_mut().filter(|travel| travel.carries(i));
            if stopped() {
                return None;
            }
            if let Some(carrier) = &mut carrier {
                carrier.store(i, ActivationPart::Input, &x);
                if carrier.has_failed() {
                    return None;
                }
            }
            let leave = match activations {
                _ if i < first => Leave::Beside(KeptParts::default()),
                Activations::Keep => Leave::Everything,
                Activations::Recompute | Activations::Offload => Leave::Beside(self.keeps_beside),
            };
            let metadata = metadata(block, Pass::Forward);
            let (out, left) = block.forward(ctx, metadata.sequences(batch), &x, leave, self.mlp_rows);
            let input = std::mem::replace(&mut x, out);
            if i >= first {
                let mut keep = |part, tensor: Tensor| match &mut carrier {
                    None => Activation::Here(tensor),
                    Some(carrier) => {
                        carrier.leave(i, part, tensor);
                        Activation::Away
                    }
                };
                let (beside, saved) = match left {
                    Left::Beside(beside) => (beside, None),
                    Left::Everything(saved) => (Beside::default(), Some((*saved, metadata))),
                };
                let x = keep(ActivationPart::Input, input);
                kept.push(Kept { x, beside: beside.map(keep), saved });
            }
        }
        if let Some(travel) = travel {
            travel.all_left();
            if travel.has_failed() {
                return None;
            }
        }
        Some((x, kept))
    }

    /// Shape of the gradient of the residual stream `x` [T, hidden]: with room for the adapters that read it.
    pub(super) fn gradient_shape(&self, ctx: &Context<'_>, x: &Tensor) -> [usize; 2] {
        let columns = self.blocks.iter().map(|block| block.gradient_columns(ctx)).max();
        [x.rows(), columns.unwrap_or(x.cols())]
    }

    /// The head over the output `x` of the last block: adds to `loss`, assigns the gradient of `x` to the first columns of `dx`.
    #[expect(clippy::too_many_arguments, reason = "the operands of one part of a pass")]
    pub(super) fn head_pass(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        loss: &mut LossSum,
        batch: &DeviceBatch,
        options: PassOptions<'_>,
        x: &Tensor,
        dx: &mut Tensor,
    ) {
        let _phase = self.device.clock().enter(Phase::HeadLoss, Pass::Forward, None);
        let supervised = Supervised { rows: &batch.rows, targets: &batch.targets };
        let losses = self.head.forward_backward(ctx, grads, x, supervised, options.weight, dx);
        loss.add(&self.device, &losses);
        self.add_auxiliary_loss(batch, options, loss);
    }

    /// Backward of the blocks of [`Self::forward_blocks`], with the gradient in `dx`; `None` when stopped on the way.
    pub(super) fn backward_blocks(
        &self,
        run: BlockRun<'_>,
        grads: &mut Grads,
        kept: Vec<Kept>,
        mut travel: Option<&mut Travel<'_>>,
        dx: &mut Tensor,
    ) -> Option<()> {
        let BlockRun { ctx, batch, metadata, stopped } = run;
        if let Some(travel) = &mut travel {
            travel.come_back();
            if travel.has_failed() {
                return None;
            }
        }
        // Who offloads or takes the MLP in tiles is short of memory.
        let mlp_rows = self.mlp_rows;
        let is_split = Tiling::new(batch.total_tokens(), mlp_rows).is_split();
        let keep = if travel.is_some() || is_split { Keep::Longest } else { Keep::Inputs };
        let first = self.first_trained_block();
        let embedding_trains = self.params.is_trainable(self.embed_tokens.weight);
        for (block, Kept { x, beside, saved }) in self.blocks[first..].iter().zip(kept).rev() {
            if stopped() {
                return None;
            }
            let (x, beside) = arrive(block, x, beside, &mut travel)?;
            // What is computed again reads the same matrices as the backward pass after it: worth keeping where they are not most of what is held.
            let _held = (saved.is_none() && !is_split).then(|| block.hold(ctx));
            let (saved, metadata) = saved.unwrap_or_else(|| {
                let metadata = metadata(block, Pass::Backward);
                let _phase = self.device.clock().enter(Phase::Recompute, Pass::Backward, Some(block.index));
                (block.recompute(ctx, metadata.sequences(batch), &x, beside, travel.is_some(), keep), metadata)
            });
            let need_dx = embedding_trains || block.index as usize > first;
            let beside = block.backward(ctx, grads, metadata.sequences(batch), &x, saved, dx, need_dx, mlp_rows);
            if let Some(travel) = &mut travel {
                travel.done(x, beside);
            }
        }
        Some(())
    }

    /// Adds the gradient of the embedding's table, if that trains.
    pub(super) fn embedding_gradient(&self, ctx: &Context<'_>, grads: &mut Grads, batch: &DeviceBatch, dx: &Tensor) {
        if self.params.is_trainable(self.embed_tokens.weight) {
            let _phase = self.device.clock().enter(Phase::HeadLoss, Pass::Backward, None);
            self.embed_tokens.backward(ctx, grads, &batch.input_ids, dx.first_columns(self.config.hidden_size));
        }
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

    /// Output of the last block [T, hidden], keeping nothing. It lies in the memory of passes: it must be dropped before the next one.
    fn hidden(&self, ctx: &Context<'_>, batch: &DeviceBatch, stop: &AtomicBool) -> Option<Tensor> {
        self.prepare_metadata(batch);
        let _scope = self.device.pass_scope();
        let mut x = self.embed_tokens.forward(ctx, &batch.input_ids);
        for block in &self.blocks {
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            let metadata = self.metadata(batch, block.window, Pass::Forward);
            x = block.forward(ctx, metadata.sequences(batch), &x, Leave::Beside(KeptParts::default()), self.mlp_rows).0;
        }
        Some(x)
    }

    pub(super) fn context(&self, dropout: Option<DropoutState>) -> Context<'_> {
        let (counts, choices) = (self.expert_counts.as_ref(), self.choices.as_ref());
        let moe = MoeRun { routing: self.routing, counts, choices, balance: self.balance.as_ref() };
        Context { moe, ..Context::new(&self.device, &self.params, dropout) }
    }

    /// Builds what layers need to know about the documents of `batch`, where that is kept: before a pass, whose memory is given back when it is done.
    pub(super) fn prepare_metadata(&self, batch: &DeviceBatch) {
        let rope = {
            let _phase = self.device.clock().enter(Phase::Metadata, Pass::Forward, None);
            self.rope_table(batch.num_positions)
        };
        self.metadata.prepare(&self.device, batch, &self.config.windows(), self.attention_path, &rope);
    }

    /// What a layer with a window needs to know about the documents of `batch`.
    pub(super) fn metadata(&self, batch: &DeviceBatch, window: Option<usize>, pass: Pass) -> Arc<SequenceMetadata> {
        let rope = self.rope_table(batch.num_positions);
        self.metadata.get_or_build(&self.device, batch, window, self.attention_path, &rope, pass)
    }

    /// The rotary table, for at least `num_positions` positions.
    pub(super) fn rope_table(&self, num_positions: usize) -> Arc<RopeTable> {
        let mut rope = self.rope.lock().unwrap_or_else(PoisonError::into_inner);
        match rope.as_ref().filter(|table| table.num_positions() >= num_positions) {
            Some(table) => Arc::clone(table),
            None => {
                // Room to grow: documents that are longer bit by bit, as in generation, need few tables.
                let num_positions = num_positions.next_power_of_two();
                let table = Arc::new(RopeTable::scaled(&self.device, &self.inv_freq, self.rope_factor, num_positions));
                // A table for which there was no memory serves nobody else.
                if !self.device.has_failed() {
                    *rope = Some(Arc::clone(&table));
                }
                table
            }
        }
    }

    /// How attention knows the documents of a pack.
    pub(super) fn attention_path(&self) -> AttentionPath {
        self.attention_path
    }

    /// The lowest block whose backward pass is needed: below it nothing trains.
    pub(super) fn first_trained_block(&self) -> usize {
        if self.params.is_trainable(self.embed_tokens.weight) {
            return 0;
        }
        let trains = |block: &Block| {
            block.adapters().flatten().any(|id| self.params.is_trainable(id))
                || self.params.is_trainable(block.input_layernorm.weight)
        };
        self.blocks.iter().position(trains).unwrap_or(self.blocks.len())
    }
}
