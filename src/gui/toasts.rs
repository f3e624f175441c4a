//! Short messages at the bottom right: passing ones for six seconds, errors until they are dismissed.

use std::time::{Duration, Instant};

use egui::accesskit::Role;
use egui::{Align2, Context, Frame, Id, Margin, Stroke, Ui, WidgetInfo, vec2};

use super::theme::Theme;
use super::widgets::icon_button;
use super::{fonts, icons};

const LIFE: Duration = Duration::from_secs(6);

struct Toast {
    text: String,
    error: bool,
    born: Instant,
}

/// The messages that wait; the last one is shown, the rest is counted.
#[derive(Default)]
pub struct Toasts {
    waiting: Vec<Toast>,
}

impl Toasts {
    /// Something to know.
    pub fn say(&mut self, text: String) {
        self.add(text, false);
    }

    /// Something that went wrong.
    pub fn complain(&mut self, text: String) {
        tracing::warn!("{text}");
        self.add(text, true);
    }

    fn add(&mut self, text: String, error: bool) {
        self.waiting.retain(|toast| toast.error && toast.text != text);
        self.waiting.push(Toast { text, error, born: Instant::now() });
    }

    /// Drops what has been shown long enough.
    pub fn tick(&mut self, ctx: &Context, now: Instant) {
        self.waiting.retain(|toast| toast.error || now.duration_since(toast.born) < LIFE);
        if let Some(toast) = self.waiting.iter().find(|toast| !toast.error) {
            ctx.request_repaint_after((toast.born + LIFE).saturating_duration_since(now));
        }
    }

    /// Draws the newest message.
    pub fn show(&mut self, ui: &Ui) {
        let Some(toast) = self.waiting.last() else { return };
        let theme = Theme::of(ui);
        let mut dismissed = false;
        egui::Area::new(Id::unique("toast")).anchor(Align2::RIGHT_BOTTOM, vec2(-16.0, -40.0)).show(ui.ctx(), |ui| {
            Frame::NONE
                .fill(theme.bg3)
                .stroke(Stroke::new(1.0, if toast.error { theme.err } else { theme.line2 }))
                .corner_radius(4)
                .inner_margin(Margin::symmetric(12, 8))
                .show(ui, |ui| {
                    ui.set_max_width(480.0);
                    ui.horizontal(|ui| {
                        if toast.error {
                            ui.label(
                                egui::RichText::new(icons::X_CIRCLE).font(fonts::icon_fill(16.0)).color(theme.err),
                            );
                        }
                        let more = self.waiting.len() - 1;
                        let text = if more > 0 { format!("{}  ({more} more)", toast.text) } else { toast.text.clone() };
                        let width = 480.0 - 90.0;
                        let galley = ui.painter().layout(text.clone(), fonts::body(), theme.t1, width);
                        let (rect, response) = ui.allocate_exact_size(galley.size(), egui::Sense::hover());
                        response.widget_info(|| {
                            WidgetInfo::labeled(if toast.error { Role::Alert } else { Role::Status }, true, &text)
                        });
                        ui.painter().galley(rect.min, galley, theme.t1);
                        dismissed = icon_button(ui, icons::X, "Dismiss").clicked();
                    });
                });
        });
        if dismissed {
            self.waiting.pop();
        }
    }
}
