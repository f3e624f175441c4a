//! AdamW over a model's trainable parameters, with state in 32 or 8 bits.

use super::config::OptimizerConfig;
use super::snapshot::{MomentValues, SlotValues, Snapshot};
use super::state_place::StatePlace;
use crate::layers::parameter::{Grads, ParamId, Parameter, Params};
use crate::model::policy::Placement;
use crate::model::transformer::Transformer;
use crate::ops::adamw::{self, AdamWParams};
use crate::ops::adamw8::{self, Moment8};
use crate::ops::cross_entropy::LossSum;
use crate::ops::multi_tensor::{self, Member, MultiTensor};
use crate::ops::norm::{self, ClipValues};
use crate::tensor::cuda::ReadSlot;
use crate::tensor::{Device, Gpu, Tensor};

/// Optimizer state of one parameter.
#[derive(Debug)]
struct Slot {
    id: ParamId,
    moments: Moments,
}

/// First and second moment of one parameter.
#[derive(Debug)]
enum Moments {
    F32([Tensor; 2]),
    Blockwise8([Moment8; 2]),
}

impl Moments {
    /// Moments that are zero; in 8 bits where that is asked for and the parameter is large enough.
    fn zeros(device: &Device, shape: &[usize], bits: u32, place: &mut StatePlace) -> Self {
        let len = shape.iter().product();
        if bits == 8 && len >= adamw8::MIN_LEN {
            Self::Blockwise8([place.moment8(device, len), place.moment8(device, len)])
        } else {
            Self::F32([place.moment(device, shape), place.moment(device, shape)])
        }
    }

    fn bits(&self) -> u32 {
        match self {
            Self::F32(_) => 32,
            Self::Blockwise8(_) => 8,
        }
    }

    fn as_ref(&self) -> multi_tensor::Moments<'_> {
        match self {
            Self::F32([m, v]) => multi_tensor::Moments::F32([m, v]),
            Self::Blockwise8([m, v]) => multi_tensor::Moments::Blockwise8([m, v]),
        }
    }

    /// A copy on the host, to the bit.
    fn values(&self) -> MomentValues {
        match self {
            Self::F32(moments) => MomentValues::F32(moments.each_ref().map(Tensor::to_vec)),
            Self::Blockwise8(moments) => MomentValues::Blockwise8(
                moments.each_ref().map(|moment| (moment.codes.to_vec(), moment.absmax.to_vec())),
            ),
        }
    }

    /// Takes over what [`Self::values`] gave.
    fn set(&mut self, values: &MomentValues) {
        match (self, values) {
            (Self::F32(moments), MomentValues::F32(values)) => {
                moments.iter_mut().zip(values).for_each(|(moment, values)| moment.set(values));
            }
            (Self::Blockwise8(moments), MomentValues::Blockwise8(values)) => {
                for (moment, (codes, absmax)) in moments.iter_mut().zip(values) {
                    moment.codes.set(codes);
                    moment.absmax.set(absmax);
                }
            }
            _ => unreachable!("a snapshot belongs to the trainer that it was taken of"),
        }
    }
}

/// AdamW for all trainable parameters of a model.
#[derive(Debug)]
pub struct Optimizer {
    slots: Vec<Slot>,
    place: StatePlace,
    updates: u64,
    /// On a GPU.
    table: Option<MultiTensor>,
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
    /// State for every trainable parameter; its moments have `bits` bits a value, 32 or 8, and 32 in parameters with fewer than
    /// [`adamw8::MIN_LEN`] values. They lie where `place` says, as far as that can be.
    pub fn new(model: &Transformer, bits: u32, mut place: StatePlace) -> Self {
        let slot = |(id, parameter): (ParamId, &Parameter)| Slot {
            id,
            moments: Moments::zeros(model.device(), &parameter.shape, bits, &mut place),
        };
        let slots = model.params().iter().filter(|(_, p)| p.trainable).map(slot).collect();
        Self { slots, place, updates: 0, table: None }
    }

    /// Where the state lies.
    pub fn state_place(&self) -> &StatePlace {
        &self.place
    }

    /// Moves the state to where it shall lie, as far as that can be; every bit of it stays. From and to a GPU this waits for the device.
    pub fn place(&mut self, model: &mut Transformer, grads: &Grads, asked: Placement) {
        if asked == self.place.asked {
            return;
        }
        let (device, mut place) = (model.device().clone(), StatePlace::new(asked));
        if device.has_failed() {
            return;
        }
        // All of the room before anything moves: where there is too little, nothing of what trains is lost.
        let rooms = self.slots.iter().map(|Slot { id, moments }| {
            let exact = exact_room(model.params(), &device, *id, &mut place);
            let shape = &model.params().get(*id).shape;
            (exact, Moments::zeros(&device, shape, moments.bits(), &mut place))
        });
        let rooms: Vec<(Option<Tensor>, Moments)> = rooms.collect();
        if let Err(error) = device.check() {
            self.place.stays = Some(format!("{error:#}"));
            return;
        }
        for (Slot { id, moments }, (exact, mut moved)) in self.slots.iter_mut().zip(rooms) {
            if let Some(exact) = exact {
                model.params_mut().move_exact(*id, exact);
            }
            moved.set(&moments.values());
            *moments = moved;
        }
        self.place = place;
        if let (Device::Cuda(gpu), Some(mut table)) = (device, self.table.take()) {
            table.set_members(&gpu, members(&self.slots, model, grads));
            self.table = Some(table);
        }
    }

    /// Updates done, or queued on a GPU.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// One update with learning rate `lr`, the gradients scaled to at most `max_grad_norm`. Weight decay spares norms and
    /// biases, as Transformers' Trainer does. Nothing is updated when the loss or a gradient is not finite.
    ///
    /// Gives what clipping found. `None` on a GPU, where the update is only queued: it counts until [`Self::take_back`] says otherwise.
    pub fn step(
        &mut self,
        model: &mut Transformer,
        grads: &Grads,
        loss: &LossSum,
        config: &OptimizerConfig,
        lr: f64,
    ) -> Option<ClipValues> {
        let params = AdamWParams {
            lr,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            weight_decay: config.weight_decay,
            step: self.updates + 1,
        };
        match (model.device().clone(), loss) {
            (Device::Cuda(gpu), LossSum::Device(loss)) => {
                let table = self.table(model, grads, &gpu);
                table.step(&gpu, &params, loss, config.max_grad_norm);
                self.updates += 1;
                None
            }
            _ => {
                let all = self.slots.iter().filter_map(|slot| grads.get(slot.id));
                let norm = all.map(|grad| norm::sum_of_squares(grad.f32s())).sum::<f64>().sqrt();
                let (scale, loss_sum) = (norm::clip_coefficient(norm, config.max_grad_norm), loss.read());
                let finite = norm.is_finite() && loss_sum.is_finite();
                if finite {
                    self.update_on_cpu(model, grads, &params, scale);
                    self.updates += 1;
                }
                Some(ClipValues { norm, scale, finite, loss_sum })
            }
        }
    }

    /// Queues a copy of what clipping finds in the update that was queued last; `None` on the CPU.
    pub fn queue_read(&self) -> Option<ReadSlot> {
        self.table.as_ref().map(MultiTensor::queue_read)
    }

    /// What such a copy holds, when the device has passed it.
    pub fn read(&self, slot: ReadSlot) -> Option<ClipValues> {
        self.table.as_ref().map(|table| table.read(slot))
    }

    /// Counts only `updates`: those queued behind them were not made.
    pub fn take_back(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Copies the values of all that trains, and the optimizer's state of it, to the host. From a GPU this waits for the device.
    pub(super) fn snapshot(&self, model: &Transformer) -> Snapshot {
        let slots = self
            .slots
            .iter()
            .map(|Slot { id, moments }| SlotValues { value: model.params().to_vec(*id), moments: moments.values() });
        Snapshot { updates: self.updates, slots: slots.collect() }
    }

    /// Sets values and state to those of a snapshot of this optimizer; all stays where it lies.
    pub(super) fn restore(&mut self, model: &mut Transformer, snapshot: &Snapshot) {
        self.updates = snapshot.updates;
        for (Slot { id, moments }, values) in self.slots.iter_mut().zip(&snapshot.slots) {
            model.params_mut().set(*id, &values.value);
            moments.set(&values.moments);
        }
    }

    /// Sets every gradient to zero.
    pub fn clear_gradients(&mut self, model: &Transformer, grads: &mut Grads) {
        match model.device() {
            Device::Cpu(_) => grads.zero(),
            Device::Cuda(gpu) => self.table(model, grads, gpu).clear_gradients(gpu),
        }
    }

    /// The table of trainable tensors, made when it is first needed: parameters, gradients and state stay where they are.
    fn table(&mut self, model: &Transformer, grads: &Grads, gpu: &Gpu) -> &MultiTensor {
        let Self { slots, table, .. } = self;
        table.get_or_insert_with(|| MultiTensor::new(model.device(), gpu, members(slots, model, grads)))
    }

    fn update_on_cpu(&mut self, model: &mut Transformer, grads: &Grads, params: &AdamWParams, scale: f32) {
        let precision = model.device().precision();
        for Slot { id, moments } in &mut self.slots {
            let Some(grad) = grads.get(*id) else { continue };
            let decays = decays(model.params().get(*id));
            let (value, working) = model.params_mut().trained_mut(*id);
            let weight_decay = if decays { params.weight_decay } else { 0.0 };
            let params = AdamWParams { weight_decay, ..*params };
            let (param, grad) = (value.f32s_mut(), grad.f32s());
            match moments {
                Moments::F32([m, v]) => adamw::update(&params, scale, param, grad, m.f32s_mut(), v.f32s_mut()),
                Moments::Blockwise8([m, v]) => adamw8::update(&params, scale, param, grad, m, v),
            }
            if let Some(working) = working {
                adamw::copy_rounded(precision, value, working);
            }
        }
    }

    /// The first gradient, as they stand, that is not finite. From a GPU this waits for the device: it serves to explain a failure.
    pub fn first_bad_gradient(&self, model: &Transformer, grads: &Grads) -> Option<BadGradient> {
        self.slots.iter().find_map(|slot| {
            let value = norm::first_non_finite(&grads.get(slot.id)?.to_vec())?;
            Some(BadGradient { name: model.params().name(slot.id).to_owned(), value })
        })
    }
}

/// Moves the exact value of a parameter whose products read a working copy to where the state shall lie.
pub(super) fn move_exact(params: &mut Params, device: &Device, id: ParamId, place: &mut StatePlace) {
    if let Some(room) = exact_room(params, device, id, place) {
        params.move_exact(id, room);
    }
}

/// Room for such a value where the state shall lie, unless it lies there or there is none.
fn exact_room(params: &Params, device: &Device, id: ParamId, place: &mut StatePlace) -> Option<Tensor> {
    let exact = params.exact(id)?;
    let (shape, category) = (exact.shape(), exact.category());
    match place.asked {
        Placement::Host => place.host_f32(device, category, shape),
        Placement::Device => exact.is_mapped().then(|| device.empty_f32(category, shape)),
    }
}

/// The parameters of `slots` with what belongs to each, for the table.
fn members<'a>(slots: &'a [Slot], model: &'a Transformer, grads: &'a Grads) -> impl Iterator<Item = Member<'a>> {
    slots.iter().filter_map(|Slot { id, moments }| {
        let (param, working) = model.params().trained(*id);
        let (grad, moments) = (grads.get(*id)?, moments.as_ref());
        Some(Member { param, working, grad, moments, decays: decays(model.params().get(*id)) })
    })
}

/// Whether weight decay acts on a parameter: not on norms and biases, those of experts included. Transformers' Trainer goes by the name, so that it
/// decays the sinks of attention.
fn decays(parameter: &Parameter) -> bool {
    let Parameter { shape, name, .. } = parameter;
    (shape.len() > 1 && !name.ends_with("bias")) || name.ends_with(".self_attn.sinks")
}
