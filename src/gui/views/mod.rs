//! The screens. A view draws itself from plain data and asks the app for what it cannot do itself.

pub mod compare;
pub mod live;
pub mod runs;
pub mod setup;
pub mod welcome;

use std::path::PathBuf;
use std::sync::Arc;

use super::actions::Action;
use super::probe::Probe;
use crate::session::Optimization;
use crate::session::compare::CompareOptions;
use crate::session::config::RunConfig;
use crate::session::machine::Machine;
use crate::session::runtime::Waker;

/// A screen of the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Screen {
    /// Welcome.
    #[default]
    Home,
    /// Set up a run.
    SetUp,
    /// The run.
    Live,
    /// Comparisons.
    Compare,
    /// List of runs.
    Runs,
}

/// What a view asks the app to do after the frame.
#[derive(Debug)]
pub enum Request {
    /// Run a command.
    Do(Action),
    /// Start a run and show it.
    StartRun(Box<RunConfig>),
    /// Read a run folder and show it.
    OpenRun(PathBuf),
    /// Set up a run from a file or folder: a model, a dataset or a `run.toml`.
    SetUp(PathBuf),
    /// Save and end the run that trains.
    StopRun,
    /// Switch an optimization of the run that trains, between two steps.
    Switch {
        /// Which one.
        optimization: Optimization,
        /// On or off.
        on: bool,
    },
    /// Start comparisons.
    StartComparison(Box<RunConfig>, CompareOptions),
    /// End the comparison that runs; what it has found stays.
    StopComparison,
    /// Tell the user something in passing.
    Say(String),
    /// Tell the user what went wrong; stays until dismissed.
    Complain(String),
}

/// What a view gets beside its own state.
pub struct ViewContext<'a> {
    /// Filled by the view, worked off by the app.
    pub requests: &'a mut Vec<Request>,
    /// For background jobs: asks for a repaint.
    pub waker: Waker,
    /// This machine, once it was looked at.
    pub machine: Option<&'a Machine>,
    /// Why nothing else can be started in this window now, when something runs.
    pub busy: Option<&'static str>,
    /// For tests that drive the window from outside.
    pub probe: &'a mut Probe,
}

impl ViewContext<'_> {
    /// Asks the app for something.
    pub fn ask(&mut self, request: Request) {
        self.requests.push(request);
    }
}

/// A waker that repaints `ctx`, at most ten times a second.
pub fn waker(ctx: &egui::Context) -> Waker {
    let ctx = ctx.clone();
    Arc::new(move || ctx.request_repaint_after(super::app::REPAINT_EVERY))
}

/// The first letter in upper case, as at the start of a sentence.
fn capitalized(words: &str) -> String {
    let mut chars = words.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
