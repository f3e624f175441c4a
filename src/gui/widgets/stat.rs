//! A figure under its caption, at a fixed width so that nothing shifts when digits change.

use egui::{Align2, Response, Sense, Ui, WidgetInfo, accesskit::Role, pos2, vec2};

use super::text;
use crate::gui::fonts;
use crate::gui::theme::Theme;

/// A caption and, under it, a figure with its unit.
#[must_use = "show it"]
pub struct Stat<'a> {
    caption: &'a str,
    value: &'a str,
    unit: &'a str,
    color: Option<egui::Color32>,
}

impl<'a> Stat<'a> {
    /// A figure without a unit; `—` stands for one that does not exist yet.
    pub fn new(caption: &'a str, value: &'a str) -> Self {
        Self { caption, value, unit: "", color: None }
    }

    /// With a unit after the figure.
    pub fn unit(mut self, unit: &'a str) -> Self {
        self.unit = unit;
        self
    }

    /// In another colour than text's.
    pub fn color(mut self, color: egui::Color32) -> Self {
        self.color = Some(color);
        self
    }

    /// Draws it `width` wide, 36 high.
    pub fn show(self, ui: &mut Ui, width: f32) -> Response {
        let theme = Theme::of(ui);
        let (rect, response) = ui.allocate_exact_size(vec2(width, 36.0), Sense::hover());
        let name = format!("{} {} {}", self.caption, self.value, self.unit);
        response.widget_info(|| WidgetInfo::labeled(Role::Label, true, name.trim_end()));
        let painter = ui.painter();
        text(painter, rect.left_top(), Align2::LEFT_TOP, self.caption, fonts::small(), theme.t3, width);
        let color = if self.value == "—" { theme.tdis } else { self.color.unwrap_or(theme.t1) };
        let baseline = rect.top() + 16.0;
        let value =
            text(painter, pos2(rect.left(), baseline), Align2::LEFT_TOP, self.value, fonts::stat(), color, width);
        let unit_at = pos2(value.right() + 3.0, value.bottom() - 2.5);
        let unit = painter.layout_no_wrap(self.unit.into(), fonts::small(), theme.t3);
        // A figure without its unit reads better than one with half of it.
        if unit_at.x + unit.size().x <= rect.right() {
            painter.galley(unit_at - vec2(0.0, unit.size().y), unit, theme.t3);
        }
        response
    }
}
