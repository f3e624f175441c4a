//! The form that starts comparisons: what to vary, how much to measure, and on what.

use egui::{Align, Layout, Rect, ScrollArea, Ui, UiBuilder, pos2, vec2};

use crate::base::units;
use crate::gui::actions::Action;
use crate::gui::theme::Theme;
use crate::gui::views::setup::Subject;
use crate::gui::views::setup::fields::{field, prose};
use crate::gui::views::{Request, ViewContext};
use crate::gui::widgets::{Button, Tile, describe, label, link, switch};
use crate::gui::{fonts, icons};
use crate::session::compare::{CompareOptions, Variation};
use crate::session::config::RunConfig;
use crate::session::run_folder;

/// Width of the column with what is measured.
const RIGHT: f32 = 404.0;
const NO_GPU: &str = "there is no GPU on this machine";
const NO_EXPERTS: &str = "the model in Set up is dense: it has no experts to route to";

/// What is asked for.
pub struct Form {
    vary: Vec<Variation>,
    pairs: String,
    steps: String,
}

impl Default for Form {
    fn default() -> Self {
        let CompareOptions { vary, pairs, steps_per_block } = CompareOptions::default();
        Self { vary, pairs: pairs.to_string(), steps: steps_per_block.to_string() }
    }
}

/// What arm B does, in a clause.
fn against(variation: Variation) -> &'static str {
    match variation {
        Variation::Cache => "against each layer building metadata anew, as published",
        Variation::CacheFused => "against each layer building metadata anew, in few operations",
        Variation::Buffers => "two device buffers for offloaded activations, against one",
        Variation::Offload => "inputs of blocks in host memory, against on the device",
        Variation::Keep => "against computing activations again in the backward pass",
        Variation::Attention => "against a dense T×T mask",
        Variation::Routing => "on the device alone, against a search and a read for each expert, as published",
        Variation::RoutingSorted => "one sort and one read, as published, against a search and a read for each expert",
        Variation::Graphs => "against every kernel queued by the host",
        Variation::All => "everything that can be on, against everything off",
    }
}

/// Why something cannot be compared here; `None` when it can, as far as that is known.
fn refusal(variation: Variation, has_gpu: bool, is_dense: bool) -> Option<&'static str> {
    match variation {
        Variation::Graphs if !has_gpu => Some(NO_GPU),
        variation if variation.needs_experts() && is_dense => Some(NO_EXPERTS),
        _ => None,
    }
}

/// A whole number of at least one, or what is wrong with it.
fn count(text: &str) -> Result<usize, &'static str> {
    match text.trim().parse() {
        Ok(0) => Err("it must be at least 1"),
        Ok(count) => Ok(count),
        Err(_) => Err("not a whole number"),
    }
}

impl Form {
    /// The options, or why there are none.
    fn options(&self) -> Result<CompareOptions, String> {
        let pairs = count(&self.pairs).map_err(|problem| format!("Pairs: {problem}"))?;
        let steps_per_block = count(&self.steps).map_err(|problem| format!("Steps: {problem}"))?;
        if self.vary.is_empty() {
            return Err("choose at least one thing to vary".into());
        }
        Ok(CompareOptions { vary: self.vary.clone(), pairs, steps_per_block })
    }

    /// Switches a variation; they are compared in the order in which they are offered.
    fn set(&mut self, variation: Variation, on: bool) {
        self.vary.retain(|other| *other != variation);
        if on {
            self.vary.push(variation);
            self.vary.sort_by_key(|variation| Variation::ALL.iter().position(|other| other == variation));
        }
    }

    /// Draws the form; `on` is what Set up holds.
    pub fn show(&mut self, ui: &mut Ui, rect: Rect, on: Subject, context: &mut ViewContext<'_>) {
        let Subject { config, problem, is_dense } = on;
        ui.painter().rect_filled(rect, 0, Theme::of(ui).line);
        let split = (rect.left() + 620.0).min(rect.right() - RIGHT.min(rect.width() / 2.0)).round();
        let left = Rect::from_min_max(rect.min, pos2(split, rect.bottom()));
        let right = Rect::from_min_max(pos2(split + 1.0, rect.top()), rect.max);
        let has_gpu = context.machine.is_none_or(|machine| machine.gpu.is_ok());
        let nothing = |_: &mut Ui| {};
        let refusal = |variation| refusal(variation, has_gpu, is_dense);
        // What is shown as off is not asked for.
        self.vary.retain(|variation| refusal(*variation).is_none());
        Tile::new("What to vary").show(ui, left, nothing, |ui| self.variations(ui, &refusal));
        Tile::new("How much, and on what").show(ui, right, nothing, |ui| {
            ui.set_max_width(RIGHT - 24.0);
            self.amounts(ui);
            ui.add_space(8.0);
            subject(ui, &config, problem.is_none(), context);
            ui.add_space(8.0);
            self.start(ui, &config, problem, context);
        });
    }

    fn variations(&mut self, ui: &mut Ui, refusal: &dyn Fn(Variation) -> Option<&'static str>) {
        let theme = Theme::of(ui);
        ScrollArea::vertical().id_salt("variations").auto_shrink(false).show(ui, |ui| {
            ui.spacing_mut().item_spacing.y = 0.0;
            for variation in Variation::ALL {
                let refused = refusal(variation);
                let enabled = refused.is_none();
                let mut on = self.vary.contains(&variation);
                let row = Rect::from_min_size(ui.cursor().min, vec2(ui.available_width(), 46.0));
                ui.advance_cursor_after_rect(row);
                let builder = UiBuilder::new().id_salt(variation.word()).max_rect(row);
                let mut row_ui = ui.new_child(builder.layout(Layout::left_to_right(Align::Center)));
                let touched = row_ui.add_enabled_ui(enabled, |ui| switch(ui, &mut on, variation.name())).inner;
                if touched.on_disabled_hover_text(refused.unwrap_or_default()).changed() {
                    self.set(variation, on);
                }
                let words = refused.unwrap_or(against(variation));
                row_ui.vertical(|ui| {
                    ui.spacing_mut().item_spacing.y = 0.0;
                    ui.add_space(5.0);
                    let color = if enabled { theme.t1 } else { theme.tdis };
                    label(ui, variation.name(), fonts::medium(13.0), color);
                    label(ui, words, fonts::table(), theme.t3);
                });
                describe(ui, row, ("variation", variation.word()), &format!("{}, {words}", variation.name()));
            }
        });
    }

    fn amounts(&mut self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        ui.horizontal_top(|ui| {
            let width = (ui.available_width() - 8.0) / 2.0;
            let problem = count(&self.pairs).err();
            field(ui, "Pairs of blocks", &mut self.pairs, width, "", problem);
            let problem = count(&self.steps).err();
            field(ui, "Counted steps in a block", &mut self.steps, width, "", problem);
        });
        ui.add_space(4.0);
        let blocks = "Blocks run in the order A B B A, so that what drifts slowly meets both arms alike. Each begins with a step \
                      that is not counted.";
        prose(ui, blocks, theme.t3);
        if let Ok(options) = self.options() {
            let steps = options.vary.len() * options.pairs * 2 * options.num_steps();
            let plural = if options.vary.len() == 1 { "comparison" } else { "comparisons" };
            let words = format!("{} {plural}: {} steps, and a warm-up", options.vary.len(), units::count(steps as u64));
            label(ui, &words, fonts::table(), theme.t2);
        }
    }

    fn start(&mut self, ui: &mut Ui, config: &RunConfig, problem: Option<String>, context: &mut ViewContext<'_>) {
        let options = self.options();
        let wrong = problem.or_else(|| options.as_ref().err().cloned());
        let obstacle = wrong.or_else(|| context.busy.map(str::to_owned));
        let width = ui.available_width();
        let button = Button::new("Start comparison").icon(icons::PLAY).primary().height(36.0).min_width(width);
        let response = ui.add_enabled(obstacle.is_none(), button);
        context.probe.rect("start comparison", &response);
        if let Some(words) = &obstacle {
            prose(ui, words, Theme::of(ui).t3);
        }
        if response.clicked()
            && let Ok(options) = options
        {
            context.ask(Request::StartComparison(Box::new(config.clone()), options));
        }
    }
}

/// What is compared on: the configuration in Set up.
fn subject(ui: &mut Ui, config: &RunConfig, fine: bool, context: &mut ViewContext<'_>) {
    let theme = Theme::of(ui);
    label(ui, "Configuration in Set up", fonts::semibold(12.0), theme.t1);
    if fine {
        let model = run_folder::short_name(&config.model.path);
        let data = run_folder::short_name(&config.data.path);
        prose(ui, &format!("{model} on {data}"), theme.t2);
        let tokens = units::count(config.packing.pack_len as u64);
        let packs = match config.train.grad_accum_steps {
            1 => "1 pack".into(),
            n => format!("{n} packs"),
        };
        prose(ui, &format!("{packs} of {tokens} tokens a step. Nothing is saved, and no run is made."), theme.t3);
    } else {
        prose(ui, "It is not complete yet.", theme.t2);
    }
    if link(ui, "Change it in Set up").clicked() {
        context.ask(Request::Do(Action::SetUp));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_compared_says_why() {
        let of = |has_gpu, is_dense| Variation::ALL.map(|variation| refusal(variation, has_gpu, is_dense));
        assert!(of(true, false).iter().all(Option::is_none));
        assert_eq!(of(false, true).into_iter().flatten().collect::<Vec<_>>(), [NO_EXPERTS, NO_EXPERTS, NO_GPU]);
    }

    #[test]
    fn the_form_asks_for_what_can_be_measured() {
        let mut form = Form::default();
        assert_eq!(form.options(), Ok(CompareOptions::default()));
        form.set(Variation::Buffers, true);
        form.set(Variation::Cache, true);
        assert_eq!(form.options().unwrap().vary, [Variation::Cache, Variation::Buffers, Variation::All]);
        Variation::ALL.into_iter().for_each(|variation| form.set(variation, false));
        assert_eq!(form.options().unwrap_err(), "choose at least one thing to vary");
        form.set(Variation::Keep, true);
        form.pairs = "0".into();
        assert_eq!(form.options().unwrap_err(), "Pairs: it must be at least 1");
        form.pairs = "4".into();
        form.steps = "many".into();
        assert_eq!(form.options().unwrap_err(), "Steps: not a whole number");
    }
}
