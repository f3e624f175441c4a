//! The one tokio runtime, and background jobs that the window polls and never waits for.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use tokio::runtime::{Builder, Runtime};

use crate::base::error::Result;

/// Called from any thread when there is something new to poll; the window asks for a repaint in it.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A job reports progress to its waker at most this often.
const WAKE_EVERY: Duration = Duration::from_millis(100);

/// The runtime that owns downloads, dialogs, previews and the run store's writer. Its threads are named `tandem-io`.
/// Training never runs on it.
///
/// # Errors
/// When the system refuses the threads; the first answer is kept.
pub fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            Builder::new_multi_thread()
                .worker_threads(2)
                .max_blocking_threads(16)
                .thread_name("tandem-io")
                .enable_all()
                .build()
                .map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(|error| anyhow!("the background threads could not be started: {error}"))
}

/// How far a job is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Progress {
    /// What it is doing, in words.
    pub stage: String,
    /// Units done (bytes, records).
    pub done: u64,
    /// Units in all; 0 when not known.
    pub total: u64,
}

impl Progress {
    /// Share done, 0 to 1; `None` when the total is not known.
    pub fn fraction(&self) -> Option<f32> {
        (self.total > 0).then(|| (self.done as f64 / self.total as f64).min(1.0) as f32)
    }
}

/// A job's side of its [`Task`]: it reports progress here and sees here that nobody wants its result any more.
#[derive(Clone)]
pub struct TaskControl {
    stop: Arc<AtomicBool>,
    progress: Arc<Mutex<Progress>>,
    last_wake: Arc<Mutex<Instant>>,
    waker: Option<Waker>,
}

impl TaskControl {
    fn new(waker: Option<Waker>) -> Self {
        Self {
            stop: Arc::new(AtomicBool::new(false)),
            progress: Arc::new(Mutex::new(Progress::default())),
            last_wake: Arc::new(Mutex::new(Instant::now())),
            waker,
        }
    }

    /// Raised when the task was cancelled or dropped.
    pub fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// Publishes progress.
    pub fn report(&self, stage: &str, done: u64, total: u64) {
        {
            let mut progress = lock(&self.progress);
            if progress.stage != stage {
                progress.stage = stage.to_owned();
            }
            (progress.done, progress.total) = (done, total);
        }
        let mut last = lock(&self.last_wake);
        if last.elapsed() >= WAKE_EVERY {
            *last = Instant::now();
            drop(last);
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker();
        }
    }
}

/// The result of a background job: polled without waiting, cancelled when dropped.
///
/// Each task has its own channel, so replacing a task by a newer one can never show the older result.
pub struct Task<T> {
    control: TaskControl,
    result: Receiver<Result<Option<T>>>,
    abort: Option<tokio::task::AbortHandle>,
    taken: bool,
}

/// What [`Task::poll`] found.
#[derive(Debug)]
pub enum Poll<T> {
    /// Still working.
    Running,
    /// Ended with a result, handed out once.
    Ready(Result<T>),
    /// Ended because it was cancelled, or its result was handed out already.
    Ended,
}

impl<T: Send + 'static> Task<T> {
    /// Runs `work` on a thread that may block. `Ok(None)` from it means that it saw the stop flag and ended.
    pub fn blocking(
        waker: Option<Waker>,
        work: impl FnOnce(&TaskControl) -> Result<Option<T>> + Send + 'static,
    ) -> Self {
        let control = TaskControl::new(waker);
        let (sender, result) = sync_channel(1);
        let job = control.clone();
        match runtime() {
            Ok(runtime) => {
                runtime.spawn_blocking(move || {
                    let end = EndOfJob { control: &job, sender: Some(sender) };
                    let outcome = work(&job);
                    end.finish(outcome);
                });
            }
            Err(error) => fail(sender, error),
        }
        Self { control, result, abort: None, taken: false }
    }

    /// Runs a future on the runtime, for example a native dialog; dropping the task drops the future.
    pub fn future(waker: Option<Waker>, work: impl Future<Output = Result<Option<T>>> + Send + 'static) -> Self {
        let control = TaskControl::new(waker);
        let (sender, result) = sync_channel(1);
        let job = control.clone();
        let abort = match runtime() {
            Ok(runtime) => {
                let handle = runtime.spawn(async move {
                    let end = EndOfJob { control: &job, sender: Some(sender) };
                    let outcome = work.await;
                    end.finish(outcome);
                });
                Some(handle.abort_handle())
            }
            Err(error) => {
                fail(sender, error);
                None
            }
        };
        Self { control, result, abort, taken: false }
    }

    /// What there is now; never waits.
    pub fn poll(&mut self) -> Poll<T> {
        if self.taken {
            return Poll::Ended;
        }
        match self.result.try_recv() {
            Err(TryRecvError::Empty) => Poll::Running,
            received => self.taken(received.ok()),
        }
    }

    /// Waits for the end, for the command line and tests. `None` when the job was cancelled.
    ///
    /// # Errors
    /// As the job.
    pub fn wait(mut self) -> Result<Option<T>> {
        let received = self.result.recv().ok();
        match self.taken(received) {
            Poll::Ready(result) => result.map(Some),
            Poll::Running | Poll::Ended => Ok(None),
        }
    }

    fn taken(&mut self, received: Option<Result<Option<T>>>) -> Poll<T> {
        self.taken = true;
        match received {
            Some(Ok(Some(value))) => Poll::Ready(Ok(value)),
            Some(Ok(None)) => Poll::Ended,
            Some(Err(error)) => Poll::Ready(Err(error)),
            None if self.control.stop.load(Ordering::Relaxed) => Poll::Ended,
            None => Poll::Ready(Err(anyhow!("the background job ended unexpectedly; the log has its message"))),
        }
    }
}

impl<T> Task<T> {
    /// How far the job is.
    pub fn progress(&self) -> Progress {
        lock(&self.control.progress).clone()
    }

    /// Asks the job to end; it does so at its next check.
    pub fn cancel(&self) {
        self.control.stop.store(true, Ordering::Relaxed);
        if let Some(abort) = &self.abort {
            abort.abort();
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The newest result of a job that is asked for again and again, for example a preview while the user types.
///
/// A newer request cancels the older one; until it is ready, the last result stays.
pub struct Latest<T> {
    task: Option<Task<T>>,
    value: Option<Result<T>>,
}

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self { task: None, value: None }
    }
}

impl<T: Send + 'static> Latest<T> {
    /// Replaces the running job, if any.
    pub fn start(&mut self, task: Task<T>) {
        self.task = Some(task);
    }

    /// Takes over what is ready; true when there is a new result.
    pub fn poll(&mut self) -> bool {
        match self.task.as_mut().map(Task::poll) {
            None | Some(Poll::Running) => false,
            Some(Poll::Ended) => {
                self.task = None;
                false
            }
            Some(Poll::Ready(result)) => {
                self.task = None;
                self.value = Some(result);
                true
            }
        }
    }

    /// Cancels the job and forgets the last result.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes the last result out.
    pub fn take(&mut self) -> Option<Result<T>> {
        self.value.take()
    }

    /// The last result, unless it was an error.
    pub fn ok(&self) -> Option<&T> {
        self.value.as_ref()?.as_ref().ok()
    }

    /// The last result, when it was an error.
    pub fn error(&self) -> Option<&anyhow::Error> {
        self.value.as_ref()?.as_ref().err()
    }

    /// Progress of the running job; `None` when none runs.
    pub fn progress(&self) -> Option<Progress> {
        self.task.as_ref().map(Task::progress)
    }

    /// Whether a job runs.
    pub fn is_running(&self) -> bool {
        self.task.is_some()
    }
}

/// Sends the result and wakes the window, also when the job panics or is aborted (then the channel just closes).
struct EndOfJob<'a, T> {
    control: &'a TaskControl,
    sender: Option<SyncSender<Result<Option<T>>>>,
}

impl<T> EndOfJob<'_, T> {
    fn finish(mut self, outcome: Result<Option<T>>) {
        if let Some(sender) = self.sender.take() {
            // Refused only when the task is gone, and then nobody wants the result.
            let _ = sender.try_send(outcome);
        }
    }
}

impl<T> Drop for EndOfJob<'_, T> {
    fn drop(&mut self) {
        self.sender = None;
        self.control.wake();
    }
}

fn fail<T>(sender: SyncSender<Result<Option<T>>>, error: anyhow::Error) {
    let _ = sender.try_send(Err(error));
}

/// The guarded values are plain data, valid also after a panic of another holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn until_ended<T: Send + 'static>(task: &mut Task<T>) -> Poll<T> {
        loop {
            match task.poll() {
                Poll::Running => std::thread::sleep(Duration::from_millis(1)),
                other => return other,
            }
        }
    }

    #[test]
    fn a_result_is_handed_out_once_and_the_waker_is_called() {
        let (sender, woken) = mpsc::sync_channel(8);
        let waker: Waker = Arc::new(move || {
            let _ = sender.try_send(());
        });
        let mut task = Task::blocking(Some(waker), |control| {
            control.report("counting", 3, 4);
            Ok(Some(std::thread::current().name().map(str::to_owned)))
        });
        let Poll::Ready(Ok(name)) = until_ended(&mut task) else { panic!("no result") };
        assert_eq!(name.as_deref(), Some("tandem-io"));
        assert_eq!(task.progress(), Progress { stage: "counting".into(), done: 3, total: 4 });
        assert!(matches!(task.poll(), Poll::Ended));
        woken.recv_timeout(Duration::from_secs(10)).expect("the waker is called at the end");
    }

    #[test]
    fn dropping_a_task_raises_its_stop_flag() {
        let (sender, ended) = mpsc::sync_channel(1);
        let task: Task<()> = Task::blocking(None, move |control| {
            while !control.stop().load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = sender.send(());
            Ok(None)
        });
        drop(task);
        ended.recv_timeout(Duration::from_secs(10)).expect("the job sees the flag");
    }

    #[test]
    fn errors_and_panics_arrive_as_errors() {
        let mut task: Task<()> = Task::blocking(None, |_| Err(anyhow!("no such thing")));
        let Poll::Ready(Err(error)) = until_ended(&mut task) else { panic!("no error") };
        assert_eq!(error.to_string(), "no such thing");
        let mut task: Task<()> = Task::blocking(None, |_| panic!("on purpose"));
        assert!(matches!(until_ended(&mut task), Poll::Ready(Err(_))));
    }

    #[test]
    fn a_cancelled_future_ends_without_a_result() {
        let mut task: Task<()> = Task::future(None, async {
            std::future::pending::<()>().await;
            Ok(Some(()))
        });
        assert!(matches!(task.poll(), Poll::Running));
        task.cancel();
        assert!(matches!(until_ended(&mut task), Poll::Ended));
    }

    #[test]
    fn a_newer_request_replaces_the_older_and_the_last_result_stays_meanwhile() {
        let mut latest = Latest::default();
        latest.start(Task::blocking(None, |_| Ok(Some(1))));
        while !latest.poll() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let (go, wait) = mpsc::sync_channel::<()>(1);
        latest.start(Task::blocking(None, |_| Ok(Some(2))));
        latest.start(Task::blocking(None, move |_| {
            let _ = wait.recv();
            Ok(Some(3))
        }));
        assert!(!latest.poll() && latest.is_running());
        assert_eq!(latest.ok(), Some(&1));
        go.send(()).unwrap();
        while !latest.poll() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(latest.ok(), Some(&3));
        assert!(!latest.is_running());
    }
}
