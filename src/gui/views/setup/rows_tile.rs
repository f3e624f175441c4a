//! The tile How rows are read: layout, mapping, what trains, what is held out, what happens to long documents. It shares its place with the
//! optimizations and, in a small window, with the memory plan.

use egui::{Rect, RichText, Ui, vec2};

use super::SetupView;
use super::data_tile::layout_name;
use super::fields::{choice, field, problem, prose, trouble};
use super::form::Problem;
use crate::gui::fonts;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Button, Tile, label, segmented};
use crate::session::preview::Column;
use crate::session::{LayoutChoice, Overlong, TrainOn};

const LAYOUTS: [LayoutChoice; 7] = [
    LayoutChoice::Auto,
    LayoutChoice::Messages,
    LayoutChoice::Alpaca,
    LayoutChoice::PromptCompletion,
    LayoutChoice::QuestionAnswer,
    LayoutChoice::Text,
    LayoutChoice::Mapping,
];

/// What the tile shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Side {
    #[default]
    Rows,
    Optimizations,
    Memory,
}

impl Side {
    /// Height that the tile needs beside the memory plan.
    pub fn height(self) -> f32 {
        match self {
            Self::Rows | Self::Memory => 214.0,
            Self::Optimizations => 312.0,
        }
    }
}

impl SetupView {
    /// `plan_apart` says whether the memory plan has a tile of its own.
    pub(super) fn rows_tile(&mut self, ui: &mut Ui, rect: Rect, plan_apart: bool, problems: &[Problem]) {
        if plan_apart && self.side == Side::Memory {
            self.side = Side::Rows;
        }
        let found = self.jobs.preview.result.ok().map(|preview| layout_name(preview.layout));
        let mut side = self.side;
        let (title, note) = match side {
            Side::Rows => ("How rows are read", found),
            Side::Optimizations => ("Optimizations", None),
            Side::Memory => ("Memory plan", None),
        };
        Tile::new(title).show(
            ui,
            rect,
            |ui| {
                ui.spacing_mut().item_spacing.x = 8.0;
                let sides = [(Side::Rows, "rows"), (Side::Optimizations, "optimizations"), (Side::Memory, "memory")];
                let sides = if plan_apart { &sides[..2] } else { &sides[..] };
                segmented(ui, "Settings in this tile", &mut side, sides, 20.0);
                if let Some(note) = note {
                    label(ui, note, fonts::small(), Theme::of(ui).t3);
                }
            },
            |ui| {
                egui::ScrollArea::vertical().id_salt(title).auto_shrink(false).show(ui, |ui| {
                    ui.spacing_mut().item_spacing = vec2(10.0, 8.0);
                    match self.side {
                        Side::Rows => self.row_fields(ui, problems),
                        Side::Optimizations => self.optimization_fields(ui),
                        Side::Memory => self.memory_body(ui),
                    }
                });
            },
        );
        self.side = side;
    }

    fn row_fields(&mut self, ui: &mut Ui, problems: &[Problem]) {
        let theme = Theme::of(ui);
        let width = ui.available_width() - 6.0;
        let half = ((width - 10.0) / 2.0).floor();
        ui.horizontal_top(|ui| {
            let words = |layout| if layout == LayoutChoice::Auto { "by its columns" } else { layout_name(layout) };
            let layouts = LAYOUTS.map(|layout| (layout, words(layout)));
            choice(ui, "Layout", &mut self.form.layout, &layouts, half);
            let trained = [
                (TrainOn::Assistant, "assistant turns"),
                (TrainOn::LastTurn, "last turn only"),
                (TrainOn::Everything, "everything"),
            ];
            choice(ui, "Train on", &mut self.form.train_on, &trained, half);
        });
        let columns = self.jobs.data.result.ok().map(|facts| facts.columns.clone()).unwrap_or_default();
        if self.form.layout == LayoutChoice::Mapping {
            self.mapping(ui, width, &columns, problems);
        } else if self.jobs.preview.result.error().is_some() && !columns.is_empty() && !self.jobs.preview.is_behind() {
            let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
            prose(ui, &format!("Columns found: {}.", names.join(", ")), theme.t2);
            if ui.add(Button::new("Map the columns")).clicked() {
                self.start_mapping(&columns);
            }
        }
        ui.horizontal_top(|ui| {
            field(
                ui,
                "Held out",
                &mut self.form.held_out,
                half,
                "% of records",
                problem(problems, "data.eval_fraction"),
            );
            let overlong = [
                (Overlong::Truncate, "cut at the pack's end"),
                (Overlong::Split, "split into several"),
                (Overlong::Drop, "leave out"),
            ];
            choice(ui, "Longer than a pack", &mut self.form.overlong, &overlong, half);
        });
        let system = &mut self.form.system;
        field(ui, "System message where a record has none", system, width, "", problem(problems, "data.system"));
    }

    /// Turns to the mapping, with the first two columns as a beginning.
    fn start_mapping(&mut self, columns: &[Column]) {
        self.form.layout = LayoutChoice::Mapping;
        let name = |index: usize| columns.get(index).map(|column| format!("{{{}}}", column.name)).unwrap_or_default();
        if self.form.prompt.is_empty() && self.form.completion.is_empty() {
            (self.form.prompt, self.form.completion) = (name(0), name(1));
        }
    }

    fn mapping(&mut self, ui: &mut Ui, width: f32, columns: &[Column], problems: &[Problem]) {
        let theme = Theme::of(ui);
        for (caption, name, in_prompt) in
            [("The user says", "data.prompt", true), ("The assistant answers", "data.completion", false)]
        {
            let value = if in_prompt { &mut self.form.prompt } else { &mut self.form.completion };
            ui.scope(|ui| {
                ui.spacing_mut().item_spacing = vec2(4.0, 3.0);
                let named = label(ui, caption, fonts::small(), theme.t3);
                let edit = egui::TextEdit::multiline(value)
                    .id(egui::Id::unique(("set up", caption)))
                    .font(fonts::mono())
                    .desired_rows(2)
                    .margin(egui::Margin::symmetric(8, 4))
                    .desired_width(width);
                let response = ui.add(edit).labelled_by(named.id);
                ui.horizontal_wrapped(|ui| {
                    for column in columns {
                        let words = RichText::new(format!("{{{}}}", column.name)).font(fonts::mono());
                        let button = ui.add(egui::Button::new(words).min_size(vec2(0.0, 24.0)));
                        ui.ctx().accesskit_node_builder(button.id, |node| {
                            node.set_label(format!("Add {{{}}} to: {caption}", column.name));
                        });
                        if button.on_hover_text(&column.sample).clicked() {
                            insert(ui, value, response.id, &format!("{{{}}}", column.name));
                        }
                    }
                });
                if let Some(problem) = problem(problems, name) {
                    trouble(ui, problem);
                }
            });
        }
    }
}

/// Puts text where the cursor of a text field is, or at its end.
fn insert(ui: &Ui, value: &mut String, field: egui::Id, text: &str) {
    let state = egui::TextEdit::load_state(ui.ctx(), field);
    let cursor = state.and_then(|state| state.cursor.char_range()).map(|range| range.primary.index);
    let at = cursor.and_then(|cursor| value.char_indices().nth(usize::from(cursor)).map(|(at, _)| at));
    value.insert_str(at.unwrap_or(value.len()), text);
}
