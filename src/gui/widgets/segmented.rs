//! A segmented control: one choice out of a few, all in sight.

use egui::accesskit::Role;
use egui::{
    Align2, EventFilter, Key, Modifiers, Rect, Response, Sense, Stroke, StrokeKind, Ui, WidgetInfo, pos2, vec2,
};

use super::focus_ring;
use crate::gui::fonts;
use crate::gui::theme::Theme;

/// A segmented control of `height` (20 in a tile's title, 26 elsewhere). `name` is what assistive technology calls the
/// whole; each segment is a radio button named by its text. Arrow keys move the choice.
pub fn segmented<T: PartialEq + Copy>(
    ui: &mut Ui,
    name: &str,
    choice: &mut T,
    options: &[(T, &str)],
    height: f32,
) -> Response {
    let theme = Theme::of(ui);
    let size = if height > 22.0 { 13.0 } else { 12.0 };
    let font = |selected: bool| if selected { fonts::medium(size) } else { fonts::regular(size) };
    // The medium weight is the wider one: measured with it, nothing shifts when the choice moves.
    let widths: Vec<f32> = options
        .iter()
        .map(|(_, text)| ui.painter().layout_no_wrap((*text).into(), fonts::medium(size), theme.t1).size().x + 16.0)
        .collect();
    let total: f32 = widths.iter().sum();
    let (area, mut response) = ui.allocate_exact_size(vec2(total, height.max(24.0)), Sense::hover());
    let rect = Rect::from_center_size(area.center(), vec2(total, height));
    response.widget_info(|| WidgetInfo::labeled(Role::RadioGroup, ui.is_enabled(), name));
    ui.painter().rect(rect, 4, theme.bg2, Stroke::new(1.0, theme.line), StrokeKind::Outside);

    let mut left = rect.left();
    for (i, ((value, text), width)) in options.iter().zip(widths).enumerate() {
        let segment = Rect::from_min_size(pos2(left, rect.top()), vec2(width, height));
        left += width;
        let hit = segment.with_min_y(area.top()).with_max_y(area.bottom());
        let part = ui.interact(hit, response.id.with(i), Sense::click());
        let step = if part.has_focus() {
            // Else egui would move the focus by the arrows.
            let filter = EventFilter { horizontal_arrows: true, ..EventFilter::default() };
            ui.memory_mut(|memory| memory.set_focus_lock_filter(part.id, filter));
            // Consumed, because the next segment gets the focus in this very frame.
            ui.input_mut(|input| {
                let mut pressed = |key| i32::from(input.consume_key(Modifiers::NONE, key));
                pressed(Key::ArrowRight) - pressed(Key::ArrowLeft)
            })
        } else {
            0
        };
        if part.clicked() && *choice != *value {
            *choice = *value;
            response.mark_changed();
        }
        if let Some(next) = i.checked_add_signed(step as isize).filter(|&n| step != 0 && n < options.len()) {
            *choice = options[next].0;
            response.mark_changed();
            ui.memory_mut(|memory| memory.request_focus(response.id.with(next)));
        }
        let selected = *choice == *value;
        part.widget_info(|| WidgetInfo::selected(Role::RadioButton, ui.is_enabled(), selected, *text));
        if selected {
            ui.painter().rect_filled(segment, 4, theme.bg4);
        } else if part.hovered() {
            ui.painter().rect_filled(segment, 4, theme.bg3);
        }
        let color = match (ui.is_enabled(), selected) {
            (false, _) => theme.tdis,
            (true, true) => theme.t1,
            (true, false) => theme.t2,
        };
        ui.painter().text(segment.center(), Align2::CENTER_CENTER, text, font(selected), color);
        focus_ring(ui, &part, 4);
    }
    response
}
