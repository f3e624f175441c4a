//! cuBLASLt: the vendor's matrix products, looked up at run time, with one algorithm per shape that is chosen once and kept.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{CudaContext, result};

use super::CudaDevice;
use super::probe::DeviceFacts;
use crate::base::error::Result;
use crate::tensor::dtype::DType;

/// Scratch that the library may use, in bytes: what NVIDIA recommends for Hopper, and enough for older cards.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Which operand is transposed; all matrices are row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// `c [M, N] = a [M, K] · b [N, K]ᵀ`.
    Nt,
    /// `c [M, N] = a [M, K] · b [K, N]`.
    Nn,
    /// `c [M, N] = a [K, M]ᵀ · b [K, N]`.
    Tn,
}

/// Sizes and strides of a product: all that an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Which operand is transposed.
    pub form: Form,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// Values between rows of `a`.
    pub lda: usize,
    /// Values between rows of `b`.
    pub ldb: usize,
    /// Values between rows of `c`.
    pub ldc: usize,
    /// Values between rows of what is added.
    pub ld_source: usize,
    /// Format of `c` and of what is added; `a` and `b` are bf16.
    pub out: DType,
}

/// Operands of one product, `c = alpha · a·b + beta · source`.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// Address of `a`.
    pub a: u64,
    /// Address of `b`.
    pub b: u64,
    /// Address of `c`.
    pub c: u64,
    /// Address of what is added, scaled by beta: `c` itself when accumulating, otherwise memory that `c` does not share.
    pub source: u64,
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on what is added; with 0 it is not read.
    pub beta: f32,
}

/// The library, its workspace, and the algorithms chosen so far.
pub struct BlasLt {
    handle: Handle,
    workspace: u64,
    context: Arc<CudaContext>,
    plans: Mutex<HashMap<Shape, Plan>>,
}

struct Handle(sys::cublasLtHandle_t);
// SAFETY: the library's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: cublasLtMatmul may be called with one handle from several threads.
unsafe impl Sync for Handle {}

#[derive(Clone, Copy)]
struct Plan {
    desc: sys::cublasLtMatmulDesc_t,
    /// Layouts in the library's column-major view: its first operand is our `b`.
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    source: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algo: sys::cublasLtMatmulAlgo_t,
}
// SAFETY: descriptors are read-only after they are made, and live as long as the library object that holds the plans.
unsafe impl Send for Plan {}

impl BlasLt {
    /// Opens the library; `None` where it is not installed or `TANDEM_NO_CUBLASLT` is set: then the own kernels serve.
    ///
    /// # Errors
    /// When the library is there but does not start.
    pub fn new(context: &Arc<CudaContext>, facts: &DeviceFacts) -> Result<Option<Self>> {
        let forbidden = std::env::var_os("TANDEM_NO_CUBLASLT").is_some_and(|v| !v.is_empty() && v != "0");
        // SAFETY: only tries to open the library.
        if forbidden || facts.laptop_tiles || !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let handle = lt::create_handle().context("cuBLASLt did not start")?;
        // SAFETY: a plain allocation, freed in `drop`.
        let workspace =
            unsafe { result::malloc_sync(WORKSPACE_BYTES) }.context("no memory for cuBLASLt's workspace")?;
        Ok(Some(Self { handle: Handle(handle), workspace, context: Arc::clone(context), plans: Mutex::default() }))
    }

    /// Version of the library, for example 130100.
    pub fn version(&self) -> usize {
        // SAFETY: reads a constant.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Queues `c = alpha · a·b + beta · source` on the compute stream of `device`.
    ///
    /// # Errors
    /// When the library has no algorithm for the shape or refuses the launch.
    pub fn matmul(&self, device: &CudaDevice, mut shape: Shape, mut operands: Operands) -> Result<()> {
        if operands.beta == 0.0 {
            (operands.source, shape.ld_source) = (operands.c, shape.ldc);
        }
        let plan = {
            let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
            match plans.get(&shape) {
                Some(plan) => *plan,
                None => {
                    let plan = self.plan(shape).with_context(|| format!("cuBLASLt for {shape:?}"))?;
                    plans.insert(shape, plan);
                    plan
                }
            }
        };
        device.count_launch();
        let Operands { a, b, c, source, alpha, beta } = operands;
        // SAFETY: descriptors and layouts describe the buffers whose addresses the caller passes; the stream orders their reuse.
        unsafe {
            lt::matmul(
                self.handle.0,
                plan.desc,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                b as *const c_void,
                plan.first,
                a as *const c_void,
                plan.second,
                source as *const c_void,
                plan.source,
                c as *mut c_void,
                plan.out,
                &plan.algo,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cu_stream().cast(),
            )
        }
        .with_context(|| format!("cuBLASLt for {shape:?}"))
    }

    /// A row-major matrix is the transpose of the column-major one with the same memory, so `cᵀ = bᵀ·aᵀ` is what the library computes:
    /// its m is our n, its first operand our `b`.
    fn plan(&self, shape: Shape) -> Result<Plan> {
        let Shape { form, m, n, k, lda, ldb, ldc, ld_source, out } = shape;
        let (transpose_first, transpose_second) = match form {
            Form::Nt => (true, false),
            Form::Nn => (false, false),
            Form::Tn => (false, true),
        };
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let out_type = match out {
            DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            DType::Bf16 => bf16,
        };
        let layout = |kind, rows: usize, cols: usize, ld: usize| {
            lt::create_matrix_layout(kind, rows as u64, cols as u64, ld as i64).context("a matrix layout")
        };
        let first = if transpose_first { layout(bf16, k, n, ldb) } else { layout(bf16, n, k, ldb) }?;
        let second = if transpose_second { layout(bf16, m, k, lda) } else { layout(bf16, k, m, lda) }?;
        let result_layout = layout(out_type, n, m, ldc)?;
        let source_layout = layout(out_type, n, m, ld_source)?;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let desc = lt::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).context("a product descriptor")?;
        use sys::cublasLtMatmulDescAttributes_t as DescAttribute;
        for (attribute, transposed) in [
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose_first),
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose_second),
        ] {
            let operation = i32::from(transposed);
            // SAFETY: the attribute is a 32-bit enum: 0 plain, 1 transposed.
            unsafe {
                lt::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(&operation).cast(), size_of::<i32>())
            }
            .context("a transposition")?;
        }
        let preference = lt::create_matmul_pref().context("a preference")?;
        use sys::cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute;
        let bytes = WORKSPACE_BYTES;
        let workspace = PreferenceAttribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the attribute is a size.
        unsafe {
            lt::set_matmul_pref_attribute(preference, workspace, std::ptr::from_ref(&bytes).cast(), size_of::<usize>())
        }
        .context("a workspace preference")?;
        // Sums that are split over k meet in f32 in the workspace: neither in place (not deterministic) nor in bf16 (not accurate).
        let scheme: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let mask = PreferenceAttribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        // SAFETY: the attribute is a 32-bit mask.
        unsafe {
            lt::set_matmul_pref_attribute(preference, mask, std::ptr::from_ref(&scheme).cast(), size_of::<u32>())
        }
        .context("a preference for how split sums meet")?;
        // SAFETY: all descriptors were just made.
        let found = unsafe {
            lt::get_matmul_algo_heuristic(self.handle.0, desc, first, second, source_layout, result_layout, preference)
        };
        // SAFETY: made above, used no more.
        unsafe { lt::destroy_matmul_pref(preference) }.context("releasing a preference")?;
        let found = found.context("no algorithm for this shape")?;
        ensure!(
            found.workspaceSize <= WORKSPACE_BYTES,
            "the algorithm wants {} bytes of workspace",
            found.workspaceSize
        );
        Ok(Plan { desc, first, second, source: source_layout, out: result_layout, algo: found.algo })
    }
}

impl Drop for BlasLt {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, plan) in plans.drain() {
            // SAFETY: made in `plan`, released once.
            unsafe {
                let _ = lt::destroy_matrix_layout(plan.first);
                let _ = lt::destroy_matrix_layout(plan.second);
                let _ = lt::destroy_matrix_layout(plan.source);
                let _ = lt::destroy_matrix_layout(plan.out);
                let _ = lt::destroy_matmul_desc(plan.desc);
            }
        }
        // SAFETY: the handle and the workspace were made in `new`.
        unsafe {
            let _ = lt::destroy_handle(self.handle.0);
            let _ = result::memory_free(self.workspace);
        }
    }
}
