//! The window: theme, fonts, widgets, views. The only floor that names egui.

pub mod fonts;
pub mod icons;
pub mod theme;
pub mod widgets;
