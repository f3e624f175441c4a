//! Routing, the activation of experts and weights in MXFP4 on the GPU against the CPU: what is chosen, sorted, copied or dequantized is bit-equal.

use tandem::formats::mxfp4::Mxfp4;
use tandem::ops::expert_activation::{self, ExpertActivation, Gating};
use tandem::ops::mxfp4::{self, Mxfp4Weight};
use tandem::ops::routing::{self, Balance, Grouping, RouterWeights, Rows};
use tandem::tensor::{Device, Indices, Tensor};

use super::{Bench, SCRATCH, tensor};

/// Tokens, experts, experts a token.
const ROUTERS: [(usize, usize, usize); 12] = [
    (1, 1, 1),
    (1, 128, 8),
    (3, 4, 4),
    (9, 5, 2),
    (31, 32, 4),
    (64, 33, 16),
    (777, 128, 16),
    (8000, 32, 4),
    (8000, 128, 8),
    (1001, 256, 32),
    (7, 130, 1),
    (20_000, 8, 2),
];

const HOWS: [RouterWeights; 2] = [RouterWeights::Chosen, RouterWeights::All];

fn f32s(device: &Device, shape: &[usize], values: &[f32]) -> Tensor {
    device.tensor_f32(SCRATCH, shape, values.to_vec())
}

fn chosen(d: &Device, logits: &Tensor, k: usize, how: RouterWeights) -> (Indices, Tensor) {
    let mut experts = d.empty_indices(SCRATCH, logits.rows() * k);
    let mut weights = d.empty_f32(SCRATCH, &[logits.rows(), k]);
    routing::choose(d, logits, how, false, &mut experts, &mut weights);
    (experts, weights)
}

/// Runs `f` on the CPU in bf16 and on the GPU.
fn on_both<R: Send>(b: &Bench, f: impl Fn(&Device) -> R + Sync) -> [R; 2] {
    let results = [1, 2].map(|i| b.devices[i].run(|| f(&b.devices[i])));
    b.devices[2].check().unwrap();
    results
}

#[test]
fn experts_are_chosen_as_on_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    for (tokens, num_experts, k) in ROUTERS {
        let mut logits = b.values(tokens * num_experts);
        // bf16 has so few values that many are equal; in one row all are, and one has what is not a number.
        logits[..num_experts].fill(0.25);
        if tokens > 5 {
            logits[2 * num_experts..3 * num_experts].fill(f32::NAN);
            logits[3 * num_experts..][..3].copy_from_slice(&[f32::NEG_INFINITY, f32::NAN, -f32::NAN]);
            logits[4 * num_experts..][..2].copy_from_slice(&[-0.0, 0.0]);
        }
        for how in HOWS {
            let [cpu, gpu] = on_both(&b, |d| {
                let logits = f32s(d, &[tokens, num_experts], &logits);
                let (experts, weights) = chosen(d, &logits, k, how);
                // Given choices: those of the row, turned around.
                let turned: Vec<i32> = experts.to_vec().chunks(k).flat_map(|row| row.iter().rev().copied()).collect();
                let mut given = d.indices(SCRATCH, turned.clone());
                let mut of_given = d.empty_f32(SCRATCH, &[tokens, k]);
                routing::choose(d, &logits, how, true, &mut given, &mut of_given);
                assert_eq!(given.to_vec(), turned, "given experts stay");
                (experts.to_vec(), [weights.to_vec(), of_given.to_vec()].concat())
            });
            let what = format!("{tokens} tokens, {k} of {num_experts} experts, {how:?}");
            assert!(cpu.0 == gpu.0, "{what}: other experts");
            for (cpu, gpu) in cpu.1.iter().zip(&gpu.1) {
                assert!((cpu - gpu).abs() <= 1e-5 || cpu.is_nan() && gpu.is_nan(), "{what}: weights {cpu} and {gpu}");
            }
        }
    }
}

#[test]
fn gradients_and_counts_of_routers() {
    let Some(mut b) = Bench::new() else { return };
    for (tokens, num_experts, k) in ROUTERS {
        let logits: Vec<f32> = b.values(tokens * num_experts).iter().map(|x| 3.0 * x).collect();
        let (dweights, dots) = (b.values(tokens * k), b.values(tokens * num_experts));
        let gradient = b.values(num_experts);
        let columns = num_experts.next_multiple_of(8);
        let real = tokens - tokens / 10;
        for how in HOWS {
            for (biased, balanced, on_device) in [(false, false, false), (true, true, false), (false, true, true)] {
                let what = format!("{tokens} tokens, {k} of {num_experts} experts, {how:?}, {biased}, {balanced}");
                b.compare(&what, 3.0, |d| {
                    let logits = f32s(d, &[tokens, num_experts], &logits);
                    let (experts, weights) = chosen(d, &logits, k, how);
                    let (dweights, dots) = (f32s(d, &[tokens, k], &dweights), f32s(d, &[tokens, num_experts], &dots));
                    let gradient = f32s(d, &[num_experts], &gradient);
                    let real_rows = d.indices(SCRATCH, vec![real as i32]);
                    let rows = if on_device { Rows::Device(&real_rows) } else { real.into() };
                    let balance = balanced.then_some(Balance { gradient: &gradient, rows });
                    // What lies behind its columns stays.
                    let mut dlogits = tensor(d, &[tokens, columns + 8], &vec![0.5; tokens * (columns + 8)]);
                    let (dots, into) = (biased.then_some(&dots), dlogits.first_columns_mut(columns));
                    routing::backward(d, &logits, how, &experts, &weights, &dweights, dots, balance, into);
                    let [mut sums, mut counts] = [1.0, 2.0].map(|x| f32s(d, &[num_experts], &vec![x; num_experts]));
                    routing::count(d, &logits, &experts, rows, Some(&mut sums), counts.view_mut());
                    routing::count(d, &logits, &experts, rows, None, counts.view_mut());
                    let inside = f32s(d, &[tokens, columns], &dlogits.first_columns(columns).to_vec());
                    let behind = f32s(d, &[tokens, 8], &dlogits.view().columns(columns, 8).to_vec());
                    vec![inside, behind, sums, counts]
                });
            }
        }
    }
}

#[test]
fn counts_of_choices_are_exact() {
    let Some(mut b) = Bench::new() else { return };
    for (tokens, num_experts, k) in ROUTERS {
        let logits = b.values(tokens * num_experts);
        let [cpu, gpu] = on_both(&b, |d| {
            let logits = f32s(d, &[tokens, num_experts], &logits);
            let (experts, _) = chosen(d, &logits, k, RouterWeights::Chosen);
            [0, 1, tokens / 2, tokens].map(|rows| {
                let mut counts = d.zeros_f32(SCRATCH, &[num_experts]);
                routing::count(d, &logits, &experts, rows, None, counts.view_mut());
                counts.to_vec()
            })
        });
        assert!(cpu == gpu, "{tokens} tokens, {k} of {num_experts} experts");
        assert_eq!(gpu[3].iter().sum::<f32>(), (tokens * k) as f32);
    }
}

/// Experts of pairs.
fn choices(b: &mut Bench, pairs: usize, num_experts: usize) -> Vec<i32> {
    // In bf16 the largest value is 1.
    let expert = |x: &f32| ((x + 1.0) / 2.0 * num_experts as f32) as i32;
    b.values(pairs).iter().map(|x| expert(x).min(num_experts as i32 - 1)).collect()
}

#[test]
fn pairs_are_sorted_as_on_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let mut cases: Vec<(usize, Vec<i32>)> = vec![
        (1, vec![0; 1]),
        (4, vec![]),
        (4, vec![2; 5000]),
        (32, vec![31; 513]),
        // Experts in runs, and in turns.
        (128, (0..64_000).map(|i| i / 500).collect()),
        (128, (0..64_001).map(|i| i % 128).collect()),
    ];
    for (pairs, num_experts) in [
        (1, 1),
        (31, 4),
        (33, 32),
        (511, 33),
        (512, 8),
        (513, 256),
        (4000, 128),
        (64_000, 128),
        (65_537, 32),
        (100_003, 256),
        (1_600_000, 128),
        (3_200_000, 256),
    ] {
        cases.push((num_experts, choices(&mut b, pairs, num_experts)));
    }
    for (num_experts, experts) in cases {
        let pairs = experts.len();
        let [cpu, gpu] = on_both(&b, |d| {
            let experts = d.indices(SCRATCH, experts.clone());
            let mut grouping = Grouping::room(d, SCRATCH, pairs, num_experts);
            routing::group(d, &experts, &mut grouping);
            [grouping.offsets.to_vec(), grouping.source.to_vec(), grouping.place.to_vec()]
        });
        for (name, (cpu, gpu)) in ["offsets", "source", "place"].iter().zip(cpu.iter().zip(&gpu)) {
            assert!(cpu == gpu, "{pairs} pairs of {num_experts} experts: {name}");
        }
        // One expert at a time, where that does not take minutes.
        if num_experts <= 128 && pairs <= 70_000 {
            let d = &b.devices[2];
            let found = d.run(|| {
                let experts = d.indices(SCRATCH, experts.clone());
                let mut grouping = Grouping::room(d, SCRATCH, pairs, num_experts);
                let mut offsets = vec![0];
                for expert in 0..num_experts {
                    let mut found = d.empty_indices(SCRATCH, 1);
                    let first = offsets[expert] as usize;
                    routing::find(d, &experts, expert, first, &mut grouping, &mut found);
                    offsets.push(offsets[expert] + found.to_vec()[0]);
                }
                [offsets, grouping.source.to_vec(), grouping.place.to_vec()]
            });
            d.check().unwrap();
            assert!(found == cpu, "{pairs} pairs of {num_experts} experts, one after another");
        }
    }
}

#[test]
fn rows_of_experts_are_gathered_and_combined() {
    let Some(mut b) = Bench::new() else { return };
    for (tokens, k, num_experts, width) in [
        (1, 1, 1, 8),
        (3, 2, 4, 24),
        (65, 4, 32, 2880),
        (130, 8, 128, 2048),
        (1000, 5, 7, 1032),
        (9, 16, 16, 4096),
        (8000, 8, 128, 64),
    ] {
        let pairs = tokens * k;
        let experts = choices(&mut b, pairs, num_experts);
        let (x, weights) = (b.values(tokens * (width + 8)), b.values(pairs));
        let (residual, around) = (b.values(tokens * (width + 16)), b.values(pairs * (width + 64)));
        let grouped = |d: &Device| {
            let mut grouping = Grouping::room(d, SCRATCH, pairs, num_experts);
            routing::group(d, &d.indices(SCRATCH, experts.clone()), &mut grouping);
            grouping
        };
        let gathered = |d: &Device, grouping: &Grouping| {
            let x = tensor(d, &[tokens, width + 8], &x);
            let mut xs = tensor(d, &[pairs, width + 64], &around);
            // In three runs, one of them empty.
            for (first, count) in [(0, pairs / 3), (pairs / 3, 0), (pairs / 3, pairs - pairs / 3)] {
                let into = xs.first_columns_mut(width).row_range(first, count);
                routing::gather(d, x.first_columns(width), &grouping.source, first, k, into);
            }
            xs
        };
        let what = format!("{tokens} tokens, {k} of {num_experts} experts, {width} wide");
        let [cpu, gpu] = on_both(&b, |d| gathered(d, &grouped(d)).to_vec());
        assert!(cpu == gpu, "{what}: gathered");
        b.compare(&what, 2.0, |d| {
            let grouping = grouped(d);
            let xs = gathered(d, &grouping);
            let weights = f32s(d, &[tokens, k], &weights);
            let residual = tensor(d, &[tokens, width + 16], &residual);
            let residual = residual.first_columns(width);
            [(None, None), (Some(&weights), None), (None, Some(residual)), (Some(&weights), Some(residual))]
                .into_iter()
                .map(|(weights, residual)| {
                    let mut y = d.zeros(SCRATCH, &[tokens, width + 24]);
                    let into = y.first_columns_mut(width);
                    routing::combine(d, xs.first_columns(width), &grouping.place, k, weights, residual, into);
                    y
                })
                .collect()
        });
    }
}

#[test]
fn activations_of_experts() {
    let Some(mut b) = Bench::new() else { return };
    for (tokens, k, width) in [(1, 1, 8), (7, 2, 24), (33, 4, 768), (16, 4, 2880), (5, 2, 4104), (2000, 2, 264)] {
        let rows = tokens * k;
        // Up to 9, so that limits are reached.
        let gate_up: Vec<f32> = b.values(rows * 2 * width).iter().map(|x| 8.0 * x).collect();
        let (u, weights) = (b.values(rows * (width + 8)), b.values(rows));
        let source: Vec<i32> = (0..rows as i32).map(|p| (p * 7 + 3) % rows as i32).collect();
        let source = if rows % 7 == 0 { (0..rows as i32).rev().collect() } else { source };
        for kind in [Gating::Silu, Gating::GPT_OSS] {
            for interleaved in [false, true] {
                let act = ExpertActivation { kind, interleaved };
                b.compare(&format!("{rows} rows of {width}, {act:?}"), 3.0, |d| {
                    let mut gate_up_at = d.zeros(SCRATCH, &[rows, 2 * width + 16]);
                    gate_up_at.first_columns_mut(2 * width).set(&gate_up);
                    let mut h = d.zeros(SCRATCH, &[rows, width + 8]);
                    expert_activation::forward(d, act, gate_up_at.first_columns(2 * width), h.first_columns_mut(width));
                    let (u, weights) = (tensor(d, &[rows, width + 8], &u), f32s(d, &[tokens, k], &weights));
                    let source = d.indices(SCRATCH, source.clone());
                    let mut results = vec![h];
                    for wanted in [false, true] {
                        let mut gate_up = d.zeros(SCRATCH, &[rows, 2 * width + 16]);
                        gate_up.first_columns_mut(2 * width).set(&gate_up_at.first_columns(2 * width).to_vec());
                        let mut dweights = d.empty_f32(SCRATCH, &[tokens, k]);
                        let mut weighted = d.zeros(SCRATCH, &[rows, width + 24]);
                        expert_activation::backward_in_place(
                            d,
                            act,
                            u.first_columns(width),
                            &source,
                            &weights,
                            gate_up.first_columns_mut(2 * width),
                            &mut dweights,
                            wanted.then(|| weighted.first_columns_mut(width)),
                        );
                        results.extend([gate_up, dweights, weighted]);
                    }
                    results
                });
            }
        }
    }
}

#[test]
fn weights_in_mxfp4_are_bit_equal_to_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    // Every code under every scale but 255, then sizes around those of a block of the kernel.
    let codes: Vec<u8> = (0..255).flat_map(|_| (0..16u8).map(|i| (2 * i % 16) | (2 * i % 16 + 1) << 4)).collect();
    let mut stored = vec![Mxfp4::new(&[255, 32], codes, (0..255).collect::<Vec<u8>>()).unwrap()];
    for shape in [[1, 1, 32], [1, 8, 1024], [3, 5, 2880], [4, 257, 64], [2, 1001, 96]] {
        stored.push(Mxfp4::quantize(&b.values(shape.iter().product()), &shape).unwrap());
    }
    for stored in &stored {
        let [cpu, gpu] = on_both(&b, |d| {
            let mut weight = Mxfp4Weight::room(d, stored.shape());
            weight.set(stored);
            let mut out = d.empty(SCRATCH, stored.shape());
            mxfp4::dequantize(d, &weight, &mut out);
            out.to_vec().iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        let off = cpu.iter().zip(&gpu).position(|(cpu, gpu)| cpu != gpu);
        assert!(off.is_none(), "{:?}: value {off:?} differs", stored.shape());
    }
    // What Transformers makes of scale 255.
    let [cpu, gpu] = on_both(&b, |d| {
        let mut weight = Mxfp4Weight::room(d, &[32]);
        weight.set(&Mxfp4::new(&[32], vec![0x90; 16], vec![255]).unwrap());
        let mut out = d.empty(SCRATCH, &[32]);
        mxfp4::dequantize(d, &weight, &mut out);
        out.to_vec()
    });
    for values in [cpu, gpu] {
        assert!(values.chunks(2).all(|pair| pair[0].is_nan() && pair[1] == f32::NEG_INFINITY), "{values:?}");
    }
}
