//! Colours of the window, dark and light, and how they map onto egui's own widgets.
//!
//! Views take every colour from [`Theme`]; no other file of the window names one.

use std::sync::Arc;

use egui::{Color32, CornerRadius, FontFamily, FontId, Margin, Shadow, Stroke, Style, TextStyle, Visuals, vec2};

use super::fonts;
use crate::session::{MemoryCategory, Phase};

/// Every colour of the window.
#[derive(Debug, Clone, PartialEq)]
pub struct Theme {
    /// Whether this is the dark theme.
    pub dark: bool,
    /// Window, menu bar, rail, status bar, fill of inputs.
    pub bg0: Color32,
    /// Tile.
    pub bg1: Color32,
    /// Empty lane, segmented control, selected rail item.
    pub bg2: Color32,
    /// Button, hover, selected row, chip, empty part of a bar.
    pub bg3: Color32,
    /// Pressed, selected segment, progress track.
    pub bg4: Color32,
    /// Tile borders, row rules.
    pub line: Color32,
    /// Control outlines, total rules, zero line.
    pub line2: Color32,
    /// Plot grid.
    pub grid: Color32,
    /// Values, names, titles.
    pub t1: Color32,
    /// Secondary text.
    pub t2: Color32,
    /// Captions, units, axis figures.
    pub t3: Color32,
    /// Disabled text and "—"; never the only carrier of information.
    pub tdis: Color32,
    /// Link text, active icon, selection edge, progress, current value.
    pub acc: Color32,
    /// Primary button, switch on, end token.
    pub acc_fill: Color32,
    /// Running chip, trained tokens.
    pub acc_bg: Color32,
    /// Text on `acc_fill`.
    pub on_acc: Color32,
    /// Passed, better.
    pub ok: Color32,
    /// Warning, cost.
    pub warn: Color32,
    /// Failed, limit line.
    pub err: Color32,
    /// Text for copies that compute waits for.
    pub hot: Color32,
    /// Fill of a banner that says all is well.
    pub ok_bg: Color32,
    /// Fill of a warning banner.
    pub warn_bg: Color32,
    /// Fill of an error banner.
    pub err_bg: Color32,
    /// Phase colours, in the order of [`Phase::ALL`].
    phases: [Color32; Phase::ALL.len()],
    /// Colours of runs in an overlay; the first is this run's.
    pub runs: [Color32; 4],
}

const fn rgb(hex: u32) -> Color32 {
    Color32::from_rgb((hex >> 16) as u8, (hex >> 8) as u8, hex as u8)
}

/// The dark theme.
pub const DARK: Theme = Theme {
    dark: true,
    bg0: rgb(0x0E1114),
    bg1: rgb(0x14181C),
    bg2: rgb(0x1B2025),
    bg3: rgb(0x242A31),
    bg4: rgb(0x2F373F),
    line: rgb(0x262D34),
    line2: rgb(0x3A444E),
    grid: rgb(0x20262C),
    t1: rgb(0xE9EDF0),
    t2: rgb(0xAEB8C1),
    t3: rgb(0x88949F),
    tdis: rgb(0x5F6B76),
    acc: rgb(0x2FC6AA),
    acc_fill: rgb(0x12806D),
    acc_bg: rgb(0x12302C),
    on_acc: rgb(0xFFFFFF),
    ok: rgb(0x5FCB7A),
    warn: rgb(0xE9B44C),
    err: rgb(0xFF7A66),
    hot: rgb(0xFF8A6B),
    ok_bg: rgb(0x15291C),
    warn_bg: rgb(0x2E2614),
    err_bg: rgb(0x331C19),
    phases: [
        rgb(0x62CFFF),
        rgb(0x4C8AEC),
        rgb(0x9D70AB),
        rgb(0xA59BD9),
        rgb(0xB1DA7C),
        rgb(0xD28A21),
        rgb(0xCF4325),
        rgb(0xF1E7D2),
        rgb(0xEDA3BB),
        rgb(0x5E6973),
        rgb(0x49535D),
    ],
    runs: [rgb(0x2FC6AA), rgb(0xE79A3C), rgb(0x9478F0), rgb(0xE4E9ED)],
};

/// The light theme.
pub const LIGHT: Theme = Theme {
    dark: false,
    bg0: rgb(0xE9ECEF),
    bg1: rgb(0xFFFFFF),
    bg2: rgb(0xF4F6F8),
    bg3: rgb(0xE8ECF0),
    bg4: rgb(0xDCE2E8),
    line: rgb(0xDDE2E7),
    line2: rgb(0xB4BEC8),
    grid: rgb(0xEDF0F3),
    t1: rgb(0x161B20),
    t2: rgb(0x46525D),
    t3: rgb(0x5E6B77),
    tdis: rgb(0x98A3AE),
    acc: rgb(0x08705F),
    acc_fill: rgb(0x08705F),
    acc_bg: rgb(0xDDF1ED),
    on_acc: rgb(0xFFFFFF),
    ok: rgb(0x18713A),
    warn: rgb(0x8A5A00),
    err: rgb(0xBF2C18),
    hot: rgb(0xBF2C18),
    ok_bg: rgb(0xE2F3E7),
    warn_bg: rgb(0xFBF0D8),
    err_bg: rgb(0xFCE6E2),
    phases: [
        rgb(0x1C9AD3),
        rgb(0x1F6BC9),
        rgb(0x70337E),
        rgb(0x4D23B7),
        rgb(0x4B6F39),
        rgb(0xBF852F),
        rgb(0xCE1D0C),
        rgb(0x412C05),
        rgb(0xAF4C80),
        rgb(0x8A949E),
        rgb(0xA9B3BC),
    ],
    runs: [rgb(0x08705F), rgb(0xB35C00), rgb(0x6B4BC4), rgb(0x161B20)],
};

impl Theme {
    /// The theme that `ui` is drawn in.
    pub fn of(ui: &egui::Ui) -> &'static Self {
        if ui.visuals().dark_mode { &DARK } else { &LIGHT }
    }

    /// Colour of a phase.
    pub fn phase(&self, phase: Phase) -> Color32 {
        self.phases[phase as usize]
    }

    /// Colour of text on the colour of a phase.
    pub fn on_phase(&self, phase: Phase) -> Color32 {
        match (self.dark, phase) {
            (true, Phase::ExposedCopy | Phase::HostWait | Phase::DataWait) => self.on_acc,
            (true, _) => self.bg0,
            (false, Phase::Attention | Phase::Recompute | Phase::HostWait | Phase::DataWait) => self.t1,
            (false, _) => self.on_acc,
        }
    }

    /// Colour of a memory category: the hues of the phases, one palette to learn.
    pub fn memory(&self, category: MemoryCategory) -> Color32 {
        self.phase(match category {
            MemoryCategory::Weights => Phase::Mlp,
            MemoryCategory::Activations => Phase::Attention,
            MemoryCategory::Workspace => Phase::Recompute,
            MemoryCategory::Optimizer => Phase::Optimizer,
            MemoryCategory::OffloadBuffers => Phase::ExposedCopy,
            MemoryCategory::Adapters => Phase::Moe,
            MemoryCategory::Gradients => Phase::HeadLoss,
            MemoryCategory::Metadata => Phase::Metadata,
        })
    }

    /// egui's own style in these colours.
    fn style(&self) -> Style {
        let mut style = Style { visuals: self.visuals(), ..Style::default() };
        style.text_styles = [
            (TextStyle::Heading, fonts::semibold(15.0)),
            (TextStyle::Body, fonts::body()),
            (TextStyle::Button, fonts::medium(13.0)),
            (TextStyle::Small, fonts::small()),
            (TextStyle::Monospace, FontId::new(12.0, FontFamily::Monospace)),
        ]
        .into();
        style.animation_time = 0.10;
        let spacing = &mut style.spacing;
        spacing.item_spacing = vec2(8.0, 4.0);
        spacing.button_padding = vec2(11.0, 5.0);
        spacing.interact_size.y = 26.0;
        spacing.menu_margin = Margin::same(4);
        spacing.scroll.bar_width = 8.0;
        style.interaction.selectable_labels = false;
        style
    }

    fn visuals(&self) -> Visuals {
        let mut v = if self.dark { Visuals::dark() } else { Visuals::light() };
        let outline = |color| Stroke::new(1.0, color);
        v.panel_fill = self.bg1;
        v.window_fill = self.bg1;
        v.window_stroke = outline(self.line2);
        v.extreme_bg_color = self.bg0;
        v.text_edit_bg_color = Some(self.bg0);
        v.faint_bg_color = self.bg2;
        v.code_bg_color = self.bg2;
        v.weak_text_color = Some(self.t3);
        v.hyperlink_color = self.acc;
        v.warn_fg_color = self.warn;
        v.error_fg_color = self.err;
        v.window_shadow = Shadow::NONE;
        v.popup_shadow = Shadow::NONE;
        v.window_corner_radius = CornerRadius::same(6);
        v.menu_corner_radius = CornerRadius::same(6);
        v.selection.bg_fill = self.acc_bg;
        v.selection.stroke = outline(self.acc);
        v.text_cursor.stroke = Stroke::new(1.5, self.acc);
        v.striped = false;

        let w = &mut v.widgets;
        for visuals in [&mut w.noninteractive, &mut w.inactive, &mut w.hovered, &mut w.active, &mut w.open] {
            visuals.corner_radius = CornerRadius::same(4);
            visuals.expansion = 0.0;
            visuals.fg_stroke = outline(self.t1);
            visuals.bg_stroke = outline(self.line2);
            visuals.bg_fill = self.bg3;
            visuals.weak_bg_fill = self.bg3;
        }
        w.noninteractive.bg_stroke = outline(self.line);
        w.noninteractive.bg_fill = self.bg1;
        w.noninteractive.weak_bg_fill = self.bg1;
        w.hovered.bg_stroke = outline(self.t3);
        w.active.bg_stroke = outline(self.acc);
        for visuals in [&mut w.hovered, &mut w.active, &mut w.open] {
            visuals.bg_fill = self.bg4;
            visuals.weak_bg_fill = self.bg4;
        }
        v
    }
}

/// Gives egui both themes. Call once, after the fonts.
pub fn install(ctx: &egui::Context) {
    ctx.set_style_of(egui::Theme::Dark, Arc::new(DARK.style()));
    ctx.set_style_of(egui::Theme::Light, Arc::new(LIGHT.style()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// WCAG relative luminance.
    fn luminance(c: Color32) -> f64 {
        let linear = |v: u8| {
            let v = f64::from(v) / 255.0;
            if v <= 0.03928 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * linear(c.r()) + 0.7152 * linear(c.g()) + 0.0722 * linear(c.b())
    }

    fn contrast(a: Color32, b: Color32) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_is_readable_on_every_surface() {
        for theme in [&DARK, &LIGHT] {
            for bg in [theme.bg0, theme.bg1, theme.bg2, theme.bg3] {
                for text in [theme.t1, theme.t2, theme.t3] {
                    assert!(contrast(text, bg) >= 4.5, "{text:?} on {bg:?}: {:.2}", contrast(text, bg));
                }
            }
            assert!(contrast(theme.on_acc, theme.acc_fill) >= 4.5);
            for (text, bg) in [(theme.err, theme.err_bg), (theme.warn, theme.warn_bg), (theme.ok, theme.ok_bg)] {
                assert!(contrast(text, bg) >= 4.5, "{text:?} on {bg:?}");
            }
        }
    }

    #[test]
    fn phases_stand_out_from_the_tile_and_from_each_other() {
        for theme in [&DARK, &LIGHT] {
            for (i, phase) in Phase::ALL.into_iter().enumerate() {
                assert_eq!(theme.phase(phase), theme.phases[i]);
                let least = if phase == Phase::DataWait { 2.0 } else { 3.0 };
                assert!(contrast(theme.phase(phase), theme.bg1) >= least, "{phase:?}");
                assert!(contrast(theme.on_phase(phase), theme.phase(phase)) >= 4.5, "text on {phase:?}");
                assert!(Phase::ALL[..i].iter().all(|&other| theme.phase(other) != theme.phase(phase)));
            }
        }
    }
}
