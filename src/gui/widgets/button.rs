//! Buttons: neutral and primary, with an icon before the text.

use egui::accesskit::Role;
use egui::{Response, Sense, Stroke, StrokeKind, Ui, Widget, WidgetInfo, pos2, vec2};

use super::focus_ring;
use crate::gui::fonts;
use crate::gui::theme::Theme;

/// A button with text and, usually, an icon before it.
#[must_use = "add it with ui.add"]
pub struct Button<'a> {
    text: &'a str,
    icon: Option<&'a str>,
    primary: bool,
    height: f32,
    min_width: f32,
}

impl<'a> Button<'a> {
    /// A neutral button, 28 high.
    pub fn new(text: &'a str) -> Self {
        Self { text, icon: None, primary: false, height: 28.0, min_width: 0.0 }
    }

    /// With an icon before the text.
    pub fn icon(mut self, icon: &'a str) -> Self {
        self.icon = Some(icon);
        self
    }

    /// The one button of its region that goes on.
    pub fn primary(mut self) -> Self {
        self.primary = true;
        self
    }

    /// Of this height.
    pub fn height(mut self, height: f32) -> Self {
        self.height = height;
        self
    }

    /// At least this wide.
    pub fn min_width(mut self, width: f32) -> Self {
        self.min_width = width;
        self
    }
}

impl Widget for Button<'_> {
    fn ui(self, ui: &mut Ui) -> Response {
        let theme = Theme::of(ui);
        let enabled = ui.is_enabled();
        let color = match (enabled, self.primary) {
            (false, _) => theme.tdis,
            (true, true) => theme.on_acc,
            (true, false) => theme.t1,
        };
        let text = ui.painter().layout_no_wrap(self.text.into(), fonts::medium(13.0), color);
        let icon_font = if self.primary { fonts::icon_fill(16.0) } else { fonts::icon(16.0) };
        let icon = self.icon.map(|icon| ui.painter().layout_no_wrap(icon.into(), icon_font, color));
        let icon_width = icon.as_ref().map_or(0.0, |icon| icon.size().x + 6.0);
        let content = icon_width + text.size().x;
        let width = (content + 2.0 * ui.spacing().button_padding.x).max(self.min_width);
        let (rect, response) = ui.allocate_exact_size(vec2(width, self.height), Sense::click());
        response.widget_info(|| WidgetInfo::labeled(Role::Button, enabled, self.text));
        if !ui.is_rect_visible(rect) {
            return response;
        }
        let pressed = response.is_pointer_button_down_on();
        let (fill, outline) = match (enabled, self.primary) {
            (false, _) => (theme.bg2, theme.line),
            (true, true) if pressed => (theme.acc_fill.gamma_multiply(0.85), theme.acc_fill),
            (true, true) if response.hovered() => (theme.acc_fill, theme.acc),
            (true, true) => (theme.acc_fill, theme.acc_fill),
            (true, false) if pressed => (theme.bg4, theme.acc),
            (true, false) if response.hovered() => (theme.bg4, theme.t3),
            (true, false) => (theme.bg3, theme.line2),
        };
        ui.painter().rect(rect, 4, fill, Stroke::new(1.0, outline), StrokeKind::Inside);
        let left = rect.center().x - content / 2.0;
        if let Some(icon) = icon {
            ui.painter().galley(pos2(left, rect.center().y - icon.size().y / 2.0), icon, color);
        }
        ui.painter().galley(pos2(left + icon_width, rect.center().y - text.size().y / 2.0), text, color);
        focus_ring(ui, &response, 4);
        response
    }
}
