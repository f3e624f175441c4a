//! The Data tile: the dataset, what of it is kept and why not all, and how long its documents are.

use egui::accesskit::Role;
use egui::{Align2, Color32, Popup, Rect, Sense, Shape, Stroke, Ui, WidgetInfo, pos2, vec2};

use super::SetupView;
use super::fields::{INPUT, input, named};
use super::jobs::Wanted;
use super::model_tile::from_right;
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::views::ViewContext;
use crate::gui::views::welcome::{banner, progress_bar};
use crate::gui::widgets::{Button, Stat, Tile, icon_button, label, link, text};
use crate::gui::{fonts, icons};
use crate::session::LayoutChoice;
use crate::session::preview::{Histogram, Preview, Reason};
use crate::session::starter::STARTER;

const ROW: f32 = 22.0;

impl SetupView {
    pub(super) fn data_tile(&mut self, ui: &mut Ui, rect: Rect, context: &mut ViewContext<'_>) {
        let state = self.preview_state();
        Tile::new("Data").show(
            ui,
            rect,
            |ui| {
                let theme = Theme::of(ui);
                ui.spacing_mut().item_spacing.x = 6.0;
                if let PreviewState::Checked(words) = &state {
                    ui.label(egui::RichText::new(icons::CHECK_CIRCLE).font(fonts::icon_fill(14.0)).color(theme.ok));
                    label(ui, words, fonts::small(), theme.t3);
                } else if let PreviewState::Other(words) = &state {
                    label(ui, words, fonts::small(), theme.t3);
                }
            },
            |ui| {
                ui.spacing_mut().item_spacing = vec2(8.0, 8.0);
                self.data_path(ui, context);
                self.data_body(ui);
            },
        );
    }

    /// What the title bar says about the preview.
    fn preview_state(&self) -> PreviewState {
        let preview = &self.jobs.preview;
        if preview.is_behind() {
            return PreviewState::Other("checking".into());
        }
        match (preview.result.ok(), preview.result.error()) {
            (Some(preview), _) => PreviewState::Checked(format!("checked in {:.1} s", preview.took.as_secs_f64())),
            (None, Some(_)) => PreviewState::Other("cannot be used".into()),
            (None, None) => PreviewState::Other(String::new()),
        }
    }

    fn data_path(&mut self, ui: &mut Ui, context: &mut ViewContext<'_>) {
        let theme = Theme::of(ui);
        ui.horizontal(|ui| {
            ui.spacing_mut().item_spacing.x = 4.0;
            let width = ui.available_width() - 60.0;
            let wrong = self.jobs.data.result.error().is_some();
            let facts = self.data_facts();
            let response = input(ui, "Dataset path", &mut self.form.data, width, &facts, wrong);
            named(ui, &response, "Dataset path");
            if response.changed() && self.form.data.trim() == STARTER {
                self.choose_dataset(std::path::Path::new(STARTER));
            }
            context.probe.rect("dataset path", &response);
            if self.form.data.is_empty() {
                let at = pos2(response.rect.left() + 8.0, response.rect.center().y);
                let hint = "path of a .jsonl or .txt file, or drop it on the window";
                text(ui.painter(), at, Align2::LEFT_CENTER, hint, fonts::body(), theme.t3, width - 16.0);
            }
            if icon_button(ui, icons::FOLDER_OPEN, "Choose a dataset").clicked() {
                self.jobs.open_dialog(Wanted::Dataset, &context.waker);
            }
            let recent = icon_button(ui, icons::CLOCK, "Recent datasets");
            self.recent_menu(&recent);
        });
    }

    /// Encoding, layout and size, in the path field at the right.
    fn data_facts(&self) -> String {
        let Some(facts) = self.jobs.data.result.ok() else { return String::new() };
        let layout = self.jobs.preview.result.ok().map(|preview| format!("{}, ", layout_name(preview.layout)));
        format!("UTF-8, {}{}", layout.unwrap_or_default(), units::bytes(facts.bytes))
    }

    fn recent_menu(&mut self, button: &egui::Response) {
        let mut chosen = None;
        Popup::menu(button).show(|ui| {
            ui.set_min_width(320.0);
            let starter = std::path::PathBuf::from(STARTER);
            if ui.button("starter: The Devil's Dictionary").clicked() {
                chosen = Some(starter.clone());
            }
            for path in self.recent.datasets.iter().filter(|path| **path != starter) {
                if ui.button(path.display().to_string()).clicked() {
                    chosen = Some(path.clone());
                }
            }
        });
        if let Some(path) = chosen {
            self.choose_dataset(&path);
        }
    }

    /// Ways to begin while no dataset is chosen.
    fn first_datasets(&mut self, ui: &mut Ui) {
        label(ui, "No dataset chosen. Begin with", fonts::table(), Theme::of(ui).t3);
        let mut chosen = None;
        ui.horizontal_wrapped(|ui| {
            if ui.add(Button::new("The Devil's Dictionary").icon(icons::FILE_TEXT)).clicked() {
                chosen = Some(std::path::PathBuf::from(STARTER));
            }
            for path in self.recent.datasets.iter().filter(|path| path.is_absolute()).take(4) {
                let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
                let button = ui.add(Button::new(&name).icon(icons::FILE_TEXT));
                if button.on_hover_text(path.display().to_string()).clicked() {
                    chosen = Some(path.clone());
                }
            }
        });
        if let Some(path) = chosen {
            self.choose_dataset(&path);
        }
    }

    fn data_body(&mut self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        let preview = &self.jobs.preview;
        if let Some(error) = preview.result.error().or(self.jobs.data.result.error())
            && !preview.is_behind()
        {
            egui::ScrollArea::vertical().id_salt("data error").show(ui, |ui| banner(ui, theme, &format!("{error:#}")));
            return;
        }
        let Some(shown) = preview.result.ok() else {
            match preview.result.progress() {
                Some(progress) => {
                    progress_bar(ui, &progress.stage, progress.fraction(), progress.done, progress.total);
                }
                None if self.form.data.is_empty() => self.first_datasets(ui),
                None => {
                    label(ui, "Choose a model to see what it will read", fonts::table(), theme.t3);
                }
            }
            return;
        };
        stats(ui, shown);
        let rest = ui.available_rect_before_wrap();
        let left = (rest.width() * 0.52).min(320.0);
        let list = rest.with_max_x(rest.left() + left);
        let mut column = ui.new_child(egui::UiBuilder::new().max_rect(list));
        egui::ScrollArea::vertical().id_salt("reasons").auto_shrink(false).show(&mut column, |ui| {
            ui.spacing_mut().item_spacing.y = 0.0;
            for reason in &shown.reasons {
                reason_row(ui, reason);
            }
            let packs = format!("packs per epoch, {:.1} % full", shown.fill * 100.0);
            row(ui, &packs, shown.num_packs(), theme.t2);
        });
        histogram(ui, rest.with_min_x(rest.left() + left + 20.0), &shown.histogram, shown.pack_len);
    }
}

enum PreviewState {
    Checked(String),
    Other(String),
}

/// A layout as people call it.
pub fn layout_name(layout: LayoutChoice) -> &'static str {
    match layout {
        LayoutChoice::Auto => "found from the columns",
        LayoutChoice::Messages => "messages",
        LayoutChoice::Alpaca => "Alpaca",
        LayoutChoice::PromptCompletion => "prompt and completion",
        LayoutChoice::QuestionAnswer => "question and answer",
        LayoutChoice::Text => "plain text",
        LayoutChoice::Mapping => "mapping",
    }
}

fn stats(ui: &mut Ui, preview: &Preview) {
    let theme = Theme::of(ui);
    let count = |n: usize| units::count(n as u64);
    let width = ((ui.available_width() - 4.0 * 8.0) / 5.0).floor();
    let tokens = short_count(preview.num_tokens);
    let share = 100.0 * preview.num_trained_tokens as f64 / preview.num_tokens.max(1) as f64;
    ui.horizontal(|ui| {
        Stat::new("Records", &count(preview.num_rows)).show(ui, width);
        Stat::new("Kept", &count(preview.num_train + preview.num_eval)).show(ui, width);
        let dropped = preview.num_dropped();
        let dropped_text = count(dropped);
        let stat = Stat::new("Dropped", &dropped_text);
        if dropped > 0 { stat.color(theme.warn) } else { stat }.show(ui, width);
        Stat::new("Tokens", &tokens).show(ui, width);
        Stat::new("Trained on", &format!("{share:.1}")).unit("%").show(ui, width);
    });
}

/// `131,573`, `1.67 M`.
fn short_count(n: u64) -> String {
    if n >= 1_000_000 { format!("{:.2} M", n as f64 / 1e6) } else { units::count(n) }
}

fn row(ui: &mut Ui, words: &str, count: usize, color: Color32) -> Rect {
    let theme = Theme::of(ui);
    let (rect, response) = ui.allocate_exact_size(vec2(ui.available_width(), ROW), Sense::hover());
    let figure = units::count(count as u64);
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, format!("{words}: {figure}")));
    let y = rect.center().y;
    let figure_at = rect.right() - 52.0;
    let painter = ui.painter();
    text(painter, pos2(figure_at, y), Align2::RIGHT_CENTER, &figure, fonts::medium(12.0), theme.t1, 60.0);
    let room = figure_at - 46.0 - rect.left();
    let shown = text(painter, pos2(rect.left(), y), Align2::LEFT_CENTER, words, fonts::table(), color, room);
    if shown.width() >= room - 6.0 {
        response.on_hover_text(words);
    }
    rect
}

fn reason_row(ui: &mut Ui, reason: &Reason) {
    let theme = Theme::of(ui);
    let rect = row(ui, &reason.text, reason.count, theme.t2);
    if reason.rows.is_empty() {
        return;
    }
    let show = link(&mut from_right(ui, rect), "show");
    ui.ctx().accesskit_node_builder(show.id, |node| node.set_label(format!("show: {}", reason.text)));
    Popup::menu(&show).close_behavior(egui::PopupCloseBehavior::CloseOnClickOutside).show(|ui| {
        ui.set_max_width(520.0);
        ui.spacing_mut().item_spacing.y = 4.0;
        for (line, details) in &reason.rows {
            let words = format!("line {line}: {details}");
            ui.add(egui::Label::new(egui::RichText::new(words).font(fonts::table())).wrap().selectable(true));
        }
        if reason.count > reason.rows.len() {
            let more = units::count((reason.count - reason.rows.len()) as u64);
            label(ui, &format!("and {more} more"), fonts::small(), theme.t3);
        }
    });
}

/// Bars of document lengths, with the limit of a pack.
fn histogram(ui: &mut Ui, rect: Rect, histogram: &Histogram, pack_len: usize) {
    if rect.width() < 60.0 || rect.height() < 48.0 {
        return;
    }
    let theme = Theme::of(ui);
    let response = ui.interact(rect, ui.scope_id().with("histogram"), Sense::hover());
    let summary = format!("Lengths of documents, longest {} tokens", units::count(histogram.longest as u64));
    response.widget_info(|| WidgetInfo::labeled(Role::Image, true, &summary));
    let painter = ui.painter();
    let plot = rect.with_max_y(rect.bottom() - 16.0).with_min_y(rect.top() + 4.0);
    let most = histogram.bins.iter().copied().max().unwrap_or(0).max(1) as f32;
    // The limit is in sight when it is near the data; far beyond it, bars would be too thin to see.
    let bins = histogram.bins.len().max((pack_len / histogram.bin_tokens + 2).min(histogram.bins.len() * 3 / 2));
    let width = plot.width() / bins as f32;
    let x = |tokens: f32| plot.left() + tokens / histogram.bin_tokens as f32 * width;
    for (i, &count) in histogram.bins.iter().enumerate().filter(|(_, count)| **count > 0) {
        let left = plot.left() + i as f32 * width;
        // A bin that holds something is always in sight.
        let height = (count as f32 / most * (plot.height() - 12.0)).max(1.0);
        let bar = Rect::from_min_max(
            pos2(left, plot.bottom() - height),
            pos2((left + width - 1.0).max(left + 0.5), plot.bottom()),
        );
        let beyond = i * histogram.bin_tokens >= pack_len;
        painter.rect_filled(bar, 0, if beyond { theme.warn } else { theme.t3 });
    }
    painter.hline(plot.x_range(), painter.round_to_pixel_center(plot.bottom()), Stroke::new(1.0, theme.line2));
    let limit = x(pack_len as f32);
    if limit <= plot.right() {
        let limit = painter.round_to_pixel_center(limit);
        let line = [pos2(limit, plot.top()), pos2(limit, plot.bottom())];
        painter.extend(Shape::dashed_line(&line, Stroke::new(1.0, theme.warn), 3.0, 3.0));
        let words = units::count(pack_len as u64);
        text(painter, pos2(limit - 4.0, plot.top()), Align2::RIGHT_TOP, &words, fonts::small(), theme.warn, 80.0);
    }
    let tick = (histogram.bin_tokens * bins / 4).next_power_of_two();
    let unit = text(painter, rect.right_bottom(), Align2::RIGHT_BOTTOM, "tokens", fonts::small(), theme.t3, 60.0);
    let mut at = 0;
    while x(at as f32) + 16.0 < unit.left() {
        let anchor = if at == 0 { Align2::LEFT_BOTTOM } else { Align2::CENTER_BOTTOM };
        let words = units::count(at as u64);
        text(painter, pos2(x(at as f32), rect.bottom()), anchor, &words, fonts::small(), theme.t3, 60.0);
        at += tick;
    }
    if let Some(pointer) = response.hover_pos() {
        let bin = ((pointer.x - plot.left()) / width).max(0.0) as usize;
        if let Some(count) = histogram.bins.get(bin) {
            let from = bin * histogram.bin_tokens;
            let to = from + histogram.bin_tokens - 1;
            let words =
                format!("{} to {} tokens: {count} documents", units::count(from as u64), units::count(to as u64));
            response.on_hover_text_at_pointer(words);
        }
    }
}

/// Height that the tile needs.
pub const HEIGHT: f32 = 28.0 + 16.0 + INPUT + 8.0 + 36.0 + 8.0 + 124.0;
