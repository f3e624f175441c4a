//! Matrix products of which each group of rows has a matrix of its own: the experts of a mixture, f32 sums.
//!
//! | op | computes, for the rows r of each group e | gradient it serves |
//! |---|---|---|
//! | [`nt`] | `c[r] = alpha·a[r]·b[e]ᵀ + bias[e] + beta·c[r]` | `y = x·Wᵀ + bias` |
//! | [`nn`] | `c[r] = alpha·a[r]·b[e] + beta·c[r]` | `dx = dy·W` |
//! | [`tn`] | `c[e] += alpha·Σ a[r]ᵀ·b[r]` | `dW += dyᵀ·x` |
//!
//! Rows are sorted by group. Groups may be empty; rows before the first group and behind the last are left alone. The matrices of the groups lie one
//! below the other: `b` [E·N, K] has that of group e in its rows e·N to (e + 1)·N. Operands are matrices inside tensors ([`View`]), as for
//! [`matmul`], and as there none of them rounds on the CPU: layers do that where Transformers casts. On a GPU operands are bf16, and `c` is bf16 for
//! [`nt`] and [`nn`] and f32 for [`tn`].

use std::ops::Range;

use super::grouped_matmul_hopper as hopper;
use super::grouped_matmul_plan::{GroupedOperands, GroupedShape, choose, params};
use super::matmul_plan::Card;
use super::{elementwise, matmul};
use crate::kernel_args;
use crate::tensor::cuda::Launch;
use crate::tensor::cuda::blaslt::Form;
use crate::tensor::{DType, Device, Gpu, Indices, MemoryCategory, Tensor, View, ViewMut};

/// Which rows belong to which group.
#[derive(Debug, Clone, Copy)]
pub enum Groups<'a> {
    /// First row of each group and the end, i32 [E + 1], on the device: the host never reads them.
    Device(&'a Indices),
    /// The same, known to the host: one dense product a group ([`matmul`]).
    Host(&'a [usize]),
}

impl Groups<'_> {
    /// Number of groups, the empty ones included.
    pub fn count(&self) -> usize {
        let bounds = match self {
            Self::Device(offsets) => offsets.len(),
            Self::Host(offsets) => offsets.len(),
        };
        assert!(bounds > 0, "offsets of groups end with the end of the last");
        bounds - 1
    }

    /// Number and rows of each group that has any, as the host knows them.
    fn occupied(&self, rows: usize) -> Vec<(usize, Range<usize>)> {
        let offsets: Vec<usize> = match self {
            Self::Device(offsets) => offsets.to_vec().iter().map(|&row| row as usize).collect(),
            Self::Host(offsets) => offsets.to_vec(),
        };
        assert!(
            offsets.is_sorted() && offsets.last().is_some_and(|&end| end <= rows),
            "offsets of groups: {offsets:?}"
        );
        let groups = offsets.windows(2).map(|bounds| bounds[0]..bounds[1]).enumerate();
        groups.filter(|(_, rows)| !rows.is_empty()).collect()
    }
}

/// `c[r] = alpha·a[r]·b[e]ᵀ + bias[e] + beta·c[r]` for the rows r of each group e. `a` [R, K], `b` [E·N, K], `bias` [E, N] in the format of
/// weights, `c` [R, N]. On a GPU the own kernels add all of it in f32 and round once.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
pub fn nt<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    bias: Option<&Tensor>,
    beta: f32,
    groups: Groups<'_>,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, mut c) = (a.into(), b.into(), c.into());
    let n = c.cols();
    assert_eq!((a.cols(), c.rows(), groups.count() * n), (b.cols(), a.rows(), b.rows()), "shapes of a·bᵀ by group");
    let fits = bias.is_none_or(|bias| bias.len() == b.rows() && bias.dtype() == device.dtype());
    assert!(fits, "a bias has a value for each row of b, in the format of weights");
    if let (Device::Cuda(gpu), Groups::Device(offsets)) = (device, groups) {
        return launch(gpu, Form::Nt, alpha, a, b, bias, beta, offsets, c);
    }
    for (group, rows) in groups.occupied(a.rows()) {
        let (first, count) = (rows.start, rows.len());
        let (a, b) = (a.row_range(first, count), b.row_range(group * n, n));
        let mut c = c.reborrow().row_range(first, count);
        matmul::nt(device, alpha, a, b, beta, c.reborrow());
        if let Some(bias) = bias {
            add_bias(device, bias, group, c);
        }
    }
}

/// Adds row `group` of `bias` to every row of `c`.
fn add_bias(device: &Device, bias: &Tensor, group: usize, mut c: ViewMut<'_>) {
    let (rows, n) = (c.rows(), c.cols());
    match device {
        Device::Cpu(_) => {
            let (stride, bias) = (c.stride(), &bias.f32s()[group * n..][..n]);
            for row in c.f32s_mut().chunks_mut(stride) {
                row.iter_mut().zip(bias).for_each(|(c, bias)| *c += bias);
            }
        }
        Device::Cuda(gpu) => {
            let spread = device.empty(MemoryCategory::Workspace, &[rows, n]);
            let from = bias.pointer() + (group * n * bias.dtype().num_bytes()) as u64;
            let args = kernel_args![from, spread.pointer(), rows as i64, n as i32, n as i64];
            gpu.launch("broadcast_rows", Launch::elements(rows * n, 1), args);
            elementwise::add_assign(device, c, &spread);
        }
    }
}

/// `c[r] = alpha·a[r]·b[e] + beta·c[r]` for the rows r of each group e. `a` [R, N], `b` [E·N, K], `c` [R, K].
pub fn nn<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    beta: f32,
    groups: Groups<'_>,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, mut c) = (a.into(), b.into(), c.into());
    let n = a.cols();
    assert_eq!((groups.count() * n, c.rows(), c.cols()), (b.rows(), a.rows(), b.cols()), "shapes of a·b by group");
    if let (Device::Cuda(gpu), Groups::Device(offsets)) = (device, groups) {
        return launch(gpu, Form::Nn, alpha, a, b, None, beta, offsets, c);
    }
    for (group, rows) in groups.occupied(a.rows()) {
        let (a, b) = (a.row_range(rows.start, rows.len()), b.row_range(group * n, n));
        matmul::nn(device, alpha, a, b, beta, c.reborrow().row_range(rows.start, rows.len()));
    }
}

/// `c[e] += alpha·Σ a[r]ᵀ·b[r]` over the rows r of each group e. `a` [R, M], `b` [R, N], `c` f32 [E·M, N]. A group without rows leaves its part alone.
pub fn tn<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    groups: Groups<'_>,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, mut c) = (a.into(), b.into(), c.into());
    let m = a.cols();
    assert_eq!((a.rows(), c.rows(), c.cols()), (b.rows(), groups.count() * m, b.cols()), "shapes of aᵀ·b by group");
    if let (Device::Cuda(gpu), Groups::Device(offsets)) = (device, groups) {
        return launch(gpu, Form::Tn, alpha, a, b, None, 1.0, offsets, c);
    }
    for (group, rows) in groups.occupied(a.rows()) {
        let (a, b) = (a.row_range(rows.start, rows.len()), b.row_range(rows.start, rows.len()));
        matmul::tn(device, alpha, a, b, 1.0, c.reborrow().row_range(group * m, m));
    }
}

/// Queues a product whose groups the device knows.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
fn launch(
    gpu: &Gpu,
    form: Form,
    alpha: f32,
    a: View<'_>,
    b: View<'_>,
    bias: Option<&Tensor>,
    beta: f32,
    offsets: &Indices,
    c: ViewMut<'_>,
) {
    let (groups, rows, n) = (offsets.len() - 1, a.rows(), c.cols());
    let (m, k) = if form == Form::Tn { (a.cols(), 0) } else { (0, a.cols()) };
    if groups == 0 || rows == 0 || n == 0 || (form == Form::Tn && m == 0) {
        return;
    }
    let out = if form == Form::Tn { DType::F32 } else { DType::Bf16 };
    assert_eq!((a.dtype(), b.dtype(), c.dtype()), (DType::Bf16, DType::Bf16, out), "formats of a product by group");
    let shape = GroupedShape { form, groups, rows, m, n, k, lda: a.stride(), ldb: b.stride(), ldc: c.stride() };
    let bias = bias.map_or(0, Tensor::pointer);
    let (a, b, c, offsets) = (a.pointer(), b.pointer(), c.pointer(), offsets.pointer());
    let operands = GroupedOperands { a, b, c, bias, offsets, alpha, beta };
    if hopper::takes(gpu.facts(), &shape, &operands) && hopper::is_better(&shape) {
        hopper::launch(gpu, &shape, &operands);
    } else {
        launch_on_every_card(gpu, &shape, &operands);
    }
}

/// Queues a product by the kernels that every card runs.
pub fn launch_on_every_card(gpu: &Gpu, shape: &GroupedShape, operands: &GroupedOperands) {
    let facts = gpu.facts();
    let plan = choose(shape, Card { max_shared_bytes: facts.max_shared_bytes, num_sms: facts.num_sms });
    gpu.allow_shared_bytes(plan.kernel, plan.shared_bytes);
    let launch = Launch { shared_bytes: plan.shared_bytes, ..Launch::new(plan.blocks, plan.threads) };
    gpu.launch_struct(plan.kernel, launch, &params(shape, operands));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
    use crate::tensor::cuda::{DeviceFacts, Pool, RecordingFacts};

    const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

    /// Lengths of groups: none empty, some empty (the first, one between, the last), all rows in one, one row each, no rows at all.
    const LENGTHS: [&[usize]; 6] = [&[3, 5, 2], &[0, 4, 0, 1, 6, 0], &[0, 0, 9], &[7], &[1, 1, 1, 1], &[0, 0]];

    fn offsets(lengths: &[usize]) -> Vec<usize> {
        let sums = lengths.iter().scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        });
        std::iter::once(0).chain(sums).collect()
    }

    fn on_device(device: &Device, offsets: &[usize]) -> Indices {
        device.indices(SCRATCH, offsets.iter().map(|&row| row as i32).collect())
    }

    /// Group of each row.
    fn group_of(lengths: &[usize]) -> Vec<usize> {
        lengths.iter().enumerate().flat_map(|(group, &length)| std::iter::repeat_n(group, length)).collect()
    }

    #[test]
    fn all_three_forms_agree_with_the_definition() {
        let device = cpu(2);
        let mut values = Values::new(1);
        for lengths in LENGTHS {
            for (n, k) in [(1, 1), (5, 3), (33, 70)] {
                let (groups, group) = (lengths.len(), group_of(lengths));
                let (rows, host) = (group.len(), offsets(lengths));
                let device_offsets = on_device(&device, &host);
                let x = values.tensor(&device, &[rows, k]);
                let w = values.tensor(&device, &[groups, n, k]);
                let bias = values.tensor(&device, &[groups, n]);
                let dy = values.tensor(&device, &[rows, n]);
                let [y, dx, dw] = [[rows, n], [rows, k], [groups * n, k]].map(|shape| values.vec(shape[0] * shape[1]));
                let (xs, ws, dys) = (x.f32s(), w.f32s(), dy.f32s());
                let weight = |e: usize, i: usize, j: usize| ws[(e * n + i) * k + j];
                let want_y: Vec<f32> = (0..rows * n)
                    .map(|at| {
                        let (r, i) = (at / n, at % n);
                        let sum: f32 = (0..k).map(|j| xs[r * k + j] * weight(group[r], i, j)).sum();
                        0.5 * sum + bias.f32s()[group[r] * n + i] + 2.0 * y[at]
                    })
                    .collect();
                let want_dx: Vec<f32> = (0..rows * k)
                    .map(|at| {
                        let (r, j) = (at / k, at % k);
                        let sum: f32 = (0..n).map(|i| dys[r * n + i] * weight(group[r], i, j)).sum();
                        0.5 * sum - dx[at]
                    })
                    .collect();
                let want_dw: Vec<f32> = (0..groups * n * k)
                    .map(|at| {
                        let (e, i, j) = (at / (n * k), at / k % n, at % k);
                        let of_group = (0..rows).filter(|&r| group[r] == e);
                        dw[at] + 0.5 * of_group.map(|r| dys[r * n + i] * xs[r * k + j]).sum::<f32>()
                    })
                    .collect();
                for by in [Groups::Device(&device_offsets), Groups::Host(&host)] {
                    let mut c = device.tensor(SCRATCH, &[rows, n], y.clone());
                    device.run(|| nt(&device, 0.5, &x, &w, Some(&bias), 2.0, by, &mut c));
                    assert_close("nt", c.f32s(), &want_y, 1e-5);
                    let mut c = device.tensor(SCRATCH, &[rows, k], dx.clone());
                    device.run(|| nn(&device, 0.5, &dy, &w, -1.0, by, &mut c));
                    assert_close("nn", c.f32s(), &want_dx, 1e-5);
                    let mut c = device.tensor(SCRATCH, &[groups * n, k], dw.clone());
                    device.run(|| tn(&device, 0.5, &dy, &x, by, &mut c));
                    assert_close("tn", c.f32s(), &want_dw, 1e-5);
                }
            }
        }
    }

    #[test]
    fn matrices_inside_tensors_and_what_lies_beside_them() {
        let device = cpu(2);
        let mut values = Values::new(2);
        let (n, k, host) = (6, 4, [1, 4, 4, 8]);
        // Rows 0 and 8 belong to no group; a, b and c lie in wider rows.
        let (x, w) = (values.tensor(&device, &[9, k + 3]), values.tensor(&device, &[3 * n, k + 2]));
        let offsets = on_device(&device, &host);
        let mut c = device.tensor(SCRATCH, &[9, n + 5], vec![f32::NAN; 9 * (n + 5)]);
        // beta 0 must not read c.
        let (a, b) = (x.view().columns(2, k), w.first_columns(k));
        device.run(|| nt(&device, 1.0, a, b, None, 0.0, Groups::Device(&offsets), c.view_mut().columns(3, n)));
        let mut want = device.zeros(SCRATCH, &[7, n]);
        for (group, first, count) in [(0, 0, 3), (2, 3, 4)] {
            let (a, b) = (a.row_range(first + 1, count), b.row_range(group * n, n));
            device.run(|| matmul::nt(&device, 1.0, a, b, 0.0, want.view_mut().row_range(first, count)));
        }
        assert_eq!(c.view().row_range(1, 7).columns(3, n).to_vec(), want.f32s());
        let written = c.f32s().iter().filter(|x| !x.is_nan()).count();
        assert_eq!(written, 7 * n, "what lies beside the result stays");
    }

    #[test]
    fn gradients_agree_with_finite_differences() {
        let device = cpu(1);
        let mut values = Values::new(3);
        let (n, k, lengths) = (5, 4, [2, 0, 3]);
        let host = offsets(&lengths);
        let (x, w, weight) = (values.vec(5 * k), values.vec(3 * n * k), values.vec(5 * n));
        let tensor = |shape: &[usize], values: &[f32]| device.tensor(SCRATCH, shape, values.to_vec());
        let groups = Groups::Host(&host);
        let loss = |x: &[f32], w: &[f32]| {
            let mut y = device.zeros(SCRATCH, &[5, n]);
            device.run(|| nt(&device, 1.0, &tensor(&[5, k], x), &tensor(&[3 * n, k], w), None, 0.0, groups, &mut y));
            dot(&weight, y.f32s())
        };
        let dy = tensor(&[5, n], &weight);
        let (mut dx, mut dw) = (device.zeros(SCRATCH, &[5, k]), device.zeros(SCRATCH, &[3 * n, k]));
        device.run(|| nn(&device, 1.0, &dy, &tensor(&[3 * n, k], &w), 0.0, groups, &mut dx));
        device.run(|| tn(&device, 1.0, &dy, &tensor(&[5, k], &x), groups, &mut dw));
        assert_gradient("dx", &x, dx.f32s(), |x| loss(x, &w));
        assert_gradient("dw", &w, dw.f32s(), |w| loss(&x, w));
    }

    #[test]
    fn on_a_gpu_a_product_is_one_launch_and_takes_no_memory() {
        for compute_capability in [(9, 0), (8, 9)] {
            let card = DeviceFacts { compute_capability, ..DeviceFacts::assumed(1 << 30) };
            let device = Device::recording(RecordingFacts::unbounded(card, true));
            let Device::Cuda(gpu) = &device else { unreachable!("a recording device is a GPU") };
            let (n, k, groups) = (512, 256, 4);
            let [x, w, bias] = [[1000, k], [groups * n, k], [groups, n]].map(|shape| device.zeros(SCRATCH, &shape));
            let [mut y, mut dx] = [[1000, n], [1000, k]].map(|shape| device.zeros(SCRATCH, &shape));
            let mut dw = device.zeros_f32(SCRATCH, &[groups * n, k]);
            let offsets = on_device(&device, &[0, 100, 100, 900, 1000]);
            let by = Groups::Device(&offsets);
            let (before, bytes) = (gpu.counters(), gpu.arena_bytes(Pool::Lasting));
            nt(&device, 1.0, &x, &w, Some(&bias), 0.0, by, &mut y);
            nn(&device, 1.0, &y, &w, 0.0, by, &mut dx);
            tn(&device, 1.0, &y, &x, by, &mut dw);
            let during = gpu.counters() - before;
            assert_eq!((during.launches, during.host_syncs, during.allocations), (3, 0, 0));
            assert_eq!(gpu.arena_bytes(Pool::Lasting), bytes);
            // Nothing to do, nothing to launch.
            let mut none = device.zeros(SCRATCH, &[0, n]);
            nt(&device, 1.0, x.view().row_range(0, 0), &w, None, 0.0, by, &mut none);
            assert_eq!((gpu.counters() - before).launches, 3);
            device.check().unwrap();
        }
    }

    #[test]
    #[should_panic(expected = "offsets of groups")]
    fn groups_end_with_the_rows() {
        let device = cpu(1);
        let [x, w, mut y] = [[1, 1]; 3].map(|shape| device.zeros(SCRATCH, &shape));
        nt(&device, 1.0, &x, &w, None, 0.0, Groups::Host(&[0, 2]), &mut y);
    }
}
