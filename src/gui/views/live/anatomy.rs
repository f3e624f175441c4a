//! The step anatomy tile: where the milliseconds of each step went, as stacked bars and as a table.

use egui::accesskit::Role;
use egui::{Align2, Color32, Painter, Rect, Sense, Stroke, Ui, WidgetInfo, lerp, pos2, vec2};

use super::loss::step_point;
use super::marks::{self, Mark};
use super::series::{decimals, ticks};
use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::widgets::bars::{Bar, Fill, Segment, step_bars};
use crate::gui::widgets::{Tile, rule, segmented, swatch, text, tile};
use crate::gui::{figures, fonts, icons};
use crate::session::run_view::{RunView, StepPoint};
use crate::session::{Phase, PhaseTime, StepReport};

/// Most steps in the nearer view.
const MOST: f32 = 40.0;
/// Room for the figures left of the bars and for the brackets right of them.
const LEFT: f32 = 38.0;
const RIGHT: f32 = 32.0;
/// What may stay without a phase.
const UNEXPLAINED: f64 = 0.02;

/// Which steps are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Choice {
    #[default]
    Last,
    All,
    Mean,
}

/// The tile's state.
#[derive(Default)]
pub struct AnatomyTile {
    choice: Choice,
}

/// Times of one step, or the mean of several.
#[derive(Debug, Clone, PartialEq)]
struct Times {
    step_ms: f64,
    phases: Vec<PhaseTime>,
    not_attributed_ms: f64,
}

impl AnatomyTile {
    /// Draws the tile. `marked` is the step under the pointer in the last frame; `hovered` gets this frame's.
    pub fn show(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        view: &RunView,
        marks: &[Mark],
        marked: Option<u64>,
        hovered: &mut Option<u64>,
    ) {
        let step = |step: &StepPoint| (format!("step {}", units::count(step.report.step)), Times::of(&step.report));
        let (title, times) = match (self.choice, marked.and_then(|step| step_point(view, step)), view.last_step()) {
            (_, Some(marked), _) => step(marked),
            (Choice::Mean, None, _) => {
                (format!("mean of {}", units::count(view.steps.len() as u64)), Times::mean(&view.steps))
            }
            (_, None, Some(last)) => step(last),
            (_, None, None) => return,
        };
        let width = rect.width() - 2.0 * tile::PADDING;
        let table_columns = TableColumns::of(ui.painter(), &times, width);
        let chart_width = width - table_columns.width - 12.0;
        // As many bars as there is room for with a gap between them.
        let most = ((chart_width - LEFT - RIGHT) / 4.0).clamp(10.0, MOST) as usize;
        let last = format!("last {most}");
        let mut choice = self.choice;
        Tile::new("Step anatomy").show(
            ui,
            rect,
            |ui| {
                let options = [(Choice::Last, last.as_str()), (Choice::All, "all"), (Choice::Mean, "mean")];
                segmented(ui, "Steps shown", &mut choice, &options, 20.0);
            },
            |ui| {
                let area = ui.max_rect();
                let steps = match self.choice {
                    Choice::Last => &view.steps[view.steps.len().saturating_sub(most)..],
                    Choice::All | Choice::Mean => &view.steps[..],
                };
                bars(ui, area.with_max_x(area.left() + chart_width), steps, marks, marked, hovered);
                table(
                    ui,
                    area.with_min_x(area.right() - table_columns.width),
                    &title,
                    &times,
                    view.has_experts(),
                    &table_columns,
                );
            },
        );
        self.choice = choice;
    }
}

impl Times {
    fn of(report: &StepReport) -> Self {
        Self { step_ms: report.step_ms, phases: report.phases.clone(), not_attributed_ms: report.not_attributed_ms }
    }

    /// The mean over steps; a part counts as zero in a step that did not measure it, and stays unmeasured when no
    /// step did.
    fn mean(steps: &[StepPoint]) -> Self {
        let n = steps.len().max(1) as f64;
        let mean = |value: &dyn Fn(&StepReport) -> f64| steps.iter().map(|s| value(&s.report)).sum::<f64>() / n;
        let part = |phase: Phase, of: fn(&PhaseTime) -> Option<f64>| {
            let measured = steps.iter().filter_map(|s| of(s.report.phases.iter().find(|p| p.phase == phase)?));
            measured.fold(None, |sum: Option<f64>, ms| Some(sum.unwrap_or(0.0) + ms)).map(|sum| sum / n)
        };
        Self {
            step_ms: mean(&|r| r.step_ms),
            phases: Phase::ALL
                .into_iter()
                .map(|phase| PhaseTime {
                    phase,
                    forward_ms: part(phase, |p| p.forward_ms),
                    backward_ms: part(phase, |p| p.backward_ms),
                    step_ms: part(phase, |p| p.step_ms),
                })
                .collect(),
            not_attributed_ms: mean(&|r| r.not_attributed_ms),
        }
    }

    /// Forward, backward, once a step; the rest hatched on top.
    fn bar(&self, theme: &Theme) -> Bar {
        let group = |of: fn(&PhaseTime) -> Option<f64>| -> Vec<Segment> {
            let measured = self.phases.iter().filter_map(|p| Some((p.phase, of(p)?)));
            measured.map(|(phase, value)| Segment { value, fill: Fill::Solid(theme.phase(phase)) }).collect()
        };
        let mut once = group(|p| p.step_ms);
        once.push(Segment { value: self.not_attributed_ms.max(0.0), fill: Fill::Hatched });
        Bar { groups: vec![group(|p| p.forward_ms), group(|p| p.backward_ms), once] }
    }
}

/// The steps that one bar stands for.
struct Column {
    first: u64,
    last: u64,
    times: Times,
}

fn columns(steps: &[StepPoint], width: f32) -> Vec<Column> {
    // A bar is at least two points wide; several steps share one where there are more.
    let most = (width / 2.0).max(1.0) as usize;
    let size = steps.len().div_ceil(most).max(1);
    steps
        .chunks(size)
        .map(|chunk| Column {
            first: chunk.first().map_or(0, |s| s.report.step),
            last: chunk.last().map_or(0, |s| s.report.step),
            times: if chunk.len() == 1 { Times::of(&chunk[0].report) } else { Times::mean(chunk) },
        })
        .collect()
}

fn bars(ui: &mut Ui, area: Rect, steps: &[StepPoint], marks: &[Mark], marked: Option<u64>, hovered: &mut Option<u64>) {
    let theme = Theme::of(ui);
    let plot = Rect::from_min_max(area.min + vec2(LEFT, 18.0), pos2(area.right() - RIGHT, area.bottom() - 20.0));
    let columns = columns(steps, plot.width());
    let bars: Vec<Bar> = columns.iter().map(|c| c.times.bar(theme)).collect();
    let totals: Vec<f64> = bars.iter().map(Bar::total).collect();
    let (max, num_taller) = axis(&totals);
    let painter = ui.painter();
    let y_of = |ms: f64| lerp(plot.bottom()..=plot.top(), (ms / max) as f32);
    let levels = ticks(0.0, max, (plot.height() / 48.0).clamp(2.0, 6.0) as usize);
    // Long steps have their axis in seconds.
    let (unit, name) = if max >= 10_000.0 { (1e3, "s") } else { (1.0, "ms") };
    let digits = decimals(&levels.iter().map(|level| level / unit).collect::<Vec<f64>>());
    for level in &levels {
        let y = painter.round_to_pixel_center(y_of(*level));
        painter.hline(plot.x_range(), y, Stroke::new(1.0, theme.grid));
        let figure = figures::grouped(*level / unit, digits);
        text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, &figure, fonts::small(), theme.t3, 44.0);
    }
    text(
        painter,
        pos2(plot.left() - 8.0, area.top() + 4.0),
        Align2::RIGHT_CENTER,
        name,
        fonts::small(),
        theme.t3,
        30.0,
    );
    let rects = step_bars(&painter.with_clip_rect(plot.intersect(painter.clip_rect())), theme, plot, &bars, max);
    for (rect, _) in rects.iter().zip(&totals).filter(|(_, total)| **total > max) {
        // A gap near the top says that the bar goes on.
        let gap = Rect::from_x_y_ranges(rect.x_range(), plot.top() + 5.0..=plot.top() + 7.0);
        painter.rect_filled(gap, 0, theme.bg1);
    }
    if num_taller > 0 {
        let words = format!("{} taller", units::count(num_taller as u64));
        let at = pos2(plot.right(), area.top() + 4.0);
        text(painter, at, Align2::RIGHT_CENTER, &words, fonts::small(), theme.t3, 80.0);
    }
    rule(painter, plot.x_range(), plot.bottom() + 0.5, theme.line2);
    switch_marks(painter, theme, area.with_min_x(plot.left()), plot, marks, &columns, &rects);
    let Some((last_rect, last_bar)) = rects.last().zip(bars.last()) else { return };
    brackets(painter, theme, *last_rect, last_bar, &y_of);

    let y = plot.bottom() + 14.0;
    text(painter, pos2(plot.left() - 8.0, y), Align2::RIGHT_CENTER, "step", fonts::small(), theme.t3, 44.0);
    let first = columns.first().map_or(0, |c| c.first);
    let last = columns.last().map_or(0, |c| c.last);
    let first_words =
        text(painter, pos2(plot.left(), y), Align2::LEFT_CENTER, &units::count(first), fonts::small(), theme.t3, 60.0);
    let last_words = units::count(last);
    let last_galley = painter.layout_no_wrap(last_words, fonts::small(), theme.t1);
    let x = last_rect.right() - last_galley.size().x;
    if x > first_words.right() + 8.0 {
        painter.galley(pos2(x, y - last_galley.size().y / 2.0), last_galley, theme.t1);
    }

    let pointer = ui.input(|input| input.pointer.hover_pos()).filter(|p| ui.clip_rect().contains(*p));
    for (column, rect) in columns.iter().zip(&rects) {
        let has = |step: u64| (column.first..=column.last).contains(&step);
        if pointer.is_some_and(|p| rect.expand2(vec2(1.0, 0.0)).contains(p)) {
            *hovered = Some(column.last);
        }
        if marked.is_some_and(has) {
            let x = ui.painter().round_to_pixel_center(rect.center().x);
            ui.painter().vline(x, plot.y_range(), Stroke::new(1.0, theme.t2));
        }
    }
    let words = format!("Milliseconds of steps {first} to {last} by phase");
    let response = ui.interact(plot, ui.scope_id().with("bars"), Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Image, true, &words));
}

/// A line before every bar with a step that changed a setting; the last one says what, above the bars.
fn switch_marks(
    painter: &Painter,
    theme: &Theme,
    area: Rect,
    plot: Rect,
    marks: &[Mark],
    columns: &[Column],
    rects: &[Rect],
) {
    let place = |mark: &Mark| columns.iter().position(|c| (c.first..=c.last).contains(&mark.step));
    let placed: Vec<(f32, &Mark)> =
        marks.iter().filter_map(|mark| Some((rects[place(mark)?].left() - 1.0, mark))).collect();
    for (x, _) in &placed {
        marks::line(painter, theme, *x, (plot.top() - 4.0..=plot.bottom()).into());
    }
    if let Some((x, mark)) = placed.last() {
        marks::words(painter, theme, *x, area.top() + 4.0, area, &mark.words);
    }
}

/// Top of the axis over bars of these heights, and how many of them go beyond it. The first steps time algorithms or warm caches up, and one may
/// wait for the disk: what is more than three times the median does not flatten the others.
fn axis(totals: &[f64]) -> (f64, usize) {
    let mut sorted: Vec<f64> = totals.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
    let usual = sorted.iter().rev().find(|&&total| total <= 3.0 * median).copied().unwrap_or_default();
    if usual <= 0.0 {
        return (1.0, 0);
    }
    // Room above, so that a bar that goes on looks taller than the others.
    let top = usual * if sorted.last() > Some(&usual) { 1.4 } else { 1.06 };
    (top, sorted.iter().filter(|&&total| total > top).count())
}

/// `fwd` and `bwd` right of the last bar.
fn brackets(painter: &Painter, theme: &Theme, last: Rect, bar: &Bar, y_of: &dyn Fn(f64) -> f32) {
    for ((low, high), name) in bar.group_ranges().into_iter().zip(["fwd", "bwd"]) {
        let (bottom, top) = (y_of(low) - 1.0, y_of(high) + 1.0);
        if bottom - top < 8.0 {
            continue;
        }
        let x = painter.round_to_pixel_center(last.right() + 5.0);
        let stroke = Stroke::new(1.0, theme.t3);
        painter.vline(x, top..=bottom, stroke);
        for y in [painter.round_to_pixel_center(top), painter.round_to_pixel_center(bottom)] {
            painter.hline((x - 3.0)..=x, y, stroke);
        }
        if bottom - top >= 14.0 {
            let at = pos2(x + 5.0, (top + bottom) / 2.0);
            text(painter, at, Align2::LEFT_CENTER, name, fonts::small(), theme.t2, 30.0);
        }
    }
}

/// Where the figures of the table stand.
struct TableColumns {
    /// Width of the table.
    width: f32,
    /// Distance of the right edges of fwd, bwd, ms and % from the table's right edge.
    right: [f32; 4],
}

impl TableColumns {
    /// As wide as the sums of `times` need, and wider in a tile with room.
    fn of(painter: &Painter, times: &Times, available: f32) -> Self {
        const NAME: f32 = 98.0;
        const SHARE: f32 = 30.0;
        let sum = |of: fn(&PhaseTime) -> Option<f64>| times.phases.iter().filter_map(of).sum();
        let sums: [f64; 3] = [sum(|p| p.forward_ms), sum(|p| p.backward_ms), times.step_ms];
        // Digits are of one width, so that columns move only with the number of them.
        let needed = sums.map(|ms| {
            painter.layout_no_wrap(figures::ms(ms.max(100.0)), fonts::medium(12.0), Color32::WHITE).size().x + 9.0
        });
        let room = 0.5 * available - NAME - SHARE - needed.iter().sum::<f32>();
        let [fwd, bwd, ms] = needed.map(|width| width + (room / 3.0).clamp(0.0, 22.0));
        Self { width: NAME + fwd + bwd + ms + SHARE, right: [bwd + ms + SHARE, ms + SHARE, SHARE, 0.0] }
    }
}

fn table(ui: &mut Ui, rect: Rect, title: &str, times: &Times, has_experts: bool, columns: &TableColumns) {
    let theme = Theme::of(ui);
    let (measured, missing): (Vec<&PhaseTime>, Vec<&PhaseTime>) =
        times.phases.iter().partition(|p| p.total_ms().is_some());
    // Head, rest and whole step stand around what was measured; what was not is shown where there is room.
    let room = rect.height() - 4.0;
    let least = (room / (measured.len() + 3) as f32).min(15.0);
    let row_height = (room / (Phase::ALL.len() + 4) as f32).clamp(least, 23.0);
    let mut y = rect.top() + row_height / 2.0;
    let painter = ui.painter().clone();
    let x = |column: usize| rect.right() - columns.right[column];
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, title, fonts::small(), theme.t3, 110.0);
    for (column, name) in ["fwd", "bwd", "ms", "%"].into_iter().enumerate() {
        text(&painter, pos2(x(column), y), Align2::RIGHT_CENTER, name, fonts::small(), theme.t3, 60.0);
    }
    let share = |ms: f64| {
        if times.step_ms > 0.0 { figures::ms(100.0 * ms / times.step_ms) } else { figures::NONE.into() }
    };
    for phase in measured {
        y += row_height;
        let total = phase.total_ms().unwrap_or_default();
        swatch(&painter, rect.left(), y).fill(&painter, theme.phase(phase.phase));
        let name_at = pos2(rect.left() + 18.0, y);
        text(&painter, name_at, Align2::LEFT_CENTER, phase.phase.name(), fonts::table(), theme.t1, 96.0);
        for (column, part) in [(0, phase.forward_ms), (1, phase.backward_ms)] {
            let (words, color) = part.map_or((figures::NONE.into(), theme.tdis), |ms| (figures::ms(ms), theme.t2));
            text(&painter, pos2(x(column), y), Align2::RIGHT_CENTER, &words, fonts::table(), color, 64.0);
        }
        text(&painter, pos2(x(2), y), Align2::RIGHT_CENTER, &figures::ms(total), fonts::medium(12.0), theme.t1, 64.0);
        text(&painter, pos2(x(3), y), Align2::RIGHT_CENTER, &share(total), fonts::table(), theme.t2, 40.0);
        tell(ui, rect, y, row_height, &format!("{} {} ms, {} %", phase.phase.name(), figures::ms(total), share(total)));
    }
    y += row_height;
    swatch(&painter, rect.left(), y).hatch(&painter, theme);
    text(&painter, pos2(rect.left() + 18.0, y), Align2::LEFT_CENTER, "not attributed", fonts::table(), theme.t1, 96.0);
    let rest = times.not_attributed_ms;
    text(&painter, pos2(x(2), y), Align2::RIGHT_CENTER, &figures::ms(rest), fonts::medium(12.0), theme.t1, 64.0);
    text(&painter, pos2(x(3), y), Align2::RIGHT_CENTER, &share(rest), fonts::table(), theme.t2, 40.0);
    tell(ui, rect, y, row_height, &format!("not attributed {} ms", figures::ms(rest)));

    y += row_height;
    rule(&painter, rect.x_range(), y - row_height / 2.0, theme.line2);
    text(&painter, pos2(rect.left(), y), Align2::LEFT_CENTER, "whole step", fonts::medium(12.0), theme.t1, 110.0);
    let sum = |of: fn(&PhaseTime) -> Option<f64>| figures::ms(times.phases.iter().filter_map(of).sum());
    text(&painter, pos2(x(0), y), Align2::RIGHT_CENTER, &sum(|p| p.forward_ms), fonts::table(), theme.t2, 64.0);
    text(&painter, pos2(x(1), y), Align2::RIGHT_CENTER, &sum(|p| p.backward_ms), fonts::table(), theme.t2, 64.0);
    text(
        &painter,
        pos2(x(2), y),
        Align2::RIGHT_CENTER,
        &figures::ms(times.step_ms),
        fonts::medium(12.0),
        theme.t1,
        64.0,
    );
    text(&painter, pos2(x(3), y), Align2::RIGHT_CENTER, "100", fonts::table(), theme.t2, 40.0);
    tell(ui, rect, y, row_height, &format!("whole step {} ms", figures::ms(times.step_ms)));

    for phase in missing {
        y += row_height;
        if y + row_height > rect.bottom() {
            break;
        }
        swatch(&painter, rect.left(), y).hatch(&painter, theme);
        let name_at = pos2(rect.left() + 18.0, y);
        text(&painter, name_at, Align2::LEFT_CENTER, phase.phase.name(), fonts::table(), theme.tdis, 110.0);
        let why = missing_why(phase.phase, times, has_experts);
        text(&painter, pos2(rect.right(), y), Align2::RIGHT_CENTER, why, fonts::small(), theme.t3, 150.0);
        tell(ui, rect, y, row_height, &format!("{}: {why}", phase.phase.name()));
    }
    let y = y + row_height;
    if y + row_height / 2.0 <= rect.bottom() + 4.0 {
        verdict(&painter, theme, rect, y, times);
    }
}

/// Why a phase has no times.
fn missing_why(phase: Phase, times: &Times, has_experts: bool) -> &'static str {
    let has = |phase: Phase| times.phases.iter().any(|time| time.phase == phase && time.total_ms().is_some());
    match phase {
        Phase::Moe | Phase::Routing if !has_experts => "no experts in this model",
        Phase::Mlp if has(Phase::Moe) => "every layer has experts",
        _ => "not measured",
    }
}

/// Whether the phases explain the step.
fn verdict(painter: &Painter, theme: &Theme, rect: Rect, y: f32, times: &Times) {
    let explained = times.not_attributed_ms.abs() <= UNEXPLAINED * times.step_ms;
    let (words, icon, font, color) = if explained {
        ("phases sum to the step within 2 %", icons::CHECK, fonts::icon(14.0), theme.ok)
    } else {
        ("phases miss more than 2 % of the step", icons::WARNING, fonts::icon_fill(14.0), theme.warn)
    };
    let shown =
        text(painter, pos2(rect.left(), y), Align2::LEFT_CENTER, words, fonts::small(), theme.t3, rect.width() - 20.0);
    painter.text(pos2(shown.right() + 12.0, y), Align2::CENTER_CENTER, icon, font, color);
}

fn tell(ui: &Ui, rect: Rect, y: f32, height: f32, words: &str) {
    let row = Rect::from_center_size(pos2(rect.center().x, y), vec2(rect.width(), height));
    let response = ui.interact(row, ui.scope_id().with(words), Sense::hover());
    response.widget_info(|| WidgetInfo::labeled(Role::Label, true, words));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gui::theme::DARK;

    #[test]
    fn a_few_slow_steps_do_not_flatten_the_others() {
        let (top, num_taller) = axis(&[160.0, 40.0, 10.0, 11.0, 9.0, 10.0, 12.0, 10.0]);
        assert_eq!(num_taller, 2);
        assert!((12.0..20.0).contains(&top), "{top}");
        let (top, num_taller) = axis(&[10.0, 20.0, 29.0]);
        assert!(num_taller == 0 && top > 29.0, "{top}");
        assert_eq!(axis(&[]), (1.0, 0));
        assert_eq!(axis(&[0.0, 0.0]), (1.0, 0));
        // One step alone is usual, however long.
        assert_eq!(axis(&[5000.0]).1, 0);
    }

    fn times() -> Times {
        let phases = Phase::ALL
            .into_iter()
            .map(|phase| match phase {
                Phase::Mlp => PhaseTime { phase, forward_ms: Some(30.0), backward_ms: Some(60.0), step_ms: None },
                Phase::Optimizer => PhaseTime { phase, forward_ms: None, backward_ms: None, step_ms: Some(8.0) },
                _ => PhaseTime { phase, forward_ms: None, backward_ms: None, step_ms: None },
            })
            .collect();
        Times { step_ms: 100.0, phases, not_attributed_ms: 2.0 }
    }

    #[test]
    fn a_bar_holds_forward_backward_and_the_rest() {
        let bar = times().bar(&DARK);
        assert_eq!(bar.group_ranges(), [(0.0, 30.0), (30.0, 90.0), (90.0, 100.0)]);
        assert_eq!(bar.groups[2].last().map(|s| s.fill), Some(Fill::Hatched));
        assert_eq!(bar.groups[0].len(), 1, "what was not measured has no segment");
    }
}
