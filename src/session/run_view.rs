//! A run as the views show it: one type, built from live events or from a run folder.

use std::path::{Path, PathBuf};

use super::event::{NoteLevel, Outcome, RunEvent, RunInfo, TimedEvent};
use super::{run_folder, store};
use crate::base::error::Result;
use crate::tensor::phase::Span;
use crate::train::report::{Choice, EvalReport, MoeReport, Optimization, StepReport};

/// Weight of the past in the smoothed loss.
const SMOOTHING: f64 = 0.9;
/// Steps over which the speed is averaged.
const SPEED_STEPS: usize = 10;

/// Counts of tokens per expert that a view holds: 32 MiB.
const MOST_COUNTS: usize = 4 << 20;

/// Where a run stands.
#[derive(Debug, Clone, PartialEq)]
pub enum RunState {
    /// Before the first step: the stage in words, with units done and in all (`total` 0 when not known).
    Preparing {
        /// The stage.
        stage: String,
        /// Units done.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// Training.
    Running,
    /// Told to stop; saving.
    Stopping,
    /// Ended.
    Finished {
        /// How.
        outcome: Outcome,
        /// Steps done.
        steps: u64,
    },
    /// Its process ended without a word (a crash, a power cut).
    Interrupted,
}

impl RunState {
    /// Whether nothing more will happen.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Interrupted)
    }

    /// The state in one or two words.
    pub fn describe(&self) -> &str {
        match self {
            Self::Preparing { .. } => "preparing",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Finished { outcome: Outcome::Completed, .. } => "completed",
            Self::Finished { outcome: Outcome::Stopped, .. } => "stopped",
            Self::Finished { outcome: Outcome::Failed(_), .. } => "failed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// One step with its place in the run.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPoint {
    /// When it ended, in milliseconds since the Unix epoch.
    pub unix_ms: i64,
    /// The step as measured; its spans are in [`RunView::last_spans`], for the last step that has some.
    pub report: StepReport,
    /// Passes over the training data so far.
    pub epoch: f64,
    /// Seconds since training began.
    pub elapsed_s: f64,
    /// Tokens of documents trained on so far.
    pub tokens_seen: u64,
    /// Seconds left, from tokens.
    pub eta_s: Option<f64>,
    /// Exponential moving average of the loss, corrected for its start.
    pub smoothed_loss: f64,
}

/// A log line with its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoteLine {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: i64,
    /// How serious it is.
    pub level: NoteLevel,
    /// The line.
    pub text: String,
}

/// Something written to disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPoint {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: i64,
    /// Step it holds.
    pub step: u64,
    /// Where.
    pub path: PathBuf,
}

/// Spans of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSpans {
    /// The step.
    pub step: u64,
    /// Its spans.
    pub spans: Vec<Span>,
}

/// An optimization that was switched while the run went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switched {
    /// First step that ran with it.
    pub step: u64,
    /// Which one.
    pub optimization: Optimization,
    /// On or off.
    pub on: bool,
}

/// A run, live or old.
#[derive(Debug, Clone, PartialEq)]
pub struct RunView {
    /// Facts, once training began.
    pub info: Option<RunInfo>,
    /// Where it stands.
    pub state: RunState,
    /// Stages gone through before the first step, in order.
    pub stages: Vec<String>,
    /// Steps in order.
    pub steps: Vec<StepPoint>,
    /// Which optimizations are on, by the last word of the run.
    pub choices: Vec<Choice>,
    /// What was switched after the first step, in order: by the user, or because memory was short.
    pub switched: Vec<Switched>,
    /// Held-out evaluations in order.
    pub evals: Vec<EvalReport>,
    /// Log lines in order.
    pub notes: Vec<NoteLine>,
    /// What was saved, in order.
    pub saved: Vec<SavedPoint>,
    /// Spans of the last step that has some.
    pub last_spans: Option<StepSpans>,
    /// When the first event happened, in milliseconds since the Unix epoch.
    pub began_unix_ms: Option<i64>,
    /// Counts of tokens per expert that the steps hold, and the first step that may hold some.
    num_counts: usize,
    first_counts: usize,
    /// Bias-free moving average of the loss: weighted sum and sum of weights.
    smoothing: (f64, f64),
}

impl Default for RunView {
    fn default() -> Self {
        Self {
            info: None,
            state: RunState::Preparing { stage: "starting".into(), done: 0, total: 0 },
            stages: Vec::new(),
            steps: Vec::new(),
            choices: Vec::new(),
            switched: Vec::new(),
            evals: Vec::new(),
            notes: Vec::new(),
            saved: Vec::new(),
            last_spans: None,
            began_unix_ms: None,
            num_counts: 0,
            first_counts: 0,
            smoothing: (0.0, 0.0),
        }
    }
}

impl RunView {
    /// Reads a run folder, also of a run that is being written; a run whose process is gone without a last word is
    /// [`RunState::Interrupted`].
    ///
    /// # Errors
    /// When the folder holds no readable store.
    pub fn load(folder: &Path) -> Result<Self> {
        // Asked first: a run that ends between the two questions has its last word in the store.
        let live = run_folder::is_live(folder);
        let mut view = Self::default();
        for event in store::read(folder)? {
            view.apply(&event);
        }
        if !live && !view.state.is_over() {
            view.state = RunState::Interrupted;
        }
        Ok(view)
    }

    /// Whether its model has routed experts, as far as the run said so.
    pub fn has_experts(&self) -> bool {
        let reported = self.last_step().is_some_and(|step| step.report.moe.is_some());
        reported || self.choices.iter().any(|choice| choice.optimization == Optimization::GroupedRouting)
    }

    /// Forgets tokens per expert of the oldest steps where all steps together hold too many: a step of a large model has thousands.
    fn drop_old_counts(&mut self) {
        while self.num_counts > MOST_COUNTS && self.first_counts + 1 < self.steps.len() {
            if let Some(moe) = &mut self.steps[self.first_counts].report.moe {
                self.num_counts -= moe.num_experts();
                moe.tokens_per_expert = Vec::new();
            }
            self.first_counts += 1;
        }
    }

    /// Takes in one event.
    pub fn apply(&mut self, timed: &TimedEvent) {
        let unix_ms = timed.unix_ms;
        self.began_unix_ms.get_or_insert(unix_ms);
        match &timed.event {
            RunEvent::Preparing { stage, done, total } => {
                if self.stages.last() != Some(stage) {
                    self.stages.push(stage.clone());
                }
                if matches!(self.state, RunState::Preparing { .. }) {
                    self.state = RunState::Preparing { stage: stage.clone(), done: *done, total: *total };
                }
            }
            RunEvent::Started(info) => {
                self.info = Some(info.clone());
                if matches!(self.state, RunState::Preparing { .. }) {
                    self.state = RunState::Running;
                }
            }
            RunEvent::Step { report, epoch, elapsed_s, tokens_seen, eta_s } => {
                let mut report = (**report).clone();
                let spans = std::mem::take(&mut report.spans);
                if !spans.is_empty() {
                    self.last_spans = Some(StepSpans { step: report.step, spans });
                }
                self.num_counts += report.moe.as_ref().map_or(0, MoeReport::num_experts);
                let smoothed_loss = self.smooth(report.loss);
                self.steps.push(StepPoint {
                    unix_ms,
                    report,
                    epoch: *epoch,
                    elapsed_s: *elapsed_s,
                    tokens_seen: *tokens_seen,
                    eta_s: *eta_s,
                    smoothed_loss,
                });
                self.drop_old_counts();
            }
            RunEvent::Choices { step, choices } => self.choose(*step, choices),
            RunEvent::Eval(report) => self.evals.push(*report),
            RunEvent::Stopping => {
                if !self.state.is_over() {
                    self.state = RunState::Stopping;
                }
            }
            RunEvent::Saved { step, path } => {
                self.saved.push(SavedPoint { unix_ms, step: *step, path: path.clone() });
            }
            RunEvent::Note { level, text } => {
                self.notes.push(NoteLine { unix_ms, level: *level, text: text.clone() });
            }
            RunEvent::Finished { outcome, steps } => {
                self.state = RunState::Finished { outcome: outcome.clone(), steps: *steps };
            }
        }
    }

    fn choose(&mut self, step: u64, choices: &[Choice]) {
        // What is known by the first step is how the run began.
        if step > 1 {
            let changed = |now: &&Choice| {
                self.choices.iter().any(|before| before.optimization == now.optimization && before.on != now.on)
            };
            let changed = choices.iter().filter(changed);
            self.switched.extend(changed.map(|now| Switched { step, optimization: now.optimization, on: now.on }));
        }
        self.choices = choices.to_vec();
    }

    fn smooth(&mut self, loss: f64) -> f64 {
        let (sum, weight) = &mut self.smoothing;
        *sum = SMOOTHING * *sum + (1.0 - SMOOTHING) * loss;
        *weight = SMOOTHING * *weight + (1.0 - SMOOTHING);
        *sum / *weight
    }

    /// The last step.
    pub fn last_step(&self) -> Option<&StepPoint> {
        self.steps.last()
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.last_step().map_or(0, |s| s.report.step)
    }

    /// Share of the planned steps done, 0 to 1; `None` before training begins.
    pub fn progress(&self) -> Option<f64> {
        let total = self.info.as_ref()?.total_steps;
        (total > 0).then(|| (self.steps_done() as f64 / total as f64).min(1.0))
    }

    /// Tokens of documents a second over the last steps; `None` before the first.
    pub fn tokens_per_sec(&self) -> Option<f64> {
        let recent = &self.steps[self.steps.len().saturating_sub(SPEED_STEPS)..];
        let tokens: u64 = recent.iter().map(|s| s.report.document_tokens).sum();
        let seconds: f64 = recent.iter().map(|s| s.report.step_ms / 1e3).sum();
        (seconds > 0.0).then(|| tokens as f64 / seconds)
    }

    /// The evaluation with the lowest loss.
    pub fn best_eval(&self) -> Option<&EvalReport> {
        self.evals.iter().min_by(|a, b| a.loss.total_cmp(&b.loss))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix_ms: i64, event: RunEvent) -> TimedEvent {
        TimedEvent { unix_ms, event }
    }

    #[test]
    fn a_stop_shows_until_the_run_ends() {
        let mut view = RunView::default();
        view.apply(&at(1, RunEvent::Preparing { stage: "loading weights".into(), done: 1, total: 2 }));
        view.apply(&at(2, RunEvent::Stopping));
        view.apply(&at(3, RunEvent::Preparing { stage: "loading weights".into(), done: 2, total: 2 }));
        assert_eq!(view.state, RunState::Stopping);
        assert_eq!(view.stages, ["loading weights"]);
        view.apply(&at(4, RunEvent::Finished { outcome: Outcome::Stopped, steps: 0 }));
        view.apply(&at(5, RunEvent::Stopping));
        assert_eq!(view.state.describe(), "stopped");
        assert_eq!(view.began_unix_ms, Some(1));
    }

    #[test]
    fn what_is_switched_after_the_first_step_is_kept_with_its_step() {
        let (cache, graphs) = (Optimization::MetadataCache, Optimization::CudaGraphs);
        let choices = |step: u64, on: [bool; 2]| {
            let choice = |(optimization, on)| Choice { optimization, on, available: true, why: String::new() };
            RunEvent::Choices { step, choices: [cache, graphs].into_iter().zip(on).map(choice).collect() }
        };
        let mut view = RunView::default();
        for (step, on) in
            [(1, [true, true]), (1, [true, false]), (5, [true, true]), (9, [false, true]), (9, [false, true])]
        {
            view.apply(&at(0, choices(step, on)));
        }
        let switched: Vec<_> = view.switched.iter().map(|s| (s.step, s.optimization, s.on)).collect();
        assert_eq!(switched, [(5, graphs, true), (9, cache, false)]);
        assert!(!view.choices[0].on && view.choices[1].on);
    }

    #[test]
    fn counts_of_experts_are_forgotten_from_the_oldest_step_on() {
        let report = |step: u64| StepReport {
            moe: Some(MoeReport {
                routing: crate::model::policy::Routing::Grouped,
                experts_per_token: 1,
                layers: vec![0],
                tokens_per_expert: vec![vec![1; MOST_COUNTS / 2]],
                routing_ms: Some(0.5),
            }),
            ..StepReport::plain(step)
        };
        let mut view = RunView::default();
        assert!(!view.has_experts());
        for step in 1..=3 {
            let report = Box::new(report(step));
            let event = RunEvent::Step { report, epoch: 0.0, elapsed_s: 0.0, tokens_seen: 0, eta_s: None };
            view.apply(&at(step as i64, event));
        }
        let kept: Vec<usize> = view.steps.iter().map(|step| step.report.moe.as_ref().unwrap().num_experts()).collect();
        assert_eq!(kept, [0, MOST_COUNTS / 2, MOST_COUNTS / 2]);
        assert_eq!(view.steps[0].report.moe.as_ref().unwrap().routing_ms, Some(0.5), "the rest stays");
        assert!(view.has_experts());
    }

    #[test]
    fn the_smoothed_loss_starts_at_the_first_loss_and_lags_behind() {
        let mut view = RunView::default();
        assert_eq!(view.smooth(4.0), 4.0);
        let second = view.smooth(2.0);
        // Weights 0.09 and 0.1 of the two losses.
        assert!((second - (0.09 * 4.0 + 0.1 * 2.0) / 0.19).abs() < 1e-12, "{second}");
    }
}
