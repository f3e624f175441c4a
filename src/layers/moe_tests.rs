//! Routed experts against finite differences, in every form of routing, with experts that get nothing and one that gets everything.

use super::*;
use crate::layers::mlp::Output;
use crate::layers::parameter::Params;
use crate::ops::expert_activation::Gating;
use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
use crate::tensor::Device;

const TOKENS: usize = 7;
const HIDDEN: usize = 6;
const INNER: usize = 4;
const EXPERTS: usize = 5;
const ROUTINGS: [Routing; 3] = [Routing::Grouped, Routing::Sorted, Routing::PerExpert];

struct Case {
    params: Params,
    moe: Moe,
}

/// A layer all of whose parameters train, adapters included, with random values.
fn case(device: &Device, values: &mut Values, top_k: usize, weights: RouterWeights, like_gpt_oss: bool) -> Case {
    let mut params = Params::new(device);
    let mut push = |name: &str, shape: &[usize]| {
        let id = params.push(name, values.tensor(device, shape));
        params.train(id);
        id
    };
    let bias = |id: ParamId| like_gpt_oss.then_some(id);
    let router =
        Router { weight: push("router", &[EXPERTS, HIDDEN]), bias: bias(push("router bias", &[EXPERTS])), weights };
    let mut experts = |name: &str, out_features: usize, in_features: usize| Experts {
        weight: push(name, &[EXPERTS, out_features, in_features]),
        bias: bias(push(&format!("{name} bias"), &[EXPERTS, out_features])),
        lora: Some(ExpertsLora {
            a: push(&format!("{name} A"), &[EXPERTS * 3, in_features]),
            b: push(&format!("{name} B"), &[EXPERTS * out_features, 3]),
            r: 3,
            scale: 0.5,
        }),
        in_features,
        out_features,
    };
    let (gate_up, down) = (experts("gate_up", 2 * INNER, HIDDEN), experts("down", HIDDEN, INNER));
    let kind = if like_gpt_oss { Gating::Clamped { alpha: 1.702, limit: 7.0 } } else { Gating::Silu };
    let activation = ExpertActivation { kind, interleaved: like_gpt_oss };
    let moe = Moe { block: 0, index: 0, router, gate_up, down, activation, num_experts: EXPERTS, top_k };
    Case { params, moe }
}

/// The layer's output [T, hidden], and what its backward pass needs.
fn forward(device: &Device, params: &Params, moe: &Moe, run: MoeRun<'_>, h: &Tensor) -> (Tensor, MoeSaved) {
    let ctx = Context { moe: run, ..Context::new(device, params, None) };
    let residual = device.zeros(MemoryCategory::Workspace, &[TOKENS, HIDDEN]);
    let mut y = device.empty(MemoryCategory::Workspace, &[TOKENS, HIDDEN]);
    let saved = moe.forward(&ctx, h, Output::Write { residual: residual.view(), y: y.view_mut() });
    (y, saved)
}

fn check(top_k: usize, weights: RouterWeights, like_gpt_oss: bool, given: Option<&[i32]>) {
    let device = cpu(2);
    let mut values = Values::new(17 + top_k as u64);
    let Case { mut params, moe } = case(&device, &mut values, top_k, weights, like_gpt_oss);
    let (h, dy) = (values.tensor(&device, &[TOKENS, HIDDEN]), values.tensor(&device, &[TOKENS, HIDDEN]));
    let mut reference: Option<(Vec<f32>, Vec<f32>)> = None;
    // Choices are those of the start, or those given: a step over the edge between two experts has no derivative.
    let choices = Choices::default();
    forward(&device, &params, &moe, MoeRun { choices: Some(&choices), ..MoeRun::default() }, &h);
    let noted = choices.noted.lock().unwrap().clone();
    let choices = Choices { given: Some(given.map_or(noted, |given| vec![given.to_vec()])), ..Choices::default() };
    for routing in ROUTINGS {
        let counts = Mutex::new(device.zeros_f32(MemoryCategory::Metadata, &[1, EXPERTS]));
        let run = MoeRun { routing, counts: Some(&counts), choices: Some(&choices), balance: None };
        let (y, saved) = forward(&device, &params, &moe, run, &h);
        let counted: f32 = counts.lock().unwrap().f32s().iter().sum();
        assert_eq!(counted as usize, TOKENS * top_k);
        let mut grads = Grads::new(&params);
        let ctx = Context { moe: run, ..Context::new(&device, &params, None) };
        let dh = moe.backward(&ctx, &mut grads, saved, &|| &h, dy.view());
        match &reference {
            Some((output, gradient)) => assert!(y.f32s() == output && dh.f32s() == gradient, "{routing:?} differs"),
            None => reference = Some((y.f32s().to_vec(), dh.f32s().to_vec())),
        }
        if routing != Routing::Grouped {
            continue;
        }
        let run = MoeRun { counts: None, ..run };
        assert_gradient("h", h.f32s(), dh.f32s(), |h: &[f32]| {
            let h = device.tensor(MemoryCategory::Workspace, &[TOKENS, HIDDEN], h.to_vec());
            dot(dy.f32s(), forward(&device, &params, &moe, run, &h).0.f32s())
        });
        for id in params.ids().filter(|&id| like_gpt_oss || !params.name(id).ends_with("bias")).collect::<Vec<_>>() {
            let (name, start, got) = (params.name(id).to_owned(), params.to_vec(id), grads.get(id).unwrap().to_vec());
            assert_gradient(&name, &start, &got, |x: &[f32]| {
                params.set(id, x);
                dot(dy.f32s(), forward(&device, &params, &moe, run, &h).0.f32s())
            });
            params.set(id, &start);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences_in_every_routing() {
    check(2, RouterWeights::Chosen, false, None);
    check(3, RouterWeights::All, false, None);
    check(2, RouterWeights::Chosen, true, None);
}

#[test]
fn one_expert_may_take_all_and_the_others_nothing() {
    check(1, RouterWeights::All, false, Some(&[3; TOKENS]));
    check(1, RouterWeights::Chosen, true, Some(&[0; TOKENS]));
    let two: Vec<i32> = (0..TOKENS).flat_map(|_| [4, 1]).collect();
    check(2, RouterWeights::Chosen, true, Some(&two));
}

#[test]
fn experts_without_tokens_have_no_gradient() {
    let device = cpu(1);
    let mut values = Values::new(5);
    let Case { params, moe } = case(&device, &mut values, 1, RouterWeights::All, true);
    let h = values.tensor(&device, &[TOKENS, HIDDEN]);
    let choices = Choices { given: Some(vec![vec![2; TOKENS]]), ..Choices::default() };
    let run = MoeRun { choices: Some(&choices), ..MoeRun::default() };
    let (y, saved) = forward(&device, &params, &moe, run, &h);
    let mut grads = Grads::new(&params);
    let ctx = Context { moe: run, ..Context::new(&device, &params, None) };
    moe.backward(&ctx, &mut grads, saved, &|| &h, y.view());
    for experts in [&moe.gate_up, &moe.down] {
        let lora = experts.lora.unwrap();
        for id in [Some(experts.weight), experts.bias, Some(lora.a), Some(lora.b)].into_iter().flatten() {
            let gradient = grads.get(id).unwrap().to_vec();
            let of_expert = gradient.chunks_exact(gradient.len() / EXPERTS);
            for (expert, values) in of_expert.enumerate() {
                let is_zero = values.iter().all(|&x| x == 0.0);
                assert_eq!(is_zero, expert != 2, "{} of expert {expert}", params.name(id));
            }
        }
    }
    assert_close("same again", forward(&device, &params, &moe, run, &h).0.f32s(), y.f32s(), 0.0);
}
