//! A comparison on a thread of its own, and what its owner holds: its events, its end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::report::{CompareEvent, CompareOptions};
use super::{Subject, compare_all};
use crate::base::error::Result;
use crate::data::loader::{Cursor, LoaderPlan};
use crate::data::pack::PackedBatch;
use crate::session::config::RunConfig;
use crate::session::event_sink::{RunWaker, spawn_waker};
use crate::session::handle::panic_text;
use crate::session::run_loop::preparing::{self, Listener, Loaded};
use crate::session::{run_folder, starter};

/// Events that may wait for the view.
const QUEUE: usize = 1024;

/// A comparison that was started. Dropping it stops the comparison after the current micro-batch.
pub struct CompareHandle {
    stop: Arc<AtomicBool>,
    /// Taken when it is dropped, so that nobody waits for room on the queue.
    events: Option<Receiver<CompareEvent>>,
    thread: Option<JoinHandle<()>>,
}

impl CompareHandle {
    /// Ends it after the current micro-batch; the pairs that were done are told as its result.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Takes events that have come, at most `max`, without waiting.
    pub fn drain(&self, max: usize) -> Vec<CompareEvent> {
        self.events.iter().flat_map(Receiver::try_iter).take(max).collect()
    }

    /// Takes the next event, waiting for it at most for `patience`; `None` when none came.
    pub fn next_event(&self, patience: Duration) -> Option<CompareEvent> {
        self.events.as_ref()?.recv_timeout(patience).ok()
    }

    /// Whether the comparison's thread has ended; its last events may still wait to be drained.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for CompareHandle {
    fn drop(&mut self) {
        self.stop();
        self.events = None;
        if let Some(thread) = self.thread.take() {
            // The thread catches panics itself.
            let _ = thread.join();
        }
    }
}

/// Starts the comparisons that `options` names, on the model and the data of a configuration. Nothing is written anywhere.
///
/// `waker` is called, from another thread and at most every 100 ms, when there are events to drain.
///
/// # Errors
/// When the configuration or the options are not valid, the starter model is meant and not on this machine, or the thread cannot be made. Everything
/// later is told by events.
pub fn start(config: RunConfig, options: CompareOptions, waker: Option<RunWaker>) -> Result<CompareHandle> {
    let config = starter::resolved(&config)?;
    config.validate()?;
    options.check()?;
    let (sender, events) = sync_channel(QUEUE);
    let wake = waker.map(spawn_waker).transpose()?;
    let teller = Teller { sender, wake };
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let thread = Builder::new()
        .name("tandem-compare".into())
        .spawn(move || {
            let failed = match catch_unwind(AssertUnwindSafe(|| run(&config, &options, &teller, &stopping))) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(format!("{error:#}")),
                Err(panic) => Some(format!("internal error: {}", panic_text(panic.as_ref()))),
            };
            if let Some(text) = failed {
                teller.tell(CompareEvent::Failed { text });
            }
        })
        .context("cannot start the comparison's thread")?;
    Ok(CompareHandle { stop, events: Some(events), thread: Some(thread) })
}

/// Where events go.
struct Teller {
    sender: SyncSender<CompareEvent>,
    wake: Option<tokio::sync::mpsc::Sender<()>>,
}

impl Teller {
    fn tell(&self, event: CompareEvent) {
        let passes = matches!(event, CompareEvent::Preparing { .. } | CompareEvent::Progress { .. });
        // What the next event of its kind says better may be lost on a view that does not keep up; a result may not. A view that is gone misses nothing.
        if passes {
            drop(self.sender.try_send(event))
        } else {
            drop(self.sender.send(event))
        }
        if let Some(wake) = &self.wake {
            // Full means that a call is due already.
            let _ = wake.try_send(());
        }
    }
}

fn run(config: &RunConfig, options: &CompareOptions, teller: &Teller, stop: &AtomicBool) -> Result<()> {
    let stage = |stage: &str, done, total| teller.tell(CompareEvent::Preparing { stage: stage.into(), done, total });
    let note = |_, text| teller.tell(CompareEvent::Note { text });
    let loaded = preparing::load(config, Listener { stage: &stage, note: &note }, stop)?;
    let Some(Loaded { mut trainer, data, .. }) = loaded else { return Ok(()) };
    let model = run_folder::short_name(&config.model.path);
    let batches = first_steps(&data.plan, options.num_steps())?;
    let subject = Subject { model: &model, batches: &batches };
    compare_all(&mut trainer, subject, options, &|event| teller.tell(event), stop)
}

/// The micro-batches of the first `num_steps` steps of a run; a shorter run begins again.
fn first_steps(plan: &LoaderPlan, num_steps: usize) -> Result<Vec<Vec<PackedBatch>>> {
    let mut loader = plan.start(Cursor::default())?;
    let mut steps = Vec::with_capacity(num_steps);
    while steps.len() < num_steps
        && let Some(step) = loader.next_step()?
    {
        steps.push(step.batches);
    }
    if steps.is_empty() {
        bail!("the run has no step to compare");
    }
    Ok(steps.iter().cycle().take(num_steps).cloned().collect())
}
