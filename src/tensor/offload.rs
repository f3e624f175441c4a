//! The carrier: takes activations to host memory beside compute, and brings them back.
//!
//! On a GPU two streams copy to and from page-locked memory. On the CPU, where activations lie in host memory anyway, two threads copy between
//! buffers: that shows and tests the order of copies, and cannot make a CPU faster.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, bail};

use super::clock::Copying;
use super::cuda::offload::CudaSlots;
use super::device::Device;
use super::lane::{CopyLane, Event};
use super::phase::{LaneKind, Pass};
use super::storage::Tensor;
use crate::base::error::Result;

/// What is made to fail on purpose, by tests of what happens then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Faults {
    /// Page-locked memory (CPU: host memory) is refused from this slot on.
    pub pinned_from: Option<usize>,
    /// So is the ring that pageable memory needs.
    pub ring: bool,
    /// There is no device memory for a second buffer.
    pub second_buffer: bool,
    /// A pass with two buffers runs out of memory.
    pub memory_for_two: bool,
    /// Copies to this slot fail.
    pub store_to: Option<usize>,
}

/// Slots of host memory for activations, and the lanes that carry them there and back.
#[derive(Debug)]
pub struct Carrier {
    device: Device,
    form: Form,
    /// Bytes of each slot.
    slots: Vec<usize>,
    faults: Faults,
    /// Activations whose copies to the host may be under way, the first one first.
    leaving: VecDeque<(usize, Leaving)>,
}

#[derive(Debug)]
enum Form {
    Cpu(CpuLanes),
    Cuda(CudaSlots),
}

#[derive(Debug)]
struct CpuLanes {
    slots: Vec<Arc<Mutex<Vec<f32>>>>,
    d2h: CopyLane,
    h2d: CopyLane,
    /// Copies that are done and not booked yet.
    done: Arc<Mutex<Vec<(Copying, Instant, Instant)>>>,
}

/// An activation that must stay until its copy is done.
#[derive(Debug)]
enum Leaving {
    /// The lane's thread has it.
    Cpu(Event),
    Cuda(Tensor),
}

/// A copy back that is under way.
#[derive(Debug)]
pub struct Reload {
    slot: usize,
    form: ReloadForm,
}

#[derive(Debug)]
enum ReloadForm {
    Cpu { done: Event, buffer: Arc<Mutex<Option<Tensor>>> },
    Cuda(Tensor),
}

impl Carrier {
    /// Slots of so many bytes each; on a GPU `pinned` bytes of them page-locked at most, the first ones.
    ///
    /// # Errors
    /// When there is no host memory for them, or on a GPU no page-locked memory at all.
    pub fn new(device: &Device, slots: Vec<usize>, pinned: u64, faults: Faults) -> Result<Self> {
        let upto = slots.iter().scan(0, |sum, &bytes| {
            *sum += bytes as u64;
            Some(*sum)
        });
        let pinned = upto.take_while(|sum| *sum <= pinned).count().min(faults.pinned_from.unwrap_or(usize::MAX));
        let form = match device {
            Device::Cpu(_) if slots.len() > pinned => bail!("there is no host memory for {} activations", slots.len()),
            Device::Cpu(_) => Form::Cpu(CpuLanes::new(&slots)?),
            Device::Cuda(gpu) => Form::Cuda(CudaSlots::new(gpu, &slots, pinned, faults.ring)?),
        };
        Ok(Self { device: device.clone(), form, slots, faults, leaving: VecDeque::new() })
    }

    /// Whether activations of so many bytes each have room.
    pub fn has_room(&self, slots: &[usize]) -> bool {
        slots.len() <= self.slots.len() && slots.iter().zip(&self.slots).all(|(wanted, bytes)| wanted <= bytes)
    }

    /// Slots that there are.
    pub fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// Host memory, in bytes.
    pub fn host_bytes(&self) -> u64 {
        self.slots.iter().map(|bytes| *bytes as u64).sum()
    }

    /// Slots in pageable memory, which a thread serves.
    pub fn num_pageable(&self) -> usize {
        match &self.form {
            Form::Cpu(_) => 0,
            Form::Cuda(slots) => slots.num_pageable(),
        }
    }

    /// Starts the copy of `x` to a slot as soon as it is computed. On the CPU it starts with [`Self::leave`].
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn store(&mut self, slot: usize, x: &Tensor, layer: u32) -> Result<()> {
        if self.faults.store_to == Some(slot) {
            bail!("copying the input of block {layer} to host memory failed");
        }
        if let Form::Cuda(slots) = &mut self.form {
            let bytes = x.len() * x.dtype().num_bytes();
            slots.store(slot, x.pointer(), bytes, copying(LaneKind::D2h, layer, bytes));
        }
        Ok(())
    }

    /// Takes over `x`, whose copy was started and which compute queued so far reads, until [`Self::settle`] lets it go.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn leave(&mut self, slot: usize, x: Tensor, layer: u32) -> Result<()> {
        let leaving = match &self.form {
            Form::Cpu(lanes) => Leaving::Cpu(lanes.store(slot, x, layer)?),
            Form::Cuda(_) => Leaving::Cuda(x),
        };
        self.leaving.push_back((slot, leaving));
        Ok(())
    }

    /// Lets go of all but the last `count` activations that leave; later compute waits for their copies, once: they are done in their order.
    pub fn settle(&mut self, count: usize) {
        // Their memory is free only behind that wait.
        let mut held = Vec::new();
        while self.leaving.len() > count
            && let Some((slot, leaving)) = self.leaving.pop_front()
        {
            let waits_later = self.leaving.len() > count;
            match (leaving, &mut self.form) {
                (Leaving::Cpu(stored), _) => stored.wait(),
                (Leaving::Cuda(x), Form::Cuda(slots)) => {
                    if !(waits_later && slots.is_pinned(slot)) {
                        slots.await_stored(slot);
                    }
                    held.push(x);
                }
                (Leaving::Cuda(_), Form::Cpu(_)) => unreachable!("a carrier serves one device"),
            }
        }
        self.book();
    }

    /// Starts the copy of a slot back, into a buffer that compute queued so far is done with.
    ///
    /// # Errors
    /// When it cannot be copied.
    pub fn reload(&mut self, slot: usize, buffer: Tensor, layer: u32) -> Result<Reload> {
        self.started(slot, buffer, layer, false)
    }

    /// As [`Self::reload`], right after another: no compute was queued since, so what that copy waited for is enough. In a recorded pass a wait more
    /// would be one more successor of the compute before it: the driver may then queue the first copy before the compute that follows.
    ///
    /// # Errors
    /// As [`Self::reload`].
    pub fn reload_behind(&mut self, slot: usize, buffer: Tensor, layer: u32) -> Result<Reload> {
        self.started(slot, buffer, layer, true)
    }

    fn started(&mut self, slot: usize, buffer: Tensor, layer: u32, has_waited: bool) -> Result<Reload> {
        let form = match &mut self.form {
            Form::Cpu(lanes) => lanes.load(slot, buffer, layer)?,
            Form::Cuda(slots) => {
                let bytes = buffer.len() * buffer.dtype().num_bytes();
                if !has_waited {
                    slots.await_free();
                }
                slots.load(slot, buffer.pointer(), bytes, copying(LaneKind::H2d, layer, bytes));
                ReloadForm::Cuda(buffer)
            }
        };
        Ok(Reload { slot, form })
    }

    /// The activation of a reload, for later compute, which waits until it is there.
    ///
    /// # Errors
    /// When the thread that copies has ended.
    pub fn arrive(&mut self, reload: Reload) -> Result<Tensor> {
        self.arrived(reload, false)
    }

    /// As [`Self::arrive`], of a reload that was started before another for which compute waits next: that wait is enough for both. In a recorded pass
    /// a wait more would part the two copies: the driver may then queue the second behind compute.
    ///
    /// # Errors
    /// As [`Self::arrive`].
    pub fn arrive_before(&mut self, reload: Reload) -> Result<Tensor> {
        self.arrived(reload, true)
    }

    fn arrived(&mut self, reload: Reload, waits_later: bool) -> Result<Tensor> {
        let x = match (reload.form, &mut self.form) {
            (ReloadForm::Cuda(buffer), Form::Cuda(slots)) => {
                if !(waits_later && slots.is_pinned(reload.slot)) {
                    slots.await_loaded(reload.slot);
                }
                buffer
            }
            (ReloadForm::Cuda(buffer), Form::Cpu(_)) => buffer,
            (ReloadForm::Cpu { done, buffer }, _) => {
                done.wait();
                let mut buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
                buffer.take().context("the thread that copies activations back has ended")?
            }
        };
        self.book();
        Ok(x)
    }

    /// Books copies of the CPU's lanes that are done.
    fn book(&self) {
        if let Form::Cpu(lanes) = &self.form {
            for (copying, start, end) in lanes.done.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                self.device.clock().book_copy(copying, start, end);
            }
        }
    }
}

fn copying(lane: LaneKind, layer: u32, bytes: usize) -> Copying {
    let pass = if lane == LaneKind::D2h { Pass::Forward } else { Pass::Backward };
    Copying { lane, pass, layer, bytes: bytes as u64 }
}

impl CpuLanes {
    fn new(slots: &[usize]) -> Result<Self> {
        let slot = |bytes: &usize| {
            let (slot_len, mut memory) = (bytes / size_of::<f32>(), Vec::new());
            memory.try_reserve_exact(slot_len).context("there is no host memory for activations")?;
            memory.resize(slot_len, 0.0);
            Ok(Arc::new(Mutex::new(memory)))
        };
        Ok(Self {
            slots: slots.iter().map(slot).collect::<Result<_>>()?,
            d2h: CopyLane::new("d2h")?,
            h2d: CopyLane::new("h2d")?,
            done: Arc::default(),
        })
    }

    fn store(&self, slot: usize, x: Tensor, layer: u32) -> Result<Event> {
        let (memory, done) = (Arc::clone(&self.slots[slot]), Arc::clone(&self.done));
        self.d2h.submit(&[], move || {
            let start = Instant::now();
            let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            memory[..x.len()].copy_from_slice(x.f32s());
            let copying = copying(LaneKind::D2h, layer, size_of_val(x.f32s()));
            done.lock().unwrap_or_else(PoisonError::into_inner).push((copying, start, Instant::now()));
        })
    }

    fn load(&self, slot: usize, mut buffer: Tensor, layer: u32) -> Result<ReloadForm> {
        let (memory, done) = (Arc::clone(&self.slots[slot]), Arc::clone(&self.done));
        let filled: Arc<Mutex<Option<Tensor>>> = Arc::default();
        let place = Arc::clone(&filled);
        let event = self.h2d.submit(&[], move || {
            let start = Instant::now();
            let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            let len = buffer.len();
            buffer.f32s_mut().copy_from_slice(&memory[..len]);
            let copying = copying(LaneKind::H2d, layer, len * size_of::<f32>());
            done.lock().unwrap_or_else(PoisonError::into_inner).push((copying, start, Instant::now()));
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
        })?;
        Ok(ReloadForm::Cpu { done: event, buffer: filled })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{MemoryCategory, Precision};

    fn cpu(threads: usize) -> Device {
        Device::cpu(threads, Precision::F32).unwrap()
    }

    fn tensor(device: &Device, value: f32) -> Tensor {
        device.tensor(MemoryCategory::Activations, &[2, 3], vec![value; 6])
    }

    #[test]
    fn what_leaves_comes_back_in_any_order_and_its_copies_are_spans() {
        let device = cpu(1);
        let mut carrier = Carrier::new(&device, vec![24; 3], u64::MAX, Faults::default()).unwrap();
        device.clock().begin_step(true, 0.0);
        for slot in 0..3 {
            let x = tensor(&device, slot as f32);
            carrier.store(slot, &x, slot as u32).unwrap();
            carrier.leave(slot, x, slot as u32).unwrap();
        }
        carrier.settle(0);
        assert_eq!(device.memory().now_bytes, 0, "nothing is left on the device");
        let mut reloads = vec![carrier.reload(2, tensor(&device, 9.0), 2)];
        reloads.extend([0, 1].map(|slot| carrier.reload_behind(slot, tensor(&device, 9.0), slot as u32)));
        for (reload, want) in reloads.into_iter().zip([2.0, 0.0, 1.0]) {
            assert_eq!(carrier.arrive(reload.unwrap()).unwrap().f32s(), [want; 6]);
        }
        let times = device.clock().read(device.clock().end_step());
        assert_eq!((times.copied.d2h, times.copied.h2d), (72, 72));
        assert_eq!(times.spans.iter().filter(|span| span.lane == LaneKind::H2d).count(), 3);
        assert!(times.spans.iter().all(|span| span.start_ms <= span.end_ms));
    }

    #[test]
    fn a_carrier_has_room_for_what_it_was_made_for() {
        let device = cpu(1);
        let carrier = Carrier::new(&device, vec![24, 36], 60, Faults::default()).unwrap();
        assert!(carrier.has_room(&[24, 36]) && carrier.has_room(&[8]));
        assert!(!carrier.has_room(&[24; 3]) && !carrier.has_room(&[28]) && !carrier.has_room(&[24, 40]));
        assert_eq!((carrier.host_bytes(), carrier.num_pageable()), (60, 0));
        let error = Carrier::new(&device, vec![24, 36], 59, Faults::default()).unwrap_err();
        assert_eq!(error.to_string(), "there is no host memory for 2 activations");
    }

    #[test]
    fn refusals_and_failing_copies_say_what_failed() {
        let device = cpu(1);
        let refused = Faults { pinned_from: Some(1), ..Faults::default() };
        let error = Carrier::new(&device, vec![24; 2], u64::MAX, refused).unwrap_err();
        assert_eq!(error.to_string(), "there is no host memory for 2 activations");
        let faults = Faults { store_to: Some(1), ..Faults::default() };
        let mut carrier = Carrier::new(&device, vec![24; 2], u64::MAX, faults).unwrap();
        carrier.store(0, &tensor(&device, 1.0), 4).unwrap();
        let error = carrier.store(1, &tensor(&device, 1.0), 5).unwrap_err();
        assert_eq!(error.to_string(), "copying the input of block 5 to host memory failed");
    }
}
