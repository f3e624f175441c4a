//! Routing on the CPU against definitions and finite differences.

use super::*;
use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};

const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

/// Experts and weights of some logits.
fn route(device: &Device, logits: &[f32], num_experts: usize, k: usize, how: RouterWeights) -> (Indices, Tensor) {
    let tokens = logits.len() / num_experts;
    let logits = device.tensor_f32(SCRATCH, &[tokens, num_experts], logits.to_vec());
    let mut experts = device.empty_indices(SCRATCH, tokens * k);
    let mut weights = device.empty_f32(SCRATCH, &[tokens, k]);
    choose(device, &logits, how, false, &mut experts, &mut weights);
    (experts, weights)
}

/// Softmax in f64.
fn softmax(logits: &[f32]) -> Vec<f64> {
    let exp: Vec<f64> = logits.iter().map(|z| f64::from(*z).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|x| x / sum).collect()
}

#[test]
fn the_greatest_logits_are_chosen() {
    let device = cpu(2);
    let mut v = Values::new(1);
    for (tokens, num_experts, k) in [(1, 1, 1), (1, 4, 4), (40, 8, 2), (7, 32, 4), (5, 128, 8), (3, 60, 7)] {
        let logits = v.vec(tokens * num_experts);
        for how in [RouterWeights::Chosen, RouterWeights::All] {
            let (experts, weights) = route(&device, &logits, num_experts, k, how);
            for (t, row) in logits.chunks(num_experts).enumerate() {
                let mut order: Vec<usize> = (0..num_experts).collect();
                order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
                let chosen: Vec<usize> = experts.i32s()[t * k..][..k].iter().map(|e| *e as usize).collect();
                assert_eq!(chosen, order[..k]);
                let p = softmax(row);
                let sum: f64 = if how == RouterWeights::All { 1.0 } else { chosen.iter().map(|e| p[*e]).sum() };
                let want: Vec<f32> = chosen.iter().map(|e| (p[*e] / sum) as f32).collect();
                assert_close("weights", &weights.f32s()[t * k..][..k], &want, 1e-6);
            }
        }
    }
}

#[test]
fn of_equal_logits_the_lowest_number_comes_first() {
    let device = cpu(1);
    let chosen = |logits: &[f32], k| {
        let (experts, weights) = route(&device, logits, logits.len(), k, RouterWeights::Chosen);
        (experts.to_vec(), weights.to_vec())
    };
    assert_eq!(chosen(&[1.0, 3.0, 3.0, 1.0, 3.0], 4), (vec![1, 2, 4, 0], chosen(&[3.0, 3.0, 3.0, 1.0], 4).1));
    assert_eq!(chosen(&[-0.0, 0.0, -1.0], 2).0, [0, 1], "zeros are equal");
    // What is not a number comes last, and no expert twice.
    assert_eq!(chosen(&[f32::NAN, f32::NEG_INFINITY, -f32::NAN, 2.0], 4).0, [3, 1, 0, 2]);
    assert_eq!(chosen(&[f32::NAN; 3], 2).0, [0, 1]);
    let (experts, weights) = chosen(&[1e4, -1e4, 1e4], 2);
    assert_eq!((experts, weights), (vec![0, 2], vec![0.5, 0.5]));
}

#[test]
fn given_experts_are_kept() {
    let device = cpu(1);
    let logits = device.tensor_f32(SCRATCH, &[1, 3], vec![0.0, 2f32.ln(), 3f32.ln()]);
    let mut experts = device.indices(SCRATCH, vec![0, 1]);
    let mut weights = device.empty_f32(SCRATCH, &[1, 2]);
    choose(&device, &logits, RouterWeights::Chosen, true, &mut experts, &mut weights);
    assert_eq!(experts.i32s(), [0, 1]);
    assert_close("chosen", weights.f32s(), &[1.0 / 3.0, 2.0 / 3.0], 1e-6);
    choose(&device, &logits, RouterWeights::All, true, &mut experts, &mut weights);
    assert_close("all", weights.f32s(), &[1.0 / 6.0, 2.0 / 6.0], 1e-6);
}

#[test]
fn gradients_agree_with_finite_differences() {
    let device = cpu(2);
    let mut v = Values::new(2);
    for (tokens, num_experts, k) in [(1, 1, 1), (4, 5, 2), (3, 4, 4), (6, 33, 8)] {
        // Far enough apart that no choice flips.
        let logits: Vec<f32> = (0..tokens * num_experts)
            .map(|i| ((i * 7 + i / num_experts) % num_experts) as f32 * 0.1 + 0.02 * v.next())
            .collect();
        let dweights = device.tensor_f32(SCRATCH, &[tokens, k], v.vec(tokens * k));
        let (dots, gradient) = (v.vec(tokens * num_experts), v.vec(num_experts));
        let bias_dots = device.tensor_f32(SCRATCH, &[tokens, num_experts], dots.clone());
        let gradient = device.tensor_f32(SCRATCH, &[num_experts], gradient);
        // The last row is padding.
        let counted = (tokens - 1).max(1);
        for how in [RouterWeights::Chosen, RouterWeights::All] {
            for (biased, balanced) in [(false, false), (true, false), (false, true), (true, true)] {
                let loss = |logits: &[f32]| {
                    let (experts, weights) = route(&device, logits, num_experts, k, how);
                    let mut loss = dot(dweights.f32s(), weights.f32s());
                    if biased {
                        let pairs = experts.i32s().iter().zip(weights.f32s()).enumerate();
                        loss += pairs
                            .map(|(i, (e, w))| f64::from(dots[i / k * num_experts + *e as usize]) * f64::from(*w))
                            .sum::<f64>();
                    }
                    if balanced {
                        let mut sums = device.zeros_f32(SCRATCH, &[num_experts]);
                        let mut counts = device.zeros_f32(SCRATCH, &[num_experts]);
                        let z = device.tensor_f32(SCRATCH, &[tokens, num_experts], logits.to_vec());
                        count(&device, &z, &experts, counted, Some(&mut sums), counts.view_mut());
                        loss += dot(gradient.f32s(), sums.f32s());
                    }
                    loss
                };
                let (experts, weights) = route(&device, &logits, num_experts, k, how);
                let z = device.tensor_f32(SCRATCH, &[tokens, num_experts], logits.clone());
                let mut dlogits =
                    device.tensor(SCRATCH, &[tokens, num_experts + 3], vec![9.0; tokens * (num_experts + 3)]);
                let balance = balanced.then(|| Balance { gradient: &gradient, rows: counted.into() });
                let bias_dots = biased.then_some(&bias_dots);
                let into = dlogits.first_columns_mut(num_experts + 2);
                backward(&device, &z, how, &experts, &weights, &dweights, bias_dots, balance, into);
                assert!(dlogits.f32s().chunks(num_experts + 3).all(|row| row[num_experts..] == [0.0, 0.0, 9.0]));
                let dlogits = dlogits.first_columns(num_experts).to_vec();
                if num_experts > 1 {
                    assert_gradient("logits", &logits, &dlogits, loss);
                } else {
                    assert_eq!(dlogits, [0.0], "one expert's weight is 1 whatever its logit");
                }
            }
        }
    }
}

#[test]
fn counts_and_probabilities_are_those_of_the_real_rows() {
    let device = cpu(2);
    let (tokens, num_experts, k) = (9, 6, 2);
    let logits = Values::new(8).vec(tokens * num_experts);
    let (experts, _) = route(&device, &logits, num_experts, k, RouterWeights::Chosen);
    let z = device.tensor_f32(SCRATCH, &[tokens, num_experts], logits.clone());
    for rows in [0, 1, 7, 9] {
        let on_device = device.indices(SCRATCH, vec![rows as i32]);
        for rows_at in [Rows::Host(rows), Rows::Device(&on_device)] {
            let [mut sums, mut counts] = [1.0, 2.0].map(|x| device.tensor_f32(SCRATCH, &[num_experts], vec![x; 6]));
            count(&device, &z, &experts, rows_at, Some(&mut sums), counts.view_mut());
            count(&device, &z, &experts, rows_at, None, counts.view_mut());
            let mut want = [1.0; 6];
            logits.chunks(6).take(rows).for_each(|row| want.iter_mut().zip(softmax(row)).for_each(|(w, p)| *w += p));
            assert_close("probabilities", sums.f32s(), &want.map(|x| x as f32), 1e-6);
            let chosen = |e: i32| experts.i32s()[..rows * k].iter().filter(|c| **c == e).count();
            let want: Vec<f32> = (0..6).map(|e| 2.0 + 2.0 * chosen(e) as f32).collect();
            assert_eq!(counts.f32s(), want);
        }
    }
}

/// Lists of experts of pairs: some without a pair, one with all, one pair, none.
fn choices() -> Vec<(usize, Vec<i32>)> {
    let mut v = Values::new(77);
    let mut random = |pairs: usize, num_experts: usize| -> Vec<i32> {
        (0..pairs).map(|_| ((v.next() + 1.0) / 2.0 * num_experts as f32) as i32).collect()
    };
    vec![
        (1, vec![0; 5]),
        (3, vec![1]),
        (4, vec![2; 9]),
        (4, vec![]),
        (32, random(100, 32)),
        (128, random(1000, 128)),
        (5, vec![4, 0, 4, 0, 1, 4]),
    ]
}

#[test]
fn groups_are_a_stable_sort() {
    let device = cpu(1);
    for (num_experts, experts) in choices() {
        let pairs = experts.len();
        let mut want: Vec<i32> = (0..pairs as i32).collect();
        want.sort_by_key(|pair| experts[*pair as usize]);
        let on_device = device.indices(SCRATCH, experts.clone());
        let mut grouping = Grouping::room(&device, SCRATCH, pairs, num_experts);
        group(&device, &on_device, &mut grouping);
        let Grouping { offsets, source, place } = &grouping;
        assert_eq!(source.i32s(), want);
        assert!(source.i32s().iter().enumerate().all(|(row, pair)| place.i32s()[*pair as usize] as usize == row));
        for e in 0..num_experts {
            let before = experts.iter().filter(|c| (**c as usize) < e).count();
            assert_eq!(offsets.i32s()[e] as usize, before);
        }
        assert_eq!(offsets.i32s()[num_experts] as usize, pairs);

        // One expert after another gives the same.
        let mut found_one_by_one = Grouping::room(&device, SCRATCH, pairs, num_experts);
        let mut first = 0;
        for e in 0..num_experts {
            let mut found = device.empty_indices(SCRATCH, 1);
            find(&device, &on_device, e, first, &mut found_one_by_one, &mut found);
            assert_eq!(first, offsets.i32s()[e] as usize);
            first += found.to_vec()[0] as usize;
        }
        assert_eq!(first, pairs);
        assert_eq!(found_one_by_one.source.i32s(), source.i32s());
        assert_eq!(found_one_by_one.place.i32s(), place.i32s());
    }
}

#[test]
fn rows_go_to_experts_and_back() {
    let device = cpu(2);
    let mut v = Values::new(6);
    for (tokens, k, num_experts, width) in [(1, 1, 1, 1), (6, 2, 4, 5), (20, 4, 7, 8)] {
        let pairs = tokens * k;
        let experts: Vec<i32> = (0..pairs).map(|_| ((v.next() + 1.0) / 2.0 * num_experts as f32) as i32).collect();
        let mut grouping = Grouping::room(&device, SCRATCH, pairs, num_experts);
        group(&device, &device.indices(SCRATCH, experts), &mut grouping);
        let x = v.tensor(&device, &[tokens, width + 1]);
        let mut xs = device.zeros(SCRATCH, &[pairs, width + 2]);
        // All rows, in two runs.
        for (first, count) in [(0, pairs / 2), (pairs / 2, pairs - pairs / 2)] {
            let into = xs.first_columns_mut(width).row_range(first, count);
            gather(&device, x.first_columns(width), &grouping.source, first, k, into);
        }
        for (row, pair) in grouping.source.i32s().iter().enumerate() {
            assert_eq!(xs.first_columns(width).row(row), x.first_columns(width).row(*pair as usize / k));
        }
        // Weighted rows are their token's row times the sum of its weights.
        let weights = device.tensor_f32(SCRATCH, &[tokens, k], v.vec(pairs));
        let residual = v.tensor(&device, &[tokens, width]);
        for (weights, residual) in
            [(None, None), (Some(&weights), None), (None, Some(&residual)), (Some(&weights), Some(&residual))]
        {
            let mut y = device.zeros(SCRATCH, &[tokens, width + 4]);
            let into = y.first_columns_mut(width);
            combine(&device, xs.first_columns(width), &grouping.place, k, weights, residual.map(Tensor::view), into);
            let want: Vec<f32> = (0..tokens * width)
                .map(|i| {
                    let (t, column) = (i / width, i % width);
                    let sum: f32 = weights.map_or(k as f32, |weights| weights.f32s()[t * k..][..k].iter().sum());
                    residual.map_or(0.0, |r| r.f32s()[i]) + sum * x.first_columns(width).row(t)[column]
                })
                .collect();
            assert_close("combined", &y.first_columns(width).to_vec(), &want, 1e-6);
        }
    }
}

#[test]
fn combining_is_the_adjoint_of_gathering() {
    let device = cpu(1);
    let mut v = Values::new(16);
    let (tokens, k, width) = (5, 3, 4);
    let experts = device.indices(SCRATCH, (0..15).map(|i| i * 7 % 4).collect());
    let mut grouping = Grouping::room(&device, SCRATCH, 15, 4);
    group(&device, &experts, &mut grouping);
    let (x, dxs) = (v.tensor(&device, &[tokens, width]), v.tensor(&device, &[15, width]));
    let (mut xs, mut dx) = (device.empty(SCRATCH, &[15, width]), device.empty(SCRATCH, &[tokens, width]));
    gather(&device, &x, &grouping.source, 0, k, &mut xs);
    combine(&device, &dxs, &grouping.place, k, None, None, &mut dx);
    assert!((dot(xs.f32s(), dxs.f32s()) - dot(x.f32s(), dx.f32s())).abs() < 1e-5);
}
