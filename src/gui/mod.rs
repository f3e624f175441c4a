//! The window: theme, widgets, views. The only floor that names egui.

pub mod actions;
pub mod app;
pub mod current_comparison;
mod current_run;
mod dialogs;
mod drain;
pub mod figures;
pub mod fonts;
pub mod icons;
mod palette;
pub mod probe;
mod shell;
pub mod theme;
mod toasts;
pub mod views;
pub mod widgets;
