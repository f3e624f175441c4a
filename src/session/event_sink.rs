//! Where a run's events go: to its store and to the live view, without ever making training wait.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::event::{NoteLevel, RunEvent, TimedEvent};
use super::runtime;
use super::store::Store;
use crate::base::error::Result;

/// Least time between two calls of the waker.
const WAKE_EVERY: Duration = Duration::from_millis(100);
/// How long the end of a run waits for its store.
const STORE_PATIENCE: Duration = Duration::from_secs(10);

/// Called when there are events to drain, at most every 100 ms.
pub type RunWaker = Box<dyn Fn() + Send + Sync>;

/// Takes events from any thread, in one order for store and view.
#[derive(Clone)]
pub struct EventSink {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    store: Option<Store>,
    view: SyncSender<TimedEvent>,
    wake: Option<tokio::sync::mpsc::Sender<()>>,
    /// Events that found the view's queue full.
    missed: u64,
    /// The store's trouble that was told last.
    told: Option<String>,
}

impl EventSink {
    /// A sink into `store` and the queue `view`.
    ///
    /// # Errors
    /// When the runtime, which calls the waker, cannot start.
    pub fn new(store: Store, view: SyncSender<TimedEvent>, waker: Option<RunWaker>) -> Result<Self> {
        let wake = match waker {
            Some(waker) => Some(spawn_waker(waker)?),
            None => None,
        };
        let inner = Inner { store: Some(store), view, wake, missed: 0, told: None };
        Ok(Self { inner: Arc::new(Mutex::new(inner)) })
    }

    /// Says something, stamped with the time of now.
    pub fn emit(&self, event: RunEvent) {
        let mut inner = self.lock();
        let unix_ms = unix_ms();
        if let Some(text) = inner.new_trouble() {
            inner.show(TimedEvent { unix_ms, event: RunEvent::Note { level: NoteLevel::Error, text } });
        }
        let event = TimedEvent { unix_ms, event };
        if let Some(store) = &inner.store {
            store.push(event.clone());
        }
        inner.show(event);
        inner.wake();
    }

    /// Says a log line.
    pub fn note(&self, level: NoteLevel, text: impl Into<String>) {
        self.emit(RunEvent::Note { level, text: text.into() });
    }

    /// Waits until the store holds everything. Later events still reach the view.
    ///
    /// # Errors
    /// When the store could not be written.
    pub fn close_store(&self) -> Result<()> {
        let store = self.lock().store.take();
        store.map_or(Ok(()), |store| store.close(STORE_PATIENCE))
    }

    /// Calls the waker soon.
    pub fn wake(&self) {
        self.lock().wake();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Hands an event to the view, or counts it when the view does not keep up; the store has it in any case.
    fn show(&mut self, event: TimedEvent) {
        if self.missed > 0 {
            let text = format!(
                "{} events were not shown here: this view did not keep up; the run folder has them",
                self.missed
            );
            let note = RunEvent::Note { level: NoteLevel::Warning, text };
            if self.view.try_send(TimedEvent { unix_ms: event.unix_ms, event: note }).is_ok() {
                self.missed = 0;
            }
        }
        // A view that is gone (`Disconnected`) misses nothing.
        if let Err(TrySendError::Full(_)) = self.view.try_send(event) {
            self.missed += 1;
        }
    }

    /// The store's trouble, the first time it is seen.
    fn new_trouble(&mut self) -> Option<String> {
        let trouble = self.store.as_ref().and_then(Store::trouble);
        if trouble == self.told {
            return None;
        }
        self.told.clone_from(&trouble);
        Some(match trouble {
            Some(reason) => {
                format!("the run's history cannot be written ({reason}); training goes on, free some disk space")
            }
            None => "the run's history is written again".into(),
        })
    }

    fn wake(&self) {
        if let Some(wake) = &self.wake {
            // Full means that a call is due already.
            let _ = wake.try_send(());
        }
    }
}

/// Calls the waker at once for a first event, and then at most every [`WAKE_EVERY`] while there are more.
pub(super) fn spawn_waker(waker: RunWaker) -> Result<tokio::sync::mpsc::Sender<()>> {
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    runtime::runtime()?.spawn(async move {
        while receiver.recv().await.is_some() {
            waker();
            tokio::time::sleep(WAKE_EVERY).await;
        }
    });
    Ok(sender)
}

fn unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX))
}
