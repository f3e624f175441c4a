//! The log tile: what the run said, newest first.

use egui::{ScrollArea, Ui};

use crate::base::units;
use crate::gui::theme::Theme;
use crate::gui::widgets::{Tile, label, log_row, segmented};
use crate::gui::{figures, fonts, icons};
use crate::session::event::{NoteLevel, Outcome};
use crate::session::run_view::{RunState, RunView};

/// Which lines are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Filter {
    #[default]
    All,
    Warnings,
}

/// The tile's state.
#[derive(Default)]
pub struct LogTile {
    filter: Filter,
}

/// One line of the log.
struct Line {
    unix_ms: i64,
    level: NoteLevel,
    icon: Option<&'static str>,
    text: String,
}

impl LogTile {
    /// Draws the tile.
    pub fn show(&mut self, ui: &mut Ui, rect: egui::Rect, view: &RunView) {
        let theme = Theme::of(ui);
        let mut lines = lines(view);
        let serious = lines.iter().filter(|line| line.level != NoteLevel::Info).count();
        if self.filter == Filter::Warnings {
            lines.retain(|line| line.level != NoteLevel::Info);
        }
        let warnings = match serious {
            1 => "1 warning".to_owned(),
            n => format!("{n} warnings"),
        };
        let mut filter = self.filter;
        Tile::new("Log").show(
            ui,
            rect,
            |ui| {
                let options = [(Filter::All, "all"), (Filter::Warnings, warnings.as_str())];
                segmented(ui, "Log lines shown", &mut filter, &options, 20.0);
            },
            |ui| {
                if lines.is_empty() {
                    let words =
                        if serious == 0 && self.filter == Filter::Warnings { "No warnings." } else { "Nothing yet." };
                    label(ui, words, fonts::table(), theme.t3);
                    return;
                }
                ui.spacing_mut().item_spacing.y = 0.0;
                let scroll = ScrollArea::vertical().auto_shrink(false).id_salt("log");
                scroll.show_rows(ui, log_row::HEIGHT, lines.len(), |ui, visible| {
                    for line in &lines[visible] {
                        let time = figures::time_of_day(line.unix_ms);
                        log_row::log_row(ui, &time, line.level, line.icon, &line.text);
                    }
                });
            },
        );
        self.filter = filter;
    }
}

/// All lines, newest first.
fn lines(view: &RunView) -> Vec<Line> {
    let mut lines: Vec<Line> = view
        .notes
        .iter()
        .map(|note| Line { unix_ms: note.unix_ms, level: note.level, icon: None, text: note.text.clone() })
        .collect();
    lines.extend(view.saved.iter().map(|saved| Line {
        unix_ms: saved.unix_ms,
        level: NoteLevel::Info,
        icon: Some(icons::FLOPPY_DISK),
        text: format!("Saved step {} to {}", units::count(saved.step), saved.path.display()),
    }));
    lines.extend(view.evals.iter().filter_map(|eval| {
        Some(Line {
            unix_ms: eval_time(view, eval.step, eval.eval_ms)?,
            level: NoteLevel::Info,
            icon: Some(icons::DIAMOND),
            text: format!(
                "Eval at step {}: loss {} on {} records, {} s",
                units::count(eval.step),
                figures::loss(eval.loss),
                units::count(eval.num_documents),
                figures::grouped(eval.eval_ms / 1e3, 1),
            ),
        })
    }));
    lines.sort_by_key(|line| line.unix_ms);
    let last = lines.last().map(|line| line.unix_ms).max(view.steps.last().map(|step| step.unix_ms));
    if let (RunState::Finished { outcome, steps }, Some(unix_ms)) = (&view.state, last) {
        let text = match outcome {
            Outcome::Completed => Some(format!("Completed after {} steps", units::count(*steps))),
            Outcome::Stopped => Some(format!("Stopped by you after {} steps", units::count(*steps))),
            // Its reason is a line of its own already.
            Outcome::Failed(_) => None,
        };
        lines.extend(text.map(|text| Line { unix_ms, level: NoteLevel::Info, icon: Some(icons::CHECK), text }));
    }
    lines.reverse();
    lines
}

/// When an evaluation ended: it follows its step; the one before the first step precedes that.
fn eval_time(view: &RunView, step: u64, eval_ms: f64) -> Option<i64> {
    if step == 0 {
        return view.steps.first().map(|first| first.unix_ms - first.report.step_ms as i64).or(view.began_unix_ms);
    }
    let i = view.steps.binary_search_by_key(&step, |s| s.report.step).ok()?;
    Some(view.steps[i].unix_ms + eval_ms as i64)
}
