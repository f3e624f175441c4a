//! The run that the Live screen shows: one that trains here, or an old one read from its folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::drain::{Drained, drain};
use crate::base::error::Result;
use crate::session::config::RunConfig;
use crate::session::event::Command;
use crate::session::handle::{self, RunHandle};
use crate::session::run_folder;
use crate::session::run_view::{RunState, RunView};

/// A run with its events so far.
pub struct CurrentRun {
    /// What is known of it.
    pub view: RunView,
    folder: PathBuf,
    name: String,
    handle: Option<RunHandle>,
}

impl CurrentRun {
    /// Starts a run; `ctx` is asked for a repaint when events come, at most ten times a second.
    ///
    /// # Errors
    /// As [`handle::start`].
    pub fn start(config: RunConfig, ctx: &egui::Context) -> Result<Self> {
        let ctx = ctx.clone();
        let waker = Box::new(move || ctx.request_repaint_after(super::app::REPAINT_EVERY));
        let name = run_folder::run_name(&config);
        let handle = handle::start(config, Some(waker))?;
        Ok(Self { view: RunView::default(), folder: handle.folder().to_owned(), name, handle: Some(handle) })
    }

    /// A run read from its folder.
    pub fn opened(folder: PathBuf, view: RunView) -> Self {
        let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Self { view, folder, name, handle: None }
    }

    /// Takes in the events that have come, for at most `budget`. Returns whether there were any.
    pub fn drain(&mut self, budget: Duration) -> bool {
        let Some(handle) = &self.handle else { return false };
        let Drained { changed, ended } =
            drain(budget, handle.is_finished(), |max| handle.drain(max), |event| self.view.apply(&event));
        if ended {
            self.handle = None;
        }
        changed
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.view.info.as_ref().map_or(&self.name, |info| &info.name)
    }

    /// Whether it trains in this window.
    pub fn is_active(&self) -> bool {
        self.handle.is_some() && !self.view.state.is_over()
    }

    /// Whether its thread has not ended yet.
    pub fn has_thread(&self) -> bool {
        self.handle.is_some()
    }

    /// Whether it can be told to save or to stop.
    pub fn takes_commands(&self) -> bool {
        self.is_active() && self.view.state != RunState::Stopping
    }

    /// Tells it something; nothing happens when it does not train here.
    pub fn send(&self, command: Command) {
        if let Some(handle) = &self.handle {
            handle.send(command);
        }
    }
}
