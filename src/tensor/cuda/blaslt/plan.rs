//! What cuBLASLt is told about a product: descriptors, layouts, and the algorithms that it proposes.

use std::ffi::c_void;

use anyhow::{Context as _, ensure};
use cudarc::cublaslt::{result as lt, sys};

use super::choices::Algorithm;
use super::{Case, Form, Handle, Operands, Shape, WORKSPACE_BYTES};
use crate::base::error::Result;
use crate::tensor::dtype::DType;

/// Most algorithms that are asked for.
const MAX_PROPOSALS: usize = 8;

/// Layout of one matrix.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(kind: sys::cudaDataType_t, rows: usize, cols: usize, ld: usize) -> Result<Self> {
        Ok(Self(lt::create_matrix_layout(kind, rows as u64, cols as u64, ld as i64).context("a matrix layout")?))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        let _ = unsafe { lt::destroy_matrix_layout(self.0) };
    }
}

/// Kind of arithmetic and which operand is transposed.
struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn new(transpose_first: bool, transpose_second: bool) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description =
            Self(lt::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).context("a product descriptor")?);
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose_first),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose_second),
        ] {
            let operation = i32::from(transposed);
            let value = std::ptr::from_ref(&operation).cast();
            // SAFETY: the attribute is a 32-bit enum: 0 plain, 1 transposed.
            unsafe { lt::set_matmul_desc_attribute(description.0, attribute, value, size_of::<i32>()) }
                .context("a transposition")?;
        }
        Ok(description)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        let _ = unsafe { lt::destroy_matmul_desc(self.0) };
    }
}

/// What an algorithm may use.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(alignment: u32) -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(lt::create_matmul_pref().context("a preference")?);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        // Sums that are split over k meet in f32 in the workspace: neither in place (not deterministic) nor in bf16 (not accurate).
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme)?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            preference.set(attribute, alignment)?;
        }
        Ok(preference)
    }

    /// `value` has the attribute's type: 64-bit sizes, 32-bit masks and alignments.
    fn set<T: Copy>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<()> {
        // SAFETY: the library copies as many bytes as it is told `value` has, and refuses another size than the attribute's.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, std::ptr::from_ref(&value).cast(), size_of::<T>()) }
            .with_context(|| format!("{attribute:?}"))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

/// A product as the library sees it: column-major, so its first operand is our `b`.
pub struct Product {
    description: Description,
    first: Layout,
    second: Layout,
    /// `None` where the source lies as the result does.
    source: Option<Layout>,
    result: Layout,
    alignment: u32,
}

// SAFETY: descriptors are plain memory of the library, read-only after they are made.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

impl Product {
    /// A row-major matrix is the transpose of the column-major one with the same memory, so `cᵀ = bᵀ·aᵀ` is what the library computes: its m is
    /// our n, its first operand our `b`.
    ///
    /// # Errors
    /// When the library refuses a size.
    pub fn new(Case { shape, alignment }: Case) -> Result<Self> {
        let Shape { form, m, n, k, lda, ldb, ldc, ld_source, out } = shape;
        let (transpose_first, transpose_second) = match form {
            Form::Nt => (true, false),
            Form::Nn => (false, false),
            Form::Tn => (false, true),
        };
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let out = match out {
            DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            DType::Bf16 => bf16,
        };
        let (first_rows, first_cols) = if transpose_first { (k, n) } else { (n, k) };
        let (second_rows, second_cols) = if transpose_second { (m, k) } else { (k, m) };
        Ok(Self {
            description: Description::new(transpose_first, transpose_second)?,
            first: Layout::new(bf16, first_rows, first_cols, ldb)?,
            second: Layout::new(bf16, second_rows, second_cols, lda)?,
            source: if ld_source == ldc { None } else { Some(Layout::new(out, n, m, ld_source)?) },
            result: Layout::new(out, n, m, ldc)?,
            alignment,
        })
    }

    fn source(&self) -> sys::cublasLtMatrixLayout_t {
        self.source.as_ref().unwrap_or(&self.result).0
    }

    /// The algorithms that the library proposes, the one it thinks fastest first; at least one.
    ///
    /// # Errors
    /// When it has none that keeps to the preferences.
    pub fn proposals(&self, handle: &Handle) -> Result<Vec<Algorithm>> {
        let preference = Preference::new(self.alignment)?;
        // SAFETY: a plain struct of integers, floats and a status whose zero is "success".
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; MAX_PROPOSALS] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all descriptors are alive; the library writes at most `MAX_PROPOSALS` results.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                self.description.0,
                self.first.0,
                self.second.0,
                self.source(),
                self.result.0,
                preference.0,
                MAX_PROPOSALS as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        }
        .result()
        .context("no algorithm for this shape")?;
        let found = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(|found| fits(found));
        let algorithms: Vec<Algorithm> = found.map(|found| found.algo.data).collect();
        ensure!(!algorithms.is_empty(), "no algorithm for this shape");
        Ok(algorithms)
    }

    /// Whether the library computes this product with `algorithm`.
    pub fn accepts(&self, handle: &Handle, algorithm: Algorithm) -> bool {
        let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm };
        // SAFETY: as in `proposals`.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors are alive; an algorithm is opaque bytes that the library checks.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle.0,
                self.description.0,
                self.first.0,
                self.second.0,
                self.source(),
                self.result.0,
                &algorithm,
                &mut found,
            )
        };
        status.result().is_ok() && fits(&found)
    }

    /// Queues the product on `stream`, with its result at `c`.
    ///
    /// # Errors
    /// When the library refuses the launch.
    pub fn launch(
        &self,
        handle: &Handle,
        algorithm: Algorithm,
        operands: Operands,
        workspace: u64,
        stream: sys::cudaStream_t,
    ) -> Result<()> {
        let Operands { a, b, c, source, alpha, beta } = operands;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: algorithm };
        // SAFETY: descriptors and layouts describe the buffers whose addresses the caller passes; the stream orders their reuse.
        unsafe {
            lt::matmul(
                handle.0,
                self.description.0,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                b as *const c_void,
                self.first.0,
                a as *const c_void,
                self.second.0,
                source as *const c_void,
                self.source(),
                c as *mut c_void,
                self.result.0,
                &algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream,
            )
        }?;
        Ok(())
    }
}

fn fits(found: &sys::cublasLtMatmulHeuristicResult_t) -> bool {
    found.state.result().is_ok() && found.workspaceSize <= WORKSPACE_BYTES
}
