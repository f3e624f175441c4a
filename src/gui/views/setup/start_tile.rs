//! The Start tile: name, what will happen, what was checked, and the button.

use egui::{Rect, Ui, vec2};

use super::SetupView;
use super::fields::{field, prose, trouble, verdict};
use super::form::Problem;
use crate::base::{paths, units};
use crate::gui::theme::Theme;
use crate::gui::views::{Request, ViewContext};
use crate::gui::widgets::{Button, Stat, Tile, label};
use crate::gui::{figures, fonts, icons};
use crate::session::config::RunConfig;
use crate::session::run_folder;
use crate::session::{DeviceChoice, MethodKind};

/// Height that the tile needs.
pub const HEIGHT: f32 = 348.0;

/// What is said while background work runs.
const CHECKING: &str = "still checking";

impl SetupView {
    pub(super) fn start_tile(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        config: &RunConfig,
        problems: &[Problem],
        context: &mut ViewContext<'_>,
    ) {
        Tile::new("Start").show(
            ui,
            rect,
            |_| {},
            |ui| {
                ui.spacing_mut().item_spacing = vec2(8.0, 8.0);
                self.start_figures(ui, config);
                let hint = run_folder::run_name(config);
                let named = field(ui, "Name", &mut self.form.name, ui.available_width(), "", None);
                if self.form.name.is_empty() && !self.form.model.is_empty() && !self.form.data.is_empty() {
                    let at = egui::pos2(named.rect.left() + 8.0, named.rect.center().y);
                    let theme = Theme::of(ui);
                    let anchor = egui::Align2::LEFT_CENTER;
                    crate::gui::widgets::text(ui.painter(), at, anchor, &hint, fonts::body(), theme.t3, 280.0);
                }
                let button_height = 36.0 + 8.0;
                let notes = ui.available_height() - button_height;
                ui.allocate_ui(vec2(ui.available_width(), notes), |ui| {
                    ui.set_height(notes);
                    egui::ScrollArea::vertical().id_salt("start").auto_shrink(false).show(ui, |ui| {
                        ui.spacing_mut().item_spacing.y = 4.0;
                        self.what_will_happen(ui, config, context);
                        self.checks_passed(ui);
                    });
                });
                self.start_button(ui, config, problems, context);
            },
        );
    }

    fn start_figures(&self, ui: &mut Ui, config: &RunConfig) {
        let preview = self.jobs.preview.result.ok();
        let width = ((ui.available_width() - 3.0 * 8.0) / 4.0).floor();
        let dash = || "—".to_owned();
        let steps = preview.map_or_else(dash, |preview| units::count(preview.total_steps));
        let packs = preview.map_or_else(dash, |preview| units::count(preview.num_packs() as u64));
        let epochs = preview.map_or_else(dash, |preview| {
            let packs = preview.num_packs().max(1) as f64;
            figures::grouped(preview.total_steps as f64 * config.train.grad_accum_steps as f64 / packs, 2)
        });
        let tokens = units::count((config.packing.pack_len * config.train.grad_accum_steps) as u64);
        ui.horizontal(|ui| {
            Stat::new("Steps", &steps).show(ui, width);
            Stat::new("Tokens/step", &tokens).show(ui, width);
            Stat::new("Packs/epoch", &packs).show(ui, width);
            Stat::new("Epochs", &epochs).show(ui, width);
        });
    }

    fn what_will_happen(&self, ui: &mut Ui, config: &RunConfig, context: &ViewContext<'_>) {
        let theme = Theme::of(ui);
        let what = match config.method.kind {
            MethodKind::Lora | MethodKind::Qlora => "The adapter",
            MethodKind::Full => "The whole model",
        };
        let saved = match config.train.save_every {
            0 => "at the end and when you stop".to_owned(),
            every => format!("every {} steps, at the end and when you stop", units::count(every)),
        };
        let folder = config.runs_dir.clone().or_else(|| paths::runs().ok());
        let folder = folder.map_or(String::new(), |folder| format!(" in a new folder in {}", folder.display()));
        prose(ui, &format!("{what} is saved{folder}, {saved}."), theme.t3);
        if let Some(machine) = context.machine
            && config.train.device == DeviceChoice::Auto
            && let Err(reason) = &machine.gpu
        {
            prose(ui, &format!("It trains on the CPU: {reason}."), theme.t3);
        }
    }

    fn checks_passed(&self, ui: &mut Ui) {
        let Some(preview) = self.jobs.preview.result.ok() else { return };
        let failed = preview.checks.iter().filter(|check| check.failure.is_some()).count();
        let warnings = failed + self.jobs.model.result.ok().map_or(0, |model| model.warnings.len());
        let passed = preview.checks.len() - failed;
        let plural = if warnings == 1 { "warning" } else { "warnings" };
        verdict(ui, warnings == 0, &format!("{passed} checks passed, {warnings} {plural}"));
    }

    /// Why training cannot start; `None` when it can.
    pub(super) fn obstacle(&self, problems: &[Problem], busy: Option<&str>) -> Option<String> {
        if let Some(problem) = problems.first() {
            return Some(in_words(problem));
        }
        if let Some(busy) = busy {
            return Some(busy.into());
        }
        let jobs = &self.jobs;
        if jobs.model.is_behind() || jobs.preview.is_behind() {
            return Some(CHECKING.into());
        }
        if jobs.model.result.error().is_some() {
            return Some("the model cannot be used; its tile says why".into());
        }
        if jobs.preview.result.error().is_some() || jobs.preview.result.ok().is_none() {
            return Some("the dataset cannot be used; its tile says why".into());
        }
        None
    }

    fn start_button(&mut self, ui: &mut Ui, config: &RunConfig, problems: &[Problem], context: &mut ViewContext<'_>) {
        let obstacle = self.obstacle(problems, context.busy);
        ui.horizontal(|ui| {
            let room = ui.available_width();
            let width = if obstacle.is_some() { 160.0 } else { room };
            let button = Button::new("Start training").icon(icons::PLAY).primary().height(36.0).min_width(width);
            let response = ui.add_enabled(obstacle.is_none(), button);
            context.probe.rect("start training", &response);
            context.probe.state("can_start", obstacle.is_none());
            if let Some(words) = &obstacle {
                let theme = Theme::of(ui);
                // What is not done yet is no mistake.
                let is_mistake = *words != CHECKING
                    && Some(words.as_str()) != context.busy
                    && !problems.iter().any(|problem| problem.message == *words);
                if !is_mistake {
                    label(ui, words, fonts::table(), theme.t3);
                } else {
                    ui.vertical(|ui| {
                        ui.add_space(6.0);
                        trouble(ui, words);
                    });
                }
            }
            if response.clicked() {
                self.remember(config, context);
                // The run reads the data for itself; both need not be in memory.
                self.jobs.let_go();
                context.ask(Request::StartRun(Box::new(config.clone())));
            }
        });
    }
}

/// A problem with the field that has it.
pub fn in_words(problem: &Problem) -> String {
    match caption(&problem.field) {
        "" => problem.message.clone(),
        caption => format!("{caption}: {}", problem.message),
    }
}

/// What the screen calls a field of `run.toml`; empty where the message says enough.
fn caption(field: &str) -> &str {
    match field {
        "model.path" | "data.path" | "method.target_modules" => "",
        "data.prompt" => "The user says",
        "data.completion" => "The assistant answers",
        "data.eval_fraction" => "Held out",
        "method.r" => "Rank",
        "method.lora_alpha" => "Alpha",
        "method.lora_dropout" => "Dropout",
        "optimizer.lr" => "Learning rate",
        "optimizer.warmup_steps" => "Warm-up",
        "optimizer.bits" => "Optimizer state",
        "packing.pack_len" => "Tokens per pack",
        "train.grad_accum_steps" => "Packs per step",
        "train.epochs" => "Epochs",
        "train.max_steps" => "Steps",
        "train.eval_every" => "Evaluate every",
        "train.save_every" => "Save every",
        other => other,
    }
}
