//! CUDA graphs: work that was queued once, recorded instead of done, and launched as a whole from then on.
//!
//! A recorded kernel has its arguments by value, so a graph does the same work on the same addresses every time. Nothing in it may upload, wait or
//! read back; what tries to is latched as an error, and the recording is given up. Copy lanes take part once they wait for an event of the compute
//! stream, and must be joined by it before the end. Timing events are nodes of their own, and a launch chooses where
//! each of them records: so one executable graph serves every step.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use anyhow::{Context as _, anyhow, ensure};
use cudarc::driver::sys::{
    self, CUevent, CUevent_record_flags, CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUgraphNode, CUgraphNodeType,
    CUstreamCaptureMode,
};
use cudarc::driver::{CudaEvent, DriverError, result};

use super::driver::Driver;
use super::{CudaDevice, EventHandle};
use crate::base::error::Result;
use crate::tensor::phase::LaneKind;

/// What is noted while a graph is recorded: the events that were recorded, in order.
#[derive(Debug, Default)]
pub(super) struct Capture {
    events: Vec<EventHandle>,
}

/// Recorded work.
pub struct Graph {
    /// `None` on a recording device, where there is nothing to do.
    nodes: Option<Nodes>,
    launches: u64,
    device: CudaDevice,
}

/// What the driver has of a graph.
struct Nodes {
    // Dropped in this order. A launch that is under way is finished all the same: the driver frees the executable graph behind it.
    exec: Executable,
    _template: Template,
    /// The nodes of the template that record an event, in the order in which they were recorded.
    marks: Vec<CUgraphNode>,
}

/// The graph that the executable one was made of; its nodes name those of the executable one.
struct Template(CUgraph);

struct Executable(CUgraphExec);

// SAFETY: the driver's handles have no ties to a thread; a graph is used by one thread at a time, because launching takes `&mut self`.
unsafe impl Send for Nodes {}
// SAFETY: a shared reference reads two numbers.
unsafe impl Sync for Nodes {}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (launches, marks) = (self.launches, self.nodes.as_ref().map_or(0, |nodes| nodes.marks.len()));
        f.debug_struct("Graph").field("launches", &launches).field("marks", &marks).finish_non_exhaustive()
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        // SAFETY: made by the driver for this value, destroyed once.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // For the parts, which are dropped next. Without a context there is nothing left to destroy.
        if let Some(driver) = self.device.driver() {
            let _ = driver.context.bind_to_thread();
        }
    }
}

impl CudaDevice {
    /// Records what `work` queues on the compute stream instead of doing it, and gives it with what `work` returned. Launches that `work` counted
    /// are taken off again: each launch of the graph counts them.
    ///
    /// # Errors
    /// When something in `work` failed or cannot be recorded, or the driver refuses the graph. Nothing was done then, and no error stays latched.
    pub fn capture<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Graph)> {
        ensure!(!self.has_failed(), "the device has failed before");
        let launches_before = self.counters().launches;
        *self.lock_capture() = Some(Capture::default());
        let Some(driver) = self.driver() else {
            let returned = work();
            *self.lock_capture() = None;
            let launches = self.take_off_launches(launches_before);
            self.check()?;
            return Ok((returned, Graph { nodes: None, launches, device: self.clone() }));
        };
        let stream = driver.stream.cu_stream();
        // SAFETY: the stream is the engine's own and not in capture. Relaxed, because the arena may ask the driver for memory in between.
        let begun =
            unsafe { result::stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) };
        if let Err(error) = begun {
            *self.lock_capture() = None;
            return Err(anyhow!(error).context("the driver does not record the stream"));
        }
        let returned = work();
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: begun above, on the same stream.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) }.result();
        let template = (!graph.is_null()).then_some(Template(graph));
        let Capture { events } = self.lock_capture().take().unwrap_or_default();
        let launches = self.take_off_launches(launches_before);
        // What was latched says more than the driver's word for a recording that broke off.
        self.check()?;
        ended.context("the driver could not record the stream")?;
        let template = template.context("the driver recorded nothing")?;
        let marks = marks(&template, &events)?;
        // SAFETY: the graph was just recorded.
        let exec = unsafe { result::graph::instantiate(template.0, CUgraphInstantiate_flags(0)) };
        let exec = Executable(exec.context("the driver refused the recorded graph")?);
        let nodes = Some(Nodes { exec, _template: template, marks });
        Ok((returned, Graph { nodes, launches, device: self.clone() }))
    }

    /// Uncounts the launches since there were `before`, and gives their number.
    fn take_off_launches(&self, before: u64) -> u64 {
        let launches = self.counters().launches - before;
        self.inner.counters.launches.fetch_sub(launches, Ordering::Relaxed);
        launches
    }

    /// Whether a graph is being recorded.
    pub(super) fn is_capturing(&self) -> bool {
        self.lock_capture().is_some()
    }

    /// Latches an error if a graph is being recorded, in which `what` has no place.
    pub(super) fn refuses_while_capturing(&self, what: &'static str) -> bool {
        let refuses = self.is_capturing();
        if refuses {
            self.latch(anyhow!("{what} cannot be part of a recorded graph"));
        }
        refuses
    }

    /// Records an event on a lane's stream; in a graph as a node whose event a launch can choose.
    pub(super) fn record_event(&self, driver: &Driver, event: &CudaEvent, lane: LaneKind) -> Result<(), DriverError> {
        let stream = driver.lane(lane);
        let mut capture = self.lock_capture();
        let Some(capture) = &mut *capture else { return event.record(stream) };
        let flags = CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: the event lives as long as the clock that owns it.
        unsafe { sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), flags) }.result()?;
        capture.events.push(EventHandle::of(event));
        Ok(())
    }

    fn lock_capture(&self) -> MutexGuard<'_, Option<Capture>> {
        self.inner.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Graph {
    /// Queues the recorded work. Its marks record into `events`, one for each in their order.
    pub fn launch(&mut self, events: &[EventHandle]) {
        let device = &self.device;
        if device.has_failed() {
            return;
        }
        let Some((driver, Nodes { exec, marks, .. })) = device.driver().zip(self.nodes.as_ref()) else {
            device.inner.counters.launches.fetch_add(self.launches, Ordering::Relaxed);
            return;
        };
        assert_eq!(events.len(), marks.len(), "events for the marks of a graph");
        for (&node, event) in marks.iter().zip(events) {
            // SAFETY: a node of the template that the executable graph was made of, and an event that lives as long as the clock that owns it.
            // Launches that are under way keep the events they have.
            let set = unsafe { sys::cuGraphExecEventRecordNodeSetEvent(exec.0, node, event.get()) };
            if device.latch_result(set.result(), "choosing the events of a graph").is_none() {
                return;
            }
        }
        device.inner.counters.launches.fetch_add(self.launches, Ordering::Relaxed);
        // SAFETY: addresses in the graph are those of parameters, gradients, and memory that its owner keeps for it.
        let launched = unsafe { result::graph::launch(exec.0, driver.stream.cu_stream()) };
        device.latch_result(launched, "launching a graph");
    }
}

/// The nodes of a graph that record `events`, in their order.
fn marks(Template(graph): &Template, events: &[EventHandle]) -> Result<Vec<CUgraphNode>> {
    let mut num_nodes = 0;
    // SAFETY: without an array the driver writes the number of nodes.
    unsafe { sys::cuGraphGetNodes(*graph, std::ptr::null_mut(), &mut num_nodes) }.result().context("counting nodes")?;
    let mut nodes: Vec<CUgraphNode> = vec![std::ptr::null_mut(); num_nodes];
    if num_nodes > 0 {
        // SAFETY: the array has room for as many.
        unsafe { sys::cuGraphGetNodes(*graph, nodes.as_mut_ptr(), &mut num_nodes) }
            .result()
            .context("listing nodes")?;
    }
    let mut by_event: HashMap<CUevent, CUgraphNode> = HashMap::with_capacity(events.len());
    for node in nodes {
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of the graph; one value is written.
        unsafe { sys::cuGraphNodeGetType(node, &mut kind) }.result().context("asking for a node's type")?;
        if kind == CUgraphNodeType::CU_GRAPH_NODE_TYPE_EVENT_RECORD {
            let mut event: CUevent = std::ptr::null_mut();
            // SAFETY: as above, a node of that type.
            unsafe { sys::cuGraphEventRecordNodeGetEvent(node, &mut event) }.result().context("asking for an event")?;
            by_event.insert(event, node);
        }
    }
    ensure!(by_event.len() == events.len(), "{} of {} timing events were recorded", by_event.len(), events.len());
    let node = |event: &EventHandle| by_event.get(&event.get()).copied().context("a timing event was not recorded");
    events.iter().map(node).collect()
}
