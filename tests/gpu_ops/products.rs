//! Products whose result, and what is added to it, lie in wider rows: by cuBLASLt and by the own kernels, against the definition.

use tandem::ops::matmul_plan::{Card, choose};
use tandem::tensor::cuda::blaslt::{Form, Operands, Shape};
use tandem::tensor::cuda::{CudaDevice, Launch};
use tandem::tensor::dtype::DType;
use tandem::tensor::{Device, MemoryCategory, Tensor};

use super::{Bench, ROUNDING, SCRATCH, tensor};
use crate::golden_family::error;

/// What lies beside the result, and must stay.
const BESIDE: f32 = 7.0;

fn own(gpu: &CudaDevice, shape: Shape, operands: Operands) {
    let facts = gpu.facts();
    let plan = choose(&shape, Card { max_shared_bytes: facts.max_shared_bytes, num_sms: facts.num_sms });
    let workspace = gpu.alloc(MemoryCategory::Workspace, plan.workspace_bytes);
    let params = plan.params(&shape, &operands, workspace.pointer());
    gpu.allow_shared_bytes(plan.kernel, plan.shared_bytes);
    let launch = Launch { grid: plan.grid, block: plan.block, shared_bytes: plan.shared_bytes };
    gpu.launch_struct(plan.kernel, launch, &params);
    if let Some(second) = plan.second {
        let launch = Launch { grid: second.grid, block: second.block, shared_bytes: 0 };
        gpu.launch_struct(second.kernel, launch, &params);
    }
}

/// `rows` in `ld` values each, from column `first` on; the rest is [`BESIDE`].
fn widened(rows: &[f32], cols: usize, ld: usize, first: usize) -> Vec<f32> {
    rows.chunks_exact(cols)
        .flat_map(|row| {
            let beside = |n| std::iter::repeat_n(BESIDE, n);
            beside(first).chain(row.iter().copied()).chain(beside(ld - first - cols))
        })
        .collect()
}

#[test]
fn a_source_beside_the_result_is_added_once() {
    let Some(mut b) = Bench::new() else { return };
    let device = b.devices[2].clone();
    let Device::Cuda(gpu) = &device else { unreachable!("the third device is the GPU") };
    // Plain, short sums, sums that are split, and one that cuBLASLt's algorithms are timed on.
    for [m, n, k] in [[77, 64, 128], [300, 192, 32], [64, 24, 4096], [1024, 1024, 512]] {
        let (a, bt, added) = (b.values(m * k), b.values(n * k), b.values(m * n));
        let b_plain: Vec<f32> = (0..n * k).map(|i| bt[i % n * k + i / n]).collect();
        let dot =
            |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>() as f32;
        let products: Vec<f32> = (0..m * n).map(|i| dot(&a[i / n * k..][..k], &bt[i % n * k..][..k])).collect();
        let want: Vec<f32> = products.iter().zip(&added).map(|(p, y)| 0.5 * p + y).collect();
        let ta = tensor(&device, &[m, k], &a);
        for (form, tb, ldb) in
            [(Form::Nt, tensor(&device, &[n, k], &bt), k), (Form::Nn, tensor(&device, &[k, n], &b_plain), n)]
        {
            for (out, bound) in [(DType::Bf16, 3.0 * ROUNDING), (DType::F32, 2e-5)] {
                for (library, in_place, first) in
                    [(true, false, 8), (true, true, 8), (false, false, 8), (false, true, 8), (false, false, 3)]
                {
                    if library && !gpu.has_vendor_library() {
                        continue;
                    }
                    let (ldc, ld_source) = (n + 24, if in_place { n + 24 } else { n + first });
                    let wide = |values: Vec<f32>, ld: usize| match out {
                        DType::Bf16 => tensor(&device, &[m, ld], &values),
                        DType::F32 => device.tensor_f32(SCRATCH, &[m, ld], values),
                    };
                    let before = if in_place { added.clone() } else { vec![f32::NAN; m * n] };
                    let c = wide(widened(&before, n, ldc, first), ldc);
                    let source = wide(widened(&added, n, n + first, 0), n + first);
                    let inside = |t: &Tensor| t.pointer() + (first * out.num_bytes()) as u64;
                    let shape = Shape { form, m, n, k, lda: k, ldb, ldc, ld_source, out };
                    let operands = Operands {
                        a: ta.pointer(),
                        b: tb.pointer(),
                        c: inside(&c),
                        source: if in_place { inside(&c) } else { source.pointer() },
                        alpha: 0.5,
                        beta: 1.0,
                    };
                    device.run(|| if library { gpu.blas_matmul(shape, operands) } else { own(gpu, shape, operands) });
                    device.check().unwrap();
                    let what = format!("{shape:?}, cuBLASLt {library}, in place {in_place}, from column {first}");
                    let got = c.to_vec();
                    let result: Vec<f32> =
                        got.chunks_exact(ldc).flat_map(|row| row[first..first + n].to_vec()).collect();
                    let off = error(&result, &want);
                    assert!(off <= bound, "{what}: error {off:.2e}");
                    // Around the result, and in the source, nothing changed.
                    assert!(got == widened(&result, n, ldc, first), "{what}: wrote beside the result");
                    assert!(source.to_vec() == widened(&added, n, n + first, 0), "{what}: wrote to the source");
                }
            }
        }
    }
}
