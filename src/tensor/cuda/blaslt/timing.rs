//! Times the algorithms that cuBLASLt proposes for a product, on the real operands.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::choices::Algorithm;
use super::plan::Product;
use super::{BlasLt, Operands, Shape};
use crate::tensor::cuda::CudaDevice;

/// Runs that are timed, after one that is not.
const RUNS: usize = 3;

/// The fastest of `algorithms` by its best run. The results go to a buffer of their own, so `c` stays as it is. `None` where there is no memory for
/// that, or where nothing could be timed. The host waits for the device once.
pub fn fastest(
    blas: &BlasLt,
    device: &CudaDevice,
    product: &Product,
    shape: &Shape,
    operands: Operands,
    algorithms: &[Algorithm],
) -> Option<Algorithm> {
    let scratch = device.try_alloc(shape.m * shape.ldc * shape.out.num_bytes())?;
    let operands = Operands { c: scratch.pointer(), ..operands };
    let timed: Vec<(Algorithm, Vec<CudaEvent>)> = algorithms
        .iter()
        .filter_map(|&algorithm| Some((algorithm, time(blas, device, product, operands, algorithm)?)))
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
    product: &Product,
    operands: Operands,
    algorithm: Algorithm,
) -> Option<Vec<CudaEvent>> {
    blas.launch(device, product, algorithm, operands).ok()?;
    let mut events = Vec::with_capacity(RUNS + 1);
    for run in 0..=RUNS {
        if run > 0 {
            blas.launch(device, product, algorithm, operands).ok()?;
        }
        let event = device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).ok()?;
        event.record(device.stream()).ok()?;
        events.push(event);
    }
    Some(events)
}
