//! Products by group: every way a GPU has to compute them against the definition, over ragged groups, and what lies around the result.

use tandem::ops::grouped_matmul::{self, Groups};
use tandem::ops::grouped_matmul_hopper as hopper;
use tandem::ops::grouped_matmul_plan::{GroupedOperands, GroupedShape};
use tandem::tensor::cuda::blaslt::Form;
use tandem::tensor::{Device, Gpu, Indices, Tensor, View, ViewMut};

use super::{Bench, ROUNDING, SCRATCH, tensor};
use crate::golden_family::error;

/// What lies around the result, and must stay.
const AROUND: f32 = 7.0;
/// Rows before the first group and behind the last.
const BEFORE: usize = 3;
const BEHIND: usize = 5;

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// As operations do it.
    Chosen,
    /// One dense product a group.
    ByHost,
    EveryCard,
    Hopper,
}

const WAYS: [Way; 4] = [Way::Chosen, Way::ByHost, Way::EveryCard, Way::Hopper];

/// The operands of one product; the host knows the groups too.
struct Product<'a> {
    form: Form,
    alpha: f32,
    a: View<'a>,
    b: View<'a>,
    bias: Option<&'a Tensor>,
    beta: f32,
    offsets: &'a Indices,
    host: &'a [usize],
}

impl Product<'_> {
    /// Whether the way takes the product; if so, it is computed.
    fn run(&self, way: Way, device: &Device, gpu: &Gpu, c: ViewMut<'_>) -> bool {
        let &Self { form, alpha, a, b, bias, beta, offsets, host } = self;
        let by = match way {
            Way::Chosen => Groups::Device(offsets),
            Way::ByHost => Groups::Host(host),
            Way::EveryCard | Way::Hopper => return self.launch(way, gpu, c),
        };
        match form {
            Form::Nt => grouped_matmul::nt(device, alpha, a, b, bias, beta, by, c),
            Form::Nn => grouped_matmul::nn(device, alpha, a, b, beta, by, c),
            Form::Tn => grouped_matmul::tn(device, alpha, a, b, by, c),
        }
        true
    }

    fn launch(&self, way: Way, gpu: &Gpu, c: ViewMut<'_>) -> bool {
        let &Self { form, alpha, a, b, bias, beta, offsets, .. } = self;
        let (m, k) = if form == Form::Tn { (a.cols(), 0) } else { (0, a.cols()) };
        let shape = GroupedShape {
            form,
            groups: offsets.len() - 1,
            rows: a.rows(),
            m,
            n: c.cols(),
            k,
            lda: a.stride(),
            ldb: b.stride(),
            ldc: c.stride(),
        };
        let operands = GroupedOperands {
            a: a.pointer(),
            b: b.pointer(),
            c: c.pointer(),
            bias: bias.map_or(0, Tensor::pointer),
            offsets: offsets.pointer(),
            alpha,
            beta,
        };
        match way {
            Way::Hopper if !hopper::takes(gpu.facts(), &shape, &operands) => return false,
            Way::Hopper => hopper::launch(gpu, &shape, &operands),
            _ => grouped_matmul::launch_on_every_card(gpu, &shape, &operands),
        }
        true
    }
}

/// Offsets of groups of these lengths, from row [`BEFORE`] on.
fn offsets(lengths: &[usize]) -> Vec<usize> {
    let sums = lengths.iter().scan(BEFORE, |sum, length| {
        *sum += length;
        Some(*sum)
    });
    std::iter::once(BEFORE).chain(sums).collect()
}

fn on_device(device: &Device, offsets: &[usize]) -> Indices {
    device.indices(SCRATCH, offsets.iter().map(|&row| row as i32).collect())
}

/// A matrix inside a wider tensor, from column `first` on.
fn inside(device: &Device, values: &[f32], cols: usize, first: usize, f32s: bool) -> Tensor {
    let (rows, ld) = (values.len() / cols, cols + 24);
    let wide: Vec<f32> = values
        .chunks_exact(cols)
        .flat_map(|row| {
            let around = |n| std::iter::repeat_n(AROUND, n);
            around(first).chain(row.iter().copied()).chain(around(ld - first - cols))
        })
        .collect();
    if f32s { device.tensor_f32(SCRATCH, &[rows, ld], wide) } else { tensor(device, &[rows, ld], &wide) }
}

/// Computes one product in every way and holds it to the CPU.
fn check(
    b: &Bench,
    form: Form,
    lengths: &[usize],
    [a, w, bias, before]: [&[f32]; 4],
    [cols_a, cols_b, cols_c]: [usize; 3],
) {
    let (cpu, device) = (&b.devices[0], &b.devices[2]);
    let Device::Cuda(gpu) = device else { unreachable!("the third device is the GPU") };
    let host = offsets(lengths);
    let rows = host[lengths.len()] + BEHIND;
    for (alpha, beta, with_bias, first) in [(1.0, 0.0, false, 8), (0.5, 1.0, true, 8), (1.0, -0.5, true, 3)] {
        let beta = if form == Form::Tn { 1.0 } else { beta };
        // Nobody may read a result that is not added to.
        let before: Vec<f32> = if beta == 0.0 { vec![f32::NAN; before.len()] } else { before.to_vec() };
        let compute = |device: &Device, way: Option<(Way, &Gpu)>| -> Option<Vec<f32>> {
            let (ta, tb) = (inside(device, a, cols_a, first, false), inside(device, w, cols_b, first, false));
            let tbias = (with_bias && form == Form::Nt).then(|| tensor(device, &[lengths.len(), cols_c], bias));
            let mut c = inside(device, &before, cols_c, first, form == Form::Tn);
            let indices = on_device(device, &host);
            let product = Product {
                form,
                alpha,
                a: ta.view().columns(first, cols_a),
                b: tb.view().columns(first, cols_b),
                bias: tbias.as_ref(),
                beta,
                offsets: &indices,
                host: &host,
            };
            let ran = device.run(|| {
                let c = c.view_mut().columns(first, cols_c);
                match way {
                    Some((way, gpu)) => product.run(way, device, gpu, c),
                    None => {
                        let Product { a, b, bias, .. } = product;
                        let by = Groups::Host(&host);
                        match form {
                            Form::Nt => grouped_matmul::nt(device, alpha, a, b, bias, beta, by, c),
                            Form::Nn => grouped_matmul::nn(device, alpha, a, b, beta, by, c),
                            Form::Tn => grouped_matmul::tn(device, alpha, a, b, by, c),
                        }
                        true
                    }
                }
            });
            device.check().unwrap();
            ran.then(|| c.to_vec())
        };
        let want = compute(cpu, None).unwrap();
        let ld = cols_c + 24;
        let is_result = |i: usize| {
            let (row, column) = (i / ld, i % ld);
            let written = form == Form::Tn || (BEFORE..rows - BEHIND).contains(&row);
            written && (first..first + cols_c).contains(&column)
        };
        let results = |values: &[f32]| -> Vec<f32> {
            values.iter().enumerate().filter(|&(i, _)| is_result(i)).map(|(_, x)| *x).collect()
        };
        for way in WAYS {
            let Some(got) = compute(device, Some((way, gpu))) else { continue };
            let what = format!(
                "{way:?} {form:?}, groups of {lengths:?}, {cols_a} and {cols_b} → {cols_c}, from column {first}"
            );
            // Dense products round before they add.
            let bound = if form == Form::Tn { 2e-5 } else { 3.0 * ROUNDING };
            let off = error(&results(&got), &results(&want));
            assert!(off <= bound, "{what}: error {off:.2e}");
            let same = |(i, (x, y)): (usize, (&f32, &f32))| is_result(i) || x == y || (x.is_nan() && y.is_nan());
            assert!(got.iter().zip(&want).enumerate().all(same), "{what}: wrote around the result");
            let again = compute(device, Some((way, gpu))).unwrap();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(way == Way::ByHost || bits(&again) == bits(&got), "{what}: two runs differ");
        }
    }
}

/// Lengths of groups, n, k.
fn cases() -> Vec<(Vec<usize>, usize, usize)> {
    let mut cases = vec![
        // Tiles whole and ragged, empty groups at both ends and between.
        (vec![0, 5, 0, 130, 1, 64, 0, 128, 300, 0], 264, 200),
        (vec![517], 480, 136),
        // All rows in one group, more tile rows than are walked together.
        (vec![0, 0, 2500, 0], 600, 72),
        (vec![1, 1, 1], 72, 64),
        // More groups than a warp looks at, most of them with few rows.
        ((0..128).map(|i| i * 7 % 5).collect(), 136, 128),
        // Several tiles for each multiprocessor.
        ((0..40).map(|i| 100 + i * 37 % 101).collect(), 512, 320),
        (vec![200, 0, 333], 240, 2880),
        // On Hopper: many tiles for each cluster of the shortest sums that it takes.
        (vec![700; 80], 512, 72),
        // On Hopper: every width of a tile, for itself and in pairs.
        (vec![150, 0, 90], 512, 320),
        (vec![150, 0, 90], 320, 512),
        (vec![100, 0, 29], 256, 248),
        (vec![100, 0, 29], 248, 256),
    ];
    // Adapters: z = x·Aᵀ and z·Bᵀ.
    for r in [8, 16, 32, 64] {
        cases.push((vec![65, 0, 200, 7], r, 264));
        cases.push((vec![65, 0, 200, 7], 264, r));
    }
    cases
}

#[test]
fn products_by_group() {
    let Some(mut b) = Bench::new() else { return };
    for (lengths, n, k) in cases() {
        let (groups, rows) = (lengths.len(), BEFORE + lengths.iter().sum::<usize>() + BEHIND);
        let (x, w, bias) = (b.values(rows * k), b.values(groups * n * k), b.values(groups * n));
        let (y, dx, dw) = (b.values(rows * n), b.values(rows * k), b.values(groups * n * k));
        check(&b, Form::Nt, &lengths, [&x, &w, &bias, &y], [k, k, n]);
        check(&b, Form::Nn, &lengths, [&y, &w, &[], &dx], [n, k, k]);
        check(&b, Form::Tn, &lengths, [&y, &x, &[], &dw], [n, k, k]);
    }
}

#[test]
fn a_recorded_product_by_group_follows_the_offsets_of_each_launch() {
    let Some(mut b) = Bench::new() else { return };
    let (cpu, device) = (b.devices[0].clone(), b.devices[2].clone());
    let Device::Cuda(gpu) = &device else { unreachable!("the third device is the GPU") };
    let (rows, groups, n, k) = (600, 3, 256, 192);
    let (x, w) = (b.values(rows * k), b.values(groups * n * k));
    let [tx, tw] = [(&x, rows), (&w, groups * n)].map(|(values, rows)| tensor(&device, &[rows, k], values));
    let mut y = device.zeros(SCRATCH, &[rows, n]);
    let mut indices = on_device(&device, &[0, 0, 0, 0]);
    let product = |y: &mut Tensor, indices: &Indices| {
        grouped_matmul::nt(&device, 1.0, &tx, &tw, None, 0.0, Groups::Device(indices), y);
    };
    let before = gpu.counters();
    product(&mut y, &indices);
    let ((), mut graph) = device.run(|| gpu.capture(|| product(&mut y, &indices))).unwrap();
    assert_eq!((gpu.counters() - before).allocations, 0);
    for host in [[0, 200, 200, 600], [0, 1, 599, 600], [0, 0, 0, 600]] {
        indices.copy_from(&on_device(&device, &host));
        device.run(|| graph.launch(&[]));
        let (cx, cw) = (tensor(&cpu, &[rows, k], &x), tensor(&cpu, &[groups * n, k], &w));
        let mut want = cpu.zeros(SCRATCH, &[rows, n]);
        cpu.run(|| grouped_matmul::nt(&cpu, 1.0, &cx, &cw, None, 0.0, Groups::Host(&host), &mut want));
        let off = error(&y.to_vec(), want.f32s());
        assert!(off <= ROUNDING, "groups at {host:?}: error {off:.2e}");
    }
    device.check().unwrap();
}
