//! Copy lanes and events: work that runs beside compute, in order, and the marks to wait for.
//!
//! On the CPU a lane is a named thread. It shows and tests the order of copies; it cannot make a CPU faster.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};

use crate::base::error::Result;

/// A point in a lane's work that others can wait for.
#[derive(Debug, Clone, Default)]
pub struct Event {
    state: Arc<(Mutex<bool>, Condvar)>,
}

impl Event {
    /// Whether the point was reached.
    pub fn is_done(&self) -> bool {
        *self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the point is reached.
    pub fn wait(&self) {
        let done = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.state.1.wait_while(done, |done| !*done).unwrap_or_else(PoisonError::into_inner));
    }

    fn signal(&self) {
        *self.state.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.state.1.notify_all();
    }
}

/// Signals an event when it is dropped.
struct Signal(Event);

impl Drop for Signal {
    fn drop(&mut self) {
        self.0.signal();
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// A queue of copies that runs beside compute, one after another.
#[derive(Debug)]
pub struct CopyLane {
    sender: Option<SyncSender<(Job, Event)>>,
    thread: Option<JoinHandle<()>>,
}

impl CopyLane {
    /// Starts a lane; `name` becomes its thread's name.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub fn new(name: &str) -> Result<Self> {
        let (sender, receiver) = sync_channel::<(Job, Event)>(64);
        let thread = std::thread::Builder::new()
            .name(format!("tandem-{name}"))
            .spawn(move || {
                for (job, event) in receiver {
                    // Dropped also when the job panics: whoever waits for it is not left waiting.
                    let _signal = Signal(event);
                    job();
                }
            })
            .with_context(|| format!("the system refused a thread for the copy lane {name}"))?;
        Ok(Self { sender: Some(sender), thread: Some(thread) })
    }

    /// Queues `job` behind everything queued before and returns the event of its end. It starts when `after` are done.
    ///
    /// # Errors
    /// When the lane's thread is gone.
    pub fn submit(&self, after: &[Event], job: impl FnOnce() + Send + 'static) -> Result<Event> {
        let event = Event::default();
        let after = after.to_vec();
        let work: Job = Box::new(move || {
            after.iter().for_each(Event::wait);
            job();
        });
        let sender = self.sender.as_ref().ok_or_else(|| anyhow!("the copy lane was closed"))?;
        sender.send((work, event.clone())).map_err(|_| anyhow!("the copy lane's thread has ended"))?;
        Ok(event)
    }
}

impl Drop for CopyLane {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // A job that panicked has shown itself; there is nothing to add while dropping.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_run_in_order_and_after_their_events() {
        let (lane, other) = (CopyLane::new("test-a").unwrap(), CopyLane::new("test-b").unwrap());
        let gate = Event::default();
        let log = Arc::new(Mutex::new(Vec::new()));
        let push = |n| {
            let log = Arc::clone(&log);
            move || log.lock().unwrap().push(n)
        };
        let first = lane.submit(std::slice::from_ref(&gate), push(1)).unwrap();
        let second = lane.submit(&[], push(2)).unwrap();
        let third = other.submit(std::slice::from_ref(&second), push(3)).unwrap();
        assert!(!first.is_done(), "a lane does not start before its event");
        gate.signal();
        third.wait();
        assert_eq!(*log.lock().unwrap(), [1, 2, 3]);
    }
}
