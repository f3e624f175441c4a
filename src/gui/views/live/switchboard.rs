//! The switchboard: every optimization with its switch, its reason, and what it is worth where a number for that exists.

use egui::{Align2, Rect, Ui, UiBuilder, pos2, vec2};

use super::formulas::Figures;
use crate::gui::current_run::CurrentRun;
use crate::gui::theme::Theme;
use crate::gui::views::{Request, ViewContext};
use crate::gui::widgets::{Tile, describe, label, switch, text};
use crate::gui::{figures, fonts};
use crate::session::run_view::{RunState, RunView};
use crate::session::{Choice, Optimization};

/// Distance of the right edge of the predictions from the tile's right edge.
const PREDICTED: f32 = 66.0;
/// Where the words begin, right of the switch.
const WORDS: f32 = 34.0;
/// Steps after which a switch that nobody answered shows the run's word again: the report of a step may come one late.
const PATIENCE: u64 = 3;

/// Height of a row where there is room.
pub const ROW: f32 = 37.0;

/// Height of a row in a small window.
pub fn compact_row(switches: usize) -> f32 {
    if switches > Optimization::ALL.len() { 28.0 } else { 31.0 }
}

/// The choices that have a row. What lies where is told by the memory tile and the log.
pub fn switches(view: &RunView) -> impl Iterator<Item = &Choice> {
    let has_row =
        |optimization| Optimization::ALL.contains(&optimization) || optimization == Optimization::GroupedRouting;
    view.choices.iter().filter(move |choice| has_row(choice.optimization))
}

/// What optimizations are worth in a run, as far as that is known.
pub struct Worth<'a> {
    /// For what formulas say.
    pub figures: &'a Figures,
    /// What paired comparisons measured, in milliseconds a step, on against off.
    pub paired: &'a [(Optimization, f64)],
}

impl Worth<'_> {
    /// Change of a step by its formula, in milliseconds.
    fn predicted_ms(&self, optimization: Optimization) -> Option<f64> {
        self.figures.saving_ms(optimization).map(|ms| -ms)
    }

    /// Change of a step as measured in pairs, in milliseconds; by the last comparison of several.
    fn paired_ms(&self, optimization: Optimization) -> Option<f64> {
        self.paired.iter().rfind(|(of, _)| *of == optimization).map(|(_, ms)| *ms)
    }
}

/// A switch that was touched and that the run has not answered yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pending {
    optimization: Optimization,
    on: bool,
    after_step: u64,
}

/// The tile's state.
#[derive(Default)]
pub struct Switchboard {
    pending: Vec<Pending>,
}

impl Switchboard {
    /// Draws the tile.
    pub fn show(
        &mut self,
        ui: &mut Ui,
        rect: Rect,
        run: &CurrentRun,
        worth: &Worth<'_>,
        compact: bool,
        context: &mut ViewContext<'_>,
    ) {
        let theme = Theme::of(ui);
        let view = &run.view;
        self.forget_answered(&view.choices, view.steps_done());
        let refusal = refusal(run);
        let heads = |ui: &mut Ui| {
            let bar = ui.max_rect();
            for (distance, words) in [(0.0, "paired, ms"), (PREDICTED, "predicted")] {
                let at = pos2(bar.right() - distance, bar.center().y);
                text(ui.painter(), at, Align2::RIGHT_CENTER, words, fonts::small(), theme.t3, 70.0);
            }
        };
        Tile::new("Optimizations").show(ui, rect, heads, |ui| {
            if view.choices.is_empty() {
                label(ui, "This run did not say which optimizations are on.", fonts::table(), theme.t3);
                return;
            }
            let height = if compact { compact_row(switches(view).count()) } else { ROW };
            let area = ui.max_rect().translate(vec2(0.0, -4.0));
            for (i, choice) in switches(view).enumerate() {
                let top = area.top() + i as f32 * height;
                let row = Rect::from_min_size(pos2(area.left(), top), vec2(area.width(), height));
                let before = self.pending_of(choice);
                let mut on = before.map_or(choice.on, |pending| pending.on);
                if flip(ui, row, choice, &mut on, refusal, context) {
                    self.pending.retain(|pending| pending.optimization != choice.optimization);
                    let (optimization, after_step) = (choice.optimization, view.steps_done());
                    self.pending.push(Pending { optimization, on, after_step });
                    context.ask(Request::Switch { optimization, on });
                }
                let why =
                    if self.pending_of(choice).is_some() { "between this step and the next" } else { &choice.why };
                words(ui, row.with_min_x(row.left() + WORDS), choice, (on, why), refusal, worth);
            }
        });
    }

    fn forget_answered(&mut self, choices: &[Choice], steps_done: u64) {
        self.pending.retain(|pending| {
            let answered = choices.iter().any(|c| c.optimization == pending.optimization && c.on == pending.on);
            !answered && steps_done < pending.after_step + PATIENCE
        });
    }

    fn pending_of(&self, choice: &Choice) -> Option<Pending> {
        self.pending.iter().find(|pending| pending.optimization == choice.optimization).copied()
    }
}

/// The switch at the left of a row; whether it was touched.
fn flip(
    ui: &mut Ui,
    row: Rect,
    choice: &Choice,
    on: &mut bool,
    refusal: Option<&'static str>,
    context: &mut ViewContext<'_>,
) -> bool {
    let name = choice.optimization.name();
    let place = Rect::from_center_size(pos2(row.left() + 13.0, row.center().y), vec2(26.0, 24.0));
    let mut place = ui.new_child(UiBuilder::new().id_salt(name).max_rect(place));
    let enabled = choice.available && refusal.is_none();
    let touched = place.add_enabled_ui(enabled, |ui| switch(ui, on, name)).inner;
    context.probe.rect(name, &touched);
    let reason = if choice.available { refusal.unwrap_or_default() } else { &choice.why };
    touched.on_disabled_hover_text(reason).changed()
}

/// Name, reason and figures of a row.
fn words(
    ui: &mut Ui,
    rect: Rect,
    choice: &Choice,
    (on, why): (bool, &str),
    refusal: Option<&'static str>,
    worth: &Worth<'_>,
) {
    let theme = Theme::of(ui);
    let painter = ui.painter().clone();
    let name = choice.optimization.name();
    let (predicted, paired) = (worth.predicted_ms(choice.optimization), worth.paired_ms(choice.optimization));
    let y = rect.center().y;
    let (name_y, why_y) = (y - rect.height() * 0.2, y + rect.height() * 0.22);
    let number = |distance: f32, value: Option<f64>, font, color| {
        let (words, color) = value.map_or((figures::NONE.into(), theme.tdis), |value| (change(value), color));
        text(&painter, pos2(rect.right() - distance, name_y), Align2::RIGHT_CENTER, &words, font, color, 60.0)
    };
    number(0.0, paired, fonts::medium(12.0), theme.t1);
    let room = number(PREDICTED, predicted, fonts::table(), theme.t2).left() - rect.left() - 8.0;
    let (name_color, why_color) = if choice.available { (theme.t1, theme.t3) } else { (theme.tdis, theme.tdis) };
    let at = |y: f32| pos2(rect.left(), y);
    text(&painter, at(name_y), Align2::LEFT_CENTER, name, fonts::medium(12.0), name_color, room);
    text(&painter, at(why_y), Align2::LEFT_CENTER, why, fonts::small(), why_color, rect.width());

    let mut words = format!("{name}: {}, {why}", if on { "on" } else { "off" });
    words.extend(predicted.map(|ms| format!(", predicted {} ms", change(ms))));
    words.extend(paired.map(|ms| format!(", measured in pairs {} ms", change(ms))));
    words.extend(refusal.filter(|_| choice.available).map(|refusal| format!("; {refusal}")));
    describe(ui, rect, name, &words).on_hover_text(words);
}

/// Why nothing can be switched in this run now; `None` when it can.
fn refusal(run: &CurrentRun) -> Option<&'static str> {
    match (&run.view.state, run.takes_commands()) {
        (_, true) => None,
        (RunState::Finished { .. } | RunState::Interrupted, _) => Some("this run is over"),
        (RunState::Stopping, _) => Some("this run is stopping"),
        _ => Some("this run trains in another process"),
    }
}

/// A change of a step's time: one decimal below 100 ms.
fn change(ms: f64) -> String {
    figures::signed(ms, if ms.abs() < 100.0 { 1 } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touched_switch_waits_for_the_answer_but_not_for_ever() {
        let choice = |on| Choice { optimization: Optimization::CudaGraphs, on, available: true, why: String::new() };
        let touched = || Switchboard {
            pending: vec![Pending { optimization: Optimization::CudaGraphs, on: true, after_step: 4 }],
        };
        let mut board = touched();
        board.forget_answered(&[choice(false)], 6);
        assert_eq!(board.pending.len(), 1);
        board.forget_answered(&[choice(false)], 7);
        assert!(board.pending.is_empty(), "refused without a word");
        let mut board = touched();
        board.forget_answered(&[choice(true)], 5);
        assert!(board.pending.is_empty(), "done");
    }

    #[test]
    fn nothing_is_switched_in_a_run_of_another_process() {
        let mut run = CurrentRun::opened("/runs/a".into(), crate::session::run_view::RunView::default());
        assert_eq!(refusal(&run), Some("this run trains in another process"));
        run.view.state = RunState::Interrupted;
        assert_eq!(refusal(&run), Some("this run is over"));
    }

    #[test]
    fn changes_have_a_sign_and_few_digits() {
        assert_eq!([change(-286.31), change(1.06), change(-6.44)], ["−286", "+1.1", "−6.4"]);
    }
}
