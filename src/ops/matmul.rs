//! Matrix products, f32 with f32 accumulation.
//!
//! | op | computes | gradient it serves |
//! |---|---|---|
//! | [`nt`] | `c = alpha·a·bᵀ + beta·c` | `y = x·Wᵀ` |
//! | [`nn`] | `c = alpha·a·b + beta·c` | `dx = dy·W` |
//! | [`tn`] | `c = alpha·aᵀ·b + beta·c` | `dW += dyᵀ·x` |
//!
//! Operands are matrices inside tensors ([`View`]): rows may be longer than the product's columns.
//! None of them rounds on the CPU: layers do that where Transformers casts. The order of summation depends on the sizes alone, not on the number of threads.

use gemm::Parallelism;

use super::elementwise;
use super::matmul_plan::{Card, choose};
use crate::tensor::cuda::Launch;
use crate::tensor::cuda::blaslt::{Form, Operands, Shape};
use crate::tensor::{Device, Gpu, MemoryCategory, View, ViewMut};

/// A matrix inside a slice: `(i, j)` is at `i·row_stride + j·col_stride`.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A matrix whose rows are `row_stride` apart and whose columns are adjacent.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(rows == 0 || cols == 0 || (rows - 1) * row_stride + cols <= data.len(), "matrix exceeds its slice");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The same values, transposed.
    pub fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// A matrix to write, rows `row_stride` apart.
#[derive(Debug)]
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> MatMut<'a> {
    /// A matrix whose rows are `row_stride` apart and whose columns are adjacent.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(rows == 0 || cols == 0 || (rows - 1) * row_stride + cols <= data.len(), "matrix exceeds its slice");
        assert!(rows <= 1 || row_stride >= cols, "rows of a written matrix must not overlap");
        Self { data, rows, cols, row_stride }
    }
}

/// `c = alpha·a·b + beta·c` on the calling thread, for tiles inside a parallel operation.
pub fn gemm_serial(alpha: f32, a: Mat<'_>, b: Mat<'_>, beta: f32, c: MatMut<'_>) {
    gemm_with(Parallelism::None, alpha, a, b, beta, c);
}

fn gemm_with(parallelism: Parallelism, alpha: f32, a: Mat<'_>, b: Mat<'_>, beta: f32, c: MatMut<'_>) {
    assert_eq!((a.rows, b.cols, a.cols), (c.rows, c.cols, b.rows), "shapes of a matrix product");
    let (a_at, c_at) = (a.data.as_ptr(), c.data.as_mut_ptr());
    // SAFETY: `Mat::new` and `MatMut::new` checked that every (row, column) lies inside its slice and that written rows do not
    // overlap; `t` only exchanges the two strides. `c` is borrowed mutably, so it aliases neither `a` nor `b`.
    unsafe {
        gemm_at(parallelism, alpha, a_at, (a.row_stride, a.col_stride), b, beta, c_at, (c.rows, c.cols, c.row_stride))
    }
}

/// # Safety
/// `a` must point at as many rows and columns as `c` has rows and `b` has rows, `c` at its rows and columns, and what is written at `c` must
/// overlap neither itself nor what is read.
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
unsafe fn gemm_at(
    parallelism: Parallelism,
    alpha: f32,
    a: *const f32,
    (a_row_stride, a_col_stride): (usize, usize),
    b: Mat<'_>,
    beta: f32,
    c: *mut f32,
    (rows, cols, row_stride): (usize, usize, usize),
) {
    if rows == 0 || cols == 0 {
        return;
    }
    // SAFETY: the caller vouches for `a` and `c`; `Mat::new` checked `b`.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            b.rows,
            c,
            1,
            row_stride as isize,
            beta != 0.0,
            a,
            a_col_stride as isize,
            a_row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

impl<'a> From<View<'a>> for Mat<'a> {
    fn from(view: View<'a>) -> Self {
        Mat::new(view.f32s(), view.rows(), view.cols(), view.stride())
    }
}

impl<'a> From<ViewMut<'a>> for MatMut<'a> {
    fn from(view: ViewMut<'a>) -> Self {
        let (rows, cols, stride) = (view.rows(), view.cols(), view.stride());
        MatMut::new(view.into_f32s(), rows, cols, stride)
    }
}

/// `c [M, N] = alpha · a [M, K] · b [N, K]ᵀ + beta · c`.
pub fn nt<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    beta: f32,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, c) = (a.into(), b.into(), c.into());
    assert_eq!((a.cols(), c.rows(), c.cols()), (b.cols(), a.rows(), b.rows()), "shapes of a·bᵀ");
    match device {
        Device::Cpu(_) => gemm_with(Parallelism::Rayon(0), alpha, a.into(), Mat::from(b).t(), beta, c.into()),
        Device::Cuda(gpu) => launch(gpu, Form::Nt, a.cols(), alpha, a, b, beta, c.as_view(), c.as_view()),
    }
}

/// `c [M, N] = source [M, N] + a [M, K] · b [N, K]ᵀ`, `source` in the format of `c`.
///
/// The CPU rounds the product and the sum to the storage format, as Transformers does, and cuBLASLt was measured to do so too; the own kernels
/// add in f32 and round once.
pub fn nt_add<'a, 'b, 's, 'c>(
    device: &Device,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    source: impl Into<View<'s>>,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, source, mut c) = (a.into(), b.into(), source.into(), c.into());
    assert_eq!((a.cols(), c.rows(), c.cols()), (b.cols(), a.rows(), b.rows()), "shapes of a·bᵀ");
    assert_eq!((source.rows(), source.cols(), source.dtype()), (c.rows(), c.cols(), c.dtype()), "shapes of a sum");
    match device {
        Device::Cpu(_) => {
            nt(device, 1.0, a, b, 0.0, c.reborrow());
            elementwise::round(device, c.reborrow());
            elementwise::add_assign(device, c, source);
        }
        Device::Cuda(gpu) => launch(gpu, Form::Nt, a.cols(), 1.0, a, b, 1.0, source, c.as_view()),
    }
}

/// `c [M, N] = alpha · a [M, K] · b [K, N] + beta · c`.
pub fn nn<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    beta: f32,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, c) = (a.into(), b.into(), c.into());
    assert_eq!((a.cols(), c.rows(), c.cols()), (b.rows(), a.rows(), b.cols()), "shapes of a·b");
    match device {
        Device::Cpu(_) => gemm_with(Parallelism::Rayon(0), alpha, a.into(), b.into(), beta, c.into()),
        Device::Cuda(gpu) => launch(gpu, Form::Nn, a.cols(), alpha, a, b, beta, c.as_view(), c.as_view()),
    }
}

/// `c [M, N] = alpha · a [K, M]ᵀ · b [K, N] + beta · c`.
pub fn tn<'a, 'b, 'c>(
    device: &Device,
    alpha: f32,
    a: impl Into<View<'a>>,
    b: impl Into<View<'b>>,
    beta: f32,
    c: impl Into<ViewMut<'c>>,
) {
    let (a, b, c) = (a.into(), b.into(), c.into());
    assert_eq!((a.rows(), c.rows(), c.cols()), (b.rows(), a.cols(), b.cols()), "shapes of aᵀ·b");
    match device {
        Device::Cpu(_) => gemm_with(Parallelism::Rayon(0), alpha, Mat::from(a).t(), b.into(), beta, c.into()),
        Device::Cuda(gpu) => launch(gpu, Form::Tn, a.rows(), alpha, a, b, beta, c.as_view(), c.as_view()),
    }
}

/// The columns of `x` [M, ≥K + N] behind its first K become `alpha · x[:, ..K] · b [N, K]ᵀ`.
pub fn extend_nt<'x, 'b>(device: &Device, alpha: f32, x: impl Into<ViewMut<'x>>, b: impl Into<View<'b>>) {
    let b = b.into();
    extend(device, Form::Nt, alpha, x.into(), b.cols(), b.rows(), b);
}

/// The columns of `x` [M, ≥K + N] behind its first K become `alpha · x[:, ..K] · b [K, N]`.
pub fn extend_nn<'x, 'b>(device: &Device, alpha: f32, x: impl Into<ViewMut<'x>>, b: impl Into<View<'b>>) {
    let b = b.into();
    extend(device, Form::Nn, alpha, x.into(), b.rows(), b.cols(), b);
}

fn extend(device: &Device, form: Form, alpha: f32, mut x: ViewMut<'_>, k: usize, n: usize, b: View<'_>) {
    assert!(k + n <= x.cols(), "a matrix of {} columns has no room for {n} behind {k}", x.cols());
    match device {
        Device::Cpu(_) => {
            let (rows, stride) = (x.rows(), x.stride());
            let b = if form == Form::Nt { Mat::from(b).t() } else { b.into() };
            let start = x.f32s_mut().as_mut_ptr();
            // SAFETY: rows `stride` values apart: columns 0..k are read, columns k..k + n are written (checked above), so nothing that
            // is written is read, and both lie inside the tensor, which is borrowed mutably.
            unsafe {
                let c = start.add(k);
                gemm_at(Parallelism::Rayon(0), alpha, start, (stride, 1), b, 0.0, c, (rows, n, stride));
            }
        }
        Device::Cuda(gpu) => {
            let (a, c) = (x.as_view().columns(0, k), x.as_view().columns(k, n));
            launch(gpu, form, k, alpha, a, b, 0.0, c, c);
        }
    }
}

/// Queues `c = alpha·a·b + beta·source` on the GPU: bf16 operands, f32 sums, `c` in its own format. `c` is written although it is a [`View`]:
/// callers hold it mutably, or own the tensor whose other columns are read.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
fn launch(
    gpu: &Gpu,
    form: Form,
    k: usize,
    alpha: f32,
    a: View<'_>,
    b: View<'_>,
    beta: f32,
    source: View<'_>,
    c: View<'_>,
) {
    let (m, n) = (c.rows(), c.cols());
    if m == 0 || n == 0 {
        return;
    }
    assert!(k > 0, "a product without terms: nothing would write c");
    let (lda, ldb, ldc, ld_source) = (a.stride(), b.stride(), c.stride(), source.stride());
    let shape = Shape { form, m, n, k, lda, ldb, ldc, ld_source, out: c.dtype() };
    let operands = Operands { a: a.pointer(), b: b.pointer(), c: c.pointer(), source: source.pointer(), alpha, beta };
    if gpu.has_vendor_library() { gpu.blas_matmul(shape, operands) } else { launch_own(gpu, shape, operands) }
}

/// The own kernels: what a laptop with nothing but the driver uses.
fn launch_own(gpu: &Gpu, shape: Shape, operands: Operands) {
    let facts = gpu.facts();
    let plan = choose(&shape, Card { max_shared_bytes: facts.max_shared_bytes, num_sms: facts.num_sms });
    let workspace = gpu.alloc(MemoryCategory::Workspace, plan.workspace_bytes);
    if plan.workspace_bytes > 0 && workspace.pointer() == 0 {
        // The device is latched with the out-of-memory.
        return;
    }
    let params = plan.params(&shape, &operands, workspace.pointer());
    gpu.allow_shared_bytes(plan.kernel, plan.shared_bytes);
    let launch = Launch { grid: plan.grid, block: plan.block, shared_bytes: plan.shared_bytes };
    gpu.launch_struct(plan.kernel, launch, &params);
    if let Some(second) = plan.second {
        let launch = Launch { grid: second.grid, block: second.block, shared_bytes: 0 };
        gpu.launch_struct(second.kernel, launch, &params);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ops::testing::{Values, assert_close, cpu};

    fn naive(
        m: usize,
        n: usize,
        k: usize,
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) -> Vec<f32> {
        let dot = |i, j| (0..k).map(|l| f64::from(a(i, l)) * f64::from(b(l, j))).sum::<f64>() as f32;
        (0..m * n).map(|ij| dot(ij / n, ij % n)).collect()
    }

    #[test]
    fn all_three_forms_agree_with_the_definition() {
        let device = cpu(2);
        let mut values = Values::new(1);
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (64, 33, 129), (1, 70, 64)] {
            let (a, b) = (values.tensor(&device, &[m, k]), values.tensor(&device, &[n, k]));
            let mut c = values.tensor(&device, &[m, n]);
            let before = c.f32s().to_vec();
            device.run(|| nt(&device, 0.5, &a, &b, 2.0, &mut c));
            let product = naive(m, n, k, |i, l| a.f32s()[i * k + l], |l, j| b.f32s()[j * k + l]);
            let want: Vec<f32> = product.iter().zip(&before).map(|(p, c)| 0.5 * p + 2.0 * c).collect();
            assert_close("nt", c.f32s(), &want, 1e-5);

            let b = values.tensor(&device, &[k, n]);
            // beta 0 must not read c: it may hold NaN.
            c.f32s_mut().fill(f32::NAN);
            device.run(|| nn(&device, 1.0, &a, &b, 0.0, &mut c));
            let want = naive(m, n, k, |i, l| a.f32s()[i * k + l], |l, j| b.f32s()[l * n + j]);
            assert_close("nn", c.f32s(), &want, 1e-5);

            let a = values.tensor(&device, &[k, m]);
            device.run(|| tn(&device, 1.0, &a, &b, 0.0, &mut c));
            let want = naive(m, n, k, |i, l| a.f32s()[l * m + i], |l, j| b.f32s()[l * n + j]);
            assert_close("tn", c.f32s(), &want, 1e-5);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_number_of_threads_does_not_change_a_bit(m in 1usize..300, n in 1usize..300, k in 1usize..600) {
            let products = |threads| {
                let device = cpu(threads);
                let mut values = Values::new(7);
                let mut shape = |rows, cols| values.tensor(&device, &[rows, cols]);
                let [(a, at), (b, bt)] = [(shape(m, k), shape(k, m)), (shape(k, n), shape(n, k))];
                let mut c = [shape(m, n), shape(m, n), shape(m, n)];
                device.run(|| {
                    nt(&device, 1.0, &a, &bt, 0.0, &mut c[0]);
                    nn(&device, 1.0, &a, &b, 1.0, &mut c[1]);
                    tn(&device, 1.0, &at, &b, 1.0, &mut c[2]);
                });
                c.map(|c| c.f32s().iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
            };
            let one = products(1);
            for threads in [2, 3, 8] {
                prop_assert!(products(threads) == one, "{threads} threads");
            }
        }
    }
}
