//! The run store, `run.sqlite`: written by a task of the runtime in transactions, so that training never waits for it.

mod tables;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::mpsc::error::TrySendError;

use super::event::{NoteLevel, RunEvent, TimedEvent};
use super::run_folder::STORE_FILE;
use super::runtime;
use crate::base::error::Result;

pub use self::tables::{KEPT_SPAN_STEPS, StoreSummary};

/// Version of the tables, kept in the file's `user_version`.
pub const STORE_VERSION: i32 = 5;
/// The oldest version that is read. Version 3 added `cache` and `copies` to the steps, version 4 `pinned`, version 5 `moe`.
const OLDEST_VERSION: i32 = 2;

/// Events that may wait for the writer. Writing takes well below a millisecond an event, so that a full queue means
/// a disk that has stopped.
const QUEUE: usize = 8192;
/// Most events of one transaction.
const BATCH: usize = 512;
/// Pause before a failed transaction is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// What writer and owner tell each other beside the queue.
#[derive(Default)]
struct Shared {
    /// Events that found the queue full.
    dropped: AtomicU64,
    /// The owner waits for the end: failures are not tried again for long.
    closing: AtomicBool,
    /// Why the last transaction failed; empty again once one succeeds.
    trouble: Mutex<Option<String>>,
}

/// The writing end of a run's store.
pub struct Store {
    sender: tokio::sync::mpsc::Sender<TimedEvent>,
    done: mpsc::Receiver<Result<()>>,
    shared: Arc<Shared>,
}

impl Store {
    /// Creates `run.sqlite` in `folder` and starts its writer.
    ///
    /// # Errors
    /// When the file exists or cannot be written.
    pub fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(STORE_FILE);
        if path.exists() {
            bail!("{} exists already; a run never writes over another one", path.display());
        }
        let connection = tables::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let shared = Arc::new(Shared::default());
        let (sender, receiver) = tokio::sync::mpsc::channel(QUEUE);
        let (done_sender, done) = mpsc::sync_channel(1);
        let writer = Writer { connection, next_seq: 1, shared: Arc::clone(&shared) };
        runtime::runtime()?.spawn_blocking(move || {
            // The owner may have stopped waiting; then nobody needs the answer.
            let _ = done_sender.send(writer.run(receiver));
        });
        Ok(Self { sender, done, shared })
    }

    /// Queues an event. Never waits: when the queue is full the event is counted, and a note in the store says so.
    pub fn push(&self, event: TimedEvent) {
        if let Err(TrySendError::Full(_) | TrySendError::Closed(_)) = self.sender.try_send(event) {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Why the store cannot be written at present, if it cannot.
    pub fn trouble(&self) -> Option<String> {
        self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until everything queued is written, at most for `patience`.
    ///
    /// # Errors
    /// When something could not be written, or not in time.
    pub fn close(self, patience: Duration) -> Result<()> {
        self.shared.closing.store(true, Ordering::Relaxed);
        drop(self.sender);
        match self.done.recv_timeout(patience) {
            Ok(result) => result,
            Err(_) => Err(anyhow!("{STORE_FILE} was not written within {} s", patience.as_secs())),
        }
    }
}

/// The writing task.
struct Writer {
    connection: Connection,
    next_seq: i64,
    shared: Arc<Shared>,
}

impl Writer {
    fn run(mut self, mut queue: tokio::sync::mpsc::Receiver<TimedEvent>) -> Result<()> {
        let mut batch = Vec::with_capacity(BATCH);
        while queue.blocking_recv_many(&mut batch, BATCH) > 0 {
            let dropped = self.shared.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                batch.push(lost(dropped, batch.last().map_or(0, |e| e.unix_ms)));
            }
            self.write(&batch)?;
            batch.clear();
        }
        Ok(())
    }

    /// Writes a batch; a failure is tried again, for as long as the run lasts.
    fn write(&mut self, batch: &[TimedEvent]) -> Result<()> {
        let mut tries_while_closing = 0;
        loop {
            let result = tables::write(&mut self.connection, self.next_seq, batch);
            let mut trouble = self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            let Err(error) = result else {
                *trouble = None;
                self.next_seq += i64::try_from(batch.len()).unwrap_or(0);
                return Ok(());
            };
            *trouble = Some(format!("{error:#}"));
            drop(trouble);
            if self.shared.closing.load(Ordering::Relaxed) {
                tries_while_closing += 1;
                if tries_while_closing == 3 {
                    return Err(error.context(format!("the last events of the run are missing from {STORE_FILE}")));
                }
            }
            std::thread::sleep(RETRY);
        }
    }
}

fn lost(dropped: u64, unix_ms: i64) -> TimedEvent {
    let text = format!("{dropped} events are missing here: the disk could not take them in time");
    TimedEvent { unix_ms, event: RunEvent::Note { level: NoteLevel::Warning, text } }
}

/// Opens the store of a run folder for reading, also while the run writes it.
fn open(folder: &Path) -> Result<Connection> {
    let path = folder.join(STORE_FILE);
    if !path.is_file() {
        bail!("{} is not a run folder: it has no {STORE_FILE}", folder.display());
    }
    let context = || format!("cannot read {}", path.display());
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(&path, flags).with_context(context)?;
    connection.busy_timeout(Duration::from_secs(2)).with_context(context)?;
    let version: i32 = connection.pragma_query_value(None, "user_version", |row| row.get(0)).with_context(context)?;
    if !(OLDEST_VERSION..=STORE_VERSION).contains(&version) {
        bail!(
            "{} has version {version}; this Tandem reads versions {OLDEST_VERSION} to {STORE_VERSION}",
            path.display()
        );
    }
    Ok(connection)
}

/// Every event of a run, in order; spans only of the last [`KEPT_SPAN_STEPS`] steps that have some.
///
/// # Errors
/// When the folder holds no readable store.
pub fn read(folder: &Path) -> Result<Vec<TimedEvent>> {
    tables::read(&open(folder)?).with_context(|| format!("{} is damaged", folder.join(STORE_FILE).display()))
}

/// What a list of runs shows of a run, read without reading its steps.
///
/// # Errors
/// As [`read`].
pub fn summary(folder: &Path) -> Result<StoreSummary> {
    tables::summary(&open(folder)?).with_context(|| format!("{} is damaged", folder.join(STORE_FILE).display()))
}

#[cfg(test)]
mod tests;
