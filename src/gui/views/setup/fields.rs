//! Small parts of the Set up screen: captioned inputs with their error, chips, choices.

use egui::accesskit::Role;
use egui::{
    Align2, ComboBox, Id, Margin, Response, RichText, Sense, Stroke, StrokeKind, TextEdit, Ui, WidgetInfo, pos2, vec2,
};

use super::form::Problem;
use crate::gui::theme::Theme;
use crate::gui::widgets::{focus_ring, label};
use crate::gui::{fonts, icons};

/// Height of an input.
pub const INPUT: f32 = 26.0;

/// Finds the problem of a field.
pub fn problem<'a>(problems: &'a [Problem], field: &str) -> Option<&'a str> {
    problems.iter().find(|problem| problem.field == field).map(|problem| problem.message.as_str())
}

/// A caption, an input under it, and under that what is wrong with it.
pub fn field(
    ui: &mut Ui,
    caption: &str,
    value: &mut String,
    width: f32,
    unit: &str,
    problem: Option<&str>,
) -> Response {
    ui.allocate_ui(vec2(width, 0.0), |ui| {
        ui.vertical(|ui| {
            ui.set_width(width);
            ui.spacing_mut().item_spacing.y = 3.0;
            let named = label(ui, caption, fonts::small(), Theme::of(ui).t3);
            let response = input(ui, caption, value, width, unit, problem.is_some()).labelled_by(named.id);
            if let Some(problem) = problem {
                trouble(ui, problem);
            }
            response
        })
        .inner
    })
    .inner
}

/// An input of one line; `unit` stands in it at the right. Red while its content is wrong.
///
/// It is known to egui by `name`, not by its place: what a background job brings may put something above it, and who
/// types in it goes on typing.
pub fn input(ui: &mut Ui, name: &str, value: &mut String, width: f32, unit: &str, wrong: bool) -> Response {
    let theme = Theme::of(ui);
    if wrong {
        let visuals = ui.visuals_mut();
        for widgets in [&mut visuals.widgets.inactive, &mut visuals.widgets.hovered] {
            widgets.bg_stroke = Stroke::new(1.0, theme.err);
        }
        visuals.selection.stroke = Stroke::new(1.0, theme.err);
    }
    let edit = TextEdit::singleline(value)
        .id(Id::unique(("set up", name)))
        .font(fonts::body())
        .margin(Margin::symmetric(8, 4))
        .desired_width(width)
        .min_size(vec2(0.0, INPUT));
    if unit.is_empty() {
        ui.add(edit)
    } else {
        ui.add(edit.suffix(RichText::new(unit).font(fonts::small()).color(theme.t3)))
    }
}

/// What is wrong, in words, with a sign.
pub fn trouble(ui: &mut Ui, words: &str) {
    let theme = Theme::of(ui);
    ui.horizontal_top(|ui| {
        ui.spacing_mut().item_spacing.x = 4.0;
        ui.label(RichText::new(icons::WARNING_CIRCLE).font(fonts::icon(12.0)).color(theme.err));
        ui.add(egui::Label::new(RichText::new(words).font(fonts::small()).color(theme.err)).wrap());
    });
}

/// A sentence in small text that wraps.
pub fn prose(ui: &mut Ui, words: &str, color: egui::Color32) -> Response {
    ui.add(egui::Label::new(RichText::new(words).font(fonts::table()).color(color)).wrap())
}

/// A caption and a choice of a few words under it.
pub fn choice<T: PartialEq + Copy>(
    ui: &mut Ui,
    caption: &str,
    value: &mut T,
    options: &[(T, &str)],
    width: f32,
) -> Response {
    ui.allocate_ui(vec2(width, 0.0), |ui| {
        ui.vertical(|ui| {
            ui.set_width(width);
            ui.spacing_mut().item_spacing.y = 3.0;
            let named = label(ui, caption, fonts::small(), Theme::of(ui).t3);
            let shown = options.iter().find(|(option, _)| option == value).map_or("", |(_, words)| *words);
            // A choice is an input: it looks like one.
            ui.visuals_mut().widgets.inactive.weak_bg_fill = Theme::of(ui).bg0;
            let list = ComboBox::from_id_salt(caption)
                .width(width)
                .wrap_mode(egui::TextWrapMode::Truncate)
                .selected_text(RichText::new(shown).font(fonts::body()));
            let mut changed = false;
            let mut response = list
                .show_ui(ui, |ui| {
                    for (option, words) in options {
                        changed |= ui.selectable_value(value, *option, *words).changed();
                    }
                })
                .response
                .labelled_by(named.id);
            if changed {
                response.mark_changed();
            }
            response
        })
        .inner
    })
    .inner
}

/// A chip that is on or off, with a check mark when on.
pub fn chip(ui: &mut Ui, words: &str, on: &mut bool) -> Response {
    let theme = Theme::of(ui);
    let color = if *on { theme.t1 } else { theme.t2 };
    let galley = ui.painter().layout_no_wrap(words.into(), fonts::medium(12.0), color);
    let mark = if *on { 16.0 } else { 0.0 };
    let (rect, mut response) = ui.allocate_exact_size(vec2(galley.size().x + mark + 16.0, 24.0), Sense::click());
    if response.clicked() {
        *on = !*on;
        response.mark_changed();
    }
    response.widget_info(|| WidgetInfo::selected(Role::CheckBox, ui.is_enabled(), *on, words));
    let painter = ui.painter();
    let outline = if response.hovered() { theme.t3 } else { theme.line2 };
    let fill = if *on { theme.bg3 } else { egui::Color32::TRANSPARENT };
    painter.rect(rect, 4, fill, Stroke::new(1.0, outline), StrokeKind::Inside);
    if mark > 0.0 {
        let at = pos2(rect.left() + 8.0, rect.center().y);
        painter.text(at, Align2::LEFT_CENTER, icons::CHECK, fonts::icon(12.0), theme.acc);
    }
    painter.galley(pos2(rect.left() + 8.0 + mark, rect.center().y - galley.size().y / 2.0), galley, color);
    focus_ring(ui, &response, 4);
    response
}

/// Gives an input its name for assistive technology, where no caption is in sight.
pub fn named(ui: &Ui, response: &Response, name: &str) {
    ui.ctx().accesskit_node_builder(response.id, |node| node.set_label(name));
}

/// A check mark or a warning sign before a sentence.
pub fn verdict(ui: &mut Ui, good: bool, words: &str) -> Response {
    let theme = Theme::of(ui);
    let (icon, color) = if good { (icons::CHECK, theme.ok) } else { (icons::WARNING, theme.warn) };
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 6.0;
        ui.label(RichText::new(icon).font(fonts::icon(14.0)).color(color));
        label(ui, words, fonts::table(), if good { theme.t2 } else { theme.t1 })
    })
    .inner
}
