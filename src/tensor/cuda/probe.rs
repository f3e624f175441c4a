//! What the machine's CUDA driver and card can do, found without ever panicking.

use std::sync::Arc;

use anyhow::Context as _;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, result, sys};

use crate::base::error::Result;

/// Driver functions the engine calls. cudarc looks each up at its first use and panics when it is missing, so they are checked first.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemGetInfo_v2",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuTensorMapEncodeTiled",
    "cuGraphInstantiateWithFlags",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphEventRecordNodeGetEvent",
    "cuGraphExecEventRecordNodeSetEvent",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

/// Functions of which either spelling will do: newer drivers carry both.
const EITHER: &[(&str, &str)] = &[("cuEventElapsedTime", "cuEventElapsedTime_v2")];

/// Oldest driver interface that loads the embedded kernels (CUDA 12.0).
const MIN_DRIVER: i32 = 12_000;

/// Facts about a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Name the driver gives it.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Multiprocessors.
    pub num_sms: u32,
    /// Memory, in bytes.
    pub vram_bytes: u64,
    /// Whether it shares the host's memory.
    pub integrated: bool,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
    /// Shared memory one block may ask for, in bytes; 99 KiB when `TANDEM_TILES=86` asks for a laptop's path.
    pub max_shared_bytes: u32,
    /// Driver interface, for example 13000 for CUDA 13.0.
    pub driver_version: i32,
    /// Whether `TANDEM_TILES=86` forces compute_86 code.
    pub laptop_tiles: bool,
}

impl DeviceFacts {
    /// A card of which only the memory is known, for plans: in the rest like a small one of the RTX 40 series.
    pub fn assumed(vram_bytes: u64) -> Self {
        Self {
            name: format!("a card of {}", crate::base::units::bytes(vram_bytes)),
            compute_capability: (8, 9),
            num_sms: 24,
            vram_bytes,
            integrated: false,
            l2_bytes: 32 << 20,
            max_shared_bytes: 99 << 10,
            driver_version: MIN_DRIVER,
            laptop_tiles: false,
        }
    }
}

/// Whether the driver can be used at all.
///
/// # Errors
/// The reason in words.
pub fn driver() -> Result<(), String> {
    // SAFETY: tries to open the library, nothing else.
    if !unsafe { sys::is_culib_present() } {
        return Err("no NVIDIA driver is installed (libcuda was not found)".into());
    }
    // SAFETY: the library is present, so this does not panic.
    let library = unsafe { sys::culib() };
    // SAFETY: the symbol is only looked up, never called through this type.
    let has = |name: &str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok();
    let either = |name: &str| EITHER.iter().any(|(a, b)| (name == *a && has(b)) || (name == *b && has(a)));
    let missing: Vec<&str> = NEEDED.iter().copied().filter(|name| !has(name) && !either(name)).collect();
    if !missing.is_empty() {
        return Err(format!("the NVIDIA driver is too old: it lacks {}; update it", missing.join(", ")));
    }
    let words = |error: cudarc::driver::DriverError| {
        format!("the NVIDIA driver did not start: {error}; reinstall or reload it")
    };
    result::init().map_err(words)?;
    let version = driver_version().map_err(|error| format!("{error:#}"))?;
    if version < MIN_DRIVER {
        return Err(format!(
            "the NVIDIA driver supports CUDA {}.{}, Tandem needs 12.0: update the driver",
            version / 1000,
            version % 1000 / 10
        ));
    }
    match result::device::get_count().map_err(words)? {
        0 => Err("the NVIDIA driver sees no GPU".into()),
        _ => Ok(()),
    }
}

fn driver_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().context("asking for the driver's version")?;
    Ok(version)
}

/// Facts about the card of `context`.
///
/// # Errors
/// When the driver does not answer.
pub fn facts(context: &Arc<CudaContext>) -> Result<DeviceFacts> {
    let attribute = |attribute| context.attribute(attribute).context("asking the driver about the card");
    let (major, minor) = context.compute_capability().context("asking for the compute capability")?;
    let laptop_tiles = match std::env::var("TANDEM_TILES") {
        Err(_) => false,
        Ok(value) if value.is_empty() => false,
        Ok(value) if value == "86" => true,
        Ok(value) => anyhow::bail!("TANDEM_TILES={value}: the only forced tile set is 86"),
    };
    let shared = super::driver::max_shared_bytes(context)?;
    Ok(DeviceFacts {
        name: context.name().context("asking for the card's name")?,
        compute_capability: (major as u32, minor as u32),
        num_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        vram_bytes: context.total_mem().context("asking for the card's memory")? as u64,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
        max_shared_bytes: if laptop_tiles { shared.min(99 << 10) } else { shared },
        driver_version: driver_version()?,
        laptop_tiles,
    })
}
