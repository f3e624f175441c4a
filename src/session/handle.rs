//! Starting a run on its own thread, and what the owner of a run holds: its events, its commands, its end.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;

use super::config::RunConfig;
use super::event::{Command, NoteLevel, Outcome, RunEvent, TimedEvent};
use super::event_sink::EventSink;
pub use super::event_sink::RunWaker;
use super::run_folder::RunFolder;
use super::store::Store;
use super::{run_loop, starter};
use crate::base::error::Result;
use crate::train::report::Optimization;

/// Events that may wait for the view: minutes of a fast run.
const VIEW_QUEUE: usize = 16_384;

/// What a run asks whether somebody wants something of it.
#[derive(Debug, Clone, Default)]
pub struct Control {
    /// Raised once to end the run.
    stop: Arc<AtomicBool>,
    /// Raised to save; lowered by the run when it does.
    save_now: Arc<AtomicBool>,
    /// Optimizations to switch before the next step, in order.
    switches: Arc<Mutex<Vec<(Optimization, bool)>>>,
}

impl Control {
    /// The stop flag, for those who look at it often.
    pub fn stop_flag(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// Whether the run is to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether a save was asked for since the last call.
    pub fn take_save_now(&self) -> bool {
        self.save_now.swap(false, Ordering::Relaxed)
    }

    /// What is to be switched, since the last call.
    pub fn take_switches(&self) -> Vec<(Optimization, bool)> {
        std::mem::take(&mut self.switches.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What the training thread works with.
pub struct RunContext {
    /// The configuration, with its paths absolute and the starter found.
    pub config: RunConfig,
    /// The run's folder.
    pub folder: PathBuf,
    /// Takes the run's events.
    pub sink: EventSink,
    /// What was asked of the run.
    pub control: Control,
    /// Steps done so far, for the last event.
    pub steps_done: AtomicU64,
}

/// A run that was started.
///
/// Dropping it stops the run and waits until what was trained is saved.
pub struct RunHandle {
    folder: PathBuf,
    control: Control,
    sink: EventSink,
    events: Receiver<TimedEvent>,
    thread: Option<JoinHandle<()>>,
}

impl RunHandle {
    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Asks something of the run; it answers by events.
    pub fn send(&self, command: Command) {
        match command {
            Command::Stop => {
                if !self.control.stop.swap(true, Ordering::Relaxed) {
                    self.sink.emit(RunEvent::Stopping);
                }
            }
            Command::SaveNow => self.control.save_now.store(true, Ordering::Relaxed),
            Command::Switch { optimization, on } => {
                // The last word on an optimization counts, so that there are no more than optimizations.
                let mut switches = self.control.switches.lock().unwrap_or_else(PoisonError::into_inner);
                switches.retain(|(other, _)| *other != optimization);
                switches.push((optimization, on));
            }
        }
    }

    /// Takes events that have come, at most `max`, without waiting.
    pub fn drain(&self, max: usize) -> Vec<TimedEvent> {
        self.events.try_iter().take(max).collect()
    }

    /// Takes the next event, waiting for it at most for `patience`; `None` when none came.
    pub fn next_event(&self, patience: Duration) -> Option<TimedEvent> {
        self.events.recv_timeout(patience).ok()
    }

    /// Whether the run's thread has ended; its last events may still wait to be drained.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the end of the run; events stay to be drained. Does not stop it.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches panics itself and reports them as its last event.
            let _ = thread.join();
        }
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        if !self.is_finished() {
            self.send(Command::Stop);
        }
        self.join();
    }
}

/// Starts a run: makes its folder and trains on a thread of its own.
///
/// `waker` is called, from another thread and at most every 100 ms, when there are events to drain.
///
/// # Errors
/// When the configuration is not valid, the starter model is meant and not on this machine, or the run's folder cannot
/// be made. Everything later is told by the run's events.
pub fn start(config: RunConfig, waker: Option<RunWaker>) -> Result<RunHandle> {
    start_body(starter::resolved(&config)?, waker, run_loop::run)
}

/// Makes a run folder and starts `body` on the training thread.
///
/// # Errors
/// When the configuration is not valid, or the folder, the store or the thread cannot be made.
pub(super) fn start_body(
    config: RunConfig,
    waker: Option<RunWaker>,
    body: impl FnOnce(&RunContext) -> Result<Outcome> + Send + 'static,
) -> Result<RunHandle> {
    config.validate()?;
    let run_folder = RunFolder::create(&config)?;
    let folder = run_folder.path().to_owned();
    let (view, events) = sync_channel(VIEW_QUEUE);
    let sink = EventSink::new(Store::create(&folder)?, view, waker)?;
    let control = Control::default();
    let context = RunContext {
        config,
        folder: folder.clone(),
        sink: sink.clone(),
        control: control.clone(),
        steps_done: AtomicU64::new(0),
    };
    let thread = Builder::new()
        .name("tandem-train".into())
        .spawn(move || {
            let result = catch_unwind(AssertUnwindSafe(|| body(&context)));
            let outcome = match result {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
                Err(panic) => Outcome::Failed(format!("internal error: {}", panic_text(panic.as_ref()))),
            };
            if let Outcome::Failed(text) = &outcome {
                context.sink.note(NoteLevel::Error, text.clone());
            }
            let steps = context.steps_done.load(Ordering::Relaxed);
            context.sink.emit(RunEvent::Finished { outcome, steps });
            if let Err(error) = context.sink.close_store() {
                context.sink.note(NoteLevel::Error, format!("{error:#}"));
            }
            // Held until the store is complete, so that nobody takes the run for an interrupted one.
            drop(run_folder);
            context.sink.wake();
        })
        .context("cannot start the training thread")?;
    Ok(RunHandle { folder, control, sink, events, thread: Some(thread) })
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "a panic without a message".into()
    }
}

#[cfg(test)]
mod tests;
