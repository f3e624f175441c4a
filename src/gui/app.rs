//! The window: what it holds, what happens before a frame (`logic`), and which view draws the frame (`draw`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use egui::{Context, ThemePreference, Ui, ViewportCommand, vec2};

use super::actions::{self, Action};
use super::current_comparison::{CurrentComparison, Findings};
use super::current_run::CurrentRun;
use super::dialogs::{self, Dialog};
use super::palette::Palette;
use super::probe::Probe;
use super::toasts::Toasts;
use super::views::compare::CompareView;
use super::views::live::LiveView;
use super::views::runs::RunsView;
use super::views::setup::SetupView;
use super::views::welcome::WelcomeView;
use super::views::{Request, Screen, ViewContext, waker};
use super::{fonts, theme};
use crate::base::error::Result;
use crate::base::paths;
use crate::session::compare::CompareOptions;
use crate::session::config::RunConfig;
use crate::session::event::Command;
use crate::session::machine::Machine;
use crate::session::run_view::RunView;
use crate::session::runtime::{Poll, Task};

/// Training causes at most one repaint in this time.
pub const REPAINT_EVERY: Duration = Duration::from_millis(100);
/// Time that taking in events may cost a frame.
const EVENT_BUDGET: Duration = Duration::from_millis(4);
/// A run that another process trains is read again after so long.
const REREAD_EVERY: Duration = Duration::from_secs(2);
/// Memory and disk are read again after so long, when something happens.
const MACHINE_EVERY: Duration = Duration::from_secs(5);

/// Opens the window and returns when it is closed.
///
/// # Errors
/// When the user's data folder is unknown, or the system gives no window.
pub fn run() -> Result<()> {
    let home = paths::home()?;
    std::fs::create_dir_all(&home).with_context(|| format!("cannot make {}", home.display()))?;
    let probe = Probe::from_env()?;
    let options = eframe::NativeOptions {
        viewport: egui::ViewportBuilder::default()
            .with_title("Tandem")
            .with_app_id("tandem")
            .with_icon(egui::IconData::default())
            .with_inner_size(vec2(1440.0, 900.0))
            .with_min_inner_size(vec2(960.0, 600.0)),
        persistence_path: Some(home.join("window.ron")),
        ..eframe::NativeOptions::default()
    };
    let create: eframe::AppCreator<'_> = Box::new(move |cc| {
        install(&cc.egui_ctx);
        Ok(Box::new(TandemApp::new(&cc.egui_ctx, probe)))
    });
    eframe::run_native("Tandem", options, create)
        .map_err(|error| anyhow!("the window cannot be opened: {error}; `tandem train run.toml` trains without one"))
}

/// Gives egui our fonts and themes.
pub fn install(ctx: &Context) {
    ctx.set_fonts(fonts::definitions());
    theme::install(ctx);
}

/// Everything the window holds.
pub struct TandemApp {
    pub(super) screen: Screen,
    /// The run that trains here, or the last one that did.
    pub(super) active: Option<CurrentRun>,
    /// An old run that is looked at instead.
    pub(super) opened: Option<CurrentRun>,
    /// The comparisons that run here, or the last ones that did.
    comparison: Option<CurrentComparison>,
    pub(super) machine: Option<Machine>,
    pub(super) palette: Palette,
    pub(super) dialog: Option<Dialog>,
    pub(super) toasts: Toasts,
    pub(super) probe: Probe,
    welcome: WelcomeView,
    runs: RunsView,
    setup: SetupView,
    live: LiveView,
    compare: CompareView,
    opening: Option<Task<(PathBuf, RunView)>>,
    rereading: Option<Task<(PathBuf, RunView)>>,
    reread: Option<Instant>,
    picking: Option<Task<PathBuf>>,
    reading_machine: Option<Task<Machine>>,
    machine_read: Option<Instant>,
    quitting: bool,
}

impl TandemApp {
    /// An app that shows the welcome screen.
    pub fn new(ctx: &Context, probe: Probe) -> Self {
        let waker = waker(ctx);
        Self {
            screen: Screen::Home,
            active: None,
            opened: None,
            comparison: None,
            machine: None,
            palette: Palette::default(),
            dialog: None,
            toasts: Toasts::default(),
            probe,
            welcome: WelcomeView::new(&waker),
            runs: RunsView::default(),
            setup: SetupView::default(),
            live: LiveView::default(),
            compare: CompareView::default(),
            opening: None,
            rereading: None,
            reread: None,
            picking: None,
            reading_machine: None,
            machine_read: None,
            quitting: false,
        }
    }

    /// The run that Live shows.
    pub fn shown_run(&self) -> Option<&CurrentRun> {
        self.opened.as_ref().or(self.active.as_ref())
    }

    /// The screen that is shown.
    pub fn screen(&self) -> Screen {
        self.screen
    }

    /// Shows a run that was read already.
    pub fn show_run(&mut self, folder: PathBuf, view: RunView) {
        self.opened = Some(CurrentRun::opened(folder, view));
        self.live = LiveView::default();
        self.screen = Screen::Live;
    }

    /// Shows comparisons that were made already.
    pub fn show_comparison(&mut self, found: Findings) {
        self.comparison = Some(CurrentComparison::ended(found));
        self.compare = CompareView::default();
        self.screen = Screen::Compare;
    }

    /// The comparisons that Compare shows.
    pub fn comparison(&self) -> Option<&Findings> {
        self.comparison.as_ref().map(|comparison| &comparison.found)
    }

    /// Why nothing can be started in this window, when something runs.
    fn busy(&self) -> Option<&'static str> {
        if self.active.as_ref().is_some_and(CurrentRun::has_thread) {
            Some("a run is training; stop it first")
        } else if self.comparison.as_ref().is_some_and(CurrentComparison::is_running) {
            Some("a comparison is running; stop it first")
        } else {
            None
        }
    }

    /// Takes in what happened since the last frame. Never waits, never paints.
    pub fn logic(&mut self, ctx: &Context) {
        let now = Instant::now();
        if let Some(run) = &mut self.active {
            let had_thread = run.has_thread();
            if run.drain(EVENT_BUDGET) && run.has_thread() {
                ctx.request_repaint_after(REPAINT_EVERY);
            }
            if had_thread && !run.has_thread() {
                self.runs.refresh(&waker(ctx));
                self.welcome.refresh(&waker(ctx));
            }
        }
        if let Some(comparison) = &mut self.comparison
            && comparison.drain(EVENT_BUDGET)
            && comparison.is_running()
        {
            ctx.request_repaint_after(REPAINT_EVERY);
        }
        if self.quitting && !self.active.as_ref().is_some_and(CurrentRun::has_thread) {
            ctx.send_viewport_cmd(ViewportCommand::Close);
        }
        self.poll_tasks(ctx, now);
        self.toasts.tick(ctx, now);
        if let Some(run) = &self.active {
            self.probe.state("run", run.view.state.describe());
            self.probe.state("steps", run.view.steps_done());
            if let Some(step) = run.view.last_step() {
                self.probe.state("loss", step.report.loss);
                self.probe.state("smoothed_loss", step.smoothed_loss);
            }
        }
    }

    fn poll_tasks(&mut self, ctx: &Context, now: Instant) {
        if self.machine_read.is_none_or(|read| now.duration_since(read) >= MACHINE_EVERY)
            && self.reading_machine.is_none()
        {
            self.machine_read = Some(now);
            self.reading_machine = Some(Task::blocking(Some(waker(ctx)), |_| Ok(Some(Machine::read(&paths::runs()?)))));
        }
        if let Some(result) = take_ready(&mut self.reading_machine) {
            match result {
                Ok(machine) => self.machine = Some(machine),
                Err(error) => self.toasts.complain(format!("This machine cannot be looked at: {error:#}")),
            }
        }
        if let Some(result) = take_ready(&mut self.opening) {
            match result {
                Ok((folder, view)) => self.show_run(folder, view),
                Err(error) => self.toasts.complain(format!("{error:#}")),
            }
        }
        self.follow_other_process(ctx, now);
        if let Some(result) = take_ready(&mut self.picking) {
            match result {
                Ok(path) => self.set_up(&path),
                Err(error) => self.toasts.complain(format!("{error:#}")),
            }
        }
    }

    /// Reads an opened run again while another process trains it.
    fn follow_other_process(&mut self, ctx: &Context, now: Instant) {
        if let Some(Ok((folder, view))) = take_ready(&mut self.rereading)
            && let Some(run) = self.opened.as_mut().filter(|run| run.folder() == folder)
        {
            run.view = view;
        }
        let Some(run) = self.opened.as_ref().filter(|run| !run.view.state.is_over()) else { return };
        let due = self.reread.is_none_or(|read| now.duration_since(read) >= REREAD_EVERY);
        if due && self.rereading.is_none() {
            self.reread = Some(now);
            self.rereading = Some(load(run.folder().to_owned(), ctx));
        }
        ctx.request_repaint_after(REREAD_EVERY);
    }

    /// Draws the window and does what was asked for in it.
    pub fn draw(&mut self, ui: &mut Ui) {
        let ctx = ui.ctx().clone();
        if self.dialog.is_none() && !self.palette.is_open() {
            for action in actions::pressed(&ctx) {
                self.perform(action, &ctx);
            }
        }
        self.refuse_to_close_while_training(&ctx);
        let mut requests = Vec::new();
        self.menu_bar(ui, &mut requests);
        self.status_bar(ui);
        self.rail(ui, &mut requests);
        egui::CentralPanel::no_frame().show(ui, |ui| self.view(ui, &mut requests));
        self.drop_overlay(ui, &mut requests);
        self.toasts.show(ui);
        if let Some(action) = self.palette.show(&ctx) {
            requests.push(Request::Do(action));
        }
        dialogs::show(self, &ctx, &mut requests);
        for request in requests {
            self.fulfil(request, &ctx);
        }
        self.probe.state("screen", format!("{:?}", self.screen).to_lowercase());
        self.probe.state("dark", ui.visuals().dark_mode);
    }

    fn view(&mut self, ui: &mut Ui, requests: &mut Vec<Request>) {
        let busy = self.busy();
        let mut context = ViewContext {
            requests,
            waker: waker(ui.ctx()),
            machine: self.machine.as_ref(),
            busy,
            probe: &mut self.probe,
        };
        match self.screen {
            Screen::Home => self.welcome.ui(ui, &mut context),
            Screen::SetUp => self.setup.ui(ui, &mut context),
            Screen::Live => {
                let run = self.opened.as_ref().or(self.active.as_ref());
                let found = self.comparison.as_ref().map(|comparison| &comparison.found);
                self.live.ui(ui, run, found, &mut context);
            }
            Screen::Compare => {
                self.compare.ui(ui, self.comparison.as_ref(), || self.setup.subject(), &mut context);
            }
            Screen::Runs => self.runs.ui(ui, &mut context),
        }
    }

    fn fulfil(&mut self, request: Request, ctx: &Context) {
        match request {
            Request::Do(action) => self.perform(action, ctx),
            Request::StartRun(config) => self.start_run(*config, ctx),
            Request::OpenRun(folder) => self.open_run(folder, ctx),
            Request::SetUp(path) => self.set_up(&path),
            Request::StopRun => {
                if let Some(run) = &self.active {
                    run.send(Command::Stop);
                }
            }
            Request::Switch { optimization, on } => {
                if let Some(run) = &self.active {
                    run.send(Command::Switch { optimization, on });
                }
            }
            Request::StartComparison(config, options) => self.start_comparison(*config, options, ctx),
            Request::StopComparison => {
                if let Some(comparison) = &mut self.comparison {
                    comparison.stop();
                }
            }
            Request::Say(text) => self.toasts.say(text),
            Request::Complain(text) => self.toasts.complain(text),
        }
    }

    /// Why a command cannot be given now; `None` when it can.
    pub(super) fn unavailable(&self, action: Action) -> Option<&'static str> {
        let takes_commands = self.active.as_ref().is_some_and(CurrentRun::takes_commands);
        match action {
            Action::Stop | Action::SaveNow if !takes_commands => Some("No run is training"),
            Action::StartStarter => self.busy(),
            Action::Live | Action::CopyRunFolder if self.shown_run().is_none() => Some("No run is open"),
            _ => None,
        }
    }

    /// Runs a command.
    pub(super) fn perform(&mut self, action: Action, ctx: &Context) {
        if let Some(reason) = self.unavailable(action) {
            self.toasts.say(reason.into());
            return;
        }
        let waker = waker(ctx);
        match action {
            Action::Home => {
                self.welcome.refresh(&waker);
                self.screen = Screen::Home;
            }
            Action::SetUp => self.screen = Screen::SetUp,
            Action::Live => {
                if self.screen == Screen::Live && self.active.is_some() {
                    self.opened = None;
                }
                self.screen = Screen::Live;
            }
            Action::Compare => self.screen = Screen::Compare,
            Action::Runs => {
                self.runs.refresh(&waker);
                self.screen = Screen::Runs;
            }
            Action::OpenRunFile => {
                self.picking = Some(dialogs::pick_run_file(waker));
            }
            Action::StartStarter => {
                self.screen = Screen::Home;
                self.welcome.start_starter(&waker);
            }
            Action::SaveNow => {
                if let Some(run) = &self.active {
                    run.send(Command::SaveNow);
                }
            }
            Action::Stop => self.dialog = Some(Dialog::Stop),
            Action::CopyRunFolder => {
                if let Some(run) = self.shown_run() {
                    let path = run.folder().display().to_string();
                    ctx.copy_text(path.clone());
                    self.toasts.say(format!("Copied {path}"));
                }
            }
            Action::NextTheme => {
                let next = match ctx.options(|options| options.theme_preference) {
                    ThemePreference::System => ThemePreference::Dark,
                    ThemePreference::Dark => ThemePreference::Light,
                    ThemePreference::Light => ThemePreference::System,
                };
                ctx.set_theme(next);
                self.toasts.say(format!("Theme: {}", format!("{next:?}").to_lowercase()));
            }
            Action::ThemeSystem => ctx.set_theme(ThemePreference::System),
            Action::ThemeDark => ctx.set_theme(ThemePreference::Dark),
            Action::ThemeLight => ctx.set_theme(ThemePreference::Light),
            Action::ZoomIn => egui::gui_zoom::zoom_in(ctx),
            Action::ZoomOut => egui::gui_zoom::zoom_out(ctx),
            Action::ZoomReset => ctx.set_zoom_factor(1.0),
            Action::Palette => self.palette.open(),
            Action::Shortcuts => self.dialog = Some(Dialog::Shortcuts),
            Action::About => self.dialog = Some(Dialog::About),
            Action::Quit => ctx.send_viewport_cmd(ViewportCommand::Close),
        }
    }

    /// Starts a run and shows it, unless one trains already.
    pub fn start_run(&mut self, config: RunConfig, ctx: &Context) {
        if let Some(busy) = self.busy() {
            self.toasts.complain(format!("Nothing was started: {busy}."));
            return;
        }
        match CurrentRun::start(config, ctx) {
            Ok(run) => {
                self.active = Some(run);
                self.opened = None;
                self.live = LiveView::default();
                self.screen = Screen::Live;
            }
            Err(error) => self.toasts.complain(format!("{error:#}")),
        }
    }

    /// Starts comparisons and shows them, unless something runs already.
    pub fn start_comparison(&mut self, config: RunConfig, options: CompareOptions, ctx: &Context) {
        if let Some(busy) = self.busy() {
            self.toasts.complain(format!("Nothing was started: {busy}."));
            return;
        }
        match CurrentComparison::start(config, options, ctx) {
            Ok(comparison) => {
                self.comparison = Some(comparison);
                self.compare.show_results();
                self.screen = Screen::Compare;
            }
            Err(error) => self.toasts.complain(format!("{error:#}")),
        }
    }

    fn open_run(&mut self, folder: PathBuf, ctx: &Context) {
        if self.active.as_ref().is_some_and(|run| run.folder() == folder) {
            self.opened = None;
            self.screen = Screen::Live;
            return;
        }
        self.opening = Some(load(folder, ctx));
    }

    /// Shows Set up with a model, a dataset or a `run.toml` that was dropped or picked.
    pub fn set_up(&mut self, path: &Path) {
        self.screen = Screen::SetUp;
        if let Err(error) = self.setup.take(path) {
            self.toasts.complain(format!("{error:#}"));
        }
    }

    /// The configuration that Set up would start, and whether all its fields are right.
    pub fn setup_config(&self) -> (RunConfig, bool) {
        self.setup.config()
    }

    /// Ends the program once the run has saved what it trained.
    pub(super) fn quit_after_saving(&mut self) {
        if let Some(run) = &self.active {
            run.send(Command::Stop);
        }
        self.quitting = true;
    }

    /// Whether the window closes as soon as the run has saved.
    pub(super) fn is_quitting(&self) -> bool {
        self.quitting
    }

    fn refuse_to_close_while_training(&mut self, ctx: &Context) {
        let wants_to_close = ctx.input(|input| input.viewport().close_requested());
        if wants_to_close && self.active.as_ref().is_some_and(CurrentRun::has_thread) {
            ctx.send_viewport_cmd(ViewportCommand::CancelClose);
            self.dialog = Some(Dialog::Quit);
        }
    }
}

/// Reads a run folder in the background.
fn load(folder: PathBuf, ctx: &Context) -> Task<(PathBuf, RunView)> {
    Task::blocking(Some(waker(ctx)), move |_| {
        let view = RunView::load(&folder)?;
        Ok(Some((folder, view)))
    })
}

/// Takes the result out of a task that has one, and the task with it.
pub(super) fn take_ready<T: Send + 'static>(task: &mut Option<Task<T>>) -> Option<Result<T>> {
    match task.as_mut()?.poll() {
        Poll::Running => None,
        Poll::Ready(result) => {
            *task = None;
            Some(result)
        }
        Poll::Ended => {
            *task = None;
            None
        }
    }
}

impl eframe::App for TandemApp {
    fn logic(&mut self, ctx: &Context, _frame: &mut eframe::Frame) {
        self.logic(ctx);
    }

    fn ui(&mut self, ui: &mut Ui, _frame: &mut eframe::Frame) {
        self.draw(ui);
    }

    fn clear_color(&self, visuals: &egui::Visuals) -> [f32; 4] {
        visuals.extreme_bg_color.to_normalized_gamma_f32()
    }
}
