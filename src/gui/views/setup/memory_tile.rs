//! The tile Memory plan: what the run will take of the GPU's and the host's memory, how it would be trained, and why.

use egui::accesskit::Role;
use egui::{Align2, Color32, Rect, ScrollArea, Sense, Ui, WidgetInfo, pos2, vec2};

use super::SetupView;
use super::fields::{prose, trouble, verdict};
use crate::gui::theme::Theme;
use crate::gui::views::ViewContext;
use crate::gui::widgets::bars::budget_bar;
use crate::gui::widgets::{Tile, describe, swatch, text};
use crate::gui::{figures, fonts};
use crate::session::MemoryCategory;
use crate::session::estimate::{Estimate, HostPart, MemoryPlan, Need};

/// Height that the tile needs where a run does not fit; with less it scrolls.
pub const HEIGHT: f32 = 360.0;

/// One part of a budget: name, bytes, colour.
type Part = (String, u64, Color32);

impl SetupView {
    pub(super) fn memory_tile(&mut self, ui: &mut Ui, rect: Rect, context: &mut ViewContext<'_>) {
        let fits = self.jobs.plan.result.ok().map(|estimate| estimate.plan.fits());
        Tile::new("Memory plan").show(
            ui,
            rect,
            |ui| {
                if let Some(fits) = fits {
                    verdict(ui, fits, if fits { "fits" } else { "does not fit" });
                }
            },
            |ui| {
                ScrollArea::vertical().id_salt("memory plan").auto_shrink(false).show(ui, |ui| self.memory_body(ui));
            },
        );
        context.probe.state("memory plan", self.jobs.plan.version);
    }

    /// The plan, or why there is none.
    pub(super) fn memory_body(&self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        ui.spacing_mut().item_spacing.y = 6.0;
        let plan = &self.jobs.plan;
        match (plan.result.ok(), plan.result.error()) {
            (Some(estimate), _) => budgets(ui, estimate),
            (None, Some(error)) => drop(prose(ui, &format!("No plan: {error:#}."), theme.t3)),
            (None, None) if plan.is_behind() => drop(prose(ui, "Running the largest step without a GPU", theme.t3)),
            (None, None) => {
                let words = "What the run takes of the GPU's memory, once a model and a dataset are chosen";
                prose(ui, words, theme.t3);
            }
        }
    }
}

fn budgets(ui: &mut Ui, estimate: &Estimate) {
    let theme = Theme::of(ui);
    let plan = &estimate.plan;
    let Some(need) = plan.need() else { return };
    budget(ui, "VRAM", &device_parts(theme, plan, need), plan.vram_bytes);
    for advice in &plan.advice {
        trouble(ui, &format!("To make it fit, {advice}"));
    }
    if let Some(host_bytes) = plan.host_bytes {
        let parts: Vec<Part> = need.host.iter().map(|part| host_part(theme, part)).collect();
        budget(ui, "Host memory", &parts, host_bytes);
    }
    let choice = plan.choice();
    prose(ui, &format!("{}: {}.", sentence(&choice.what), plan.why), theme.t2);
    if !plan.before_is_measured {
        prose(ui, "There is no GPU here: what the driver takes is an assumption.", theme.t3);
    }
}

/// Upper case at the beginning.
fn sentence(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn device_parts(theme: &Theme, plan: &MemoryPlan, need: &Need) -> Vec<Part> {
    let before = if plan.before_is_measured { "in use before" } else { "driver" };
    let mut parts = vec![(before.to_owned(), need.before_bytes + need.library_bytes, theme.bg4)];
    let named =
        need.parts.iter().map(|part| (part.category.name().to_owned(), part.bytes, theme.memory(part.category)));
    parts.extend(named);
    parts.push(("gaps".into(), need.gap_bytes(), theme.t3));
    parts.retain(|(_, bytes, _)| *bytes > 0);
    parts
}

fn host_part(theme: &Theme, part: &HostPart) -> Part {
    let category = match part.what.as_str() {
        "activations" => MemoryCategory::Activations,
        "embedding" => MemoryCategory::Weights,
        "optimizer" => MemoryCategory::Optimizer,
        _ => MemoryCategory::Metadata,
    };
    (part.what.clone(), part.bytes, theme.memory(category))
}

/// A budget with its parts: figures, bar, legend.
fn budget(ui: &mut Ui, name: &str, parts: &[Part], limit: u64) {
    let theme = Theme::of(ui);
    let total: u64 = parts.iter().map(|(_, bytes, _)| bytes).sum();
    let width = ui.available_width() - 6.0;
    let (row, _) = ui.allocate_exact_size(vec2(width, 16.0), Sense::hover());
    let y = row.center().y;
    let painter = ui.painter().clone();
    text(&painter, row.left_center(), Align2::LEFT_CENTER, name, fonts::medium(12.0), theme.t1, 120.0);
    let (of, rest) = match limit.checked_sub(total) {
        Some(free) => (figures::gib(limit), format!("{} free", figures::gib(free))),
        None => (figures::gib(limit), format!("{} missing", figures::gib(total - limit))),
    };
    let color = if total > limit { theme.err } else { theme.t2 };
    text(&painter, row.right_center(), Align2::RIGHT_CENTER, &rest, fonts::table(), color, 90.0);
    let figure = format!("{} of {of} GiB", figures::gib(total));
    let at = pos2(row.right() - 96.0, y);
    text(&painter, at, Align2::RIGHT_CENTER, &figure, fonts::table(), theme.t1, 140.0);
    describe(ui, row, ("budget", name), &format!("{name}: {figure}, {rest}"));
    let (bar, _) = ui.allocate_exact_size(vec2(width, 12.0), Sense::hover());
    let segments: Vec<(f64, Color32)> = parts.iter().map(|(_, bytes, color)| (*bytes as f64, *color)).collect();
    budget_bar(ui, bar, &segments, limit as f64);
    ui.scope(|ui| {
        // Rows are as high as this at least.
        (ui.spacing_mut().item_spacing, ui.spacing_mut().interact_size.y) = (vec2(4.0, 0.0), 16.0);
        ui.horizontal_wrapped(|ui| {
            for (what, bytes, color) in parts {
                key(ui, &format!("{what} {}", figures::gib(*bytes)), *color);
            }
        });
    });
}

/// A swatch with its words, which stay together.
fn key(ui: &mut Ui, words: &str, color: Color32) {
    let galley = ui.painter().layout_no_wrap(words.to_owned(), fonts::small(), Theme::of(ui).t2);
    let (rect, response) = ui.allocate_exact_size(vec2(galley.size().x + 20.0, 16.0), Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, words));
    swatch(ui.painter(), rect.left(), rect.center().y).fill(ui.painter(), color);
    ui.painter().galley(pos2(rect.left() + 14.0, rect.center().y - galley.size().y / 2.0), galley, color);
}
