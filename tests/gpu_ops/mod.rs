//! Operations on the GPU against their CPU forms over ragged shapes.
//!
//! The bound follows the rule of the reference values: an error against f32 of at most twice (gradients: three times) that of the CPU form with
//! bf16 rounding, both fed the same bf16 inputs.

use tandem::base::rng::{Philox, unit_f32};
use tandem::ops::adamw::AdamWParams;
use tandem::ops::attention::{self, AttentionShape, Saved, TileList};
use tandem::ops::cross_entropy::{self, LossSum};
use tandem::ops::dropout::{self, DropoutKey};
use tandem::ops::multi_tensor::{Member, MultiTensor};
use tandem::ops::rope::{self, RopeTable};
use tandem::ops::{adamw, elementwise, embedding, matmul, norm, rms_norm, swiglu};
use tandem::tensor::{Device, MemoryCategory, Precision, Tensor};

use super::golden_family::error;
use super::gpu;

/// bf16 keeps 8 bits: one rounding is off by 2^-9 at most.
const ROUNDING: f64 = 1.0 / 512.0;
const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

/// The three devices an operation runs on: f32 CPU (the truth), bf16 CPU (the yardstick), GPU.
struct Bench {
    devices: [Device; 3],
    seed: u64,
}

impl Bench {
    fn new() -> Option<Self> {
        let gpu = gpu()?;
        let cpu = |precision| Device::cpu(0, precision).unwrap();
        Some(Self { devices: [cpu(Precision::F32), cpu(Precision::Bf16), gpu], seed: 0 })
    }

    /// bf16 values, uniform in [−1, 1).
    fn values(&mut self, len: usize) -> Vec<f32> {
        self.seed += 1;
        let generator = Philox::new(self.seed, 0);
        (0..len as u64).map(|i| Precision::Bf16.round(unit_f32(generator.block(i)[0]) * 2.0 - 1.0)).collect()
    }

    /// Runs `f` on all three devices and compares each tensor it returns; `factor` bounds the GPU's error against bf16 on the CPU.
    #[track_caller]
    fn compare(&self, what: &str, factor: f64, f: impl Fn(&Device) -> Vec<Tensor> + Sync) {
        let [truth, yardstick, ours] = [0, 1, 2].map(|i| {
            let device = &self.devices[i];
            let tensors: Vec<Vec<f32>> = device.run(|| f(device).iter().map(Tensor::to_vec).collect());
            device.check().unwrap();
            tensors
        });
        for (i, truth) in truth.iter().enumerate() {
            let (bf16, gpu) = (scaled_error(&yardstick[i], truth), scaled_error(&ours[i], truth));
            // Where the CPU form does not round, one rounding of the result is what a bf16 tensor costs.
            let bound = factor * bf16.max(ROUNDING);
            assert!(gpu <= bound, "{what}, output {i}: error {gpu:.2e} on the GPU, {bf16:.2e} in bf16 on the CPU");
        }
    }
}

/// `‖a − b‖ / ‖b‖`, where values that are all but zero (the gradient of a softmax over one key) count as a hundredth: inputs are of order 1.
fn scaled_error(a: &[f32], b: &[f32]) -> f64 {
    let norm = norm::sum_of_squares(b).sqrt();
    let floor = 0.01 * (b.len() as f64).sqrt();
    error(a, b) * if norm == 0.0 { 1.0 / floor } else { norm / norm.max(floor) }
}

fn tensor(device: &Device, shape: &[usize], values: &[f32]) -> Tensor {
    device.tensor(SCRATCH, shape, values.to_vec())
}

#[test]
fn matrix_products() {
    let Some(mut b) = Bench::new() else { return };
    for (m, n, k) in [(1, 8, 8), (5, 16, 24), (77, 64, 128), (300, 192, 320), (1024, 576, 1536), (64, 24, 4096)] {
        let (x, w, y) = (b.values(m * k), b.values(n * k), b.values(m * n));
        b.compare(&format!("nt {m}×{n}×{k}"), 2.0, |d| {
            let mut c = tensor(d, &[m, n], &y);
            matmul::nt(d, 0.5, &tensor(d, &[m, k], &x), &tensor(d, &[n, k], &w), 1.0, &mut c);
            elementwise::round(d, &mut c);
            vec![c]
        });
        b.compare(&format!("nn {m}×{k}×{n}"), 2.0, |d| {
            let mut c = d.empty(SCRATCH, &[m, k]);
            matmul::nn(d, 1.0, &tensor(d, &[m, n], &y), &tensor(d, &[n, k], &w), 0.0, &mut c);
            elementwise::round(d, &mut c);
            vec![c]
        });
        b.compare(&format!("tn {n}×{k}×{m}"), 2.0, |d| {
            let mut c = d.zeros_f32(SCRATCH, &[n, k]);
            matmul::tn(d, 1.0, &tensor(d, &[m, n], &y), &tensor(d, &[m, k], &x), 1.0, &mut c);
            matmul::tn(d, 1.0, &tensor(d, &[m, n], &y), &tensor(d, &[m, k], &x), 1.0, &mut c);
            vec![c]
        });
    }
}

#[test]
fn norms() {
    let Some(mut b) = Bench::new() else { return };
    for (rows, width) in [(1, 8), (7, 64), (130, 576), (33, 1024), (5, 2048), (3, 4096), (9, 5120)] {
        let (x, w, dy, before) =
            (b.values(rows * width), b.values(width), b.values(rows * width), b.values(rows * width));
        b.compare(&format!("rms_norm {rows}×{width}"), 3.0, |d| {
            let (x, w) = (tensor(d, &[rows, width], &x), tensor(d, &[width], &w));
            let (dy, mut dx) = (tensor(d, &[rows, width], &dy), tensor(d, &[rows, width], &before));
            let mut y = d.empty(SCRATCH, &[rows, width]);
            let mut rstd = d.empty_f32(SCRATCH, &[rows]);
            let mut dw = d.zeros_f32(SCRATCH, &[width]);
            rms_norm::forward(d, &x, &w, 1e-5, &mut y, &mut rstd);
            rms_norm::backward(d, &dy, &x, &w, &rstd, true, &mut dx, Some(&mut dw));
            vec![y, rstd, dx, dw]
        });
    }
}

#[test]
fn elementwise_operations() {
    let Some(mut b) = Bench::new() else { return };
    for (rows, width) in [(1, 8), (3, 24), (129, 576), (1000, 1536)] {
        let n = rows * width;
        let (x, y, z, bias) = (b.values(n), b.values(n), b.values(n), b.values(width));
        let picked: Vec<i32> = (0..rows as i32).filter(|i| i % 3 != 1).collect();
        b.compare(&format!("elementwise {rows}×{width}"), 3.0, |d| {
            let (tx, ty) = (tensor(d, &[rows, width], &x), tensor(d, &[rows, width], &y));
            let mut sum = d.empty(SCRATCH, &[rows, width]);
            elementwise::add(d, &tx, &ty, &mut sum);
            elementwise::add_assign(d, &mut sum, &tx);
            let mut biased = d.empty(SCRATCH, &[rows, width]);
            elementwise::broadcast_rows(d, &tensor(d, &[width], &bias), &mut biased);
            let mut dbias = d.zeros_f32(SCRATCH, &[width]);
            elementwise::sum_rows(d, &tx, &mut dbias);
            let rows_of = d.indices(SCRATCH, picked.clone());
            let mut gathered = d.empty(SCRATCH, &[picked.len(), width]);
            elementwise::gather_rows(d, &ty, &rows_of, &mut gathered);
            let mut scattered = d.empty(SCRATCH, &[rows, width]);
            elementwise::scatter_rows(d, &gathered, &rows_of, &mut scattered);
            let mut act = d.empty(SCRATCH, &[rows, width]);
            swiglu::forward(d, &tx, &ty, &mut act);
            let (mut gate, mut up) = (tensor(d, &[rows, width], &x), tensor(d, &[rows, width], &y));
            swiglu::backward_in_place(d, &tensor(d, &[rows, width], &z), &mut gate, &mut up);
            vec![sum, biased, dbias, gathered, scattered, act, gate, up]
        });
    }
}

#[test]
fn dropout_masks_are_those_of_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let n = 10_001;
    let (x, before) = (b.values(n), b.values(n));
    let key = DropoutKey { seed: 0x1234_5678_9ABC_DEF0, stream: 77 << 20 | 5 };
    b.compare("dropout", 2.0, |d| {
        let (x, mut dx) = (tensor(d, &[1, n], &x), tensor(d, &[1, n], &before));
        let mut y = d.empty(SCRATCH, &[1, n]);
        dropout::forward(d, key, 0.25, &x, &mut y);
        dropout::backward_accumulate(d, key, 0.25, &x, &mut dx);
        vec![y, dx]
    });
}

#[test]
fn embedding_and_rope() {
    let Some(mut b) = Bench::new() else { return };
    let (vocab, width, tokens) = (50, 192, 301);
    let (table, dx) = (b.values(vocab * width), b.values(tokens * width));
    let ids: Vec<i32> = (0..tokens as i32).map(|i| i * 7 % 13).collect();
    let positions: Vec<i32> = (0..tokens as i32).map(|i| i % 100).collect();
    b.compare("embedding and rope", 3.0, |d| {
        let (table, ids) = (tensor(d, &[vocab, width], &table), d.indices(SCRATCH, ids.clone()));
        let mut x = d.empty(SCRATCH, &[tokens, width]);
        embedding::forward(d, &table, &ids, &mut x);
        let mut dtable = d.zeros_f32(SCRATCH, &[vocab, width]);
        embedding::backward(d, &tensor(d, &[tokens, width], &dx), &ids, &mut dtable);
        let inv_freq: Vec<f32> = (0..32).map(|i| 0.8f32.powi(i)).collect();
        let rope = RopeTable::new(d, &inv_freq, 100);
        let positions = d.indices(SCRATCH, positions.clone());
        let mut turned = tensor(d, &[tokens, width], &dx);
        rope::forward(d, &mut turned, &rope, &positions);
        let mut back = tensor(d, &[tokens, width], &dx);
        rope::backward(d, &mut back, &rope, &positions);
        vec![x, dtable, turned, back]
    });
}

#[test]
fn cross_entropy_with_odd_vocabularies() {
    let Some(mut b) = Bench::new() else { return };
    for (rows, vocab) in [(1, 3), (5, 17), (33, 49_152), (7, 151_937)] {
        let logits: Vec<f32> = b.values(rows * vocab).iter().map(|x| x * 8.0).collect();
        let targets: Vec<i32> = (0..rows).map(|i| ((i * 7919 + vocab - 1) % vocab) as i32).collect();
        b.compare(&format!("cross_entropy {rows}×{vocab}"), 3.0, |d| {
            let stride = d.padded(vocab);
            let padded: Vec<f32> = logits
                .chunks_exact(vocab)
                .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(9.0, stride - vocab)))
                .collect();
            let mut z = tensor(d, &[rows, stride], &padded);
            let targets = d.indices(SCRATCH, targets.clone());
            let mut losses = d.empty_f32(SCRATCH, &[rows]);
            cross_entropy::forward_backward_in_place(d, &mut z, vocab, &targets, 0, Some(0.125), &mut losses);
            let mut sum = LossSum::new(d);
            sum.add(d, &losses);
            let sum = d.tensor_f32(SCRATCH, &[1], vec![sum.read() as f32]);
            // Without the padding, so that all devices return the same shape.
            let gradient: Vec<f32> = z.to_vec().chunks_exact(stride).flat_map(|row| row[..vocab].to_vec()).collect();
            vec![losses, sum, d.tensor_f32(SCRATCH, &[rows, vocab], gradient)]
        });
    }
}

#[test]
fn attention_over_ragged_documents() {
    let Some(mut b) = Bench::new() else { return };
    let ragged: Vec<i32> = vec![0, 1, 2, 39, 104, 105, 361, 400];
    let ones: Vec<i32> = (0..=300).collect();
    /// cu_seqlens, heads, head_dim, window.
    type Case<'a> = (&'a [i32], (usize, usize), usize, Option<usize>);
    let cases: [Case; 8] = [
        (&ragged, (4, 2), 16, None),
        (&ragged, (4, 1), 64, None),
        (&ragged, (8, 2), 128, Some(64)),
        // A window of 1 would make every softmax 1 and dq zero: nothing to compare.
        (&ragged, (9, 3), 64, Some(2)),
        (&ragged, (2, 2), 40, Some(5)),
        (&ragged, (6, 2), 72, Some(128)),
        (&ones, (4, 2), 64, None),
        (&[0, 700], (4, 2), 128, None),
    ];
    for (cu_seqlens, (heads, kv_heads), head_dim, window) in cases {
        let tokens = *cu_seqlens.last().unwrap() as usize;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let (q, d_o) = (b.values(tokens * q_width), b.values(tokens * q_width));
        let (k, v) = (b.values(tokens * kv_width), b.values(tokens * kv_width));
        let scale = (head_dim as f32).powf(-0.5);
        let shape = AttentionShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, scale };
        b.compare(
            &format!("attention {heads}/{kv_heads} heads of {head_dim}, window {window:?}, {tokens} tokens"),
            3.0,
            |d| {
                let tiles = TileList::on_device(d, cu_seqlens, window);
                let (q, d_o) = (tensor(d, &[tokens, q_width], &q), tensor(d, &[tokens, q_width], &d_o));
                let (k, v) = (tensor(d, &[tokens, kv_width], &k), tensor(d, &[tokens, kv_width], &v));
                let mut o = d.empty(SCRATCH, &[tokens, q_width]);
                let mut softmax_lse = d.empty_f32(SCRATCH, &[tokens, heads]);
                attention::forward(d, &shape, &tiles, &q, &k, &v, &mut o, &mut softmax_lse);
                let [mut dq, mut dk, mut dv] =
                    [q_width, kv_width, kv_width].map(|width| d.empty(SCRATCH, &[tokens, width]));
                let saved = Saved { q: &q, k: &k, v: &v, o: &o, softmax_lse: &softmax_lse };
                attention::backward(d, &shape, &tiles, &saved, &d_o, &mut dq, &mut dk, &mut dv);
                vec![o, softmax_lse, dq, dk, dv]
            },
        );
    }
}

#[test]
fn optimizer_over_many_tensors_follows_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let gpu = match &b.devices[2] {
        Device::Cuda(gpu) => gpu.clone(),
        Device::Cpu(_) => unreachable!("the third device is the GPU"),
    };
    let device = b.devices[2].clone();
    let lengths = [1, 8, 16_384, 16_385, 100_000];
    let start: Vec<[Vec<f32>; 2]> = lengths.iter().map(|&n| [b.values(n), b.values(n)]).collect();
    let zeros = |n| device.zeros_f32(SCRATCH, &[n]);
    let tensors: Vec<[Tensor; 5]> = start
        .iter()
        .map(|[w, g]| {
            let n = w.len();
            let of = |x: &Vec<f32>| device.tensor_f32(SCRATCH, &[n], x.clone());
            [of(w), device.empty(SCRATCH, &[n]), of(g), zeros(n), zeros(n)]
        })
        .collect();
    let members = tensors.iter().enumerate().map(|(i, [param, working, grad, m, v])| Member {
        param,
        working: (i % 2 == 0).then_some(working),
        grad,
        m,
        v,
        decays: i != 1,
    });
    let table = MultiTensor::new(&device, &gpu, members);
    let loss = device.tensor_f32(SCRATCH, &[1], vec![3.0]);
    let p = |step| AdamWParams { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step };
    let norm = start.iter().map(|[_, g]| norm::sum_of_squares(g)).sum::<f64>().sqrt();
    let mut cpu: Vec<[Vec<f32>; 3]> =
        start.iter().map(|[w, _]| [w.clone(), vec![0.0; w.len()], vec![0.0; w.len()]]).collect();
    for step in 1..=3 {
        table.step(&gpu, &p(step), &loss, 1.0);
        let values = table.read();
        assert!(values.finite && (values.norm - norm).abs() < 1e-4 * norm && values.loss_sum == 3.0, "{values:?}");
        let scale = norm::clip_coefficient(norm, 1.0);
        for (i, ([w, m, v], [_, g])) in cpu.iter_mut().zip(&start).enumerate() {
            let p = AdamWParams { weight_decay: if i == 1 { 0.0 } else { 0.1 }, ..p(step) };
            adamw::update(Precision::F32, &p, scale, w, None, g, m, v);
        }
    }
    for (i, ([param, working, ..], [w, ..])) in tensors.iter().zip(&cpu).enumerate() {
        assert!(error(&param.to_vec(), w) < 1e-5, "tensor {i}");
        if i % 2 == 0 {
            assert!(error(&working.to_vec(), w) < ROUNDING, "working copy {i}");
        }
    }
    // A gradient that is not finite forbids the update, and clearing makes it finite again.
    let before = tensors[2][0].to_vec();
    let mut bad = start[0][1].clone();
    bad[0] = f32::NAN;
    gpu.upload(tensors[0][2].pointer(), &bad);
    table.step(&gpu, &p(4), &loss, 1.0);
    assert!(!table.read().finite);
    assert_eq!(tensors[2][0].to_vec(), before);
    table.clear_gradients(&gpu);
    assert!(tensors.iter().all(|t| t[2].to_vec().iter().all(|&g| g == 0.0)));
    device.check().unwrap();
}
