//! Activation offload: which blocks' inputs wait in host memory, how many device buffers bring them back, and what stands against it.
//!
//! Forward, the input of a block leaves as soon as it is computed, and its memory is used again when its copy is done; nothing joins the lanes for
//! each block. Backward, the copy for a block starts before the block above it is queued (two buffers), or when that one is done (one buffer: copy,
//! then compute, in turns, the published baseline). The last block's input never leaves: it is needed at once.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

use super::batch::DeviceBatch;
use super::block::{Beside, Block};
use super::policy::{Activations, OffloadPolicy};
use super::transformer::Transformer;
use crate::base::error::{OutOfMemory, Result};
use crate::base::units;
use crate::tensor::offload::{Carrier, Faults, Reload};
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, MemoryCategory, Tensor};

/// Below these a copy costs more than it saves.
const LEAST_BYTES: usize = 2 << 20;
const LEAST_TOKENS: usize = 512;

/// What a batch asks of the carrier.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Tokens of the batch.
    pub tokens: usize,
    /// Columns of each activation of a block that leaves, in the order of [`ActivationPart`]; 0 where that one is not kept.
    pub columns: [usize; NUM_PARTS],
    /// Bytes of a value.
    pub value_bytes: usize,
    /// The blocks whose inputs could leave: all that are trained but the last.
    pub first: usize,
    /// One past them.
    pub end: usize,
}

/// Which activation of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ActivationPart {
    /// Its input.
    Input,
    /// The residual stream between attention and MLP.
    Middle,
    /// Queries, keys and values.
    Qkv,
}

/// Parts that there can be.
const NUM_PARTS: usize = 3;
const PARTS: [ActivationPart; NUM_PARTS] = [ActivationPart::Input, ActivationPart::Middle, ActivationPart::Qkv];

impl Load {
    /// The activations of a block that leave.
    fn parts(&self) -> impl DoubleEndedIterator<Item = ActivationPart> + '_ {
        PARTS.into_iter().filter(|part| self.columns[*part as usize] > 0)
    }

    fn num_parts(&self) -> usize {
        self.parts().count()
    }

    /// Bytes of one activation.
    fn bytes(&self, part: ActivationPart) -> usize {
        self.tokens * self.columns[part as usize] * self.value_bytes
    }

    /// Bytes of all that leaves of a block.
    fn block_bytes(&self) -> usize {
        self.parts().map(|part| self.bytes(part)).sum()
    }

    /// Bytes of each activation that leaves in a pass.
    fn slots(&self) -> Vec<usize> {
        (self.first..self.end).flat_map(|_| self.parts().map(|part| self.bytes(part))).collect()
    }

    fn slot(&self, block: usize, part: ActivationPart) -> usize {
        let before = self.parts().take_while(|other| *other != part).count();
        (block - self.first) * self.num_parts() + before
    }
}

/// What a pass with offload came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadState {
    /// Device buffers for what comes back, and why as many; `None` before the first backward pass.
    pub buffers: Option<(usize, String)>,
    /// Why nothing is offloaded although that is asked for.
    pub refused: Option<String>,
    /// What is not as good as it could be, in words.
    pub fallback: Option<String>,
    /// Blocks whose inputs leave.
    pub num_blocks: usize,
    /// Activations that leave of each of them.
    pub parts: usize,
    /// Bytes of a device buffer: of all that leaves of a block.
    pub buffer_bytes: u64,
    /// Host memory, in bytes.
    pub host_bytes: u64,
}

/// The carrier of a model with its policy.
#[derive(Debug, Default)]
pub(super) struct Offload {
    policy: OffloadPolicy,
    faults: Faults,
    carrier: Option<Carrier>,
    /// Counts changes of the carrier or its use that recorded passes do not survive.
    generation: u64,
    buffers: Option<(usize, String)>,
    refused: Option<String>,
    /// Whether a pass of this step carried something, and of how many blocks at most.
    num_blocks: usize,
    /// Activations of a block that the last pass carried.
    parts: usize,
    buffer_bytes: usize,
    /// Slots for which there was no host memory, and why.
    no_room: Option<(Vec<usize>, String)>,
    /// What ended a pass.
    error: Option<anyhow::Error>,
}

/// What speaks against offloading a batch, if anything.
///
/// # Errors
/// The reason.
pub(super) fn guardrails(device: &Device, load: Load, policy: OffloadPolicy) -> Result<(), String> {
    if load.end <= load.first {
        return Err("only the last block trains, and its input is needed at once".into());
    }
    if policy.force {
        return Ok(());
    }
    if let Device::Cuda(gpu) = device
        && gpu.facts().integrated
    {
        return Err("host and device share their memory here".into());
    }
    if load.tokens < LEAST_TOKENS {
        return Err(format!(
            "packs of {} tokens are below {LEAST_TOKENS}: copies would cost more than they save",
            load.tokens
        ));
    }
    let bytes = load.bytes(ActivationPart::Input);
    if bytes < LEAST_BYTES {
        let (is, least) = (units::bytes(bytes as u64), units::bytes(LEAST_BYTES as u64));
        return Err(format!("the input of a block takes {is}, below {least}: copies would cost more than they save"));
    }
    Ok(())
}

impl Offload {
    pub(super) fn policy(&self) -> OffloadPolicy {
        self.policy
    }

    pub(super) fn set_policy(&mut self, policy: OffloadPolicy) {
        if policy != self.policy {
            (self.policy, self.buffers, self.refused, self.no_room) = (policy, None, None, None);
        }
    }

    pub(super) fn set_faults(&mut self, faults: Faults) {
        *self = Self { policy: self.policy, faults, generation: self.generation + 1, ..Self::default() };
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn take_error(&mut self) -> Option<anyhow::Error> {
        self.error.take()
    }

    /// Whether a thread carries some of the activations, which cannot be recorded.
    pub(super) fn needs_thread(&self) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.num_pageable() > 0)
    }

    pub(super) fn state(&self) -> OffloadState {
        let pageable = self.carrier.as_ref().map_or(0, Carrier::num_pageable);
        let fallback = (pageable > 0).then(|| {
            let slots = self.carrier.as_ref().map_or(0, Carrier::num_slots);
            format!("{pageable} of {slots} activations wait in pageable memory: no more could be page-locked")
        });
        OffloadState {
            buffers: self.buffers.clone(),
            // Small batches beside large ones are no refusal.
            refused: self.refused.clone().filter(|_| self.num_blocks == 0),
            fallback,
            num_blocks: self.num_blocks,
            parts: self.parts,
            buffer_bytes: self.buffer_bytes as u64,
            host_bytes: self.carrier.as_ref().map_or(0, Carrier::host_bytes),
        }
    }

    /// What a recorded pass that runs now was recorded with.
    pub(super) fn resume(&mut self, buffers: Option<(usize, String)>) {
        self.buffers = buffers;
    }

    /// Goes on with one buffer, when there were two: `false` when that was so already.
    pub(super) fn drop_second_buffer(&mut self, why: String) -> bool {
        let had_two = self.buffers.as_ref().is_some_and(|(count, _)| *count == 2);
        if had_two {
            self.buffers = Some((1, why));
            self.generation += 1;
        }
        had_two
    }

    /// Makes room for a batch before its pass; whether its inputs will be offloaded.
    pub(super) fn prepare(&mut self, device: &Device, load: Load) -> bool {
        self.refused = guardrails(device, load, self.policy).and_then(|()| self.make_room(device, load)).err();
        if self.refused.is_some() {
            return false;
        }
        if load.block_bytes() > self.buffer_bytes {
            // More than was looked at when the number of buffers was chosen, for what is recorded as well.
            (self.buffer_bytes, self.buffers) = (load.block_bytes(), None);
            self.generation += 1;
        }
        self.num_blocks = self.num_blocks.max(load.end - load.first);
        self.parts = load.num_parts();
        true
    }

    fn make_room(&mut self, device: &Device, load: Load) -> Result<(), String> {
        let slots = load.slots();
        if self.carrier.as_ref().is_some_and(|carrier| carrier.has_room(&slots)) {
            return Ok(());
        }
        if let Some((refused, why)) = &self.no_room
            && slots.len() >= refused.len()
            && slots.iter().zip(refused).all(|(wanted, refused)| wanted >= refused)
        {
            return Err(why.clone());
        }
        self.carrier = None;
        self.generation += 1;
        let made = self.carrier_for(device, slots.clone());
        let carrier = made.inspect_err(|why| self.no_room = Some((slots, why.clone())))?;
        self.carrier = Some(carrier);
        Ok(())
    }

    fn carrier_for(&self, device: &Device, slots: Vec<usize>) -> Result<Carrier, String> {
        let available = device.available_host_bytes();
        let needed = slots.iter().map(|bytes| *bytes as u64).sum();
        if let Some(available) = available.filter(|available| *available < needed) {
            let (is, wanted) = (units::bytes(available), units::bytes(needed));
            return Err(format!("{wanted} of host memory are needed, and {is} are free"));
        }
        let budget = self.policy.pinned_bytes.or(available.map(|bytes| bytes / 2));
        Carrier::new(device, slots, budget.unwrap_or(u64::MAX), self.faults).map_err(|error| format!("{error:#}"))
    }

    /// The second device buffer for what comes back, where there are two: a tensor for each part.
    fn second_buffer(&mut self, device: &Device, load: &Load) -> Vec<(ActivationPart, Tensor)> {
        let bytes = load.block_bytes() as u64;
        let (wanted, why) = self.buffers.take().unwrap_or_else(|| self.choose_buffers(device, bytes));
        self.buffers = Some((wanted, why));
        if wanted < 2 {
            return Vec::new();
        }
        let room = |part: ActivationPart| {
            let shape = [load.tokens, load.columns[part as usize]];
            let room = device.try_empty(MemoryCategory::OffloadBuffers, &shape);
            Some((part, room.filter(|_| !self.faults.second_buffer)?))
        };
        let second: Vec<_> = load.parts().map_while(room).collect();
        if second.len() < load.num_parts() {
            self.drop_second_buffer(format!("there is no memory for a second buffer of {}", units::bytes(bytes)));
            return Vec::new();
        }
        second
    }

    fn choose_buffers(&self, device: &Device, bytes: u64) -> (usize, String) {
        let headroom = self.policy.headroom_bytes;
        match (self.policy.buffers, device) {
            (1, _) => (1, "set to one: copy, then compute, in turns".into()),
            (2, _) | (_, Device::Cpu(_)) => (2, "the next copy runs beside compute".into()),
            _ if self.policy.force => (2, "the next copy runs beside compute".into()),
            (_, Device::Cuda(gpu)) => {
                let free = gpu.available_bytes();
                let (is, least) = (units::bytes(free), units::bytes(headroom));
                if free >= headroom + bytes {
                    (2, "the next copy runs beside compute".into())
                } else {
                    (1, format!("{is} are free, and a second buffer of {} must leave {least}", units::bytes(bytes)))
                }
            }
        }
    }
}

/// One pass's use of the carrier. Dropping it joins the lanes, however far the pass came.
pub(super) struct Travel<'a> {
    offload: MutexGuard<'a, Offload>,
    device: &'a Device,
    load: Load,
    /// Device buffers that are free, of each part.
    free: [Vec<Tensor>; NUM_PARTS],
    /// Copies back that are under way, the next block's first.
    reloads: VecDeque<(usize, Reload)>,
    /// Copies back that were started.
    num_reloads: usize,
}

impl<'a> Travel<'a> {
    /// For a pass over a batch for which [`Offload::prepare`] has made room.
    pub(super) fn new(offload: MutexGuard<'a, Offload>, device: &'a Device, load: Load) -> Self {
        Self { offload, device, load, free: Default::default(), reloads: VecDeque::new(), num_reloads: 0 }
    }

    /// Whether the input of a block leaves.
    pub(super) fn carries(&self, block: usize) -> bool {
        (self.load.first..self.load.end).contains(&block)
    }

    /// Whether something failed that ends the pass.
    pub(super) fn has_failed(&self) -> bool {
        self.offload.error.is_some()
    }

    /// The input of a block is computed, and the block is to be queued next; or another activation of it, which nobody will read.
    pub(super) fn store(&mut self, block: usize, part: ActivationPart, x: &Tensor) {
        let slot = self.load.slot(block, part);
        self.with_carrier(|carrier| carrier.store(slot, x, block as u32));
    }

    /// The block that reads `x`, its input, is queued; what is no input is stored on the way.
    pub(super) fn leave(&mut self, block: usize, part: ActivationPart, x: Tensor) {
        if part != ActivationPart::Input {
            self.store(block, part, &x);
        }
        let slot = self.load.slot(block, part);
        let _phase = self.device.clock().enter(Phase::ExposedCopy, Pass::Forward, Some(block as u32));
        // Those of the block before are let go when this block's are all on their way.
        let (parts, is_last) = (self.load.num_parts(), self.load.parts().next_back() == Some(part));
        self.with_carrier(|carrier| {
            carrier.leave(slot, x, block as u32)?;
            if is_last {
                carrier.settle(parts);
            }
            Ok(())
        });
    }

    /// The forward pass is queued.
    pub(super) fn all_left(&mut self) {
        let _phase = self.device.clock().enter(Phase::ExposedCopy, Pass::Forward, None);
        self.with_carrier(|carrier| {
            carrier.settle(0);
            Ok(())
        });
    }

    /// The backward pass begins. The first buffer is what was kept of the last block, when that block is done; with a second one the first copies start
    /// now.
    pub(super) fn come_back(&mut self) {
        let second = self.offload.second_buffer(self.device, &self.load);
        let has_two = !second.is_empty();
        self.free(second);
        if self.offload.faults.memory_for_two && has_two {
            let error = OutOfMemory { wanted_bytes: 0, free_bytes: 0, category: MemoryCategory::Workspace.name() };
            self.offload.error = Some(error.into());
            return;
        }
        self.reload();
    }

    /// The activations of a block, which come in the order of the parts; compute waits for them once.
    pub(super) fn arrive(&mut self, block: usize) -> Option<Vec<Tensor>> {
        let mut reloads = Vec::new();
        for part in self.load.parts() {
            let slot = self.load.slot(block, part);
            reloads.push(self.reloads.pop_front().filter(|(of, _)| *of == slot)?.1);
        }
        let _phase = self.device.clock().enter(Phase::ExposedCopy, Pass::Backward, Some(block as u32));
        self.with_carrier(|carrier| {
            let last = reloads.len().saturating_sub(1);
            let arrive = |(i, reload)| if i == last { carrier.arrive(reload) } else { carrier.arrive_before(reload) };
            reloads.into_iter().enumerate().map(arrive).collect()
        })
    }

    /// The backward pass of the block that reads these activations is queued: their buffers are free for the next copies.
    pub(super) fn done(&mut self, input: Tensor, Beside { middle, qkv }: Beside) {
        let parts = PARTS.into_iter().zip([Some(input), middle, qkv]);
        self.free(parts.filter_map(|(part, tensor)| Some((part, tensor?))));
        self.reload();
    }

    fn free(&mut self, buffers: impl IntoIterator<Item = (ActivationPart, Tensor)>) {
        for (part, buffer) in buffers {
            self.free[part as usize].push(buffer);
        }
    }

    /// Starts copies back into the free buffers, from the highest block down; compute is waited for once.
    fn reload(&mut self) {
        let mut is_first = true;
        let parts: Vec<ActivationPart> = self.load.parts().collect();
        while self.num_reloads < parts.len() * (self.load.end - self.load.first)
            && let (blocks, part) = (self.num_reloads / parts.len(), parts[self.num_reloads % parts.len()])
            && let Some(buffer) = self.free[part as usize].pop()
        {
            self.num_reloads += 1;
            let block = self.load.end - 1 - blocks;
            let slot = self.load.slot(block, part);
            let reload = self.with_carrier(|carrier| match is_first {
                true => carrier.reload(slot, buffer, block as u32),
                false => carrier.reload_behind(slot, buffer, block as u32),
            });
            let Some(reload) = reload else { return };
            is_first = false;
            self.reloads.push_back((slot, reload));
        }
    }

    fn with_carrier<R>(&mut self, work: impl FnOnce(&mut Carrier) -> Result<R>) -> Option<R> {
        let Offload { carrier, error, .. } = &mut *self.offload;
        match work(carrier.as_mut()?) {
            Ok(value) => Some(value),
            Err(failed) => {
                error.get_or_insert(failed);
                None
            }
        }
    }
}

/// An activation of a block, until its backward pass.
pub(super) enum Activation {
    Here(Tensor),
    /// In host memory.
    Away,
}

/// The input of a block and what is kept beside it, on the device again.
pub(super) fn arrive(
    block: &Block,
    x: Activation,
    beside: Beside<Activation>,
    travel: &mut Option<&mut Travel<'_>>,
) -> Option<(Tensor, Beside)> {
    let mut away = match x {
        Activation::Here(_) => Vec::new(),
        // What is kept of a block travels together.
        Activation::Away => travel.as_mut()?.arrive(block.index as usize)?,
    }
    .into_iter();
    let mut here = |activation| match activation {
        Activation::Here(tensor) => Some(tensor),
        Activation::Away => away.next(),
    };
    let x = here(x)?;
    let mut part =
        |activation: Option<Activation>| activation.map_or(Some(None), |activation| here(activation).map(Some));
    Some((x, Beside { middle: part(beside.middle)?, qkv: part(beside.qkv)? }))
}

impl Drop for Travel<'_> {
    fn drop(&mut self) {
        // What was started must be done before the memory is used for something else.
        let reloads = std::mem::take(&mut self.reloads);
        self.with_carrier(|carrier| {
            carrier.settle(0);
            reloads.into_iter().try_for_each(|(_, reload)| carrier.arrive(reload).map(drop))
        });
    }
}

impl Transformer {
    /// Sets how activations travel, where they are offloaded.
    pub fn set_offload_policy(&mut self, policy: OffloadPolicy) {
        self.offload().set_policy(policy);
    }

    /// Whether inputs of blocks of batches of `tokens` tokens should wait in host memory, if memory is short.
    ///
    /// # Errors
    /// Why not.
    pub fn can_offload(&self, tokens: usize) -> Result<(), String> {
        guardrails(&self.device, self.load_of(tokens), self.offload().policy())
    }

    /// Makes room in host memory for the inputs of blocks of batches of `tokens` tokens, before the first of them; whether they will be offloaded.
    pub fn prepare_offload(&self, tokens: usize) -> bool {
        self.offload().prepare(&self.device, self.load_of(tokens))
    }

    /// A step begins: what became of offloading is told of its passes from now on.
    pub fn begin_offload_step(&self) {
        self.offload().num_blocks = 0;
    }

    /// What became of offloading so far.
    pub fn offload_state(&self) -> OffloadState {
        self.offload().state()
    }

    /// Goes on with one device buffer for what comes back, because of `why`; `false` when there were not two.
    pub fn drop_second_buffer(&self, why: String) -> bool {
        self.offload().drop_second_buffer(why)
    }

    /// The error that ended the last pass, if carrying activations did.
    ///
    /// # Errors
    /// That error.
    pub fn check_offload(&self) -> Result<()> {
        self.offload().take_error().map_or(Ok(()), Err)
    }

    /// Makes things fail on purpose, for tests.
    pub fn set_offload_faults(&self, faults: Faults) {
        self.offload().set_faults(faults);
    }

    /// The offloading of this model.
    pub(super) fn offload(&self) -> MutexGuard<'_, Offload> {
        self.offload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What batches of `tokens` tokens ask of the carrier.
    fn load_of(&self, tokens: usize) -> Load {
        Load {
            tokens,
            columns: self.keeps_beside().columns(&self.config),
            value_bytes: self.device.dtype().num_bytes(),
            first: self.first_trained_block(),
            end: self.blocks.len().saturating_sub(1),
        }
    }

    /// The carrier for a pass over `batch`, where its activations are offloaded.
    pub(super) fn travel(&self, batch: &DeviceBatch, activations: Activations) -> Option<Travel<'_>> {
        let load = self.load_of(batch.total_tokens());
        let mut offload = (activations == Activations::Offload).then(|| self.offload())?;
        offload.prepare(&self.device, load).then(|| Travel::new(offload, &self.device, load))
    }
}
