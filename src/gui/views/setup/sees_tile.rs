//! The tile What the model sees: packs as tokens, and what must hold for every record.

use egui::{Align2, Rect, Sense, Ui, UiBuilder, pos2, vec2};

use super::SetupView;
use super::fields::verdict;
use super::model_tile::from_right;
use super::token_flow::Writing;
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, icon_button, label, rule, segmented, text};
use crate::gui::{fonts, icons};
use crate::session::preview::PackView;

const LEGEND: f32 = 30.0;
const CHECKS: f32 = 34.0;

impl SetupView {
    pub(super) fn sees_tile(&mut self, ui: &mut Ui, rect: Rect) {
        let packs = self.jobs.preview.result.ok().map_or(0, |preview| preview.num_packs());
        self.pack = self.pack.min(packs.saturating_sub(1));
        let (mut pack, mut writing) = (self.pack, self.writing);
        Tile::new("What the model sees").flush().show(
            ui,
            rect,
            |ui| {
                ui.spacing_mut().item_spacing.x = 4.0;
                let writings = [(Writing::Tokens, "tokens"), (Writing::Ids, "ids"), (Writing::Text, "text")];
                segmented(ui, "Writing", &mut writing, &writings, 20.0);
                ui.add_space(8.0);
                ui.add_enabled_ui(pack + 1 < packs, |ui| {
                    if icon_button(ui, icons::CARET_RIGHT, "Next pack").clicked() {
                        pack += 1;
                    }
                });
                if packs > 0 {
                    let words = format!("pack {} of {}", units::count(pack as u64 + 1), units::count(packs as u64));
                    label(ui, &words, fonts::table(), Theme::of(ui).t2);
                }
                ui.add_enabled_ui(pack > 0, |ui| {
                    if icon_button(ui, icons::CARET_LEFT, "Previous pack").clicked() {
                        pack -= 1;
                    }
                });
            },
            |ui| self.sees_body(ui),
        );
        (self.pack, self.writing) = (pack, writing);
    }

    fn sees_body(&mut self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        let area = ui.max_rect();
        let (Some(pack), Some(preview)) = (self.jobs.pack.result.ok(), self.jobs.preview.result.ok()) else {
            let at = area.center();
            let words = if self.jobs.preview.is_behind() {
                "Looking at the data"
            } else {
                "The tokens of each pack, once a model and a dataset are chosen"
            };
            text(ui.painter(), at, Align2::CENTER_CENTER, words, fonts::table(), theme.t3, area.width() - 24.0);
            return;
        };
        legend(ui, area.with_max_y(area.top() + LEGEND).shrink2(vec2(12.0, 0.0)), pack, preview.pack_len);
        let checks = area.with_min_y(area.bottom() - CHECKS);
        let flow = Rect::from_min_max(
            pos2(area.left() + 12.0, area.top() + LEGEND + 2.0),
            pos2(area.right() - 4.0, checks.top() - 4.0),
        );
        let mut body = ui.new_child(UiBuilder::new().id_salt("flow").max_rect(flow));
        body.set_clip_rect(flow.intersect(ui.clip_rect()));
        self.flow.ui(&mut body, pack, self.jobs.pack.version, self.writing);

        rule(ui.painter(), checks.x_range(), checks.top(), theme.line);
        let mut row = ui.new_child(UiBuilder::new().id_salt("checks").max_rect(checks.shrink2(vec2(12.0, 4.0))));
        egui::ScrollArea::horizontal().id_salt("checks").show(&mut row, |ui| {
            ui.horizontal_centered(|ui| {
                ui.spacing_mut().item_spacing.x = 16.0;
                for check in &preview.checks {
                    let words = check.failure.as_deref().unwrap_or(check.name);
                    verdict(ui, check.failure.is_none(), words);
                }
            });
        });
    }
}

/// What the colours mean, with how many tokens have each.
fn legend(ui: &mut Ui, rect: Rect, pack: &PackView, pack_len: usize) {
    let theme = Theme::of(ui);
    let unused = format!("{} of {} slots unused", units::count(pack.unused as u64), units::count(pack_len as u64));
    let right = label(&mut from_right(ui, rect), &unused, fonts::table(), theme.t3);
    let mut row = ui.new_child(
        UiBuilder::new()
            .id_salt("legend")
            .max_rect(rect.with_max_x(right.rect.left() - 12.0))
            .layout(egui::Layout::left_to_right(egui::Align::Center)),
    );
    let keys = [
        (format!("trained {}", units::count(pack.trained as u64)), Some(theme.acc_bg), theme.acc),
        (format!("read only {}", units::count(pack.read_only as u64)), None, theme.t3),
        ("end token, trained".to_owned(), Some(theme.acc_fill), theme.acc_fill),
    ];
    row.spacing_mut().item_spacing.x = 6.0;
    for (words, fill, outline) in keys {
        let (at, _) = row.allocate_exact_size(vec2(10.0, 10.0), Sense::hover());
        let stroke = egui::Stroke::new(1.0, outline);
        let fill = fill.unwrap_or(egui::Color32::TRANSPARENT);
        row.painter().rect(at, 2, fill, stroke, egui::StrokeKind::Inside);
        label(&mut row, &words, fonts::table(), theme.t2);
        row.add_space(10.0);
    }
}
