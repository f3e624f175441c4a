//! What `tandem train` shows: a progress bar on a terminal, plain lines elsewhere, JSON lines with `--json`.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tandem::base::units;
use tandem::session::event::{NoteLevel, Outcome, RunEvent, RunInfo, TimedEvent};
use tandem::session::run_view::{RunState, RunView, StepPoint};

use super::say;

/// Least time between two step lines where there is no progress bar.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// Shows a run's events.
pub struct Output {
    view: RunView,
    folder: PathBuf,
    form: Form,
    last_line: Option<Instant>,
}

enum Form {
    /// Events as JSON on stdout, for as long as somebody reads it.
    Json { open: bool },
    /// A bar on stderr.
    Bar(ProgressBar),
    /// Lines on stderr.
    Lines,
}

impl Output {
    /// Output for the run in `folder`.
    pub fn new(json: bool, folder: &Path) -> Self {
        let form = if json {
            Form::Json { open: true }
        } else if io::stderr().is_terminal() {
            Form::Bar(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()))
        } else {
            Form::Lines
        };
        let output = Self { view: RunView::default(), folder: folder.to_owned(), form, last_line: None };
        output.line(&format!("run folder: {}", folder.display()));
        output
    }

    /// Takes in and shows one event.
    pub fn event(&mut self, event: &TimedEvent) {
        let stage_before = self.view.stages.len();
        let choices_before = std::mem::take(&mut self.view.choices);
        self.view.choices.clone_from(&choices_before);
        self.view.apply(event);
        if let Form::Json { open } = &mut self.form {
            if *open && json_line(event).is_err() {
                *open = false;
                say("nobody reads the events any more; the run goes on, and its folder has them");
            }
            return;
        }
        match &event.event {
            RunEvent::Preparing { stage, done, total } => {
                self.preparing(stage, *done, *total, self.view.stages.len() > stage_before);
            }
            RunEvent::Started(info) => self.started(info),
            RunEvent::Choices { choices, .. } => {
                for choice in choices.iter().filter(|choice| !choices_before.contains(choice)) {
                    self.line(&choice.describe());
                }
            }
            RunEvent::Step { .. } => self.step(),
            RunEvent::Eval(eval) => {
                self.line(&format!(
                    "held-out loss {:.4} at step {} ({} documents, {} tokens, {:.1} s)",
                    eval.loss,
                    eval.step,
                    units::count(eval.num_documents),
                    units::count(eval.num_label_tokens),
                    eval.eval_ms / 1e3
                ));
            }
            RunEvent::Stopping => self.line("stopping: saving what was trained (Ctrl-C again ends at once)"),
            RunEvent::Saved { step, path } => self.line(&format!("saved step {step}: {}", path.display())),
            // The error that ends a run is printed by the program itself.
            RunEvent::Note { level: NoteLevel::Error, .. } => {}
            RunEvent::Note { level: NoteLevel::Warning, text } => self.line(&format!("warning: {text}")),
            RunEvent::Note { level: NoteLevel::Info, text } => self.line(text),
            RunEvent::Finished { .. } => {}
        }
    }

    fn preparing(&self, stage: &str, done: u64, total: u64, is_new: bool) {
        match &self.form {
            Form::Bar(bar) => {
                let known = total > 0;
                let template = if known { "{msg} {bar:30} {percent}%" } else { "{msg} {pos}" };
                bar.set_style(style(template));
                bar.set_message(stage.to_owned());
                bar.set_length(total);
                bar.set_position(done);
            }
            Form::Lines if is_new => self.line(stage),
            Form::Lines | Form::Json { .. } => {}
        }
    }

    fn started(&self, info: &RunInfo) {
        self.line(&format!(
            "{} of {} on {}: {} of {} parameters, {} records ({} held out), {} steps of {} tokens",
            info.method,
            info.model,
            info.device,
            units::count(info.num_trainable),
            units::count(info.num_parameters),
            units::count(info.num_train_records as u64),
            units::count(info.num_eval_records as u64),
            units::count(info.total_steps),
            units::count(info.pack_len as u64),
        ));
        if let Form::Bar(bar) = &self.form {
            bar.set_style(style("{pos}/{len} {bar:30} {msg}"));
            bar.set_length(info.total_steps);
            bar.set_position(0);
            bar.set_message("");
        }
    }

    fn step(&mut self) {
        let Some(step) = self.view.last_step() else { return };
        let text = self.step_text(step);
        match &self.form {
            Form::Bar(bar) => {
                bar.set_position(step.report.step);
                bar.set_message(text);
            }
            Form::Lines => {
                let total = self.view.info.as_ref().map_or(0, |i| i.total_steps);
                let due = self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY);
                if due || step.report.step == total {
                    self.line(&format!("step {}/{total}: {text}", step.report.step));
                    self.last_line = Some(Instant::now());
                }
            }
            Form::Json { .. } => {}
        }
    }

    fn step_text(&self, step: &StepPoint) -> String {
        let speed = self.view.tokens_per_sec().unwrap_or(0.0);
        let eta = step.eta_s.map_or_else(|| "unknown".into(), units::clock);
        format!("loss {:.4}, {speed:.0} tokens/s, ETA {eta}", step.report.loss)
    }

    /// The last words: where the result is.
    pub fn end(&self) {
        if let Form::Bar(bar) = &self.form {
            bar.finish_and_clear();
        }
        let RunState::Finished { outcome, steps } = &self.view.state else { return };
        if let Some(load) = self.view.last_step().and_then(|step| step.report.moe.as_ref()?.describe()) {
            self.line(&format!("experts in the last step: {load}"));
        }
        let word = match outcome {
            Outcome::Completed => "completed",
            Outcome::Stopped => "stopped",
            Outcome::Failed(_) => "failed",
        };
        let mut text = format!("{word} after {} steps", units::count(*steps));
        if let Some(step) = self.view.last_step() {
            text += &format!(", loss {:.4}", step.report.loss);
        }
        if let Some(eval) = self.view.evals.last() {
            text += &format!(", held-out loss {:.4}", eval.loss);
        }
        match self.view.saved.last() {
            Some(saved) => text += &format!("; saved in {}", saved.path.display()),
            None => text += &format!("; nothing was saved (run folder: {})", self.folder.display()),
        }
        match self.form {
            // Stdout holds JSON only.
            Form::Json { .. } => say(&text),
            // A closed stdout has nobody to tell.
            Form::Bar(_) | Form::Lines => drop(writeln!(io::stdout(), "{text}")),
        }
    }

    /// A line on stderr, above the bar.
    fn line(&self, text: &str) {
        match &self.form {
            Form::Bar(bar) => bar.suspend(|| say(text)),
            Form::Lines => say(text),
            Form::Json { .. } => {}
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn json_line(event: &TimedEvent) -> io::Result<()> {
    let line = serde_json::to_string(event)?;
    writeln!(io::stdout(), "{line}")
}
