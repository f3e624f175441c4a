//! The Set up screen: model, method, data with what the model will see of it, the memory plan, and the start.

mod data_tile;
pub(super) mod fields;
mod form;
mod jobs;
mod memory_tile;
mod method_tile;
mod model_tile;
mod optimization_fields;
mod rows_tile;
mod sees_tile;
mod start_tile;
mod token_flow;

use std::path::Path;
use std::time::Instant;

use egui::{Align, Align2, Layout, Rect, Ui, UiBuilder, pos2, vec2};

use self::form::{Dropped, Form, Problem};
use self::jobs::{Jobs, Wanted};
use self::rows_tile::Side;
use self::token_flow::{TokenFlow, Writing};
use super::{Request, ViewContext};
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, rule, text};
use crate::gui::{fonts, icons};
use crate::session::config::RunConfig;
use crate::session::recent::Recent;
use crate::session::starter::{self, Status};

const HEADER: f32 = 52.0;
/// Widths of the outer columns; the middle takes the rest.
const LEFT: f32 = 392.0;
const RIGHT: f32 = 372.0;
/// Height below which the tiles of a column get less room and scroll.
const ROOMY: f32 = 700.0;
/// Height of the Start tile where others need the room.
const SMALL_START: f32 = 262.0;
/// Height from which the memory plan has a tile of its own.
const WITH_PLAN: f32 = 780.0;

/// State of the screen.
pub struct SetupView {
    form: Form,
    jobs: Jobs,
    recent: Recent,
    starter: Result<Status, String>,
    /// What is typed into the filter of models.
    filter: String,
    writing: Writing,
    /// What the tile of rows shows.
    side: Side,
    /// The pack in sight, from 0.
    pack: usize,
    flow: TokenFlow,
    looked_for_models: bool,
}

/// What a comparison would be made on.
#[derive(Debug)]
pub struct Subject {
    /// The configuration of Set up.
    pub config: RunConfig,
    /// What is wrong with it, in words.
    pub problem: Option<String>,
    /// Whether its model was looked at and has no experts.
    pub is_dense: bool,
}

impl Default for SetupView {
    fn default() -> Self {
        Self {
            form: Form::default(),
            jobs: Jobs::default(),
            recent: Recent::default(),
            starter: Ok(Status::Absent),
            filter: String::new(),
            writing: Writing::default(),
            side: Side::default(),
            pack: 0,
            flow: TokenFlow::default(),
            looked_for_models: false,
        }
    }
}

impl SetupView {
    /// Takes a model, a dataset or a `run.toml` that was dropped or picked.
    ///
    /// # Errors
    /// When a `run.toml` cannot be read; the fields stay as they are.
    pub fn take(&mut self, path: &Path) -> crate::base::error::Result<()> {
        match form::kind_of_dropped(path) {
            Dropped::RunToml => self.form = Form::from_config(&RunConfig::load(path)?),
            Dropped::Model => self.choose_model(path),
            Dropped::Data => self.choose_dataset(path),
        }
        Ok(())
    }

    /// The configuration that the fields make, and whether it is free of problems.
    pub fn config(&self) -> (RunConfig, bool) {
        let (config, problems) = self.config_and_problems();
        (config, problems.is_empty())
    }

    /// The configuration that the fields make, and what is wrong with it, by itself and for its model.
    fn config_and_problems(&self) -> (RunConfig, Vec<Problem>) {
        let (config, mut problems) = self.form.config();
        let method = &config.method;
        let Some(model) = self.jobs.model.of(&config.model.path).filter(|_| method.kind.has_adapters()) else {
            return (config, problems);
        };
        let mut add = |field: &str, message: &str| {
            if !problems.iter().any(|problem| problem.field == field) {
                problems.push(Problem { field: field.into(), message: message.into() });
            }
        };
        if model.experts.is_none() && !method.target_parameters.is_empty() {
            add("method.target_parameters", "this model has no experts");
        } else if model.num_trainable(method) == 0 {
            add("method.target_modules", "choose at least one projection that this model has");
        }
        (config, problems)
    }

    /// The configuration that the fields make, for the screen of comparisons.
    pub fn subject(&self) -> Subject {
        let (config, problems) = self.config_and_problems();
        let model = self.jobs.model.of(&config.model.path);
        let is_dense = model.is_some_and(|model| model.experts.is_none());
        Subject { config, problem: problems.first().map(start_tile::in_words), is_dense }
    }

    fn choose_model(&mut self, path: &Path) {
        self.form.model = path.display().to_string();
    }

    fn choose_dataset(&mut self, path: &Path) {
        self.form.data = path.display().to_string();
        // A mapping belongs to the columns of one dataset.
        if self.form.layout == crate::session::LayoutChoice::Mapping {
            self.form.layout = crate::session::LayoutChoice::Auto;
        }
        if path == Path::new(starter::STARTER)
            && let Ok(run) = starter::run_config()
        {
            self.form.map_as(&run);
        }
    }

    /// Begins with the model used last, else with the starter model, when one of them is here.
    fn preselect(&mut self) {
        if !self.form.model.is_empty() {
            return;
        }
        let ready = match &self.starter {
            Ok(Status::Ready { path }) => Some(path.clone()),
            _ => None,
        };
        if let Some(path) = self.recent.models.iter().find(|path| path.exists()).cloned().or(ready) {
            self.choose_model(&path);
        }
    }

    /// Puts what a run uses first in the recent lists.
    fn remember(&mut self, config: &RunConfig, context: &mut ViewContext<'_>) {
        self.recent.add_model(&config.model.path);
        self.recent.add_dataset(&config.data.path);
        if let Err(error) = self.recent.save() {
            context.ask(Request::Complain(format!("The recent files cannot be remembered: {error:#}")));
        }
    }

    fn poll(&mut self, config: &RunConfig, ui: &Ui, context: &mut ViewContext<'_>) {
        if !self.looked_for_models {
            self.looked_for_models = true;
            match Recent::load() {
                Ok(recent) => self.recent = recent,
                Err(error) => context.ask(Request::Complain(format!("{error:#}"))),
            }
            self.starter = starter::status().map_err(|error| format!("{error:#}"));
            self.jobs.find_models(&context.waker, self.recent.models.clone());
            self.preselect();
        }
        self.jobs.poll();
        if let Some(wait) = self.jobs.follow(config, Instant::now(), &context.waker) {
            ui.ctx().request_repaint_after(wait);
        }
        if let Some(wait) = self.jobs.follow_plan(config, Instant::now(), &context.waker) {
            ui.ctx().request_repaint_after(wait);
        }
        self.jobs.follow_pack(self.pack, &context.waker);
        if let Some(path) = self.jobs.starter.ok().cloned() {
            self.jobs.starter.clear();
            self.starter = Ok(Status::Ready { path: path.clone() });
            if self.form.model.is_empty() {
                self.choose_model(&path);
            }
            // The same words mean something else now.
            self.jobs.model.again();
            self.jobs.preview.again();
            self.jobs.find_models(&context.waker, self.recent.models.clone());
        }
        match self.jobs.dialog.take() {
            Some(Ok((wanted, path))) => self.picked(wanted, &path, context),
            Some(Err(error)) => context.ask(Request::Complain(format!("{error:#}"))),
            None => {}
        }
    }

    fn picked(&mut self, wanted: Wanted, path: &Path, context: &mut ViewContext<'_>) {
        match wanted {
            Wanted::ModelFolder | Wanted::ModelFile => self.choose_model(path),
            Wanted::Dataset => self.choose_dataset(path),
            Wanted::RunToml => {
                if let Err(error) = self.take(path) {
                    context.ask(Request::Complain(format!("{error:#}")));
                }
            }
        }
    }

    /// Draws the screen.
    pub fn ui(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let (config, problems) = self.config_and_problems();
        self.poll(&config, ui, context);
        let theme = Theme::of(ui);
        let body = ui.max_rect();
        // What shows between the tiles is the line.
        ui.painter().rect_filled(body, 0, theme.line);
        self.header(ui, body.with_max_y(body.top() + HEADER), &config, context);

        let area = body.with_min_y(body.top() + HEADER);
        let scale = (area.width() / 1376.0).min(1.0);
        let (left, right) = ((LEFT * scale).round(), (RIGHT * scale).round());
        let roomy = area.height() >= ROOMY;
        let column = |from: f32, to: f32| area.with_min_x(from).with_max_x(to);
        let first = column(area.left(), area.left() + left);
        let second = column(first.right() + 1.0, area.right() - right - 1.0);
        let third = column(second.right() + 1.0, area.right());

        let (model, method) = split(first, if roomy { 366.0 } else { area.height() * 0.48 });
        self.model_tile(ui, model, context);
        self.method_tile(ui, method, &config, &problems);
        let (data, sees) = split(second, if roomy { data_tile::HEIGHT } else { data_tile::HEIGHT - 46.0 });
        self.data_tile(ui, data, context);
        self.sees_tile(ui, sees);
        // Where there is no room for it, the plan is a side of the tile of rows.
        let apart = area.height() >= WITH_PLAN;
        let start = if apart || !roomy { SMALL_START } else { start_tile::HEIGHT };
        let (upper, start) = match apart {
            false => split(third, area.height() - start),
            true => {
                let (rows, rest) = split(third, self.side.height());
                let (memory, start) = split(rest, (rest.height() - start).min(memory_tile::HEIGHT));
                self.memory_tile(ui, memory, context);
                (rows, start)
            }
        };
        self.rows_tile(ui, upper, apart, &problems);
        self.start_tile(ui, start, &config, &problems, context);
        context.probe.state("preview", self.jobs.preview.version);
    }

    fn header(&mut self, ui: &mut Ui, rect: Rect, config: &RunConfig, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        let painter = ui.painter();
        painter.rect_filled(rect, 0, theme.bg0);
        rule(painter, rect.x_range(), rect.bottom() - 0.5, theme.line);
        let at = rect.left_top() + vec2(12.0, 8.0);
        text(painter, at, Align2::LEFT_TOP, "Set up a run", fonts::semibold(15.0), theme.t1, 300.0);
        let words = "Everything is looked at before it starts, with the code that trains.";
        text(painter, at + vec2(0.0, 20.0), Align2::LEFT_TOP, words, fonts::table(), theme.t3, rect.width() - 400.0);
        let buttons = UiBuilder::new()
            .id_salt("setup header")
            .max_rect(Rect::from_min_max(pos2(rect.right() - 380.0, rect.top()), rect.max - vec2(12.0, 1.0)))
            .layout(Layout::right_to_left(Align::Center));
        let mut buttons = ui.new_child(buttons);
        if buttons.add(Button::new("Open run.toml…").icon(icons::FOLDER_OPEN)).clicked() {
            self.jobs.open_dialog(Wanted::RunToml, &context.waker);
        }
        if buttons.add(Button::new("Copy as run.toml").icon(icons::COPY)).clicked() {
            match config.to_toml() {
                Ok(toml) => {
                    ui.ctx().copy_text(toml);
                    context.ask(Request::Say("Copied the run configuration".into()));
                }
                Err(error) => context.ask(Request::Complain(format!("{error:#}"))),
            }
        }
    }
}

/// Two rectangles above each other with one pixel between, the first one `height` high.
fn split(rect: Rect, height: f32) -> (Rect, Rect) {
    let at = (rect.top() + height).round().min(rect.bottom());
    (rect.with_max_y(at), rect.with_min_y((at + 1.0).min(rect.bottom())))
}
