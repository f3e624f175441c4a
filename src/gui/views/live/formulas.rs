//! The formulas of copies and cache with a run's own figures, beside what the run measured.
//!
//! `L` is the number of blocks whose inputs travel, `c` the mean time of one copy back, `g` the mean time of the backward pass of such a block,
//! `s` the mean time of one build of metadata; all times in milliseconds.

use super::intervals::Intervals;
use super::streams::lanes;
use crate::session::run_view::RunView;
use crate::session::{CacheReport, CopyReport, LaneKind, Metadata, Optimization, Pass, Span};

const MIB: f64 = (1u64 << 20) as f64;
/// Steps of each kind that a measured difference is taken from.
const RECENT: usize = 20;
/// Why figures of copies are missing in a run that makes none.
pub const NO_COPIES: &str = "nothing is offloaded in this run";

/// What the formulas are fed with, as far as this run has it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Figures {
    copies: Option<Copies>,
    cache: Option<Cache>,
}

/// Figures of the last step that copied.
#[derive(Debug, Clone, PartialEq)]
struct Copies {
    report: CopyReport,
    /// Backward passes in the step.
    passes: f64,
    reloads: Option<Reloads>,
}

/// What the spans of a step say about its copies back.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reloads {
    /// From the first copy of a pass to the end of the last block that waits for one, over all passes.
    backward_ms: f64,
    hidden_ms: f64,
    exposed_ms: f64,
}

/// Figures of the last step with the cache on.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cache {
    build_ms: Option<f64>,
    avoided_ms: Option<f64>,
    /// Metadata phase of steps with the cache off, less that of steps with it on.
    saved_ms: Option<f64>,
}

/// What a formula says and what was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What is predicted.
    pub name: &'static str,
    /// How.
    pub formula: &'static str,
    /// Unit of both values.
    pub unit: &'static str,
    /// By the formula.
    pub predicted: Option<f64>,
    /// In the run.
    pub measured: Option<f64>,
    /// Why one of them is missing, where one is.
    pub missing: &'static str,
}

impl Row {
    /// Measured against predicted in per cent; `None` without both, or when nothing was predicted.
    pub fn deviation(&self) -> Option<f64> {
        let (predicted, measured) = self.predicted.zip(self.measured)?;
        (predicted != 0.0).then(|| 100.0 * (measured / predicted - 1.0))
    }
}

impl Figures {
    /// The figures of a run.
    pub fn of(view: &RunView) -> Self {
        let copies = view.last_step().and_then(|step| step.report.copies).map(|report| {
            let passes = report.reloads as f64 / report.blocks.max(1) as f64;
            let reloads = view.last_spans.as_ref().and_then(|last| Reloads::of(&last.spans, report.reloads));
            Copies { report, passes, reloads }
        });
        Self { copies, cache: cache(view) }
    }

    /// What an optimization takes off a step of this run by its formula, in milliseconds; `None` where none is known.
    pub fn saving_ms(&self, optimization: Optimization) -> Option<f64> {
        match optimization {
            Optimization::DoubleBuffer => self.copies.as_ref()?.saving_ms(),
            Optimization::MetadataCache => self.cache.as_ref()?.avoided_ms,
            _ => None,
        }
    }

    /// The rows of the table.
    pub fn rows(&self) -> Vec<Row> {
        let copies = self.copies.as_ref();
        let two = copies.is_none_or(|copies| copies.report.buffers != 1);
        let predict = |formula: fn(f64, f64, f64) -> f64| copies.and_then(|copies| copies.predict(formula));
        let measured = |of: fn(&Reloads) -> f64| copies.and_then(|copies| copies.reloads.as_ref().map(of));
        let missing = if copies.is_none() { NO_COPIES } else { "the step left no spans of copies with their blocks" };
        let ms = |name, formula, predicted, measured| Row { name, formula, unit: "ms", predicted, measured, missing };
        let mut rows = if two {
            vec![
                ms("Backward", "c+(L−1)·max(c,g)+g", predict(|l, c, g| c + (l - 1.0) * c.max(g) + g), None),
                ms("Copy hidden", "(L−1)·min(c,g)", predict(|l, c, g| (l - 1.0) * c.min(g)), None),
                ms("Copy exposed", "c+(L−1)·max(c−g,0)", predict(|l, c, g| c + (l - 1.0) * (c - g).max(0.0)), None),
            ]
        } else {
            vec![
                ms("Backward", "L·(c+g)", predict(|l, c, g| l * (c + g)), None),
                ms("Copy hidden", "none with 1 buffer", predict(|_, _, _| 0.0), None),
                ms("Copy exposed", "L·c", predict(|l, c, _| l * c), None),
            ]
        };
        let in_spans: [fn(&Reloads) -> f64; 3] = [|r| r.backward_ms, |r| r.hidden_ms, |r| r.exposed_ms];
        for (row, of) in rows.iter_mut().zip(in_spans) {
            row.measured = measured(of);
        }
        rows.push(Row {
            name: "Cache saves",
            formula: "(lookups−builds)·s",
            unit: "ms",
            predicted: self.cache.and_then(|cache| cache.avoided_ms),
            measured: self.cache.and_then(|cache| cache.saved_ms),
            missing: match self.cache {
                None => "the cache was never on in this run",
                Some(_) => "no steps with the cache off to hold it against",
            },
        });
        rows.push(Row {
            name: "Host memory",
            formula: "L·activation",
            unit: "MiB",
            predicted: copies.map(|copies| (copies.report.blocks as u64 * copies.report.buffer_bytes) as f64 / MIB),
            measured: copies.map(|copies| copies.report.host_bytes as f64 / MIB),
            missing: NO_COPIES,
        });
        rows
    }

    /// The figures themselves in a line; `num_hidden_layers` are the blocks of the model.
    pub fn describe(&self, num_hidden_layers: Option<usize>) -> String {
        let known = |name: &str, ms: Option<f64>| match ms {
            Some(ms) => format!("{name} {ms:.2} ms"),
            None => format!("{name} not measured"),
        };
        let s = known("s", self.cache.and_then(|cache| cache.build_ms));
        let layers = num_hidden_layers.map_or_else(|| "—".into(), |layers| layers.to_string());
        match &self.copies {
            Some(Copies { report, .. }) => {
                let [c, g] = [known("c", report.reload_ms()), known("g", report.block_backward_ms)];
                format!("L {} of {layers}, {c}, {g}, {s}", report.blocks)
            }
            None => format!("{layers} blocks, {s}; {NO_COPIES}"),
        }
    }
}

impl Copies {
    /// `formula` of L, c and g, over all backward passes of the step.
    fn predict(&self, formula: fn(f64, f64, f64) -> f64) -> Option<f64> {
        let (c, g) = self.report.reload_ms().zip(self.report.block_backward_ms)?;
        Some(self.passes * formula(self.report.blocks as f64, c, g))
    }

    /// What the second buffer saves.
    fn saving_ms(&self) -> Option<f64> {
        self.predict(|l, c, g| (l - 1.0) * c.min(g))
    }
}

impl Reloads {
    /// Of a step in which `num_blocks` blocks came back, all with as many copies. `None` without spans of copies back that name their blocks.
    fn of(spans: &[Span], num_blocks: usize) -> Option<Self> {
        let mut reloads: Vec<(u32, &Span)> = spans
            .iter()
            .filter(|span| span.lane == LaneKind::H2d)
            .map(|span| span.layer.map(|layer| (layer, span)))
            .collect::<Option<_>>()?;
        reloads.sort_by(|a, b| a.1.start_ms.total_cmp(&b.1.start_ms));
        let copies_a_block = reloads.len().checked_div(num_blocks)?.max(1);
        let first_copies: Vec<(u32, &Span)> = reloads.iter().copied().step_by(copies_a_block).collect();
        // Blocks come back from the last to the first; another pass begins where one does not.
        let passes: Vec<&[(u32, &Span)]> = first_copies.chunk_by(|a, b| b.0 < a.0).collect();
        let begins: Vec<f64> = passes.iter().map(|pass| pass[0].1.start_ms).collect();
        let mut backward_ms = 0.0;
        for (i, pass) in passes.iter().enumerate() {
            let (begin, next) = (begins[i], begins.get(i + 1).copied().unwrap_or(f64::INFINITY));
            let last_block = pass.last().map(|(layer, _)| *layer);
            let waits = |span: &&Span| {
                span.lane == LaneKind::Compute
                    && span.pass == Pass::Backward
                    && span.layer == last_block
                    && (begin..next).contains(&span.start_ms)
            };
            backward_ms += spans.iter().filter(waits).map(|span| span.end_ms).reduce(f64::max)? - begin;
        }
        let copies = Intervals::union(reloads.iter().map(|(_, span)| (span.start_ms, span.end_ms)));
        let hidden_ms = copies.covered_by(&lanes::busy(spans));
        (!passes.is_empty()).then(|| Self { backward_ms, hidden_ms, exposed_ms: copies.length() - hidden_ms })
    }
}

fn cache(view: &RunView) -> Option<Cache> {
    let reports = || view.steps.iter().rev().filter_map(|step| step.report.cache.as_ref());
    let is_on = |report: &&CacheReport| report.metadata == Metadata::Cached;
    let last = reports().find(is_on)?;
    let typical = |on: bool| {
        let of_kind = reports().filter(|report| is_on(report) == on);
        median(of_kind.filter_map(|report| report.metadata_ms).take(RECENT).collect())
    };
    let saved_ms = typical(false).zip(typical(true)).map(|(off, on)| off - on);
    Some(Cache { build_ms: last.build_ms(), avoided_ms: last.avoided_ms(), saved_ms })
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::run_view::StepSpans;
    use crate::session::{CacheCounts, Phase};

    fn span(lane: LaneKind, layer: u32, start_ms: f64, end_ms: f64) -> Span {
        Span { lane, phase: Phase::Mlp, pass: Pass::Backward, layer: Some(layer), start_ms, end_ms }
    }

    fn report(buffers: usize) -> CopyReport {
        CopyReport {
            buffers,
            buffer_bytes: 1 << 20,
            blocks: 3,
            host_bytes: 3 << 20,
            d2h_bytes: 3 << 20,
            h2d_bytes: 3 << 20,
            d2h_ms: 6.0,
            h2d_ms: 6.0,
            copy_ms: 12.0,
            hidden_ms: 10.0,
            reloads: 3,
            block_backward_ms: Some(5.0),
        }
    }

    fn figures(buffers: usize, spans: Vec<Span>) -> Figures {
        let reloads = Reloads::of(&spans, 3);
        Figures { copies: Some(Copies { report: report(buffers), passes: 1.0, reloads }), cache: None }
    }

    fn values(figures: &Figures) -> Vec<(Option<f64>, Option<f64>)> {
        figures.rows().iter().map(|row| (row.predicted, row.measured)).collect()
    }

    /// Two buffers, c = 2, g = 5: the first copy is exposed, the others run beside the block before.
    fn overlapped() -> Vec<Span> {
        let copies = [(2, 10.0), (1, 12.0), (0, 17.0)].map(|(layer, at)| span(LaneKind::H2d, layer, at, at + 2.0));
        let blocks = [(2, 12.0), (1, 17.0), (0, 22.0)].map(|(layer, at)| span(LaneKind::Compute, layer, at, at + 5.0));
        copies.into_iter().chain(blocks).collect()
    }

    #[test]
    fn two_buffers_measure_as_predicted_where_copies_run_beside_blocks() {
        let figures = figures(2, overlapped());
        let both = |value: f64| (Some(value), Some(value));
        assert_eq!(values(&figures), [both(17.0), both(4.0), both(2.0), (None, None), both(3.0)]);
        assert_eq!(figures.rows()[0].deviation(), Some(0.0));
        assert_eq!(figures.saving_ms(Optimization::DoubleBuffer), Some(4.0));
        assert_eq!(figures.describe(Some(4)), "L 3 of 4, c 2.00 ms, g 5.00 ms, s not measured");
    }

    #[test]
    fn one_buffer_copies_and_computes_in_turns() {
        let turns = [(2, 0.0), (1, 7.0), (0, 14.0)];
        let spans = turns
            .iter()
            .flat_map(|&(layer, at)| {
                [span(LaneKind::H2d, layer, at, at + 2.0), span(LaneKind::Compute, layer, at + 2.0, at + 7.0)]
            })
            .collect();
        let figures = figures(1, spans);
        let both = |value: f64| (Some(value), Some(value));
        assert_eq!(values(&figures)[..3], [both(21.0), both(0.0), both(6.0)]);
        assert_eq!(figures.rows()[1].deviation(), None, "nothing was predicted");
        // What a second buffer would save is predicted all the same.
        assert_eq!(figures.saving_ms(Optimization::DoubleBuffer), Some(4.0));
    }

    #[test]
    fn every_pass_of_a_step_counts() {
        let later = |s: Span| Span { start_ms: s.start_ms + 100.0, end_ms: s.end_ms + 100.0, ..s };
        let spans: Vec<Span> = overlapped().into_iter().chain(overlapped().into_iter().map(later)).collect();
        let reloads = Reloads::of(&spans, 6).unwrap();
        assert_eq!((reloads.backward_ms, reloads.hidden_ms, reloads.exposed_ms), (34.0, 8.0, 4.0));
    }

    #[test]
    fn a_block_that_comes_back_in_several_copies_is_one_block() {
        let parts = |s: Span| match s.lane {
            LaneKind::H2d => [0.0, 0.5, 1.5].map(|from| Span { start_ms: s.start_ms + from, ..s }).to_vec(),
            _ => vec![s],
        };
        let mut spans: Vec<Span> = overlapped().into_iter().flat_map(parts).collect();
        let whole = Reloads::of(&overlapped(), 3).unwrap();
        let of_parts = Reloads::of(&spans, 3).unwrap();
        let figures = |r: &Reloads| (r.backward_ms, r.hidden_ms, r.exposed_ms);
        assert_eq!(figures(&of_parts), figures(&whole));
        // One block alone that travels, in two passes.
        spans.retain(|span| span.layer == Some(2));
        let later = |s: &Span| Span { start_ms: s.start_ms + 100.0, end_ms: s.end_ms + 100.0, ..*s };
        spans.extend(spans.clone().iter().map(later));
        assert_eq!(figures(&Reloads::of(&spans, 2).unwrap()), (14.0, 0.0, 4.0));
    }

    #[test]
    fn without_copies_nothing_is_made_up() {
        assert_eq!(Reloads::of(&[span(LaneKind::Compute, 0, 0.0, 1.0)], 1), None);
        let unnamed = Span { layer: None, ..span(LaneKind::H2d, 0, 0.0, 1.0) };
        assert_eq!(Reloads::of(&[unnamed], 1), None);
        let figures = Figures::of(&RunView::default());
        assert!(figures.rows().iter().all(|row| row.predicted.is_none() && row.measured.is_none()));
        assert_eq!(figures.rows()[0].missing, NO_COPIES);
        assert!(Optimization::ALL.into_iter().all(|o| figures.saving_ms(o).is_none()));
    }

    #[test]
    fn the_cache_is_held_against_steps_without_it() {
        let mut view = RunView::default();
        let cache = |metadata, metadata_ms, builds| CacheReport {
            metadata,
            counts: CacheCounts { lookups: 8, hits: 8 - builds, builds, evictions: 0, built_bytes: 0 },
            metadata_ms: Some(metadata_ms),
            entries: Vec::new(),
        };
        view.apply(&crate::gui::views::live::test_step(1, |report| {
            report.cache = Some(cache(Metadata::Cached, 0.5, 1));
            report.copies = Some(CopyReport { reloads: 6, ..report_of_copies() });
        }));
        let s = |view: &RunView| Figures::of(view).rows()[3].clone();
        assert_eq!((s(&view).predicted, s(&view).measured), (Some(3.5), None));
        assert_eq!(Figures::of(&view).copies.map(|copies| copies.passes), Some(2.0));
        view.apply(&crate::gui::views::live::test_step(2, |report| {
            report.cache = Some(cache(Metadata::Published, 4.5, 8));
        }));
        assert_eq!((s(&view).predicted, s(&view).measured), (Some(3.5), Some(4.0)));
        view.last_spans = Some(StepSpans { step: 2, spans: overlapped() });
        assert_eq!(Figures::of(&view).copies, None, "spans alone are no copies of the last step");
    }

    fn report_of_copies() -> CopyReport {
        report(2)
    }
}
