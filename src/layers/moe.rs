//! Routed experts: `y[t] = Σ_j w[t,j] · down_e(act(gate_up_e(h[t])))` over the experts e = e(t, j) that a router chose for token t.
//!
//! Rows are pairs of a token and one of its experts, sorted by expert, so that each expert has a run of them. Expert outputs are never kept: the
//! gradient of a weight is `dw = ⟨W_dᵀ·dy, h⟩ + b_d·dy`, and `W_dᵀ·dy` is needed anyway.
//!
//! Adapters on experts are PEFT's `target_parameters`: for each expert `W_e + s·B_e·A_e`, with `A` [E·r, in] and `B` [E·out, r] one below the other.

use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::Context;
use super::held::Hold;
use super::mlp::Output;
use super::parameter::{Grads, ParamId};
use crate::ops::cross_entropy::LossSum;
use crate::ops::expert_activation::{self, ExpertActivation};
use crate::ops::grouped_matmul::{self, Groups};
use crate::ops::routing::{self, Balance, Grouping, RouterWeights};
use crate::ops::{elementwise, expert_balance, expert_bias, matmul};
use crate::tensor::clock::PhaseGuard;
use crate::tensor::phase::{Pass, Phase};
use crate::tensor::{Device, Indices, MemoryCategory, Tensor, View};

/// How rows get to their experts. All forms give the same rows in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// Counts, offsets and order stay on the device, and one grouped product reads them there.
    #[default]
    Grouped,
    /// One stable sort and one read of the counts by the host, which queues a product for each expert: the published improvement.
    Sorted,
    /// For each expert the host asks which rows are its own, waits for their number, and gathers them: the published baseline.
    PerExpert,
}

/// How routed experts run in a pass, and what is noted of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct MoeRun<'a> {
    /// How rows get to their experts.
    pub routing: Routing,
    /// Adds how often each expert was chosen in forward passes: f32 [layers with experts, E].
    pub counts: Option<&'a Mutex<Tensor>>,
    /// Choices that are given or noted.
    pub choices: Option<&'a Choices>,
    /// The auxiliary loss, where the model trains with it.
    pub balance: Option<&'a Balances>,
}

/// What the auxiliary loss of a pass is made of, and its gradient: f32 [E] each, over all layers.
#[derive(Debug)]
pub struct Balances {
    /// Probabilities of the router, summed over the rows of a forward pass.
    pub probabilities: Mutex<Tensor>,
    /// How often experts were chosen in it.
    pub counts: Mutex<Tensor>,
    /// Gradient with respect to each row's probabilities, for the backward pass.
    pub gradient: Mutex<Tensor>,
}

impl Balances {
    /// Room for so many experts.
    pub fn new(device: &Device, experts: usize) -> Self {
        let room = || Mutex::new(device.zeros_f32(MemoryCategory::Metadata, &[1, experts]));
        Self { probabilities: room(), counts: room(), gradient: room() }
    }

    /// Begins a pass.
    pub fn clear(&self) {
        lock(&self.probabilities).fill_zero();
        lock(&self.counts).fill_zero();
    }

    /// Adds `share` times the auxiliary loss of the pass, over `rows` rows of all layers, to `loss`, in which it weighs `1 / weight`, and makes its
    /// gradient.
    pub fn close(&self, device: &Device, rows: usize, share: f32, weight: f32, loss: &mut LossSum) {
        let mut value = device.empty_f32(MemoryCategory::Workspace, &[1]);
        let (probabilities, counts) = (lock(&self.probabilities), lock(&self.counts));
        let mut gradient = lock(&self.gradient);
        expert_balance::balance(
            device,
            &probabilities,
            &counts,
            rows,
            share,
            share / weight,
            &mut gradient,
            &mut value,
        );
        loss.add(device, &value);
    }
}

fn lock(tensor: &Mutex<Tensor>) -> MutexGuard<'_, Tensor> {
    tensor.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Choices of experts, by number of the layer among those with experts: for comparisons with other arithmetic, where a close choice may fall
/// otherwise.
#[derive(Debug, Default)]
pub struct Choices {
    /// Experts of all (token, slot) pairs of a pass, taken instead of those that the router would choose.
    pub given: Option<Vec<Vec<i32>>>,
    /// Experts that were chosen in a forward pass.
    pub noted: Mutex<Vec<Vec<i32>>>,
}

/// The router: which experts a token goes to.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// Weight [E, hidden].
    pub weight: ParamId,
    /// Bias [E].
    pub bias: Option<ParamId>,
    /// How logits become weights.
    pub weights: RouterWeights,
}

/// An adapter on all experts of a layer.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsLora {
    /// `lora_A` [E·r, in], expert by expert.
    pub a: ParamId,
    /// `lora_B` [E·out, r], expert by expert.
    pub b: ParamId,
    /// Rank.
    pub r: usize,
    /// `lora_alpha / r`, or `lora_alpha / √r`.
    pub scale: f32,
}

/// One linear layer of every expert.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    /// Weights [E, out, in].
    pub weight: ParamId,
    /// Biases [E, out].
    pub bias: Option<ParamId>,
    /// Adapters.
    pub lora: Option<ExpertsLora>,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output.
    pub out_features: usize,
}

/// The routed experts of one block.
#[derive(Debug, Clone)]
pub struct Moe {
    /// Number of the block.
    pub block: u32,
    /// Number of the layer among those with experts.
    pub index: usize,
    /// The router.
    pub router: Router,
    /// Gate and up projection of every expert.
    pub gate_up: Experts,
    /// Down projection of every expert.
    pub down: Experts,
    /// What lies between them.
    pub activation: ExpertActivation,
    /// Number of experts (E).
    pub num_experts: usize,
    /// Experts of a token (k).
    pub top_k: usize,
}

/// What [`Moe::forward`] leaves for the backward pass.
#[derive(Debug)]
pub struct MoeSaved {
    routed: Routed,
    /// Gate and up of every row [T·k, 2·I].
    gate_up: Tensor,
}

/// Where rows go.
#[derive(Debug)]
struct Routed {
    /// f32 [T, E].
    logits: Tensor,
    /// Experts of the pairs [T·k].
    experts: Indices,
    /// f32 [T, k].
    weights: Tensor,
    grouping: Grouping,
    /// First row of each expert and the end, where the host knows them.
    offsets: Option<Vec<usize>>,
}

impl Routed {
    fn groups(&self) -> Groups<'_> {
        match &self.offsets {
            Some(offsets) => Groups::Host(offsets),
            None => Groups::Device(&self.grouping.offsets),
        }
    }
}

impl Experts {
    /// Keeps the weights while the hold lives, where they have to be made of packed ones: several products of a pass read them.
    pub fn hold<'a>(&self, ctx: &Context<'a>) -> Hold<'a> {
        ctx.params.hold_experts(self.weight)
    }

    /// `x` [R, in] → `y` [R, out], assigned.
    fn forward(&self, ctx: &Context<'_>, groups: Groups<'_>, x: View<'_>, y: &mut Tensor) {
        let device = ctx.device;
        let bias = self.bias.map(|bias| ctx.params.operand(bias));
        grouped_matmul::nt(device, 1.0, x, ctx.params.experts(self.weight).view(), bias, 0.0, groups, y.view_mut());
        if let Some(lora) = &self.lora {
            let z = self.z(ctx, lora, groups, x);
            let b = ctx.params.operand(lora.b).view();
            grouped_matmul::nt(device, 1.0, z.first_columns(lora.r), b, None, 1.0, groups, y.view_mut());
        }
        elementwise::round(device, y);
    }

    /// `s·x·Aᵀ` [R, ≥r].
    fn z(&self, ctx: &Context<'_>, lora: &ExpertsLora, groups: Groups<'_>, x: View<'_>) -> Tensor {
        let mut z = ctx.scratch(&[x.rows(), ctx.device.stride(lora.r)]);
        let a = ctx.params.operand(lora.a).view();
        grouped_matmul::nt(ctx.device, lora.scale, x, a, None, 0.0, groups, z.first_columns_mut(lora.r));
        elementwise::round(ctx.device, z.first_columns_mut(lora.r));
        z
    }

    /// `s·dy·B` [R, ≥r].
    fn dz(&self, ctx: &Context<'_>, lora: &ExpertsLora, groups: Groups<'_>, dy: View<'_>) -> Tensor {
        let mut dz = ctx.scratch(&[dy.rows(), ctx.device.stride(lora.r)]);
        let b = ctx.params.operand(lora.b).view();
        grouped_matmul::nn(ctx.device, lora.scale, dy, b, 0.0, groups, dz.first_columns_mut(lora.r));
        elementwise::round(ctx.device, dz.first_columns_mut(lora.r));
        dz
    }

    /// `dy` [R, out] → `dx` [R, in], assigned; `dz` as [`Self::dz`] gives it.
    fn input_gradient(
        &self,
        ctx: &Context<'_>,
        groups: Groups<'_>,
        dy: View<'_>,
        dz: Option<&Tensor>,
        dx: &mut Tensor,
    ) {
        let device = ctx.device;
        let weight = ctx.params.experts(self.weight);
        grouped_matmul::nn(device, 1.0, dy, weight.view(), 0.0, groups, dx.view_mut());
        if let Some((lora, dz)) = self.lora.as_ref().zip(dz) {
            let a = ctx.params.operand(lora.a).view();
            grouped_matmul::nn(device, 1.0, dz.first_columns(lora.r), a, 1.0, groups, dx.view_mut());
        }
        elementwise::round(device, dx);
    }

    /// Gradients of weights and adapters, from inputs `x` [R, in] and `dy` [R, out].
    fn gradients(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        groups: Groups<'_>,
        x: View<'_>,
        dy: View<'_>,
        dz: Option<&Tensor>,
    ) {
        if let Some(dweight) = grads.get_mut(self.weight) {
            grouped_matmul::tn(ctx.device, 1.0, dy, x, groups, dweight.view_mut());
        }
        let Some((lora, dz)) = self.lora.as_ref().zip(dz) else { return };
        if let Some(db) = grads.get_mut(lora.b) {
            let z = self.z(ctx, lora, groups, x);
            grouped_matmul::tn(ctx.device, 1.0, dy, z.first_columns(lora.r), groups, db.view_mut());
        }
        if let Some(da) = grads.get_mut(lora.a) {
            grouped_matmul::tn(ctx.device, 1.0, dz.first_columns(lora.r), x, groups, da.view_mut());
        }
    }

    /// Whether something trains whose gradient needs the layer's input.
    fn trains(&self, ctx: &Context<'_>) -> bool {
        let trains = |id| ctx.params.is_trainable(id);
        trains(self.weight) || self.lora.is_some_and(|lora| trains(lora.a) || trains(lora.b))
    }
}

impl Moe {
    /// Shape of an input of so many rows.
    pub fn input_shape(&self, ctx: &Context<'_>, rows: usize) -> [usize; 2] {
        [rows, ctx.device.stride(self.gate_up.in_features)]
    }

    /// `h` [T, ≥hidden] → `residual + y` [T, hidden].
    pub fn forward(&self, ctx: &Context<'_>, h: &Tensor, output: Output<'_>) -> MoeSaved {
        let h = h.first_columns(self.gate_up.in_features);
        let counts = matches!(output, Output::Write { .. });
        let (routed, x) = {
            let _phase = self.enter(ctx, Phase::Routing, Pass::Forward);
            self.route(ctx, h, counts)
        };
        let rows = x.rows();
        let phase = self.enter(ctx, Phase::Moe, Pass::Forward);
        let mut gate_up = ctx.saved(&[rows, self.gate_up.out_features]);
        self.gate_up.forward(ctx, routed.groups(), x.view(), &mut gate_up);
        drop(x);
        if let Output::Write { residual, y } = output {
            let mut act = ctx.scratch(&[rows, self.down.in_features]);
            expert_activation::forward(ctx.device, self.activation, gate_up.view(), act.view_mut());
            let mut out = ctx.scratch(&[rows, self.down.out_features]);
            self.down.forward(ctx, routed.groups(), act.view(), &mut out);
            drop((act, phase));
            let _phase = self.enter(ctx, Phase::Routing, Pass::Forward);
            let place = &routed.grouping.place;
            routing::combine(ctx.device, out.view(), place, self.top_k, Some(&routed.weights), Some(residual), y);
        }
        MoeSaved { routed, gate_up }
    }

    /// Backward of [`Moe::forward`] but for the residual: the gradient of `h` [T, hidden] from `dy` [T, hidden]. `h` gives its input again
    /// [T, ≥hidden], where something trains that needs it.
    pub fn backward<'a>(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        saved: MoeSaved,
        h: &dyn Fn() -> &'a Tensor,
        dy: View<'_>,
    ) -> Tensor {
        let MoeSaved { routed, mut gate_up } = saved;
        let (device, k, hidden) = (ctx.device, self.top_k, self.gate_up.in_features);
        let (tokens, rows) = (dy.rows(), gate_up.rows());
        let Grouping { offsets, source, place } = &routed.grouping;
        let groups = routed.groups();

        let mut d_out = ctx.scratch(&[rows, hidden]);
        {
            let _phase = self.enter(ctx, Phase::Routing, Pass::Backward);
            routing::gather(device, dy, source, 0, k, d_out.view_mut());
        }
        let phase = self.enter(ctx, Phase::Moe, Pass::Backward);
        let dz = self.down.lora.as_ref().map(|lora| self.down.dz(ctx, lora, groups, d_out.view()));
        let mut d_act = ctx.scratch(&[rows, self.down.in_features]);
        self.down.input_gradient(ctx, groups, d_out.view(), dz.as_ref(), &mut d_act);
        let mut d_weights = device.empty_f32(MemoryCategory::Workspace, &[tokens, k]);
        let mut weighted_act = self.down.trains(ctx).then(|| ctx.scratch(&[rows, self.down.in_features]));
        expert_activation::backward_in_place(
            device,
            self.activation,
            d_act.view(),
            source,
            &routed.weights,
            gate_up.view_mut(),
            &mut d_weights,
            weighted_act.as_mut().map(Tensor::view_mut),
        );
        drop(d_act);
        if let Some(act) = weighted_act {
            self.down.gradients(ctx, grads, groups, act.view(), d_out.view(), dz.as_ref());
        }
        if let Some(dbias) = self.down.bias.and_then(|bias| grads.get_mut(bias)) {
            expert_bias::gradient(device, d_out.view(), offsets, Some((source, &routed.weights)), dbias);
        }
        drop((d_out, dz));

        let d_gate_up = gate_up;
        if let Some(dbias) = self.gate_up.bias.and_then(|bias| grads.get_mut(bias)) {
            expert_bias::gradient(device, d_gate_up.view(), offsets, None, dbias);
        }
        let dz = self.gate_up.lora.as_ref().map(|lora| self.gate_up.dz(ctx, lora, groups, d_gate_up.view()));
        if self.gate_up.trains(ctx) {
            let mut x = ctx.scratch(&[rows, hidden]);
            routing::gather(device, h().first_columns(hidden), source, 0, k, x.view_mut());
            self.gate_up.gradients(ctx, grads, groups, x.view(), d_gate_up.view(), dz.as_ref());
        }
        let mut dx = ctx.scratch(&[rows, hidden]);
        self.gate_up.input_gradient(ctx, groups, d_gate_up.view(), dz.as_ref(), &mut dx);
        drop((d_gate_up, dz, phase));

        let _phase = self.enter(ctx, Phase::Routing, Pass::Backward);
        let through_router = self.router_backward(ctx, grads, &routed, h, dy, &d_weights);
        let mut dh = ctx.scratch(&[tokens, hidden]);
        routing::combine(device, dx.view(), place, k, None, Some(through_router.view()), dh.view_mut());
        dh
    }

    fn enter<'a>(&self, ctx: &Context<'a>, phase: Phase, pass: Pass) -> PhaseGuard<'a> {
        ctx.device.clock().enter(phase, pass, Some(self.block))
    }

    /// Which rows go where, and the input of every row [T·k, hidden].
    fn route(&self, ctx: &Context<'_>, h: View<'_>, counts: bool) -> (Routed, Tensor) {
        let (device, tokens, k, num_experts) = (ctx.device, h.rows(), self.top_k, self.num_experts);
        let mut logits = device.empty_f32(MemoryCategory::Activations, &[tokens, num_experts]);
        matmul::nt(device, 1.0, h, ctx.params.operand(self.router.weight), 0.0, &mut logits);
        if let Some(bias) = self.router.bias {
            expert_bias::add(device, ctx.params.operand(bias), &mut logits);
        }
        let mut experts = device.empty_indices(MemoryCategory::Activations, tokens * k);
        let given = self.given(ctx, tokens);
        if let Some(given) = &given {
            experts.copy_from(&device.indices(MemoryCategory::Workspace, given.clone()));
        }
        let mut weights = ctx.saved_f32(&[tokens, k]);
        routing::choose(device, &logits, self.router.weights, given.is_some(), &mut experts, &mut weights);
        if counts {
            if let Some(all) = ctx.moe.counts {
                let mut all = lock(all);
                let row = all.view_mut().row_range(self.index, 1);
                routing::count(device, &logits, &experts, tokens, None, row);
            }
            if let Some(Balances { probabilities, counts, .. }) = ctx.moe.balance {
                let (mut probabilities, mut counts) = (lock(probabilities), lock(counts));
                routing::count(device, &logits, &experts, tokens, Some(&mut probabilities), counts.view_mut());
            }
            self.note(ctx, &experts);
        }
        let mut grouping = Grouping::room(device, MemoryCategory::Activations, tokens * k, num_experts);
        let mut x = ctx.scratch(&[tokens * k, h.cols()]);
        let offsets = match ctx.moe.routing {
            Routing::Grouped | Routing::Sorted => {
                routing::group(device, &experts, &mut grouping);
                routing::gather(device, h, &grouping.source, 0, k, x.view_mut());
                (ctx.moe.routing == Routing::Sorted).then(|| read_offsets(ctx, &grouping.offsets, tokens * k))
            }
            Routing::PerExpert => {
                let offsets = self.find_rows(ctx, h, &experts, &mut grouping, &mut x);
                let on_device = offsets.iter().map(|&row| row as i32).collect();
                grouping.offsets = device.indices(MemoryCategory::Activations, on_device);
                Some(offsets)
            }
        };
        (Routed { logits, experts, weights, grouping, offsets }, x)
    }

    /// The rows of one expert after the other: found, counted by the host, gathered.
    fn find_rows(
        &self,
        ctx: &Context<'_>,
        h: View<'_>,
        experts: &Indices,
        grouping: &mut Grouping,
        x: &mut Tensor,
    ) -> Vec<usize> {
        let (device, k) = (ctx.device, self.top_k);
        let mut offsets = vec![0];
        let mut found = device.empty_indices(MemoryCategory::Workspace, 1);
        let mut first = 0;
        for expert in 0..self.num_experts {
            routing::find(device, experts, expert, first, grouping, &mut found);
            let count = match device.keeps_values() {
                true => found.to_vec().first().map_or(0, |&count| count as usize).min(experts.len() - first),
                // A device that only records takes one expert to have all: no step needs more memory than that.
                false => experts.len() - first,
            };
            routing::gather(device, h, &grouping.source, first, k, x.view_mut().row_range(first, count));
            first += count;
            offsets.push(first);
        }
        offsets
    }

    /// The router's part of the backward pass: its gradients, and what it adds to the gradient of `h` [T, hidden].
    fn router_backward<'a>(
        &self,
        ctx: &Context<'_>,
        grads: &mut Grads,
        routed: &Routed,
        h: &dyn Fn() -> &'a Tensor,
        dy: View<'_>,
        d_weights: &Tensor,
    ) -> Tensor {
        let (device, tokens, hidden, num_experts) = (ctx.device, dy.rows(), self.gate_up.in_features, self.num_experts);
        let bias_dots = self.down.bias.map(|bias| {
            let mut dots = device.empty_f32(MemoryCategory::Workspace, &[tokens, num_experts]);
            matmul::nt(device, 1.0, dy, ctx.params.operand(bias), 0.0, &mut dots);
            dots
        });
        let mut d_logits = ctx.scratch(&[tokens, device.stride(num_experts)]);
        let balance = ctx.moe.balance.map(|balance| lock(&balance.gradient));
        let balance = balance.as_deref().map(|gradient| Balance { gradient, rows: tokens.into() });
        routing::backward(
            device,
            &routed.logits,
            self.router.weights,
            &routed.experts,
            &routed.weights,
            d_weights,
            bias_dots.as_ref(),
            balance,
            d_logits.first_columns_mut(num_experts),
        );
        let d_logits = d_logits.first_columns(num_experts);
        let Router { weight, bias, .. } = self.router;
        if let Some(dweight) = grads.get_mut(weight) {
            matmul::tn(device, 1.0, d_logits, h().first_columns(hidden), 1.0, dweight);
        }
        if let Some(dbias) = bias.and_then(|bias| grads.get_mut(bias)) {
            elementwise::sum_rows(device, d_logits, dbias);
        }
        let mut dh = ctx.scratch(&[tokens, hidden]);
        matmul::nn(device, 1.0, d_logits, ctx.params.operand(weight), 0.0, &mut dh);
        elementwise::round(device, &mut dh);
        dh
    }

    /// Choices that are given for the rows of this pass or tile.
    fn given(&self, ctx: &Context<'_>, tokens: usize) -> Option<Vec<i32>> {
        let given = ctx.moe.choices?.given.as_ref()?;
        let (from, count) = (ctx.first_row * self.top_k, tokens * self.top_k);
        Some(given[self.index][from..from + count].to_vec())
    }

    fn note(&self, ctx: &Context<'_>, experts: &Indices) {
        if let Some(choices) = ctx.moe.choices {
            let mut noted = choices.noted.lock().unwrap_or_else(PoisonError::into_inner);
            let layers = noted.len().max(self.index + 1);
            noted.resize(layers, Vec::new());
            noted[self.index].extend(experts.to_vec());
        }
    }
}

/// The first row of each expert and the end, read by the host.
fn read_offsets(ctx: &Context<'_>, offsets: &Indices, rows: usize) -> Vec<usize> {
    if ctx.device.keeps_values() {
        return offsets.to_vec().into_iter().map(|row| (row.max(0) as usize).min(rows)).collect();
    }
    // A device that only records takes the first expert to have all: no step needs more memory than that.
    let experts = offsets.len() - 1;
    (0..=experts).map(|expert| if expert == 0 { 0 } else { rows }).collect()
}

#[cfg(test)]
#[path = "moe_tests.rs"]
mod tests;
