//! One run from its configuration to its result: preparation, training, evaluation, saving. Stop 8 of the walk.

mod eta;
pub(super) mod preparing;
mod rehearsal;
mod saving;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::bail;

use self::eta::Eta;
use self::preparing::Prepared;
use super::event::{NoteLevel, Outcome, RunEvent};
use super::handle::RunContext;
use crate::base::error::Result;
use crate::train::report::StepReport;
use crate::train::trainer::Stepped;

/// Runs a run on the calling thread; everything it has to say goes to the context's sink.
///
/// # Errors
/// When something cannot be read or written, does not fit together, or training gives numbers that are not finite. What
/// was trained until then is saved.
pub(super) fn run(context: &RunContext) -> Result<Outcome> {
    let Some(prepared) = preparing::prepare(context)? else { return Ok(Outcome::Stopped) };
    Training::new(context, prepared).run()
}

/// A run between its first and its last step.
struct Training<'a> {
    context: &'a RunContext,
    prepared: Prepared,
    began: Instant,
    /// Epochs of the steps that are not told yet, in order: a GPU's reports come one step late.
    untold: VecDeque<f64>,
    tokens_seen: u64,
    eta: Eta,
    /// Step of the last evaluation.
    evaluated: Option<u64>,
    /// Step that was saved last.
    saved: Option<u64>,
}

/// How a part of a run ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Done,
    Stopped,
}

impl<'a> Training<'a> {
    fn new(context: &'a RunContext, prepared: Prepared) -> Self {
        Self {
            context,
            prepared,
            began: Instant::now(),
            untold: VecDeque::new(),
            tokens_seen: 0,
            eta: Eta::default(),
            evaluated: None,
            saved: None,
        }
    }

    fn run(mut self) -> Result<Outcome> {
        self.context.sink.emit(RunEvent::Started(self.prepared.info.clone()));
        self.tell_choices();
        let ended = match rehearsal::rehearse(&mut self.prepared, self.context) {
            Ok(true) => self.train(),
            Ok(false) => Ok(Ended::Stopped),
            Err(error) => Err(error),
        };
        let ended = ended.map_err(|error| rehearsal::with_way_out(error, self.prepared.planned.as_ref()));
        // However it ended, the last step is told.
        let ended = match (ended, self.flush()) {
            (Ok(ended), Ok(())) => Ok(ended),
            (Ok(_), Err(error)) => Err(error),
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(step_error)) => {
                self.context.sink.note(NoteLevel::Error, format!("{step_error:#}"));
                Err(error)
            }
        };
        // An error that ends the run must not cost what was trained before it.
        let saved = self.save_result();
        match (ended, saved) {
            (Ok(Ended::Done), Ok(())) => Ok(Outcome::Completed),
            (Ok(Ended::Stopped), Ok(())) => Ok(Outcome::Stopped),
            (Ok(_), Err(error)) => Err(error),
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(save_error)) => {
                self.context.sink.note(NoteLevel::Error, format!("nothing could be saved: {save_error:#}"));
                Err(error)
            }
        }
    }

    /// Steps, evaluations and the saves between them, up to the last step or a stop.
    fn train(&mut self) -> Result<Ended> {
        let train = &self.context.config.train;
        let (eval_every, save_every) = (train.eval_every, train.save_every);
        let total_steps = self.prepared.info.total_steps;
        if eval_every > 0 && self.evaluate()? == Ended::Stopped {
            return Ok(Ended::Stopped);
        }
        while self.prepared.trainer.steps_done() < total_steps {
            if self.step()? == Ended::Stopped {
                return Ok(Ended::Stopped);
            }
            let step = self.prepared.trainer.steps_done();
            let due = |every: u64| every > 0 && step.is_multiple_of(every);
            // The end saves and evaluates by itself.
            if step < total_steps {
                if due(eval_every) && self.evaluate()? == Ended::Stopped {
                    return Ok(Ended::Stopped);
                }
                if due(save_every) {
                    self.save_step()?;
                }
            }
        }
        self.evaluate()
    }

    /// One optimizer step.
    fn step(&mut self) -> Result<Ended> {
        let control = &self.context.control;
        if control.take_save_now() {
            self.save_now()?;
        }
        self.switch();
        let waited = Instant::now();
        // The loader is never far behind, so that this wait is too short to look at the stop flag.
        let Some(next) = self.prepared.loader.next_step()? else {
            bail!("the loader ended before the run did");
        };
        let data_wait_ms = waited.elapsed().as_secs_f64() * 1e3;
        let Stepped::Submitted(report) =
            self.prepared.trainer.step(&next.batches, data_wait_ms, control.stop_flag())?
        else {
            return Ok(Ended::Stopped);
        };
        self.tell_choices();
        self.untold.push_back(next.epoch);
        if let Some(report) = report {
            self.tell(report);
        }
        Ok(Ended::Done)
    }

    /// Tells which optimizations are on, when that is news.
    fn tell_choices(&mut self) {
        if let Some(choices) = self.prepared.trainer.take_choices() {
            let step = self.prepared.trainer.steps_done().max(1);
            self.context.sink.emit(RunEvent::Choices { step, choices });
        }
    }

    /// Switches what was asked for since the last step.
    fn switch(&mut self) {
        let off = self.context.config.optimizations.baselines();
        for (optimization, on) in self.context.control.take_switches() {
            let trainer = &mut self.prepared.trainer;
            let choices = trainer.choices();
            if let Some(choice) = choices.iter().find(|choice| choice.optimization == optimization && !choice.available)
            {
                let text = format!("{} cannot be switched now: {}", optimization.name(), choice.why);
                self.context.sink.note(NoteLevel::Info, text);
                continue;
            }
            trainer.set_switches(trainer.switches().with(optimization, on, off));
            let word = if on { "on" } else { "off" };
            let text =
                format!("{} switched {word} by you, from step {} on", optimization.name(), trainer.steps_done() + 1);
            self.context.sink.note(NoteLevel::Info, text);
        }
    }

    /// Waits for the last step and tells it, unless that was done: what follows sees the model and the events after it.
    fn flush(&mut self) -> Result<()> {
        if let Some(report) = self.prepared.trainer.flush()? {
            self.tell(Box::new(report));
        }
        Ok(())
    }

    /// Tells a step; steps are told in their order.
    fn tell(&mut self, report: Box<StepReport>) {
        self.context.steps_done.store(report.step, Ordering::Relaxed);
        self.tokens_seen += report.document_tokens;
        let steps_left = self.prepared.info.total_steps.saturating_sub(report.step);
        let tokens_left = steps_left as f64 * self.prepared.tokens_per_step;
        let eta_s = self.eta.after_step(report.document_tokens, report.step_ms, tokens_left);
        self.context.sink.emit(RunEvent::Step {
            report,
            epoch: self.untold.pop_front().unwrap_or_default(),
            elapsed_s: self.began.elapsed().as_secs_f64(),
            tokens_seen: self.tokens_seen,
            eta_s,
        });
    }

    /// Measures the held-out loss, once a step; does nothing without held-out records.
    fn evaluate(&mut self) -> Result<Ended> {
        let step = self.prepared.trainer.steps_done();
        if self.prepared.eval_batches.is_empty() || self.evaluated == Some(step) {
            return Ok(Ended::Done);
        }
        self.flush()?;
        let report = self.prepared.trainer.evaluate(&self.prepared.eval_batches, self.context.control.stop_flag())?;
        let Some(report) = report else { return Ok(Ended::Stopped) };
        self.evaluated = Some(step);
        self.context.sink.emit(RunEvent::Eval(report));
        Ok(Ended::Done)
    }

    /// Saves at the end, on stop and after an error, when something was trained that is not saved yet.
    fn save_result(&mut self) -> Result<()> {
        if self.prepared.trainer.steps_done() == 0 {
            return Ok(());
        }
        self.save("")
    }

    /// Saves because the user asked for it.
    fn save_now(&mut self) -> Result<()> {
        self.flush()?;
        if self.prepared.trainer.steps_done() == 0 {
            self.context.sink.note(NoteLevel::Info, "nothing is trained yet, so there is nothing to save");
            return Ok(());
        }
        self.save_step()
    }

    /// Saves into a folder of this step, unless that was done already.
    fn save_step(&mut self) -> Result<()> {
        self.flush()?;
        let step = self.prepared.trainer.steps_done();
        if self.saved == Some(step) { Ok(()) } else { self.save(&format!("-step-{step}")) }
    }

    fn save(&mut self, suffix: &str) -> Result<()> {
        let Prepared { trainer, checkpoint, .. } = &self.prepared;
        let step = trainer.steps_done();
        let saved = saving::save(trainer, &self.context.config.method, checkpoint, &self.context.folder, suffix)?;
        self.saved = Some(step);
        for note in saved.notes {
            self.context.sink.note(NoteLevel::Info, note);
        }
        self.context.sink.emit(RunEvent::Saved { step, path: saved.path });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
