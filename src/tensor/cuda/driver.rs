//! The driver's side of a device: context, streams, kernels, matrix library, memory to upload from.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, anyhow};
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction, CUfunction_attribute};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};

use super::blaslt::BlasLt;
use super::pinned::PinnedSource;
use super::probe::{self, DeviceFacts};
use super::staging::Staging;
use super::{Launch, images};
use crate::base::error::Result;
use crate::tensor::phase::LaneKind;

/// What a device has of the CUDA driver.
pub(super) struct Driver {
    pub context: Arc<CudaContext>,
    /// The stream that all compute runs on.
    pub stream: Arc<CudaStream>,
    /// Streams of copies to the host and to the device, beside compute.
    copy_streams: [Arc<CudaStream>; 2],
    /// Kernel functions by name, from every embedded image.
    functions: HashMap<String, Function>,
    /// The vendor's matrix library, or why the own kernels serve.
    pub blas: Result<BlasLt, String>,
    pub staging: Mutex<Staging>,
}

/// A loaded kernel.
#[derive(Debug, Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a function handle is a name for code in a loaded module; the driver allows launches from any thread that has the context.
unsafe impl Send for Function {}
// SAFETY: as above; launching does not change the handle.
unsafe impl Sync for Function {}

impl Driver {
    /// Opens the first GPU. Page-locked memory is booked with `pinned`, which the context is given to.
    ///
    /// # Errors
    /// When the driver refuses something, or this build has no kernels for the card.
    pub(super) fn open() -> Result<(Self, DeviceFacts, PinnedSource)> {
        let context = CudaContext::new(0).context("the CUDA driver refused a context")?;
        // SAFETY: every buffer of this engine is ordered by its own streams and events; cudarc's tracking is not needed.
        unsafe { context.disable_event_tracking() };
        let facts = probe::facts(&context)?;
        let new_stream = || context.new_stream().context("the CUDA driver refused a stream");
        let (stream, copy_streams) = (new_stream()?, [new_stream()?, new_stream()?]);
        let functions = load_functions(&context, &facts)?;
        let blas = BlasLt::new(&context, &facts);
        if let Err(reason) = &blas {
            tracing::info!("Tandem's own kernels compute matrix products: {reason}");
        }
        let pinned = PinnedSource::of_driver(&context);
        let staging = Staging::new(&context, &pinned).context("the CUDA driver refused page-locked memory")?;
        let driver = Self { context, stream, copy_streams, functions, blas, staging: Mutex::new(staging) };
        Ok((driver, facts, pinned))
    }

    /// The stream of a lane: those of copies run beside compute and order nothing by themselves.
    pub(super) fn lane(&self, lane: LaneKind) -> &CudaStream {
        match lane {
            LaneKind::D2h => &self.copy_streams[0],
            LaneKind::H2d => &self.copy_streams[1],
            _ => &self.stream,
        }
    }

    /// Bytes the driver says are in use on the card, by everybody.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        self.context.bind_to_thread().ok()?;
        let (free, total) = result::mem_get_info().ok()?;
        Some((total - free) as u64)
    }

    /// Queues kernel `name` on the compute stream.
    ///
    /// # Errors
    /// When there is no such kernel, or the driver refuses the launch.
    pub(super) fn launch(&self, name: &str, launch: Launch, args: &mut [*mut c_void]) -> Result<()> {
        let function = self
            .functions
            .get(name)
            .with_context(|| format!("this build has no kernel {name}; `cargo xtask kernels` builds them"))?;
        let [x, y, z] = launch.grid;
        // SAFETY: the caller passes the arguments that the kernel's signature asks for (checked by the operation tests), and the
        // buffers behind them live until the stream has passed this launch, because the arena reuses memory in stream order.
        let status = unsafe {
            sys::cuLaunchKernel(
                function.0,
                x,
                y,
                z,
                launch.block,
                1,
                1,
                launch.shared_bytes,
                self.stream.cu_stream(),
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        status.result().map_err(|error| anyhow!(error).context(format!("launching {name} with {launch:?}")))
    }

    /// Lets kernel `name`, if there is one, use up to `bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(super) fn allow_shared_bytes(&self, name: &str, bytes: u32) -> Result<(), DriverError> {
        let Some(function) = self.functions.get(name) else { return Ok(()) };
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the handle belongs to a module that lives as long as the context.
        unsafe { sys::cuFuncSetAttribute(function.0, attribute, bytes as i32) }.result()
    }
}

/// Loads every embedded image and looks up the kernels that it names.
fn load_functions(context: &Arc<CudaContext>, facts: &DeviceFacts) -> Result<HashMap<String, Function>> {
    let mut functions = HashMap::new();
    for image in images::for_device(facts)? {
        // SAFETY: the bytes are a complete cubin, or PTX with a final NUL, made by the kernel compiler; the module is never unloaded,
        // so the functions live as long as the process.
        let module = unsafe { result::module::load_data(image.bytes.as_ptr().cast()) };
        let module =
            module.with_context(|| format!("the driver refused the kernels of {} for {}", image.name, image.target))?;
        for kernel in &image.kernels {
            let name = CString::new(kernel.as_str()).context("a kernel name with a NUL")?;
            // SAFETY: the module was just loaded.
            let function = unsafe { result::module::get_function(module, name) };
            let function =
                function.with_context(|| format!("kernel {kernel} is missing in the image of {}", image.name))?;
            functions.insert(kernel.clone(), Function(function));
        }
    }
    context.check_err().context("loading kernels")?;
    Ok(functions)
}

/// Shared memory that one block may ask for on this card, in bytes.
pub(super) fn max_shared_bytes(context: &CudaContext) -> Result<u32> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    Ok(context.attribute(attribute).context("asking for the shared memory limit")? as u32)
}
