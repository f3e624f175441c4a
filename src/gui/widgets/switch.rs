//! A switch: 26×14, teal when on.

use egui::accesskit::Role;
use egui::{Response, Sense, Stroke, StrokeKind, Ui, WidgetInfo, lerp, pos2, vec2};

use super::focus_ring;
use crate::gui::theme::Theme;

/// A switch for `on`; `name` is what assistive technology calls it.
pub fn switch(ui: &mut Ui, on: &mut bool, name: &str) -> Response {
    let theme = Theme::of(ui);
    let enabled = ui.is_enabled();
    let (area, mut response) = ui.allocate_exact_size(vec2(26.0, 24.0), Sense::click());
    if response.clicked() {
        *on = !*on;
        response.mark_changed();
    }
    response.widget_info(|| WidgetInfo::selected(Role::Switch, enabled, *on, name));
    let rect = egui::Rect::from_center_size(area.center(), vec2(26.0, 14.0));
    let how_on = ui.ctx().animate_bool_responsive(response.id, *on);
    let fill = match (enabled, *on) {
        (false, _) => theme.bg3,
        (true, true) => theme.acc_fill,
        (true, false) => theme.bg4,
    };
    let outline = match (enabled && *on, response.hovered()) {
        (true, false) => theme.acc_fill,
        (true, true) => theme.acc,
        (false, true) => theme.t3,
        (false, false) => theme.line2,
    };
    ui.painter().rect(rect, 7, fill, Stroke::new(1.0, outline), StrokeKind::Inside);
    let knob = match (enabled, *on) {
        (false, _) => theme.tdis,
        (true, true) => theme.on_acc,
        (true, false) => theme.t3,
    };
    let x = lerp((rect.left() + 7.0)..=(rect.right() - 7.0), how_on);
    ui.painter().circle_filled(pos2(x, rect.center().y), 4.5, knob);
    focus_ring(ui, &response, 7);
    response
}
