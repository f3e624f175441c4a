//! Operations on the GPU against their CPU forms over ragged shapes.
//!
//! The bound follows the rule of the reference values: an error against f32 of at most twice (gradients: three times) that of the CPU form with
//! bf16 rounding, both fed the same bf16 inputs.

mod attention;
mod grouped;
mod heads;
mod nf4;
mod products;
mod routing;

use tandem::base::rng::{Philox, unit_f32};
use tandem::ops::adamw::AdamWParams;
use tandem::ops::adamw8::{self, Moment8};
use tandem::ops::cross_entropy::{self, LossSum};
use tandem::ops::dropout::{self, DropoutKey};
use tandem::ops::multi_tensor::{Member, Moments, MultiTensor};
use tandem::ops::rms_norm::{self, NormRounding};
use tandem::ops::rope::{self, RopeTable};
use tandem::ops::swiglu_lora::{self, Adapters, Gradients};
use tandem::ops::{adamw, adapter, elementwise, embedding, matmul, norm, swiglu};
use tandem::tensor::{Device, MemoryCategory, Precision, Tensor, View};

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
fn products_of_matrices_inside_tensors() {
    let Some(mut b) = Bench::new() else { return };
    // Rows, inner width, adapter columns, output width.
    for (m, k, r, n) in [(3, 16, 8, 24), (200, 64, 16, 136), (513, 576, 48, 960)] {
        let (columns, rows) = (k + r + 8, n + r);
        let (x, matrix) = (b.values(m * columns), b.values(rows * columns));
        let (residual, dy) = (b.values(m * n), b.values(m * (n + r + 16)));
        b.compare(&format!("a projection {m}×{k}→{n}, r {r}"), 3.0, |d| {
            let mut x = tensor(d, &[m, columns], &x);
            let matrix = tensor(d, &[rows, columns], &matrix);
            let mut dy = tensor(d, &[m, n + r + 16], &dy);
            let weights = matrix.view();
            // z behind x, y = residual + [x z]·[W B]ᵀ.
            matmul::extend_nt(d, 0.5, &mut x, weights.row_range(n, r).columns(0, k));
            elementwise::round(d, x.view_mut().columns(k, r));
            let mut y = d.zeros(SCRATCH, &[m, n + 8]);
            let residual = tensor(d, &[m, n], &residual);
            let w = weights.row_range(0, n).columns(0, k + r);
            matmul::nt_add(d, x.first_columns(k + r), w, &residual, y.first_columns_mut(n));
            // dz behind dy, dx = [dy dz]·[W; A], dA = dzᵀ·x.
            matmul::extend_nn(d, 0.5, &mut dy, weights.row_range(0, n).columns(k, r));
            elementwise::round(d, dy.view_mut().columns(n, r));
            let mut dx = d.empty(SCRATCH, &[m, k]);
            matmul::nn(d, 1.0, dy.first_columns(n + r), weights.columns(0, k), 0.0, &mut dx);
            elementwise::round(d, &mut dx);
            let mut da = d.zeros_f32(SCRATCH, &[r, k]);
            matmul::tn(d, 1.0, dy.view().columns(n, r), x.first_columns(k), 1.0, &mut da);
            let mut z = d.empty(SCRATCH, &[m, r]);
            elementwise::copy(d, x.view().columns(k, r), &mut z);
            vec![x, z, y, dy, dx, da]
        });
    }
}

#[test]
fn norms() {
    let Some(mut b) = Bench::new() else { return };
    let widths = [
        (1, 8),
        (7, 64),
        (130, 576),
        (33, 1024),
        (8, 1032),
        (5, 2048),
        (7, 2056),
        (3, 4096),
        (9, 5120),
        (3, 8192),
        (10, 8200),
    ];
    for (rows, width) in widths {
        let (x, w, dy, before) =
            (b.values(rows * width), b.values(width), b.values(rows * width), b.values(rows * width));
        b.compare(&format!("rms_norm {rows}×{width}"), 3.0, |d| {
            let (x, w) = (tensor(d, &[rows, width], &x), tensor(d, &[width], &w));
            // Rows with room behind them, as projections want them.
            let (dy, mut dx) = (tensor(d, &[rows, width], &dy), d.zeros(SCRATCH, &[rows, width + 16]));
            dx.first_columns_mut(width).set(&before);
            let [mut y, mut other] = [(); 2].map(|()| d.zeros(SCRATCH, &[rows, width + 64]));
            let mut rstd = d.empty_f32(SCRATCH, &[rows]);
            let mut dw = d.zeros_f32(SCRATCH, &[width]);
            let after = (1e-5, NormRounding::AfterWeight);
            rms_norm::forward(d, &x, &w, after, other.first_columns_mut(width), &mut rstd);
            let before = (1e-5, NormRounding::BeforeWeight);
            rms_norm::forward(d, &x, &w, before, y.first_columns_mut(width), &mut rstd);
            rms_norm::backward(d, &dy, &x, &w, &rstd, true, dx.first_columns_mut(width), Some(&mut dw));
            vec![y, other, rstd, dx, dw]
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
            // Rows with room behind them: what lies there must stay.
            let mut sum = d.zeros(SCRATCH, &[rows, width + 8]);
            elementwise::copy(d, &ty, sum.first_columns_mut(width));
            elementwise::add_assign(d, sum.first_columns_mut(width), &tx);
            let mut biased = d.zeros(SCRATCH, &[rows, width + 8]);
            elementwise::broadcast_rows(d, &tensor(d, &[width], &bias), biased.view_mut().columns(8, width));
            let mut dbias = d.zeros_f32(SCRATCH, &[width]);
            elementwise::sum_rows(d, &tx, &mut dbias);
            let rows_of = d.indices(SCRATCH, picked.clone());
            // A run of them, from some number on.
            let first = picked.len() / 3;
            let mut gathered = d.empty(SCRATCH, &[picked.len() - first, width]);
            elementwise::gather_rows(d, &ty, &rows_of, first, &mut gathered);
            let mut scattered = d.zeros(SCRATCH, &[rows, width + 16]);
            elementwise::scatter_rows(d, &gathered, &rows_of, first, &mut scattered);
            let mut gate_up = d.zeros(SCRATCH, &[rows, 2 * width + 16]);
            elementwise::copy(d, &tx, gate_up.first_columns_mut(width));
            elementwise::copy(d, &ty, gate_up.view_mut().columns(width, width));
            let mut act = d.zeros(SCRATCH, &[rows, width + 8]);
            swiglu::forward(d, gate_up.first_columns(2 * width), act.first_columns_mut(width));
            let dh = tensor(d, &[rows, width], &z);
            swiglu::backward_in_place(d, &dh, gate_up.first_columns_mut(2 * width));
            vec![sum, biased, dbias, gathered, scattered, act, gate_up]
        });
    }
}

#[test]
fn swiglu_with_the_adapters_around_it() {
    let Some(mut b) = Bench::new() else { return };
    for (rows, inner, r) in [(1, 8, 8), (33, 264, 16), (200, 136, 24), (1000, 1536, 16), (517, 520, 32)] {
        let (base, d_act) = (b.values(rows * 2 * inner), b.values(rows * inner));
        let (a, b_gate, b_up) = (b.values(r * inner), b.values(inner * r), b.values(inner * r));
        let (dz_down, z) = (b.values(rows * r), b.values(rows * 2 * r));
        b.compare(&format!("swiglu_lora {rows}×{inner}, r {r}"), 3.0, |d| {
            // As in the matrices of a model: B behind W, A below it, z behind x.
            let width = 64 + 2 * r;
            let mut matrix = d.zeros(SCRATCH, &[2 * inner, width]);
            matrix.view_mut().row_range(0, inner).columns(64, r).set(&b_gate);
            matrix.view_mut().row_range(inner, inner).columns(64 + r, r).set(&b_up);
            let mut a_down = d.zeros(SCRATCH, &[r, inner + 16]);
            a_down.first_columns_mut(inner).set(&a);
            let mut gate_up = d.zeros(SCRATCH, &[rows, 2 * inner + 2 * r + 8]);
            gate_up.first_columns_mut(2 * inner).set(&base);
            let (dz_down, z) = (tensor(d, &[rows, r], &dz_down), tensor(d, &[rows, 2 * r], &z));
            let adapters = Adapters {
                a_down: a_down.first_columns(inner),
                b: matrix.view().columns(64, 2 * r),
                dz_down: dz_down.view(),
                z: z.view(),
                scale_down: 0.5,
                scale_gate_up: 2.0,
            };
            let [mut da, mut db_gate, mut db_up] =
                [[r, inner], [inner, r], [inner, r]].map(|shape| d.zeros_f32(SCRATCH, &shape));
            let mut z_down = d.empty(SCRATCH, &[rows, r]);
            for _ in 0..2 {
                // Twice, so that gradients accumulate.
                gate_up.first_columns_mut(2 * inner).set(&base);
                let gradients = Gradients { a_down: &mut da, b: [&mut db_gate, &mut db_up] };
                let d_act = tensor(d, &[rows, inner], &d_act);
                swiglu_lora::backward(d, &adapters, &d_act, &mut gate_up, &mut z_down, gradients);
            }
            vec![gate_up, z_down, da, db_gate, db_up]
        });
    }
}

#[test]
fn gradients_of_adapters() {
    let Some(mut b) = Bench::new() else { return };
    // Rows, widths of the layers, rank; the widths of one layer are those of A's input as well.
    let cases: [(usize, &[usize], usize); 6] = [
        (1, &[8], 8),
        (65, &[264, 136], 16),
        (200, &[512, 128, 128], 16),
        (1000, &[1544], 32),
        (3000, &[520, 8, 24], 24),
        (70, &[300 * 8], 48),
    ];
    for (rows, widths, r) in cases {
        let (n, all) = (widths.iter().sum::<usize>(), r * widths.len());
        let (dy, z, weights) = (b.values(rows * n), b.values(rows * all), b.values(n * r));
        b.compare(&format!("adapter {rows} rows, {widths:?}, r {r}"), 3.0, |d| {
            let mut gradient = d.zeros(SCRATCH, &[rows, n + all + 8]);
            gradient.first_columns_mut(n).set(&dy);
            let mut matrix = d.zeros(SCRATCH, &[n, 8 + all]);
            let mut first = 0;
            for (layer, &width) in widths.iter().enumerate() {
                let mut block = matrix.view_mut().row_range(first, width).columns(8 + layer * r, r);
                block.set(&weights[first * r..(first + width) * r]);
                first += width;
            }
            let z = tensor(d, &[rows, all], &z);
            let mut db: Vec<Tensor> = widths.iter().map(|&width| d.zeros_f32(SCRATCH, &[width, r])).collect();
            for _ in 0..2 {
                // Twice, so that gradients accumulate.
                let db = &mut db.iter_mut().collect::<Vec<_>>();
                let weights = matrix.view().columns(8, all);
                adapter::b_gradients_and_dz(d, 0.5, gradient.view_mut(), widths, z.view(), weights, db);
            }
            let dz = gradient.view().columns(n, all);
            let mut da = d.zeros_f32(SCRATCH, &[all, n]);
            adapter::a_gradient(d, dz, gradient.first_columns(n), &mut da);
            adapter::a_gradient(d, dz, gradient.first_columns(n), &mut da);
            let mut alone = d.zeros_f32(SCRATCH, &[n, all]);
            adapter::b_gradient(d, gradient.first_columns(n), z.view(), &mut alone);
            db.extend([gradient, da, alone]);
            db
        });
    }
}

#[test]
fn dropout_masks_are_those_of_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let n = 10_001;
    let (x, before) = (b.values(n), b.values(n));
    // Whole, and tiles that begin inside a block of random words, or far behind what 32 bits count.
    for first in [0, 1, 4, 7, (5 << 32) + 2] {
        let key = DropoutKey { seed: 0x1234_5678_9ABC_DEF0, stream: 77 << 20 | 5, first };
        b.compare(&format!("dropout from value {first}"), 2.0, |d| {
            let (x, mut dx) = (tensor(d, &[1, n], &x), tensor(d, &[1, n], &before));
            let mut y = d.empty(SCRATCH, &[1, n]);
            dropout::forward(d, key, 0.25, &x, &mut y);
            dropout::backward_accumulate(d, key, 0.25, &x, &mut dx);
            vec![y, dx]
        });
    }
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
    for (rows, vocab) in [(1, 3), (5, 17), (300, 4104), (33, 49_152), (3, 116_160), (7, 151_937)] {
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

/// Where a working copy of `n` values lies in its matrix.
fn block(matrix: &Tensor, n: usize) -> View<'_> {
    matrix.view().row_range(0, n / 8).columns(8, 8)
}

#[test]
fn optimizer_over_many_tensors_follows_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let gpu = match &b.devices[2] {
        Device::Cuda(gpu) => gpu.clone(),
        Device::Cpu(_) => unreachable!("the third device is the GPU"),
    };
    let device = b.devices[2].clone();
    let lengths = [8, 16, 16_384, 16_392, 100_000];

    let start: Vec<[Vec<f32>; 2]> = lengths.iter().map(|&n| [b.values(n), b.values(n)]).collect();
    let zeros = |n| device.zeros_f32(SCRATCH, &[n]);
    let tensors: Vec<[Tensor; 5]> = start
        .iter()
        .map(|[w, g]| {
            let n = w.len();
            let of = |x: &Vec<f32>| device.tensor_f32(SCRATCH, &[n], x.clone());
            // The working copy lies in a matrix, with other values between its rows.
            [of(w), device.zeros(SCRATCH, &[n / 8 + 1, 8 + 8]), of(g), zeros(n), zeros(n)]
        })
        .collect();
    let members = tensors.iter().enumerate().map(|(i, [param, working, grad, m, v])| Member {
        param,
        working: (i % 2 == 0).then(|| block(working, param.len())),
        grad: grad.view(),
        moments: Moments::F32([m, v]),
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
        let values = table.read(table.queue_read());
        assert!(values.finite && (values.norm - norm).abs() < 1e-4 * norm && values.loss_sum == 3.0, "{values:?}");
        let scale = norm::clip_coefficient(norm, 1.0);
        for (i, ([w, m, v], [_, g])) in cpu.iter_mut().zip(&start).enumerate() {
            let p = AdamWParams { weight_decay: if i == 1 { 0.0 } else { 0.1 }, ..p(step) };
            adamw::update(&p, scale, w, g, m, v);
        }
    }
    for (i, ([param, working, ..], [w, ..])) in tensors.iter().zip(&cpu).enumerate() {
        assert!(error(&param.to_vec(), w) < 1e-5, "tensor {i}");
        if i % 2 == 0 {
            assert!(error(&block(working, w.len()).to_vec(), w) < ROUNDING, "working copy {i}");
            let columns_before = working.first_columns(8).to_vec();
            assert!(columns_before.iter().all(|&x| x == 0.0), "what lies between the rows of {i}");
        }
    }
    // A gradient that is not finite forbids the update, and clearing makes it finite again.
    let before = tensors[2][0].to_vec();
    let mut bad = start[0][1].clone();
    bad[0] = f32::NAN;
    gpu.upload(tensors[0][2].pointer(), &bad);
    table.step(&gpu, &p(4), &loss, 1.0);
    assert!(!table.read(table.queue_read()).finite);
    assert_eq!(tensors[2][0].to_vec(), before);
    table.clear_gradients(&gpu);
    // A step that was queued behind it changes nothing either.
    table.step(&gpu, &p(5), &loss, 1.0);
    assert!(!table.read(table.queue_read()).finite);
    assert_eq!(tensors[2][0].to_vec(), before);
    assert!(tensors.iter().all(|t| t[2].to_vec().iter().all(|&g| g == 0.0)));
    device.check().unwrap();
}

/// Moments in 8 bits beside one tensor with 32: every bit is that of the CPU form, in whole and in ragged blocks.
#[test]
fn moments_in_8_bits_are_those_of_the_cpu_to_the_bit() {
    let Some(mut b) = Bench::new() else { return };
    let (cpu, device) = (b.devices[0].clone(), b.devices[2].clone());
    let Device::Cuda(gpu) = &device else { unreachable!("the third device is the GPU") };
    let lengths = [1, 255, 4096, 4097, 5143, 16_384, 16_640, 100_008];
    let start: Vec<Vec<f32>> = lengths.iter().map(|&n| b.values(n)).collect();
    // Gradients over many orders of magnitude, with zeros and a block of them.
    let gradients: Vec<Vec<f32>> = lengths
        .iter()
        .map(|&n| b.values(n).into_iter().zip(b.values(n)).enumerate())
        .map(|values| {
            values.map(|(i, (x, y))| if i % 7 == 0 || i / 256 == 3 { 0.0 } else { x * (9.0 * y).exp() }).collect()
        })
        .collect();
    let of = |x: &[f32]| device.tensor_f32(SCRATCH, &[x.len()], x.to_vec());
    let values: Vec<Tensor> = start.iter().map(|x| of(x)).collect();
    let grads: Vec<Tensor> = gradients.iter().map(|x| of(x)).collect();
    let working: Vec<Tensor> = lengths.iter().map(|&n| device.zeros(SCRATCH, &[n / 8 + 1, 8 + 8])).collect();
    let pair = |device: &Device, n| [Moment8::zeros(device, n), Moment8::zeros(device, n)];
    let moments: Vec<[Moment8; 2]> = lengths.iter().map(|&n| pair(&device, n)).collect();
    let exact: [Tensor; 4] = std::array::from_fn(|i| of(&[[0.5; 9], [0.1; 9], [0.0; 9], [0.0; 9]][i]));
    let members = (0..lengths.len()).map(|i| Member {
        param: &values[i],
        working: (lengths[i] % 8 == 0).then(|| block(&working[i], lengths[i])),
        grad: grads[i].view(),
        moments: Moments::Blockwise8([&moments[i][0], &moments[i][1]]),
        decays: i != 4,
    });
    let in_32 = Moments::F32([&exact[2], &exact[3]]);
    let in_32 = Member { param: &exact[0], working: None, grad: exact[1].view(), moments: in_32, decays: true };
    let table = MultiTensor::new(&device, gpu, members.chain([in_32]));
    let loss = device.tensor_f32(SCRATCH, &[1], vec![3.0]);
    let mut want: Vec<(Vec<f32>, [Moment8; 2])> = start.iter().map(|x| (x.clone(), pair(&cpu, x.len()))).collect();
    for step in 1..=4 {
        let p = AdamWParams { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step };
        table.step(gpu, &p, &loss, 1.0);
        let found = table.read(table.queue_read());
        assert!(found.finite && found.scale < 1.0);
        for (i, (value, [m, v])) in want.iter_mut().enumerate() {
            let p = AdamWParams { weight_decay: if i == 4 { 0.0 } else { 0.1 }, ..p };
            adamw8::update(&p, found.scale, value, &gradients[i], m, v);
        }
        for (i, (value, wanted)) in want.iter().enumerate() {
            let n = lengths[i];
            assert_eq!(values[i].to_vec(), *value, "{n} values, step {step}");
            for (which, (ours, wanted)) in moments[i].iter().zip(wanted).enumerate() {
                assert_eq!(ours.absmax.to_vec(), wanted.absmax.to_vec(), "absmax {which} of {n} values, step {step}");
                assert!(
                    ours.codes.to_vec()[..n] == wanted.codes.u8s()[..n],
                    "codes {which} of {n} values, step {step}"
                );
            }
            if n % 8 == 0 {
                assert!(error(&block(&working[i], n).to_vec(), value) < ROUNDING, "working copy of {n} values");
                let before = working[i].first_columns(8).to_vec();
                assert!(before.iter().all(|&x| x == 0.0), "what lies between the rows of {n} values");
            }
        }
        assert!(exact[0].to_vec().iter().all(|&x| x < 0.5), "the tensor with 32 bits moved too");
    }
    device.check().unwrap();
}
