//! Projections with adapters: gradients against finite differences, dropout, and each layer of a projection against itself alone.

use super::*;
use std::sync::Arc;

use crate::formats::nf4::Nf4;
use crate::formats::safetensors::Dtype;
use crate::layers::DropoutState;
use crate::layers::held::Operand;
use crate::layers::parameter::{Params, Part};
use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};

const ROWS: usize = 5;
const IN: usize = 12;
const OUT: [usize; 2] = [7, 4];
const N: usize = 11;
const R: usize = 3;

/// Two layers on one input with biases and adapters, all of it trainable. `columns` are those of an adapter: at least its rank.
fn layer(device: &Device, dropout: f32, columns: usize) -> (Params, Projection) {
    let mut values = Values::new(4);
    let mut params = Params::new(device);
    let matrix = params.push_matrix(N + 2 * columns, IN + 2 * columns);
    let mut first = 0;
    let linears = OUT.into_iter().enumerate().map(|(i, out_features)| {
        let part = Part { matrix, row: first, col: 0, rows: out_features, cols: IN };
        let weight = params.push_part("weight", part);
        params.set(weight, &values.vec(out_features * IN));
        let bias = params.push("bias", values.tensor(device, &[out_features]));
        params.train(weight);
        params.train(bias);
        let a = Part { matrix, row: N + i * columns, col: 0, rows: R, cols: IN };
        let a = params.push_adapter("lora_A", a, || values.vec(R * IN), Some(i * columns));
        let b = Part { matrix, row: first, col: IN + i * columns, rows: out_features, cols: R };
        let b = params.push_adapter("lora_B", b, || values.vec(out_features * R), None);
        let lora = Lora { a, b, r: R, first: i * columns, scale: 1.5, dropout, index: 9 + i as u32 };
        let linear = Linear { weight, bias: Some(bias), lora: Some(lora), first, out_features };
        first += out_features;
        linear
    });
    let linears = linears.collect();
    let projection = Projection { linears, matrix, in_features: IN, out_features: N, adapter_columns: 2 * columns };
    (params, projection)
}

fn state(step: u64) -> DropoutState {
    DropoutState { seed: 3, step, micro_batch: 0 }
}

/// Output, and the input with z behind it.
fn forward(ctx: &Context<'_>, projection: &Projection, x: &[f32]) -> (Vec<f32>, Tensor) {
    let mut input = ctx.scratch(&projection.input_shape(ctx.device, ROWS));
    input.first_columns_mut(IN).set(x);
    let mut y = ctx.scratch(&[ROWS, N]);
    projection.forward(ctx, &mut input, None, &mut y);
    (y.to_vec(), input)
}

#[test]
fn gradients_agree_with_finite_differences_with_and_without_dropout_and_padding() {
    let device = cpu(2);
    for (dropout, columns) in [(None, R), (None, R + 1), (Some(state(1)), R + 1)] {
        let (mut params, projection) = layer(&device, 0.4, columns);
        let mut values = Values::new(6);
        let x = values.tensor(&device, &[ROWS, IN]);
        let gradient = values.vec(ROWS * N);
        let mut dx = device.empty(MemoryCategory::Workspace, &[ROWS, IN]);
        let mut grads = Grads::new(&params);
        {
            let ctx = Context::new(&device, &params, dropout);
            let (_, input) = forward(&ctx, &projection, x.f32s());
            let saved = projection.saved_z(&ctx, &input);
            assert_eq!(saved.as_ref().unwrap().to_vec(), projection.z(&input).unwrap().to_vec());
            let mut dy = ctx.scratch(&projection.output_shape(&device, ROWS));
            dy.first_columns_mut(N).set(&gradient);
            let z = saved.as_ref().map(Tensor::view);
            projection.backward(&ctx, &mut grads, x.view(), z, dy.view_mut(), Some(dx.view_mut()));
        }
        let loss = |params: &Params, x: &[f32]| {
            let ctx = Context::new(&device, params, dropout);
            dot(&gradient, &forward(&ctx, &projection, x).0)
        };
        assert_gradient("dx", x.f32s(), dx.f32s(), |x| loss(&params, x));
        let ids: Vec<ParamId> = params.ids().collect();
        for id in ids {
            let (start, what) = (params.to_vec(id), params.name(id).to_owned());
            assert_gradient(&what, &start, &grads.get(id).unwrap().to_vec(), |value| {
                params.set(id, value);
                loss(&params, x.f32s())
            });
            params.set(id, &start);
        }
    }
}

#[test]
fn a_residual_is_added_and_a_layer_without_adapter_gets_none() {
    let device = cpu(1);
    let (params, mut projection) = layer(&device, 0.0, R);
    let mut values = Values::new(3);
    let (x, residual) = (values.vec(ROWS * IN), values.tensor(&device, &[ROWS, N]));
    let ctx = Context::new(&device, &params, None);
    let (plain, _) = forward(&ctx, &projection, &x);
    let with_residual = |projection: &Projection| {
        let mut input = ctx.scratch(&projection.input_shape(&device, ROWS));
        input.first_columns_mut(IN).set(&x);
        let mut y = ctx.scratch(&[ROWS, N]);
        projection.forward(&ctx, &mut input, Some(residual.view()), &mut y);
        y.to_vec()
    };
    let want: Vec<f32> = plain.iter().zip(residual.f32s()).map(|(y, r)| y + r).collect();
    assert_close("with biases", &with_residual(&projection), &want, 1e-6);
    let biases: Vec<Vec<f32>> = projection.linears.iter().map(|l| params.to_vec(l.bias.unwrap())).collect();
    projection.linears.iter_mut().for_each(|linear| linear.bias = None);
    let biases = biases.concat();
    let want: Vec<f32> = want.iter().enumerate().map(|(i, y)| y - biases[i % N]).collect();
    assert_close("without biases", &with_residual(&projection), &want, 1e-6);
}

#[test]
fn dropout_keeps_the_mean_and_touches_the_adapter_alone() {
    let device = cpu(2);
    let (mut params, projection) = layer(&device, 0.25, R);
    let x = Values::new(8).vec(ROWS * IN);
    let run = |params: &Params, dropout| forward(&Context::new(&device, params, dropout), &projection, &x).0;
    let plain = run(&params, None);
    let mut mean = vec![0.0f32; plain.len()];
    let steps = 3000;
    for step in 1..=steps {
        let y = run(&params, Some(state(step)));
        mean.iter_mut().zip(y).for_each(|(mean, y)| *mean += y / steps as f32);
    }
    assert_ne!(run(&params, Some(state(1))), plain);
    assert_close("mean", &mean, &plain, 0.02);
    for linear in &projection.linears {
        params.set(linear.lora.unwrap().b, &vec![0.0; linear.out_features * R]);
    }
    assert_eq!(run(&params, Some(state(1))), run(&params, None));
}

#[test]
fn weights_in_4_bits_give_what_their_values_give_and_are_made_once_while_they_are_held() {
    let device = cpu(2);
    let (sizes, r, cols) = ([7, 4], R, 16);
    let mut values = Values::new(12);
    let stored: Vec<Nf4<'static>> = sizes
        .iter()
        .map(|&rows| Nf4::quantize("w", &values.vec(rows * cols), &[rows, cols], Dtype::F32, true).unwrap())
        .collect();
    let (a, b) = ([(); 2].map(|()| values.vec(r * cols)), sizes.map(|rows| values.vec(rows * r)));
    let (x, gradient) = (values.vec(ROWS * cols), values.vec(ROWS * N));
    let run = |packed: bool, held: bool| {
        let mut params = Params::new(&device);
        let matrix = match packed {
            true => params.push_packed_matrix(&sizes, cols, 0, true),
            false => params.push_matrix(N, cols),
        };
        let mut first = 0;
        let linears = (0..2).map(|i| {
            let (rows, row) = (sizes[i], first);
            let weight = params.push_part("weight", Part { matrix, row, col: 0, rows, cols });
            match packed {
                true => params.set_nf4(weight, &stored[i]),
                false => params.set(weight, &stored[i].dequantize().unwrap()),
            }
            assert_eq!((params.is_nf4(weight), params.to_vec(weight)), (packed, stored[i].dequantize().unwrap()));
            params.make_room(matrix, N, cols, 2 * r);
            let part = Part { matrix, row: N + i * r, col: 0, rows: r, cols };
            let a = params.push_adapter("lora_A", part, || a[i].clone(), Some(i * r));
            let part = Part { matrix, row, col: cols + i * r, rows, cols: r };
            let b = params.push_adapter("lora_B", part, || b[i].clone(), None);
            let lora = Lora { a, b, r, first: i * r, scale: 1.5, dropout: 0.0, index: 0 };
            first += rows;
            Linear { weight, bias: None, lora: Some(lora), first: row, out_features: rows }
        });
        let linears = linears.collect();
        let projection = Projection { linears, matrix, in_features: cols, out_features: N, adapter_columns: 2 * r };
        let mut grads = Grads::new(&params);
        let ctx = Context::new(&device, &params, None);
        let _held = held.then(|| projection.hold(&ctx));
        let made = [(); 2].map(|()| match params.matrix(matrix) {
            Operand::Lasting(_) => None,
            Operand::Made(made) => Some(made),
        });
        if let [Some(first), Some(second)] = made {
            assert_eq!(Arc::ptr_eq(&first, &second), held);
        }
        let mut input = ctx.scratch(&projection.input_shape(&device, ROWS));
        input.first_columns_mut(cols).set(&x);
        let mut y = ctx.scratch(&[ROWS, N]);
        projection.forward(&ctx, &mut input, None, &mut y);
        let mut dy = ctx.scratch(&projection.output_shape(&device, ROWS));
        dy.first_columns_mut(N).set(&gradient);
        let mut dx = ctx.scratch(&[ROWS, cols]);
        let z = projection.z(&input);
        projection.backward(&ctx, &mut grads, input.first_columns(cols), z, dy.view_mut(), Some(dx.view_mut()));
        let mut all = vec![y.to_vec(), dx.to_vec()];
        all.extend(params.ids().filter_map(|id| grads.get(id)).map(|grad| grad.to_vec()));
        all
    };
    let want = run(false, false);
    assert_eq!(want.len(), 6);
    assert!(run(true, false) == want && run(true, true) == want);
}
