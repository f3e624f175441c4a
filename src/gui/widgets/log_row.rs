//! One line of a log: time, icon of its level, text.

use egui::accesskit::Role;
use egui::{Align2, Response, Sense, Ui, WidgetInfo, pos2, vec2};

use super::text;
use crate::gui::theme::Theme;
use crate::gui::{fonts, icons};
use crate::session::event::NoteLevel;

/// Height of a row.
pub const HEIGHT: f32 = 22.0;

/// A log row over the whole width; the full text shows on hover when it is cut.
pub fn log_row(ui: &mut Ui, time: &str, level: NoteLevel, icon: Option<&str>, line: &str) -> Response {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), HEIGHT), Sense::hover());
    let level_name = match level {
        NoteLevel::Info => "",
        NoteLevel::Warning => "warning: ",
        NoteLevel::Error => "error: ",
    };
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, format!("{time} {level_name}{line}")));
    if !ui.is_rect_visible(rect) {
        return response;
    }
    let painter = ui.painter();
    let y = rect.center().y;
    text(painter, pos2(rect.left(), y), Align2::LEFT_CENTER, time, fonts::table(), theme.t3, 56.0);
    let (mark, font, mark_color, color) = match (level, icon) {
        (NoteLevel::Warning, _) => (icons::WARNING, fonts::icon_fill(14.0), theme.warn, theme.t1),
        (NoteLevel::Error, _) => (icons::X_CIRCLE, fonts::icon_fill(14.0), theme.err, theme.err),
        (NoteLevel::Info, Some(icon)) => (icon, fonts::icon(14.0), theme.acc, theme.t1),
        (NoteLevel::Info, None) => (icons::INFO, fonts::icon(14.0), theme.t3, theme.t2),
    };
    painter.text(pos2(rect.left() + 66.0, y), Align2::CENTER_CENTER, mark, font, mark_color);
    let left = rect.left() + 80.0;
    let width = rect.right() - left;
    let shown = text(painter, pos2(left, y), Align2::LEFT_CENTER, line, fonts::table(), color, width);
    if shown.width() >= width - 8.0 || line.contains('\n') { response.on_hover_text(line) } else { response }
}
