//! Times the algorithms that cuBLASLt proposes for a product, on the real operands.

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, result};

use super::choices::Algorithm;
use super::plan::Product;
use super::{BlasLt, Operands, Shape};
use crate::tensor::cuda::driver::Driver;
use crate::tensor::cuda::{CudaBuffer, CudaDevice};

/// Runs that are timed, after one that is not.
const RUNS: usize = 3;

/// Memory for results that nobody reads: of what the engine has free, or else from the driver for as long as it takes.
enum Scratch<'a> {
    Free(CudaBuffer),
    Driver(u64, &'a CudaDevice),
}

impl<'a> Scratch<'a> {
    fn new(device: &'a CudaDevice, driver: &Driver, bytes: usize) -> Option<Self> {
        if let Some(buffer) = device.try_alloc_within(bytes) {
            return Some(Self::Free(buffer));
        }
        driver.context.bind_to_thread().ok()?;
        // SAFETY: a plain allocation, freed in `drop`.
        let allocated = (bytes as u64 <= device.room()).then(|| unsafe { result::malloc_sync(bytes) });
        Some(Self::Driver(allocated?.ok()?, device))
    }

    fn pointer(&self) -> u64 {
        match self {
            Self::Free(buffer) => buffer.pointer(),
            Self::Driver(pointer, _) => *pointer,
        }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if let Self::Driver(pointer, device) = self {
            device.bind();
            // SAFETY: allocated in `new`; the driver waits for work that uses it.
            let _ = unsafe { result::memory_free(*pointer) };
        }
    }
}

/// The fastest of `algorithms` by its best run. Where `c` is assigned the runs write there, what the product itself writes again; where it is added
/// to they write to memory that is free, so that it stays as it is. `None` where there is no memory for that, or where nothing could be timed. The
/// host waits for the device once.
pub(super) fn fastest(
    blas: &BlasLt,
    device: &CudaDevice,
    driver: &Driver,
    product: &Product,
    shape: &Shape,
    operands: Operands,
    algorithms: &[Algorithm],
) -> Option<Algorithm> {
    // Timing must not let an arena grow: a run would keep that memory.
    let adds_in_place = operands.beta != 0.0 && operands.source == operands.c;
    let scratch = adds_in_place.then(|| Scratch::new(device, driver, shape.m * shape.ldc * shape.out.num_bytes()));
    let operands = match scratch {
        Some(ref scratch) => Operands { c: scratch.as_ref()?.pointer(), ..operands },
        None => operands,
    };
    let timed: Vec<(Algorithm, Vec<CudaEvent>)> = algorithms
        .iter()
        .filter_map(|&algorithm| Some((algorithm, time(blas, device, driver, product, operands, algorithm)?)))
        .collect();
    device.synchronize();
    let best_ms = |events: &[CudaEvent]| {
        let runs = events.windows(2).filter_map(|pair| pair[0].elapsed_ms(&pair[1]).ok());
        runs.min_by(f32::total_cmp)
    };
    let best = timed.iter().filter_map(|(algorithm, events)| Some((best_ms(events)?, algorithm)));
    // Of equal ones the first: the library's own order.
    best.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, algorithm)| *algorithm)
}

/// Queues one run, then [`RUNS`] runs with an event before, between and after them. `None` when a launch is refused.
fn time(
    blas: &BlasLt,
    device: &CudaDevice,
    driver: &Driver,
    product: &Product,
    operands: Operands,
    algorithm: Algorithm,
) -> Option<Vec<CudaEvent>> {
    blas.launch(device, driver, product, algorithm, operands).ok()?;
    let mut events = Vec::with_capacity(RUNS + 1);
    for run in 0..=RUNS {
        if run > 0 {
            blas.launch(device, driver, product, algorithm, operands).ok()?;
        }
        let event = driver.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).ok()?;
        event.record(&driver.stream).ok()?;
        events.push(event);
    }
    Some(events)
}
