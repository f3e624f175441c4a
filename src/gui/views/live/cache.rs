//! The cache tile: lookups, hits and builds of metadata in one step, as figures, as a strip of cells, and what is kept. In a run of a model with
//! experts it has a second side, which is theirs.

use egui::accesskit::Role;
use egui::{Align2, Painter, Rect, Stroke, StrokeKind, Ui, WidgetInfo, pos2, vec2};

use super::experts;
use super::loss::step_point;
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Stat, Tile, describe, label, rule, segmented, text};
use crate::gui::{figures, fonts};
use crate::session::run_view::{RunView, StepPoint};
use crate::session::{AttentionPath, CacheEntry, CacheReport, Metadata, Phase};

/// Height of a cell, and its least width with the gap after it.
const CELL: f32 = 14.0;
const PITCH: f32 = 4.0;

/// What the tile shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Side {
    #[default]
    Cache,
    Experts,
}

/// The tile's state.
#[derive(Default)]
pub struct CacheTile {
    side: Side,
}

impl CacheTile {
    /// Draws the tile; `marked` is the step under the pointer.
    pub fn show(&mut self, ui: &mut Ui, rect: Rect, view: &RunView, marked: Option<u64>, compact: bool) {
        let step = marked.and_then(|step| step_point(view, step)).or(view.last_step());
        if !view.has_experts() {
            cache(ui, rect, step, compact);
            return;
        }
        let theme = Theme::of(ui);
        let mut side = self.side;
        let (title, form) = match side {
            Side::Cache => ("Packing metadata cache", None),
            Side::Experts => ("Experts", step.and_then(|step| Some(experts::how(step.report.moe.as_ref()?.routing)))),
        };
        let controls = |ui: &mut Ui| {
            ui.spacing_mut().item_spacing.x = 8.0;
            segmented(ui, "Shown in this tile", &mut side, &[(Side::Cache, "cache"), (Side::Experts, "MoE")], 20.0);
            if let Some(step) = step {
                let number = format!("step {}", units::count(step.report.step));
                let words = form.map_or(number.clone(), |form| format!("{form}, {number}"));
                label(ui, &words, fonts::small(), theme.t3);
            }
        };
        Tile::new(title).show(ui, rect, controls, |ui| match self.side {
            Side::Cache => cache_body(ui, step, compact),
            Side::Experts => experts::body(ui, step, compact),
        });
        self.side = side;
    }
}

/// The tile without a second side.
fn cache(ui: &mut Ui, rect: Rect, step: Option<&StepPoint>, compact: bool) {
    let theme = Theme::of(ui);
    let report = step.and_then(|step| step.report.cache.as_ref());
    let note = |ui: &mut Ui| {
        if let Some((step, report)) = step.zip(report) {
            let words = format!("{}, step {}", how(report.metadata), units::count(step.report.step));
            label(ui, &words, fonts::small(), theme.t3);
        }
    };
    Tile::new("Packing metadata cache").show(ui, rect, note, |ui| cache_body(ui, step, compact));
}

fn cache_body(ui: &mut Ui, step: Option<&StepPoint>, compact: bool) {
    match step.and_then(|step| step.report.cache.as_ref()) {
        Some(report) => body(ui, report, compact),
        None => {
            label(ui, "Not measured in this step.", fonts::table(), Theme::of(ui).t3);
        }
    }
}

fn how(metadata: Metadata) -> &'static str {
    match metadata {
        Metadata::Cached => "built once",
        Metadata::Fused => "off, fused rebuild",
        Metadata::Published => "off, as published",
    }
}

fn body(ui: &mut Ui, report: &CacheReport, compact: bool) {
    let theme = Theme::of(ui);
    let area = ui.max_rect();
    let counts = report.counts;
    let size = match report.entries.iter().map(|entry| entry.bytes).sum::<u64>() {
        0 => figures::NONE.to_owned(),
        bytes => units::bytes(bytes),
    };
    let (size, size_unit) = size.rsplit_once(' ').unwrap_or((size.as_str(), ""));
    let avoided = report.avoided_ms();
    let avoided_unit = if avoided.is_some() { "ms" } else { "" };
    let avoided = avoided.map_or_else(|| figures::NONE.into(), figures::ms);
    let count = units::count;
    let width = (area.width() * 0.18).floor();
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 0.0;
        Stat::new("Lookups", &count(counts.lookups)).show(ui, width);
        Stat::new("Hits", &count(counts.hits)).show(ui, width);
        Stat::new("Builds", &count(counts.builds)).show(ui, width);
        Stat::new("Size", size).unit(size_unit).show(ui, (area.width() * 0.25).floor());
        Stat::new("Avoided", &avoided).unit(avoided_unit).show(ui, width);
    });
    let top = area.top() + 36.0 + if compact { 4.0 } else { 8.0 };
    let cells = Rect::from_min_size(pos2(area.left(), top), vec2(area.width(), CELL));
    let strip = Strip::of(counts.lookups, counts.hits, (cells.width() / PITCH) as usize);
    paint_strip(ui.painter(), theme, cells, &strip);
    let words = format!("{} lookups: {} built, {} hit", counts.lookups, counts.lookups - counts.hits, counts.hits);
    let image = ui.interact(cells, ui.scope_id().with("cells"), egui::Sense::hover());
    image.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    let y = cells.bottom() + 10.0;
    let built = format!("{} built", count(counts.lookups - counts.hits));
    text(ui.painter(), pos2(area.left(), y), Align2::LEFT_CENTER, &built, fonts::small(), theme.t3, area.width() / 2.0);
    let hit = match strip.lookups_per_cell {
        1 => format!("{} hit", count(counts.hits)),
        n => format!("{} hit; a cell is {n} lookups", count(counts.hits)),
    };
    text(ui.painter(), pos2(area.right(), y), Align2::RIGHT_CENTER, &hit, fonts::small(), theme.t3, area.width() / 1.5);
    let mut table_top = y + if compact { 9.0 } else { 12.0 };
    if counts.evictions > 0 {
        let words = format!("{} given up: the cache holds too few entries for these windows", count(counts.evictions));
        let line = Rect::from_min_size(pos2(area.left(), table_top), vec2(area.width(), 14.0));
        text(ui.painter(), line.left_center(), Align2::LEFT_CENTER, &words, fonts::small(), theme.warn, area.width());
        describe(ui, line, "evictions", &words);
        table_top += 15.0;
    }
    entries(ui, area.with_min_y(table_top), &report.entries, if compact { 17.0 } else { 22.0 });
}

/// What is kept, a row each.
fn entries(ui: &mut Ui, area: Rect, entries: &[CacheEntry], row: f32) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let mut y = area.top() + row / 2.0;
    let (kind_x, size_x, hits_x) = (area.left() + area.width() * 0.36, area.right() - 56.0, area.right());
    for (x, anchor, words) in [
        (area.left(), Align2::LEFT_CENTER, "entry"),
        (kind_x, Align2::LEFT_CENTER, "holds"),
        (size_x, Align2::RIGHT_CENTER, "size"),
        (hits_x, Align2::RIGHT_CENTER, "hits"),
    ] {
        text(&painter, pos2(x, y), anchor, words, fonts::small(), theme.t3, 90.0);
    }
    rule(&painter, area.x_range(), y + row / 2.0 - 0.5, theme.line);
    if entries.is_empty() {
        let at = pos2(area.left(), y + row);
        text(&painter, at, Align2::LEFT_CENTER, "nothing is kept", fonts::table(), theme.t3, area.width());
    }
    let room = ((area.bottom() - y - row / 2.0) / row).floor().max(1.0) as usize;
    for (i, entry) in entries.iter().take(room).enumerate() {
        y += row;
        let left = entries.len() - i;
        if i + 1 == room && left > 1 {
            let words = format!("{left} more");
            text(&painter, pos2(area.left(), y), Align2::LEFT_CENTER, &words, fonts::table(), theme.t3, area.width());
            break;
        }
        let name = entry.window.map_or_else(|| "full attention".into(), |window| format!("window {window}"));
        let kind = match entry.path {
            AttentionPath::Varlen => "tile lists",
            AttentionPath::Masked => "T×T mask",
        };
        let (size, hits) = (units::bytes(entry.bytes), units::count(entry.hits));
        let at = |x: f32| pos2(x, y);
        text(
            &painter,
            at(area.left()),
            Align2::LEFT_CENTER,
            &name,
            fonts::table(),
            theme.t1,
            kind_x - area.left() - 6.0,
        );
        text(&painter, at(kind_x), Align2::LEFT_CENTER, kind, fonts::table(), theme.t2, size_x - kind_x - 60.0);
        text(&painter, at(size_x), Align2::RIGHT_CENTER, &size, fonts::table(), theme.t2, 80.0);
        text(&painter, at(hits_x), Align2::RIGHT_CENTER, &hits, fonts::medium(12.0), theme.t1, 50.0);
        let line = Rect::from_center_size(pos2(area.center().x, y), vec2(area.width(), row));
        describe(ui, line, ("entry", i), &format!("{name}, {kind}, {size}, {hits} hits"));
    }
}

/// The lookups of a step as cells, those that were built first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Strip {
    /// Whether something was built for a cell.
    built: Vec<bool>,
    lookups_per_cell: u64,
}

impl Strip {
    /// At most `most` cells; several lookups share one where there are more.
    fn of(lookups: u64, hits: u64, most: usize) -> Self {
        let lookups_per_cell = lookups.div_ceil(most.max(1) as u64).max(1);
        let num_built = lookups.saturating_sub(hits);
        let firsts = (0..lookups).step_by(lookups_per_cell as usize);
        Self { built: firsts.map(|first| first < num_built).collect(), lookups_per_cell }
    }
}

fn paint_strip(painter: &Painter, theme: &Theme, rect: Rect, strip: &Strip) {
    if strip.built.is_empty() {
        painter.rect_stroke(rect, 0, Stroke::new(1.0, theme.line2), StrokeKind::Inside);
        return;
    }
    let scale = painter.pixels_per_point();
    let pitch = (rect.width() / strip.built.len() as f32).min(24.0);
    let snap = |x: f32| (x * scale).round() / scale;
    for (i, built) in strip.built.iter().enumerate() {
        let (left, right) = (rect.left() + i as f32 * pitch, rect.left() + (i + 1) as f32 * pitch);
        let cell = Rect::from_min_max(pos2(snap(left), rect.top()), pos2(snap(right) - 1.0, rect.bottom()));
        let color = if *built { theme.phase(Phase::Metadata) } else { theme.acc.gamma_multiply(0.75) };
        painter.rect_filled(cell, 0, color);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_is_a_cell_while_there_is_room() {
        let strip = Strip::of(6, 4, 80);
        assert_eq!((strip.built, strip.lookups_per_cell), (vec![true, true, false, false, false, false], 1));
    }

    #[test]
    fn many_lookups_share_cells_and_no_build_is_lost() {
        let strip = Strip::of(1000, 999, 80);
        assert_eq!(strip.lookups_per_cell, 13);
        assert_eq!((strip.built.len(), strip.built.iter().filter(|built| **built).count()), (77, 1));
        assert!(Strip::of(1000, 0, 80).built.iter().all(|built| *built), "off: every layer builds");
        assert_eq!(Strip::of(0, 0, 80).built.len(), 0);
    }
}
