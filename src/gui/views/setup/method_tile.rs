//! The Method tile: what trains, how fast, how long.

use egui::{Rect, Ui, vec2};

use super::SetupView;
use super::fields::{chip, choice, field, problem, prose, trouble};
use super::form::{LengthUnit, PROJECTIONS, Problem};
use super::model_tile::parameters;
use crate::base::units;
use crate::gui::fonts;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, label, segmented};
use crate::session::config::RunConfig;
use crate::session::inspect::{MLP, ModelInfo};
use crate::session::{MethodKind, ScheduleKind};

const GAP: f32 = 10.0;
/// Adapters on experts, in the order of `EXPERT_PARAMETERS`.
const EXPERTS: [&str; 2] = ["experts gate+up", "experts down"];
const NO_MLP: &str = "No gate, up and down here: every layer has experts instead.";

impl SetupView {
    pub(super) fn method_tile(&mut self, ui: &mut Ui, rect: Rect, config: &RunConfig, problems: &[Problem]) {
        Tile::new("Method").show(
            ui,
            rect,
            |_| {},
            |ui| {
                egui::ScrollArea::vertical().id_salt("method").auto_shrink(false).show(ui, |ui| {
                    ui.spacing_mut().item_spacing = vec2(GAP, 8.0);
                    let kinds = [(MethodKind::Lora, "LoRA"), (MethodKind::Qlora, "QLoRA"), (MethodKind::Full, "Full")];
                    segmented(ui, "Method", &mut self.form.kind, &kinds, 26.0);
                    // The scroll bar floats over the right edge.
                    let third = ((ui.available_width() - 2.0 * GAP - 6.0) / 3.0).floor();
                    self.numbers(ui, third, problems);
                    self.intervals(ui, third, problems);
                    if self.form.kind.has_adapters() {
                        self.adapters(ui, problems);
                    }
                    self.method_notes(ui, config);
                });
            },
        );
    }

    fn numbers(&mut self, ui: &mut Ui, third: f32, problems: &[Problem]) {
        let form = &mut self.form;
        let find = |name: &str| problem(problems, name);
        if form.kind.has_adapters() {
            ui.horizontal_top(|ui| {
                field(ui, "Rank", &mut form.rank, third, "", find("method.r"));
                field(ui, "Alpha", &mut form.alpha, third, "", find("method.lora_alpha"));
                field(ui, "Dropout", &mut form.dropout, third, "", find("method.lora_dropout"));
            });
        }
        ui.horizontal_top(|ui| {
            field(ui, "Learning rate", &mut form.lr, third, "", find("optimizer.lr"));
            field(ui, "Warm-up", &mut form.warmup, third, "steps", find("optimizer.warmup_steps"));
            let schedules = [
                (ScheduleKind::Cosine, "cosine"),
                (ScheduleKind::Linear, "linear"),
                (ScheduleKind::Constant, "constant"),
            ];
            choice(ui, "Schedule", &mut form.schedule, &schedules, third);
        });
        ui.horizontal_top(|ui| {
            field(ui, "Tokens per pack", &mut form.pack_len, third, "", find("packing.pack_len"));
            field(ui, "Packs per step", &mut form.packs_per_step, third, "", find("train.grad_accum_steps"));
            let (caption, unit, name) = match form.length_unit {
                LengthUnit::Epochs => ("Epochs", "", "train.epochs"),
                LengthUnit::Steps => ("Steps", "", "train.max_steps"),
            };
            field(ui, caption, &mut form.length, third, unit, find(name));
        });
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = 8.0;
            label(ui, "Length in", fonts::small(), Theme::of(ui).t3);
            let units = [(LengthUnit::Epochs, "epochs"), (LengthUnit::Steps, "steps")];
            let before = self.form.length_unit;
            segmented(ui, "Length in", &mut self.form.length_unit, &units, 20.0);
            if before != self.form.length_unit {
                let steps = self.jobs.preview.result.ok().map(|preview| preview.total_steps);
                self.form.change_length_unit(steps);
            }
        });
    }

    /// How often the run looks back: evaluation and saving; and what the optimizer keeps.
    fn intervals(&mut self, ui: &mut Ui, third: f32, problems: &[Problem]) {
        let form = &mut self.form;
        ui.horizontal_top(|ui| {
            let find = |name: &str| problem(problems, name);
            field(ui, "Evaluate every", &mut form.eval_every, third, "steps", find("train.eval_every"));
            field(ui, "Save every", &mut form.save_every, third, "steps", find("train.save_every"));
            choice(ui, "Optimizer state", &mut form.optimizer_bits, &[(32, "32 bits"), (8, "8 bits")], third);
        });
    }

    fn adapters(&mut self, ui: &mut Ui, problems: &[Problem]) {
        ui.scope(|ui| {
            ui.spacing_mut().item_spacing = vec2(4.0, 3.0);
            label(ui, "Adapters on", fonts::small(), Theme::of(ui).t3);
            let model = self.jobs.model.result.ok();
            let has_mlp = model.is_none_or(ModelInfo::has_mlp);
            let has_experts = model.is_some_and(|model| model.experts.is_some());
            ui.horizontal_wrapped(|ui| {
                for ((name, short), on) in PROJECTIONS.iter().zip(&mut self.form.adapters) {
                    if has_mlp || !MLP.contains(name) {
                        chip(ui, short, on);
                    } else {
                        // What the model does not have is not chosen, whatever is meant for other models.
                        let shown = ui.add_enabled_ui(false, |ui| chip(ui, short, &mut false)).inner;
                        shown.on_disabled_hover_text(NO_MLP);
                    }
                }
                // In a model without them they can only be taken back.
                if has_experts || self.form.expert_adapters.contains(&true) {
                    for (short, on) in EXPERTS.iter().zip(&mut self.form.expert_adapters) {
                        chip(ui, short, on);
                    }
                }
            });
            if !has_mlp {
                prose(ui, NO_MLP, Theme::of(ui).t3);
            }
            for field in ["method.target_modules", "method.target_parameters"] {
                if let Some(problem) = problem(problems, field) {
                    trouble(ui, problem);
                }
            }
        });
    }

    fn method_notes(&self, ui: &mut Ui, config: &RunConfig) {
        let theme = Theme::of(ui);
        let mut notes = Vec::new();
        if let Some(model) = self.jobs.model.result.ok() {
            let trainable = model.num_trainable(&config.method);
            let share = 100.0 * trainable as f64 / model.num_parameters.max(1) as f64;
            let count = if trainable >= 1_000_000 { parameters_exact(trainable) } else { units::count(trainable) };
            notes.push(format!("{count} trainable weights, {share:.2} % of {}.", parameters(model.num_parameters)));
            if config.packing.pack_len > model.max_position_embeddings {
                notes.push(format!(
                    "Documents longer than {} tokens go beyond the context the model was made for.",
                    units::count(model.max_position_embeddings as u64)
                ));
            }
        }
        let held_out = self.jobs.preview.result.ok().map(|preview| preview.num_eval);
        let on = held_out.map_or(String::new(), |n| format!(" on {} held-out records", units::count(n as u64)));
        notes.push(match config.optimizer.bits {
            8 => "AdamW with 8-bit state, a quarter of the memory.".into(),
            _ => "AdamW with f32 state.".to_owned(),
        });
        notes.push(match (held_out, config.train.eval_every) {
            (Some(0), _) => "Nothing is held out, so nothing is evaluated.".into(),
            (_, 0) => format!("Eval at the end{on}."),
            (_, every) => format!("Eval every {} steps{on}.", units::count(every)),
        });
        prose(ui, &notes.join(" "), theme.t3);
    }
}

/// `4.88M`.
fn parameters_exact(n: u64) -> String {
    let n = n as f64;
    if n >= 1e9 { format!("{:.2}B", n / 1e9) } else { format!("{:.2}M", n / 1e6) }
}
