//! The MoE side of the cache tile: how the tokens of one step spread over experts, as figures and as a heat map with experts across and layers down.

use egui::accesskit::Role;
use egui::{Align2, Color32, Mesh, Painter, Pos2, Rect, Sense, Shape, Stroke, StrokeKind, Ui, WidgetInfo, pos2, vec2};

use super::loss::box_of_rows;
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::views::setup::fields::prose;
use crate::gui::widgets::{Stat, describe, text};
use crate::gui::{figures, fonts};
use crate::session::run_view::StepPoint;
use crate::session::{MoeReport, Phase, Routing};

/// Room left of the map for the numbers of layers.
const LEFT: f32 = 20.0;
/// Heights of the axis and of the legend under the map.
const AXIS: f32 = 13.0;
const LEGEND: f32 = 14.0;
/// Most that a side of a cell takes, and from which size on a gap parts cells.
const LARGEST: f32 = 28.0;
const WITH_GAP: f32 = 5.0;
/// The load, in means, that has the last colour.
const FULL: f64 = 4.0;
/// How much of its colour the least load has, so that it is no idle expert's.
const LEAST: f32 = 0.18;

/// The form of routing in a word.
pub fn how(routing: Routing) -> &'static str {
    match routing {
        Routing::Grouped => "grouped",
        Routing::Sorted => "sorted, as published",
        Routing::PerExpert => "per expert, as published",
    }
}

/// Draws the body of the tile.
pub fn body(ui: &mut Ui, step: Option<&StepPoint>, compact: bool) {
    let theme = Theme::of(ui);
    let Some((step, report)) = step.and_then(|step| Some((step, step.report.moe.as_ref()?))) else {
        prose(ui, "This step did not tell what its experts got.", theme.t3);
        return;
    };
    let area = ui.max_rect();
    stats(ui, step, report);
    let below = area.with_min_y(area.top() + 36.0 + if compact { 4.0 } else { 8.0 });
    if report.tokens_per_expert.is_empty() {
        let step = units::count(step.report.step);
        let words =
            format!("Counts of step {step} are in the run's folder: the window keeps those of the newest steps only.");
        ui.advance_cursor_after_rect(area.with_max_y(below.top()));
        prose(ui, &words, theme.t3);
        return;
    }
    map(ui, below, report);
}

/// The figures above the map.
fn stats(ui: &mut Ui, step: &StepPoint, report: &MoeReport) {
    let room = ui.max_rect().width();
    // Captions and units differ in length.
    let [worst_width, mean_width, idle_width, syncs_width, routing_width] =
        [0.19, 0.155, 0.245, 0.21, 0.2].map(|part| (room * part).floor());
    let times = |times: Option<f64>| times.map_or_else(|| figures::NONE.to_owned(), |times| figures::grouped(times, 2));
    fn unit(known: bool, unit: &str) -> &str {
        if known { unit } else { "" }
    }
    let worst = report.worst_layer();
    let known = !report.tokens_per_expert.is_empty();
    let idle = if known { units::count(report.idle_experts() as u64) } else { figures::NONE.into() };
    let of_all = format!("of {}", units::count(report.num_experts() as u64));
    let layers = report.layers.len().max(1) as f64;
    let syncs = step.report.counters.map(|counters| counters.host_syncs);
    let syncs_of_a_layer = syncs.map_or_else(|| figures::NONE.into(), |syncs| per_layer(syncs as f64 / layers));
    let routing = report.routing_ms.map_or_else(|| figures::NONE.into(), figures::ms);
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 0.0;
        let most = times(worst.map(|(_, most)| most));
        let shown = Stat::new("Worst layer", &most).unit(unit(worst.is_some(), "×")).show(ui, worst_width);
        shown.on_hover_text(worst.map_or_else(
            || "No token went to an expert.".to_owned(),
            |(layer, _)| format!("Load of the fullest expert over the mean, in layer {}", number(report, layer)),
        ));
        let mean = report.mean_imbalance();
        let shown = Stat::new("Mean", &times(mean)).unit(unit(mean.is_some(), "×")).show(ui, mean_width);
        shown.on_hover_text("Load of the fullest expert over the mean, on average over the layers");
        let shown = Stat::new("Idle", &idle).unit(unit(known, &of_all)).show(ui, idle_width);
        shown.on_hover_text("Experts of all layers that got no token");
        let shown =
            Stat::new("Host syncs", &syncs_of_a_layer).unit(unit(syncs.is_some(), "a layer")).show(ui, syncs_width);
        shown.on_hover_text(match syncs {
            Some(syncs) => format!(
                "{} host syncs in the step, whatever made them, over {} layers with experts",
                units::count(syncs),
                report.layers.len()
            ),
            None => "Not counted: there is no GPU in this run".to_owned(),
        });
        let shown =
            Stat::new("Routing", &routing).unit(unit(report.routing_ms.is_some(), "ms")).show(ui, routing_width);
        shown.on_hover_text("Choosing experts, and moving rows to them and back, in both passes");
    });
}

/// A whole number as it is, another with a decimal.
fn per_layer(value: f64) -> String {
    figures::grouped(value, if value.fract() == 0.0 { 0 } else { 1 })
}

/// Number of a row of the report in the model.
fn number(report: &MoeReport, layer: usize) -> usize {
    report.layers.get(layer).copied().unwrap_or(layer)
}

/// Where the cells of a map lie: whole pixels, so that all edges are sharp.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Grid {
    rect: Rect,
    layers: usize,
    experts: usize,
    pixels_per_point: f32,
}

impl Grid {
    /// The largest grid that fits `area`, with cells of at most [`LARGEST`].
    fn of(area: Rect, layers: usize, experts: usize, pixels_per_point: f32) -> Self {
        let side = |room: f32, cells: usize| room.max(0.0).min(LARGEST * cells as f32);
        let rect = Rect::from_min_size(area.min, vec2(side(area.width(), experts), side(area.height(), layers)));
        Self { rect, layers, experts, pixels_per_point }
    }

    /// An edge between cells: the nearest pixel.
    fn edge(self, from: f32, length: f32, i: usize, cells: usize) -> f32 {
        ((from + length * i as f32 / cells as f32) * self.pixels_per_point).round() / self.pixels_per_point
    }

    /// The place of a cell, with the gap after it.
    fn cell(self, layer: usize, expert: usize) -> Rect {
        let x = |i| self.edge(self.rect.left(), self.rect.width(), i, self.experts);
        let y = |i| self.edge(self.rect.top(), self.rect.height(), i, self.layers);
        Rect::from_min_max(pos2(x(expert), y(layer)), pos2(x(expert + 1), y(layer + 1)))
    }

    /// What of a cell is painted: all of it where cells are small.
    fn painted(self, layer: usize, expert: usize) -> Rect {
        let cell = self.cell(layer, expert);
        let pixel = 1.0 / self.pixels_per_point;
        let gap = |side: f32| if side >= WITH_GAP { pixel } else { 0.0 };
        Rect::from_min_max(cell.min, cell.max - vec2(gap(cell.width()), gap(cell.height())))
    }

    /// The cell at a point.
    fn at(self, point: Pos2) -> Option<(usize, usize)> {
        if !self.rect.contains(point) {
            return None;
        }
        let of = |from: f32, length: f32, cells: usize| {
            ((from / length * cells as f32).max(0.0) as usize).min(cells.saturating_sub(1))
        };
        let expert = of(point.x - self.rect.left(), self.rect.width(), self.experts);
        let layer = of(point.y - self.rect.top(), self.rect.height(), self.layers);
        Some((layer, expert))
    }
}

/// Colour of a load in means of its layer; none of an idle expert.
fn color(theme: &Theme, load: f64) -> Option<Color32> {
    let moe = theme.phase(Phase::Moe);
    if load <= 0.0 {
        None
    } else if load <= 1.0 {
        Some(theme.bg3.lerp_to_gamma(moe, LEAST + (1.0 - LEAST) * load as f32))
    } else {
        Some(moe.lerp_to_gamma(theme.t1, (load.log2() / FULL.log2()).min(1.0) as f32))
    }
}

/// Loads of a layer in means of it; nothing where the layer got no token.
fn loads(tokens: &[u64]) -> impl Iterator<Item = f64> {
    let all: u64 = tokens.iter().sum();
    let mean = all as f64 / tokens.len().max(1) as f64;
    tokens.iter().map(move |&tokens| if all == 0 { 0.0 } else { tokens as f64 / mean })
}

fn map(ui: &mut Ui, area: Rect, report: &MoeReport) {
    let theme = Theme::of(ui);
    let rows = &report.tokens_per_expert;
    let experts = rows.iter().map(Vec::len).max().unwrap_or_default();
    let room = Rect::from_min_max(area.min + vec2(LEFT, 0.0), area.max - vec2(0.0, AXIS + LEGEND));
    let grid = Grid::of(room, rows.len(), experts, ui.pixels_per_point());
    if experts == 0 || grid.rect.height() < 1.0 {
        return;
    }
    let painter = ui.painter().clone();
    painter.rect_stroke(grid.rect.expand(1.0), 0, Stroke::new(1.0, theme.line), StrokeKind::Outside);
    let mut mesh = Mesh::default();
    for (layer, tokens) in rows.iter().enumerate() {
        for (expert, load) in loads(tokens).enumerate() {
            if let Some(color) = color(theme, load) {
                mesh.add_colored_rect(grid.painted(layer, expert), color);
            }
        }
    }
    painter.add(Shape::mesh(mesh));
    let tokens: u64 = rows.iter().flatten().sum();
    let mean = tokens as f64 / report.num_experts().max(1) as f64;
    let words = format!(
        "Tokens of {} layers × {experts} experts, {} an expert on average",
        rows.len(),
        figures::grouped(mean, 1)
    );
    let image = ui.interact(grid.rect, ui.scope_id().with("experts"), Sense::hover());
    image.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
    axes(&painter, theme, grid, report);
    legend(&painter, theme, Rect::from_min_max(pos2(area.left(), area.bottom() - LEGEND), area.max));

    let pointer = ui.input(|input| input.pointer.hover_pos()).filter(|p| ui.clip_rect().contains(*p));
    let Some((layer, expert)) = pointer.and_then(|pointer| grid.at(pointer)) else { return };
    let Some(load) = rows[layer].get(expert).and_then(|_| loads(&rows[layer]).nth(expert)) else { return };
    let tokens = units::count(rows[layer][expert]);
    let cell = grid.painted(layer, expert);
    painter.rect_stroke(cell, 0, Stroke::new(1.0, theme.bg1), StrokeKind::Outside);
    painter.rect_stroke(cell.expand(1.0), 0, Stroke::new(1.0, theme.t1), StrokeKind::Outside);
    let of_mean = format!("{} ×", figures::grouped(load, 2));
    let (layer, expert_words) = (number(report, layer).to_string(), expert.to_string());
    let words = format!("layer {layer}, expert {expert}: {tokens} tokens, {of_mean} the mean");
    let figures = [("layer", layer), ("expert", expert_words), ("tokens", tokens), ("of the mean", of_mean)];
    box_of_rows(&painter, theme, area.with_min_y(area.top() - 4.0), cell.center().x, &figures);
    describe(ui, cell, "load", &words);
}

/// Numbers of the first and the last layer and expert.
fn axes(painter: &Painter, theme: &Theme, grid: Grid, report: &MoeReport) {
    let rect = grid.rect;
    let small = |at: Pos2, anchor, words: &str| text(painter, at, anchor, words, fonts::small(), theme.t3, 70.0);
    let last = report.tokens_per_expert.len() - 1;
    let x = rect.left() - 5.0;
    small(pos2(x, rect.top() - 2.0), Align2::RIGHT_TOP, &number(report, 0).to_string());
    if last > 0 && rect.height() >= 24.0 {
        small(pos2(x, rect.bottom() + 2.0), Align2::RIGHT_BOTTOM, &number(report, last).to_string());
    }
    let y = rect.bottom() + 1.0;
    let first = small(pos2(rect.left(), y), Align2::LEFT_TOP, "0");
    if rect.width() >= 120.0 {
        small(pos2(rect.center().x, y), Align2::CENTER_TOP, "experts");
    }
    let words = painter.layout_no_wrap((grid.experts - 1).to_string(), fonts::small(), theme.t3);
    let left = rect.right() - words.size().x;
    if left > first.right() + 6.0 {
        painter.galley(pos2(left, y), words, theme.t3);
    }
}

/// What the colours mean.
fn legend(painter: &Painter, theme: &Theme, rect: Rect) {
    const SHADES: usize = 48;
    let y = rect.center().y;
    let put = |x: f32, anchor, words: &str| text(painter, pos2(x, y), anchor, words, fonts::small(), theme.t3, 170.0);
    let most = put(rect.right(), Align2::RIGHT_CENTER, "4 × the mean");
    let ramp = Rect::from_center_size(pos2(most.left() - 6.0 - SHADES as f32 / 2.0, y), vec2(SHADES as f32, 8.0));
    let mut mesh = Mesh::default();
    for i in 0..SHADES {
        // As far from 0 to 1 as from 1 to 4: half of the ramp each, the second one in logarithms.
        let part = 2.0 * (i as f64 + 0.5) / SHADES as f64;
        let load = if part <= 1.0 { part } else { FULL.powf(part - 1.0) };
        let shade = Rect::from_min_size(ramp.min + vec2(i as f32, 0.0), vec2(1.0, ramp.height()));
        mesh.add_colored_rect(shade, color(theme, load).unwrap_or(theme.bg1));
    }
    painter.add(Shape::mesh(mesh));
    painter.vline(
        painter.round_to_pixel_center(ramp.center().x),
        ramp.y_range().expand(2.0),
        Stroke::new(1.0, theme.t3),
    );
    let few = put(ramp.left() - 6.0, Align2::RIGHT_CENTER, "few");
    let square = Rect::from_center_size(pos2(few.left() - 16.0, y), vec2(8.0, 8.0));
    painter.rect_stroke(square, 0, Stroke::new(1.0, theme.line2), StrokeKind::Inside);
    let idle = put(square.left() - 5.0, Align2::RIGHT_CENTER, "idle");
    let room = idle.left() - 8.0 - rect.left();
    text(painter, rect.left_center(), Align2::LEFT_CENTER, "rows: layers", fonts::small(), theme.t3, room);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gui::theme::{DARK, LIGHT};

    fn area() -> Rect {
        Rect::from_min_size(pos2(20.0, 40.0), vec2(308.0, 84.0))
    }

    #[test]
    fn cells_fill_the_map_without_overlap_on_whole_pixels() {
        for (layers, experts) in [(24, 32), (48, 128), (1, 8)] {
            for scale in [1.0, 1.5, 2.0] {
                let grid = Grid::of(area(), layers, experts, scale);
                let mut right = grid.cell(0, 0).left();
                for expert in 0..experts {
                    let cell = grid.cell(0, expert);
                    assert_eq!(cell.left(), right);
                    assert!(cell.width() * scale >= 1.0, "{cell:?} of {experts}");
                    assert!(((cell.left() * scale).round() - cell.left() * scale).abs() < 1e-3);
                    right = cell.right();
                }
                let painted = grid.painted(layers - 1, experts - 1);
                assert!(painted.width() > 0.0 && painted.height() > 0.0, "every cell is seen");
            }
        }
    }

    #[test]
    fn a_point_finds_its_cell() {
        let grid = Grid::of(area(), 48, 128, 1.0);
        assert_eq!(grid.at(grid.rect.min), Some((0, 0)));
        assert_eq!(grid.at(grid.rect.max), Some((47, 127)));
        assert_eq!(grid.at(grid.rect.max + vec2(1.0, 0.0)), None);
        let grid = Grid::of(area(), 2, 6, 1.0);
        assert_eq!(grid.rect.size(), vec2(6.0 * LARGEST, 2.0 * LARGEST), "a small model has no giant cells");
        assert_eq!(grid.at(grid.cell(1, 4).center()), Some((1, 4)));
    }

    #[test]
    fn more_load_is_more_colour_and_idle_has_none() {
        for theme in [&DARK, &LIGHT] {
            assert_eq!(color(theme, 0.0), None);
            let far = |load: f64| {
                let (color, tile) = (color(theme, load).unwrap(), theme.bg1);
                let part = |a: u8, b: u8| u32::from(a.abs_diff(b));
                part(color.r(), tile.r()) + part(color.g(), tile.g()) + part(color.b(), tile.b())
            };
            let steps = [0.001, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0].map(far);
            assert!(steps.is_sorted() && steps[0] > 30, "{steps:?}");
            assert_eq!(color(theme, 4.0), color(theme, 400.0));
        }
    }

    #[test]
    fn loads_are_told_in_means_of_their_layer() {
        assert_eq!(loads(&[2, 0, 6, 0]).collect::<Vec<_>>(), [1.0, 0.0, 3.0, 0.0]);
        assert_eq!(loads(&[0, 0]).collect::<Vec<_>>(), [0.0, 0.0]);
        assert_eq!([per_layer(0.0), per_layer(32.0), per_layer(1.25)], ["0", "32", "1.2"]);
    }
}
