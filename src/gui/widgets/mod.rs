//! Painted widgets of the window. Each tells assistive technology (and the tests) what it is.

pub mod bars;
pub mod button;
pub mod hatch;
pub mod log_row;
pub mod segmented;
pub mod spark;
pub mod stat;
pub mod swatch;
pub mod switch;
pub mod tile;

use egui::accesskit::Role;
use egui::{Align2, FontId, Painter, Pos2, Rect, Response, Stroke, StrokeKind, Ui, WidgetInfo, pos2, vec2};

use super::fonts;
use super::theme::Theme;

pub use button::Button;
pub use segmented::segmented;
pub use stat::Stat;
pub use swatch::swatch;
pub use switch::switch;
pub use tile::Tile;

/// The ring around what has the keyboard focus: 2 px, outside by 1.
pub fn focus_ring(ui: &Ui, response: &Response, rounding: u8) {
    if response.has_focus() {
        let stroke = Stroke::new(2.0, Theme::of(ui).acc);
        ui.painter().rect_stroke(response.rect.expand(1.0), rounding + 1, stroke, StrokeKind::Outside);
    }
}

/// A horizontal rule, snapped to whole pixels.
pub fn rule(painter: &Painter, x: impl Into<egui::Rangef>, y: f32, color: egui::Color32) {
    painter.hline(x, painter.round_to_pixel_center(y), Stroke::new(1.0, color));
}

/// Paints one line of text, cut with `…` when it is wider than `max_width`; returns where it went.
pub fn text(
    painter: &Painter,
    pos: Pos2,
    anchor: Align2,
    text: &str,
    font: FontId,
    color: egui::Color32,
    max_width: f32,
) -> Rect {
    let mut job = egui::text::LayoutJob::simple_singleline(text.into(), font, color);
    job.wrap = egui::text::TextWrapping::truncate_at_width(max_width.max(0.0));
    let galley = painter.layout_job(job);
    let rect = anchor.anchor_size(pos, galley.size());
    painter.galley(rect.min, galley, color);
    rect
}

/// A label that assistive technology reads as one text, painted by `text`; takes the space it needs.
pub fn label(ui: &mut Ui, string: &str, font: FontId, color: egui::Color32) -> Response {
    ui.add(egui::Label::new(egui::RichText::new(string).font(font).color(color)))
}

/// As [`label`], but cut with `…` at the end of the line; the whole text shows on hover.
pub fn label_cut(ui: &mut Ui, string: &str, font: FontId, color: egui::Color32) -> Response {
    ui.add(egui::Label::new(egui::RichText::new(string).font(font).color(color)).truncate())
}

/// Text that acts when clicked, in the accent colour.
pub fn link(ui: &mut Ui, string: &str) -> Response {
    let theme = Theme::of(ui);
    let galley = ui.painter().layout_no_wrap(string.into(), fonts::medium(12.0), theme.acc);
    let (rect, response) =
        ui.allocate_exact_size(vec2(galley.size().x, galley.size().y.max(24.0)), egui::Sense::click());
    response.widget_info(|| WidgetInfo::labeled(Role::Link, ui.is_enabled(), string));
    let at = pos2(rect.left(), rect.center().y - galley.size().y / 2.0);
    if response.hovered() {
        rule(ui.painter(), rect.x_range(), at.y + galley.size().y - 1.0, theme.acc);
        ui.ctx().set_cursor_icon(egui::CursorIcon::PointingHand);
    }
    let color = if ui.is_enabled() { theme.acc } else { theme.tdis };
    ui.painter().galley_with_override_text_color(at, galley, color);
    focus_ring(ui, &response, 2);
    response
}

/// Reports a painted part of the window as a piece of text, so that screen readers (and tests) find it.
pub fn describe(ui: &mut Ui, rect: Rect, id_salt: impl std::hash::Hash + std::fmt::Debug, text: &str) -> Response {
    let response = ui.interact(rect, ui.scope_id().with(id_salt), egui::Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, text));
    response
}

/// A small icon button without text; `name` is its tooltip and its accessible name.
pub fn icon_button(ui: &mut Ui, icon: &str, name: &str) -> Response {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(26.0, 24.0), egui::Sense::click());
    response.widget_info(|| WidgetInfo::labeled(Role::Button, ui.is_enabled(), name));
    if response.hovered() || response.is_pointer_button_down_on() {
        ui.painter().rect_filled(rect, 4, theme.bg3);
    }
    let color = match (ui.is_enabled(), response.hovered()) {
        (false, _) => theme.tdis,
        (true, true) => theme.t1,
        (true, false) => theme.t2,
    };
    ui.painter().text(rect.center(), Align2::CENTER_CENTER, icon, fonts::icon(16.0), color);
    focus_ring(ui, &response, 4);
    response.on_hover_text(name)
}
