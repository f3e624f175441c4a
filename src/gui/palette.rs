//! The command palette: every command by name (Ctrl+P).

use egui::accesskit::Role;
use egui::{Align2, Context, Frame, Id, Key, Margin, Modal, Sense, Stroke, WidgetInfo, pos2, vec2};

use super::actions::{self, Action};
use super::fonts;
use super::theme::Theme;
use super::widgets::{label, text};

const WIDTH: f32 = 440.0;
const ROW: f32 = 30.0;
const SHOWN: usize = 10;

/// The palette's state.
#[derive(Default)]
pub struct Palette {
    open: bool,
    query: String,
    selected: usize,
}

impl Palette {
    /// Opens it, empty.
    pub fn open(&mut self) {
        *self = Self { open: true, ..Self::default() };
    }

    /// Whether it is open.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Draws it when it is open; returns the command that was chosen.
    pub fn show(&mut self, ctx: &Context) -> Option<Action> {
        if !self.open {
            return None;
        }
        let mut chosen = None;
        let area = Modal::default_area(Id::unique("palette")).anchor(Align2::CENTER_TOP, vec2(0.0, 60.0));
        let modal = Modal::new(Id::unique("palette")).area(area).frame(Frame::NONE).show(ctx, |ui| {
            let theme = Theme::of(ui);
            Frame::NONE
                .fill(theme.bg1)
                .stroke(Stroke::new(1.0, theme.line2))
                .corner_radius(6)
                .inner_margin(Margin::same(8))
                .show(ui, |ui| {
                    ui.set_width(WIDTH);
                    ui.spacing_mut().item_spacing.y = 2.0;
                    let name = label(ui, "Find a command", fonts::small(), theme.t3);
                    let (down, up, enter) = ui.input_mut(|input| {
                        let none = egui::Modifiers::NONE;
                        (
                            input.consume_key(none, Key::ArrowDown),
                            input.consume_key(none, Key::ArrowUp),
                            input.consume_key(none, Key::Enter),
                        )
                    });
                    let edit = egui::TextEdit::singleline(&mut self.query)
                        .desired_width(f32::INFINITY)
                        .margin(Margin::symmetric(8, 5));
                    let field = ui.add(edit).labelled_by(name.id);
                    field.request_focus();
                    if field.changed() {
                        self.selected = 0;
                    }
                    ui.add_space(6.0);
                    let found = actions::search(&self.query);
                    let last = found.len().min(SHOWN).saturating_sub(1);
                    self.selected = (self.selected + usize::from(down)).saturating_sub(usize::from(up)).min(last);
                    if enter {
                        chosen = found.get(self.selected).map(|command| command.action);
                    }
                    if found.is_empty() {
                        label(ui, "No command has these words", fonts::body(), theme.t3);
                    }
                    for (i, command) in found.into_iter().take(SHOWN).enumerate() {
                        let (rect, row) = ui.allocate_exact_size(vec2(WIDTH, ROW), Sense::click());
                        row.widget_info(|| WidgetInfo::labeled(Role::MenuItem, true, command.name));
                        if row.clicked() {
                            chosen = Some(command.action);
                        }
                        if i == self.selected || row.hovered() {
                            ui.painter().rect_filled(rect, 4, theme.bg3);
                        }
                        let y = rect.center().y;
                        let icon_color = if i == self.selected { theme.acc } else { theme.t3 };
                        let painter = ui.painter();
                        painter.text(
                            pos2(rect.left() + 18.0, y),
                            Align2::CENTER_CENTER,
                            command.icon,
                            fonts::icon(16.0),
                            icon_color,
                        );
                        text(
                            painter,
                            pos2(rect.left() + 36.0, y),
                            Align2::LEFT_CENTER,
                            command.name,
                            fonts::body(),
                            theme.t1,
                            300.0,
                        );
                        let keys = actions::shortcut_text(ui.ctx(), command.action);
                        painter.text(
                            pos2(rect.right() - 10.0, y),
                            Align2::RIGHT_CENTER,
                            keys,
                            fonts::small(),
                            theme.t3,
                        );
                    }
                });
        });
        if modal.should_close() || chosen.is_some() {
            self.open = false;
        }
        chosen
    }
}
