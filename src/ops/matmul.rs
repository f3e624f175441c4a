//! Matrix products, f32 with f32 accumulation.
//!
//! | op | computes | gradient it serves |
//! |---|---|---|
//! | [`nt`] | `c = alpha·a·bᵀ + beta·c` | `y = x·Wᵀ` |
//! | [`nn`] | `c = alpha·a·b + beta·c` | `dx = dy·W` |
//! | [`tn`] | `c = alpha·aᵀ·b + beta·c` | `dW += dyᵀ·x` |
//!
//! Rows may be longer than the product's columns (padding): the stride of a matrix is the tensor's last dimension.
//! None of them rounds on the CPU: layers do that where Transformers casts. The order of summation depends on the sizes alone, not on the number of threads.

use gemm::Parallelism;

use super::matmul_plan::{Card, choose};
use crate::tensor::cuda::Launch;
use crate::tensor::cuda::blaslt::{Form, Operands, Shape};
use crate::tensor::{Device, Gpu, MemoryCategory, Tensor};

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
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    // SAFETY: `Mat::new` and `MatMut::new` checked that every (row, column) lies inside its slice and that written rows do not
    // overlap; `t` only exchanges the two strides. `c` is borrowed mutably, so it aliases neither `a` nor `b`.
    unsafe {
        gemm::gemm(
            c.rows,
            c.cols,
            a.cols,
            c.data.as_mut_ptr(),
            1,
            c.row_stride as isize,
            beta != 0.0,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
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

/// `c [M, N] = alpha · a [M, K] · b [N, K]ᵀ + beta · c`.
pub fn nt(device: &Device, alpha: f32, a: &Tensor, b: &Tensor, beta: f32, c: &mut Tensor) {
    let ((m, k), (n, k2)) = ((a.rows(), a.cols()), (b.rows(), b.cols()));
    assert!(k == k2 && c.rows() == m && c.cols() >= n, "shapes of a·bᵀ");
    match device {
        Device::Cpu(_) => {
            let (a, b) = (Mat::new(a.f32s(), m, k, k), Mat::new(b.f32s(), n, k, k).t());
            let ldc = c.cols();
            gemm_with(Parallelism::Rayon(0), alpha, a, b, beta, MatMut::new(c.f32s_mut(), m, n, ldc));
        }
        Device::Cuda(gpu) => launch(gpu, Form::Nt, [m, n, k], alpha, a, b, beta, c),
    }
}

/// `c [M, N] = alpha · a [M, K] · b [K, N] + beta · c`.
pub fn nn(device: &Device, alpha: f32, a: &Tensor, b: &Tensor, beta: f32, c: &mut Tensor) {
    let (m, (k, n)) = (a.rows(), (b.rows(), b.cols()));
    assert!(a.cols() >= k && (c.rows(), c.cols()) == (m, n), "shapes of a·b");
    match device {
        Device::Cpu(_) => {
            let (a, b) = (Mat::new(a.f32s(), m, k, a.cols()), Mat::new(b.f32s(), k, n, n));
            gemm_with(Parallelism::Rayon(0), alpha, a, b, beta, MatMut::new(c.f32s_mut(), m, n, n));
        }
        Device::Cuda(gpu) => launch(gpu, Form::Nn, [m, n, k], alpha, a, b, beta, c),
    }
}

/// `c [M, N] = alpha · a [K, M]ᵀ · b [K, N] + beta · c`.
pub fn tn(device: &Device, alpha: f32, a: &Tensor, b: &Tensor, beta: f32, c: &mut Tensor) {
    let (m, (k, n)) = (c.rows(), (b.rows(), b.cols()));
    assert!(a.rows() == k && a.cols() >= m && c.cols() == n, "shapes of aᵀ·b");
    match device {
        Device::Cpu(_) => {
            let (a, b) = (Mat::new(a.f32s(), k, m, a.cols()).t(), Mat::new(b.f32s(), k, n, n));
            gemm_with(Parallelism::Rayon(0), alpha, a, b, beta, MatMut::new(c.f32s_mut(), m, n, n));
        }
        Device::Cuda(gpu) => launch(gpu, Form::Tn, [m, n, k], alpha, a, b, beta, c),
    }
}

/// Queues a product on the GPU: bf16 operands, f32 sums, `c` in its own format.
#[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
fn launch(gpu: &Gpu, form: Form, [m, n, k]: [usize; 3], alpha: f32, a: &Tensor, b: &Tensor, beta: f32, c: &Tensor) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let shape = Shape { form, m, n, k, lda: a.cols(), ldb: b.cols(), ldc: c.cols(), out: c.dtype() };
    let operands = Operands { a: a.pointer(), b: b.pointer(), c: c.pointer(), alpha, beta };
    match gpu.blas() {
        Some(_) => gpu.blas_matmul(shape, operands),
        None => launch_own(gpu, shape, operands),
    }
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
