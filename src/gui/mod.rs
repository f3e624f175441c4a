//! The window: theme, widgets, views.
