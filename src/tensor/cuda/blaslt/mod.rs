//! cuBLASLt: the vendor's matrix products, looked up at run time, with one algorithm per shape that is chosen once and kept.
//!
//! Large products are timed: the library's own guess is often not its fastest algorithm. Another algorithm may sum in another order, so a choice
//! is kept in a file of the user's cache folder, and equal runs on one machine stay bit-equal.

mod choices;
mod library;
mod plan;
mod timing;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, ensure};
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{CudaContext, result};
use serde::{Deserialize, Serialize};

use super::CudaDevice;
use super::driver::Driver;
use super::probe::DeviceFacts;
use crate::base::error::Result;
use crate::tensor::dtype::DType;
use choices::{Algorithm, Choices, Maker};
use plan::Product;

/// Cases that are known at one time.
const MAX_CASES: usize = 16_384;

/// Scratch that the library may use, in bytes: what NVIDIA recommends for Hopper, and enough for older cards.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Products of at least this many floating-point operations are timed: below it the choice matters less than a launch. The thin products of adapters
/// are among those that the library guesses worst.
const MIN_TIMED_FLOP: f64 = 1e8;
/// Alignment of whole tensors, and what the library assumes of addresses unless it is told less, in bytes.
const ALIGNMENT: u64 = 256;

/// Which operand is transposed; all matrices are row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// `c [M, N] = a [M, K] · b [N, K]ᵀ`.
    Nt,
    /// `c [M, N] = a [M, K] · b [K, N]`.
    Nn,
    /// `c [M, N] = a [K, M]ᵀ · b [K, N]`.
    Tn,
}

/// Sizes and strides of a product: all that an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

/// All that a choice depends on: the sizes, and how the operands lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Case {
    shape: Shape,
    /// Largest power of two that divides all addresses, at most [`ALIGNMENT`].
    alignment: u32,
}

impl Case {
    fn new(shape: Shape, operands: &Operands) -> Self {
        let Operands { a, b, c, source, .. } = *operands;
        let alignment = (a | b | c | source | ALIGNMENT).trailing_zeros();
        Self { shape, alignment: 1 << alignment }
    }

    /// The same sizes with rows that follow each other. What is chosen depends on sizes alone: an operand that lies in one matrix in one run and in
    /// another in the next (z, which some runs keep apart from x) must not change the order of a sum.
    fn without_strides(mut self) -> Self {
        let Shape { form, m, n, k, .. } = self.shape;
        let (a_cols, b_cols) = match form {
            Form::Nt => (k, k),
            Form::Nn => (k, n),
            Form::Tn => (m, n),
        };
        let stride = |cols: usize| cols.next_multiple_of(64);
        let shape = &mut self.shape;
        (shape.lda, shape.ldb, shape.ldc, shape.ld_source) = (stride(a_cols), stride(b_cols), stride(n), stride(n));
        self
    }

    /// The case whose choice serves this one: strides do not count, and the number of tokens is rounded up to three significant bits. Packs differ
    /// in length by a little, and each length would be timed otherwise.
    fn kind(self) -> Self {
        let mut kind = self;
        let tokens = match kind.shape.form {
            Form::Nt | Form::Nn => &mut kind.shape.m,
            Form::Tn => &mut kind.shape.k,
        };
        *tokens = tokens.next_multiple_of((tokens.next_power_of_two() / 8).max(1));
        kind.without_strides()
    }

    fn is_timed(&self) -> bool {
        let Shape { m, n, k, .. } = self.shape;
        2.0 * m as f64 * n as f64 * k as f64 >= MIN_TIMED_FLOP
    }
}

/// The library, its workspace, and the algorithms chosen so far.
pub struct BlasLt {
    handle: Handle,
    workspace: u64,
    context: Arc<CudaContext>,
    plans: Mutex<Plans>,
}

struct Handle(sys::cublasLtHandle_t);
// SAFETY: the library's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: cublasLtMatmul may be called with one handle from several threads.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made in `BlasLt::new`, released once.
        let _ = unsafe { lt::destroy_handle(self.0) };
    }
}

/// What was decided in this process; it stays as it is.
struct Plans {
    by_case: HashMap<Case, (Arc<Product>, Algorithm)>,
    /// Choices by [`Case::kind`].
    chosen: HashMap<Case, Algorithm>,
    /// Where choices are kept; `None` when nothing is timed.
    choices: Option<Choices>,
}

impl BlasLt {
    /// Opens the library. Where that fails the own kernels serve. Two environment variables change what is used: `TANDEM_NO_CUBLASLT=1` leaves
    /// all products to the own kernels; `TANDEM_BLAS_TIMING=0` times nothing and takes the library's first proposal for every shape.
    ///
    /// # Errors
    /// Why the library does not serve, in words: it is forbidden, not installed, or does not start.
    pub fn new(context: &Arc<CudaContext>, facts: &DeviceFacts) -> Result<Self, String> {
        if std::env::var_os("TANDEM_NO_CUBLASLT").is_some_and(|v| !v.is_empty() && v != "0") {
            return Err("TANDEM_NO_CUBLASLT is set".into());
        }
        if facts.laptop_tiles {
            return Err("TANDEM_TILES is set".into());
        }
        let file = library::load(facts.driver_version)?;
        let handle = Handle(lt::create_handle().map_err(|error| format!("cuBLASLt did not start: {error}"))?);
        // SAFETY: a plain allocation, freed in `drop`.
        let workspace = unsafe { result::malloc_sync(WORKSPACE_BYTES) }
            .map_err(|error| format!("no memory for cuBLASLt's workspace: {error}"))?;
        // SAFETY: reads a constant.
        let cublaslt = unsafe { sys::cublasLtGetVersion() };
        match file {
            Some(file) => tracing::info!("cuBLASLt {} from {}", version_in_words(cublaslt), file.display()),
            None => tracing::info!("cuBLASLt {}, found by the system's loader", version_in_words(cublaslt)),
        }
        let choices = if std::env::var_os("TANDEM_BLAS_TIMING").is_some_and(|v| v == "0") {
            None
        } else {
            let maker = Maker { card: facts.name.clone(), compute_capability: facts.compute_capability, cublaslt };
            let choices = Choices::of_user(maker);
            choices.inspect_err(|error| tracing::warn!("products are not timed: {error:#}")).ok()
        };
        let plans = Mutex::new(Plans { by_case: HashMap::new(), chosen: HashMap::new(), choices });
        Ok(Self { handle, workspace, context: Arc::clone(context), plans })
    }

    /// Name and version, for example `cuBLASLt 13.1.0`.
    pub fn describe(&self) -> String {
        // SAFETY: reads a constant.
        format!("cuBLASLt {}", version_in_words(unsafe { sys::cublasLtGetVersion() }))
    }

    /// Queues `c = alpha · a·b + beta · source` on the compute stream of `device`. The host waits for the device when a large shape is new.
    ///
    /// # Errors
    /// When the library has no algorithm for the shape or refuses the launch.
    pub(in crate::tensor::cuda) fn matmul(
        &self,
        device: &CudaDevice,
        driver: &Driver,
        shape: Shape,
        operands: Operands,
    ) -> Result<()> {
        self.queue(device, driver, shape, operands).with_context(|| format!("cuBLASLt for {shape:?}"))
    }

    fn queue(&self, device: &CudaDevice, driver: &Driver, mut shape: Shape, mut operands: Operands) -> Result<()> {
        if operands.beta == 0.0 {
            (operands.source, shape.ld_source) = (operands.c, shape.ldc);
        }
        let in_place = operands.source == operands.c;
        ensure!(!in_place || shape.ld_source == shape.ldc, "a source in place must lie as the result does");
        let case = Case::new(shape, &operands);
        let (product, algorithm) = {
            let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
            match plans.by_case.get(&case) {
                Some(plan) => plan.clone(),
                None => {
                    let product = Arc::new(Product::new(case)?);
                    let algorithm = self.choose(device, driver, &mut plans, &product, case, operands)?;
                    // Rows of experts differ from step to step: what was known of them once need not be kept for ever.
                    if plans.by_case.len() >= MAX_CASES {
                        plans.by_case.clear();
                    }
                    plans.by_case.insert(case, (Arc::clone(&product), algorithm));
                    (product, algorithm)
                }
            }
        };
        self.launch(device, driver, &product, algorithm, operands)
    }

    fn launch(
        &self,
        device: &CudaDevice,
        driver: &Driver,
        product: &Product,
        algorithm: Algorithm,
        operands: Operands,
    ) -> Result<()> {
        device.count_launch();
        product.launch(&self.handle, algorithm, operands, self.workspace, driver.stream.cu_stream().cast())
    }

    /// The algorithm for a case that is new in this process: of a large product the one chosen for its kind, by timing if nobody did so before;
    /// otherwise the library's first proposal.
    fn choose(
        &self,
        device: &CudaDevice,
        driver: &Driver,
        plans: &mut Plans,
        product: &Product,
        case: Case,
        operands: Operands,
    ) -> Result<Algorithm> {
        let kind = case.kind();
        let first = || self.first(product, case);
        let Some(choices) = plans.choices.as_ref().filter(|_| kind.is_timed()) else { return first() };
        if let Some(chosen) = plans.chosen.get(&kind).copied().or_else(|| choices.find(&kind)) {
            plans.chosen.insert(kind, chosen);
            return if product.accepts(&self.handle, chosen) { Ok(chosen) } else { first() };
        }
        let proposals = product.proposals(&self.handle)?;
        let Some(fastest) = timing::fastest(self, device, driver, product, &case.shape, operands, &proposals) else {
            return first();
        };
        match choices.keep(&kind, fastest) {
            Ok(kept) => {
                plans.chosen.insert(kind, kept);
                if kept == fastest || product.accepts(&self.handle, kept) { Ok(kept) } else { first() }
            }
            Err(error) => {
                // A choice that the next run does not know would change its bits.
                tracing::warn!("products are not timed, because a choice could not be kept: {error:#}");
                plans.choices = None;
                first()
            }
        }
    }

    /// The library's first proposal for the sizes of a case, or, where its strides do not allow that, for the case itself.
    fn first(&self, product: &Product, case: Case) -> Result<Algorithm> {
        let plain = Product::new(case.without_strides())?;
        let proposed = plain.proposals(&self.handle).ok().map(|proposals| proposals[0]);
        match proposed.filter(|&proposed| product.accepts(&self.handle, proposed)) {
            Some(proposed) => Ok(proposed),
            None => Ok(product.proposals(&self.handle)?[0]),
        }
    }
}

impl Drop for BlasLt {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `new`; the driver waits for work that uses it.
            let _ = unsafe { result::memory_free(self.workspace) };
        }
    }
}

/// `13.1.0` for 130100; before CUDA 12 the parts had fewer digits.
fn version_in_words(version: usize) -> String {
    let (major, rest) =
        if version < 100_000 { (version / 1000, version % 1000) } else { (version / 10_000, version % 10_000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const SHAPE: Shape = Shape {
        form: Form::Nt,
        m: 8192,
        n: 4096,
        k: 2048,
        lda: 2048,
        ldb: 2048,
        ldc: 6144,
        ld_source: 4096,
        out: DType::Bf16,
    };

    #[test]
    fn packs_of_about_one_length_share_a_choice() {
        let kind = |form, m, k| Case { shape: Shape { form, m, k, ..SHAPE }, alignment: 256 }.kind().shape;
        for m in [7169, 8000, 8191, 8192] {
            assert_eq!(kind(Form::Nt, m, 2048).m, 8192);
            assert_eq!((kind(Form::Nn, m, 2048).m, kind(Form::Nn, m, 2048).k), (8192, 2048));
            // In gradients of weights the tokens are what is summed over.
            assert_eq!((kind(Form::Tn, 2047, m).m, kind(Form::Tn, 2047, m).k), (2047, 8192));
        }
        assert_eq!((kind(Form::Nt, 7168, 2047).m, kind(Form::Nt, 8193, 2047).m), (7168, 10_240));
        assert_eq!(kind(Form::Nt, 8192, 2047).k, 2047);
        for m in 1..=16 {
            let rounded = kind(Form::Nt, m, 1).m;
            assert!(rounded >= m && (m > 8 || rounded == m), "{m}: {rounded}");
        }
    }

    #[test]
    fn choices_do_not_depend_on_strides() {
        let case = |form, lda, ldb, ldc, ld_source| Case {
            shape: Shape { form, lda, ldb, ldc, ld_source, ..SHAPE },
            alignment: 256,
        };
        for form in [Form::Nt, Form::Nn, Form::Tn] {
            let kind = case(form, 8256, 4160, 8192, 4096).kind();
            assert_eq!(kind, case(form, 8192, 4096, 4160, 4096).kind());
            assert!(kind.shape.lda >= 2048 && kind.shape.ldc >= kind.shape.n);
        }
    }

    #[test]
    fn alignment_is_that_of_the_worst_address() {
        let operands = Operands { a: 512, b: 1024, c: 4096, source: 4096, alpha: 1.0, beta: 0.0 };
        let alignment = |operands| Case::new(SHAPE, &operands).alignment;
        assert_eq!(alignment(operands), 256);
        assert_eq!(alignment(Operands { c: 4096 + 64, ..operands }), 64);
        assert_eq!(alignment(Operands { source: 4096 + 128, a: 512 + 2, ..operands }), 2);
    }

    #[test]
    fn small_products_are_not_timed() {
        let timed = |m, n, k| Case { shape: Shape { m, n, k, ..SHAPE }, alignment: 256 }.is_timed();
        assert!(timed(8192, 4096, 4096) && timed(1000, 1000, 50) && timed(8192, 16, 2048));
        assert!(!timed(1000, 1000, 49) && !timed(1, 4096, 4096));
    }

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!([130_100, 120_803, 11_111].map(version_in_words), ["13.1.0", "12.8.3", "11.1.11"]);
    }
}
