//! Work behind the Set up screen: looking at the model, the dataset and what the model sees, never on the UI thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::session::config::RunConfig;
use crate::session::estimate::{self, Estimate};
use crate::session::inspect::{self, FoundModel, ModelInfo, Places};
use crate::session::preview::{self, DataFacts, PackView, Preview};
use crate::session::runtime::{Latest, Task, Waker};
use crate::session::starter;

/// Time without a change after which the preview is made again.
pub const DEBOUNCE: Duration = Duration::from_millis(300);

/// What a native dialog was opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// A model folder.
    ModelFolder,
    /// A GGUF file.
    ModelFile,
    /// A dataset file.
    Dataset,
    /// A run.toml.
    RunToml,
}

/// All background work of the screen.
#[derive(Default)]
pub struct Jobs {
    /// Models on this machine.
    pub models: Latest<Vec<FoundModel>>,
    /// The chosen model.
    pub model: Follow<PathBuf, ModelInfo>,
    /// A first look at the dataset.
    pub data: Follow<PathBuf, DataFacts>,
    /// What the model sees.
    pub preview: Follow<RunConfig, Arc<Preview>>,
    /// The memory plan: of a version of the preview, and of what the plan depends on beside it.
    pub plan: Follow<(u64, RunConfig), Estimate>,
    /// The pack in sight: version of the preview and number of the pack.
    pub pack: Follow<(u64, usize), PackView>,
    /// Fetching the starter model.
    pub starter: Latest<PathBuf>,
    /// An open dialog.
    pub dialog: Latest<(Wanted, PathBuf)>,
}

impl Jobs {
    /// Looks for models again.
    pub fn find_models(&mut self, waker: &Waker, recent: Vec<PathBuf>) {
        self.models.start(Task::blocking(Some(waker.clone()), move |control| {
            Ok(inspect::discover(&Places::of_user(&recent), control.stop()))
        }));
    }

    /// Follows the configuration: what changed is looked at again after a pause in typing. Returns the time until
    /// which nothing needs to be done.
    pub fn follow(&mut self, config: &RunConfig, now: Instant, waker: &Waker) -> Option<Duration> {
        let (model, data) = (&config.model.path, &config.data.path);
        let has = |path: &PathBuf| !path.as_os_str().is_empty();
        let waits = [
            self.model.follow(has(model).then(|| model.clone()), DEBOUNCE, now, |path| {
                Task::blocking(Some(waker.clone()), move |_| inspect::inspect(&path).map(Some))
            }),
            self.data.follow(has(data).then(|| data.clone()), DEBOUNCE, now, |path| {
                Task::blocking(Some(waker.clone()), move |_| preview::probe(&path).map(Some))
            }),
            self.preview.follow((has(model) && has(data)).then(|| relevant(config)), DEBOUNCE, now, |config| {
                Task::blocking(Some(waker.clone()), move |control| {
                    let report = |stage: &str, done: u64, total: u64| control.report(stage, done, total);
                    Ok(preview::preview(&config, &report, control.stop())?.map(Arc::new))
                })
            }),
        ];
        waits.into_iter().flatten().min()
    }

    /// Makes the memory plan of a configuration that was looked at, after a pause in typing. Returns the time until which nothing needs to be done.
    pub fn follow_plan(&mut self, config: &RunConfig, now: Instant, waker: &Waker) -> Option<Duration> {
        let preview = self.preview.result.ok().filter(|_| !self.preview.is_behind()).cloned();
        let key = preview.as_ref().map(|_| (self.preview.version, planned(config)));
        self.plan.follow(key, DEBOUNCE, now, |(_, config)| {
            Task::blocking(Some(waker.clone()), move |_| {
                preview.map(|preview| estimate::of_preview(&config, &preview)).transpose()
            })
        })
    }

    /// Makes the view of a pack, unless that is done.
    pub fn follow_pack(&mut self, pack: usize, waker: &Waker) {
        let wanted = self.preview.result.ok().map(|preview| (Arc::clone(preview), (self.preview.version, pack)));
        let (preview, key) = wanted.unzip();
        self.pack.follow(key, Duration::ZERO, Instant::now(), |(_, pack)| {
            Task::blocking(Some(waker.clone()), move |_| Ok(preview.and_then(|preview| preview.pack(pack))))
        });
    }

    /// Forgets the preview, which holds the whole dataset; it is made again when the screen is shown.
    pub fn let_go(&mut self) {
        self.preview.again();
        self.preview.result.clear();
        self.pack.again();
        self.pack.result.clear();
        self.plan.again();
    }

    /// Takes over what is ready.
    pub fn poll(&mut self) {
        self.models.poll();
        self.model.result.poll();
        self.data.result.poll();
        if self.preview.result.poll() {
            self.preview.version += 1;
        }
        if self.pack.result.poll() {
            self.pack.version += 1;
        }
        if self.plan.result.poll() {
            self.plan.version += 1;
        }
        self.starter.poll();
        self.dialog.poll();
    }

    /// Fetches the starter model.
    pub fn fetch_starter(&mut self, waker: &Waker) {
        self.starter.start(starter::fetch(Some(waker.clone())));
    }

    /// Opens a native dialog; where the system has none, it closes at once and the path field remains.
    pub fn open_dialog(&mut self, wanted: Wanted, waker: &Waker) {
        let dialog = rfd::AsyncFileDialog::new();
        self.dialog.start(Task::future(Some(waker.clone()), async move {
            let picked = match wanted {
                Wanted::ModelFolder => dialog.set_title("Choose a model folder").pick_folder().await,
                Wanted::ModelFile => {
                    dialog.set_title("Choose a GGUF file").add_filter("GGUF models", &["gguf"]).pick_file().await
                }
                Wanted::Dataset => {
                    let dialog = dialog.set_title("Choose a dataset");
                    dialog.add_filter("Datasets", &["jsonl", "ndjson", "txt", "md"]).pick_file().await
                }
                Wanted::RunToml => {
                    dialog.set_title("Choose a run.toml").add_filter("Run configuration", &["toml"]).pick_file().await
                }
            };
            Ok(picked.map(|file| (wanted, file.path().to_path_buf())))
        }));
    }
}

/// A result that follows its input, after a pause in the input's changes.
pub struct Follow<K, T> {
    /// The newest result.
    pub result: Latest<T>,
    /// Grows with every new result.
    pub version: u64,
    started_for: Option<K>,
    wanted: Option<K>,
    due: Option<Instant>,
}

impl<K, T> Default for Follow<K, T> {
    fn default() -> Self {
        Self { result: Latest::default(), version: 0, started_for: None, wanted: None, due: None }
    }
}

impl<K: Clone + PartialEq, T: Send + 'static> Follow<K, T> {
    /// Whether what is shown is not (yet) about the present input.
    pub fn is_behind(&self) -> bool {
        self.due.is_some() || self.result.is_running()
    }

    /// What was found for `input`; `None` while that is not known.
    pub fn of(&self, input: &K) -> Option<&T> {
        let is_about_it = self.started_for.as_ref() == Some(input) && !self.result.is_running();
        self.result.ok().filter(|_| is_about_it)
    }

    /// Makes it again although the input did not change, for example because a file did.
    pub fn again(&mut self) {
        self.started_for = None;
    }

    /// Starts a job for `wanted` once it stayed the same for `pause`. Returns the time until then.
    fn follow(
        &mut self,
        wanted: Option<K>,
        pause: Duration,
        now: Instant,
        start: impl FnOnce(K) -> Task<T>,
    ) -> Option<Duration> {
        let Some(wanted) = wanted else {
            if self.started_for.is_some() || self.due.is_some() {
                (self.started_for, self.wanted, self.due) = (None, None, None);
                self.result.clear();
                self.version += 1;
            }
            return None;
        };
        if self.started_for.as_ref() == Some(&wanted) {
            (self.wanted, self.due) = (None, None);
            return None;
        }
        if self.wanted.as_ref() != Some(&wanted) {
            // The first input needs no pause: nobody is typing it.
            let pause = if self.started_for.is_none() { Duration::ZERO } else { pause };
            (self.wanted, self.due) = (Some(wanted.clone()), Some(now + pause));
        }
        let due = self.due.unwrap_or(now);
        if now < due {
            return Some(due - now);
        }
        self.result.start(start(wanted.clone()));
        (self.started_for, self.wanted, self.due) = (Some(wanted), None, None);
        None
    }
}

/// The configuration with everything left out that the memory plan does not depend on.
fn planned(config: &RunConfig) -> RunConfig {
    let mut planned = RunConfig {
        model: config.model.clone(),
        packing: config.packing.clone(),
        method: config.method.clone(),
        optimizations: config.optimizations.clone(),
        memory: config.memory.clone(),
        ..RunConfig::default()
    };
    planned.optimizer.bits = config.optimizer.bits;
    let (to, from) = (&mut planned.train, &config.train);
    (to.activations, to.attention, to.cuda_graphs) = (from.activations, from.attention, from.cuda_graphs);
    (to.device, to.vram_limit_gib, to.grad_accum_steps) = (from.device, from.vram_limit_gib, from.grad_accum_steps);
    planned
}

/// The configuration with everything left out that the preview does not depend on.
fn relevant(config: &RunConfig) -> RunConfig {
    let mut relevant = RunConfig {
        seed: config.seed,
        model: config.model.clone(),
        data: config.data.clone(),
        packing: config.packing.clone(),
        ..RunConfig::default()
    };
    relevant.train.grad_accum_steps = config.train.grad_accum_steps;
    relevant.train.epochs = config.train.epochs;
    relevant.train.max_steps = config.train.max_steps;
    relevant
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(key: u32) -> Task<u32> {
        Task::blocking(None, move |_| Ok(Some(key)))
    }

    #[test]
    fn the_first_input_starts_at_once_and_later_ones_after_a_pause() {
        let mut follow = Follow::<u32, u32>::default();
        let t0 = Instant::now();
        let at = |ms: u64| t0 + Duration::from_millis(ms);
        assert_eq!(follow.follow(Some(1), DEBOUNCE, at(0), start), None);
        assert_eq!(follow.started_for, Some(1));
        assert_eq!(follow.follow(Some(2), DEBOUNCE, at(10), start), Some(DEBOUNCE));
        assert_eq!(follow.follow(Some(3), DEBOUNCE, at(200), start), Some(DEBOUNCE));
        assert_eq!(follow.started_for, Some(1));
        assert_eq!(follow.follow(Some(3), DEBOUNCE, at(400), start), Some(Duration::from_millis(100)));
        assert_eq!(follow.follow(Some(3), DEBOUNCE, at(500), start), None);
        assert_eq!(follow.started_for, Some(3));
        // Back to what is shown: nothing to do.
        follow.follow(Some(4), DEBOUNCE, at(600), start);
        assert_eq!(follow.follow(Some(3), DEBOUNCE, at(700), start), None);
        assert!(follow.due.is_none());
        follow.follow(None, DEBOUNCE, at(800), start);
        assert!(follow.started_for.is_none() && !follow.result.is_running());
    }

    #[test]
    fn the_plan_depends_on_what_takes_memory_alone() {
        let mut a = RunConfig::default();
        (a.optimizer.lr, a.seed, a.name) = (1.0, 3, "a".into());
        assert_eq!(planned(&a), planned(&RunConfig::default()));
        for change in [
            |c: &mut RunConfig| c.method.r += 1,
            |c: &mut RunConfig| c.optimizer.bits = 8,
            |c: &mut RunConfig| c.packing.pack_len += 1,
            |c: &mut RunConfig| c.train.vram_limit_gib = 8.0,
            |c: &mut RunConfig| c.optimizations.offload_buffers = 1,
            |c: &mut RunConfig| c.optimizations.grouped_routing = crate::session::Switch::Off,
        ] {
            let mut changed = a.clone();
            change(&mut changed);
            assert_ne!(planned(&changed), planned(&a));
        }
    }

    #[test]
    fn the_preview_does_not_depend_on_the_optimizer() {
        let mut a = RunConfig::default();
        a.optimizer.lr = 1.0;
        a.method.r = 3;
        assert_eq!(relevant(&a), relevant(&RunConfig::default()));
        a.packing.pack_len = 99;
        assert_ne!(relevant(&a), relevant(&RunConfig::default()));
    }
}
