//! What an optimization should save by simple models with the run's own numbers, beside what was measured and what was published.

use super::report::{CompareReport, Prediction, Quantities, Variation};
use super::summary::{arm_mean, copies_mean, mean, phase_ms};
use super::text::with_sign;
use super::{Block, Measured, stats};
use crate::data::pack::PackedBatch;
use crate::tensor::phase::Phase;
use crate::train::config::Activations;

/// Metadata caching, as published for PyTorch.
const PUBLISHED_CACHE: &str = "steps/s +14.3 % (forward +43.3 %, backward +5.8 %) for Qwen3-14B QLoRA; 11.5 % of a step for Llama-3.2-1B, 14.8 % for \
                               Qwen3-0.6B";
/// Double-buffered offload, likewise.
const PUBLISHED_BUFFERS: &str = "steps/s +8.40 % (8B), +6.70 % (14B), +4.61 % (32B) on a B200";
/// Sorted routing over a search for each expert, likewise.
const PUBLISHED_ROUTING: &str =
    "10 to 15 % of a step for gpt-oss (forward +23 %, backward +13 %), sorted against a search for each expert";
/// A prediction within this share of what was measured is right.
const CLOSE: f64 = 0.2;

/// The run's own numbers.
pub(super) fn quantities(measured: &Measured<'_>) -> Quantities {
    let [a, b] = measured.paired();
    let builds = |blocks| arm_mean(blocks, |steps| mean(steps, |step| Some(step.cache.as_ref()?.counts.builds as f64)));
    // One buffer, or the arm that copies at all, shows both times undisturbed.
    let copies = |of| copies_mean(b, of).or_else(|| copies_mean(a, of));
    let steps = measured.subject.batches;
    Quantities {
        num_blocks: measured.num_blocks,
        num_micro_batches: stats::mean(&steps[1..].iter().map(|step| step.len() as f64).collect::<Vec<f64>>())
            .unwrap_or_default(),
        num_offloaded: copies(|copies| Some(copies.blocks as f64)).map(|blocks| blocks.round() as usize),
        build_ms: arm_mean(b, |steps| mean(steps, |step| step.cache.as_ref()?.build_ms())),
        builds_avoided: builds(a).zip(builds(b)).map(|(a, b)| b - a).filter(|avoided| *avoided > 0.0),
        reload_ms: copies(|copies| copies.reload_ms()),
        block_backward_ms: copies(|copies| copies.block_backward_ms),
        step_ms: arm_mean(b, |steps| mean(steps, |step| Some(step.step_ms))).unwrap_or_default(),
    }
}

/// Share of the pairs of tokens of a pack that lie in one document, in all batches: what attention has to visit of what a mask visits.
pub(super) fn pair_share(batches: &[Vec<PackedBatch>]) -> f64 {
    let square = |n: i32| f64::from(n).powi(2);
    let of =
        |pairs: fn(&PackedBatch) -> Vec<i32>| -> f64 { batches.iter().flatten().flat_map(pairs).map(square).sum() };
    let seen = of(|batch| batch.cu_seqlens.windows(2).map(|bounds| bounds[1] - bounds[0]).collect());
    seen / of(|batch| vec![batch.input_ids.len() as i32])
}

/// A model's word on one optimization: formula, A − B in milliseconds where it can tell, and what else there is to say.
struct Model {
    formula: &'static str,
    predicted_ms: Option<f64>,
    published: Option<&'static str>,
    /// Said where there is no figure.
    why: String,
}

/// The models of what was varied, each with what was measured.
pub(super) fn predictions(measured: &Measured<'_>, report: &CompareReport) -> Vec<Prediction> {
    if measured.variation != Variation::All {
        return vec![beside(measured.variation.name(), model(measured.variation, measured, report), report)];
    }
    let [a, b] = [0, 1].map(|arm| measured.arms[arm].switches);
    let mut parts = vec![Variation::Cache];
    if a.attention != b.attention {
        parts.push(Variation::Attention);
    }
    if a.routing != b.routing {
        parts.push(Variation::Routing);
    }
    match a.activations {
        Activations::Offload => parts.push(Variation::Buffers),
        Activations::Keep => parts.push(Variation::Keep),
        Activations::Recompute => {}
    }
    let models: Vec<(Variation, Model)> = parts.into_iter().map(|part| (part, model(part, measured, report))).collect();
    let known: Vec<f64> = models.iter().filter_map(|(_, model)| model.predicted_ms).collect();
    let complete = known.len() == models.len();
    let sum = Model {
        formula: "sum",
        predicted_ms: (!known.is_empty()).then(|| known.iter().sum()),
        published: None,
        why: String::new(),
    };
    let alone = models.into_iter().map(|(part, model)| Prediction {
        why: if model.predicted_ms.is_some() { "vary it alone to measure it".into() } else { model.why },
        name: part.name().into(),
        formula: model.formula.into(),
        predicted_ms: model.predicted_ms,
        measured_ms: None,
        half_interval_ms: None,
        gain_percent: None,
        published: model.published.map(Into::into),
    });
    let mut predictions: Vec<Prediction> = alone.collect();
    let mut together = beside("All together", sum, report);
    if !complete {
        together.why = "the sum of those for which there is a figure".into();
    }
    predictions.push(together);
    predictions
}

fn model(variation: Variation, measured: &Measured<'_>, report: &CompareReport) -> Model {
    let Quantities {
        num_micro_batches,
        num_offloaded,
        build_ms,
        builds_avoided,
        reload_ms: c,
        block_backward_ms: g,
        ..
    } = report.quantities;
    let travel = num_offloaded.map(|blocks| blocks as f64).zip(c).zip(g).map(|((blocks, c), g)| (blocks, c, g));
    let no_copies = "nothing was offloaded, or its times were not measured".to_owned();
    match variation {
        Variation::Cache | Variation::CacheFused => Model {
            formula: "−(builds avoided)·s",
            predicted_ms: builds_avoided.zip(build_ms).map(|(builds, s)| -builds * s),
            published: Some(PUBLISHED_CACHE),
            why: "the time of a build was not measured".into(),
        },
        Variation::Buffers => Model {
            formula: "−(L−1)·min(c, g) a micro-batch",
            predicted_ms: travel.map(|(blocks, c, g)| -num_micro_batches * (blocks - 1.0) * c.min(g)),
            published: Some(PUBLISHED_BUFFERS),
            why: no_copies,
        },
        Variation::Offload => {
            let two = copies_mean(measured.paired()[0], |copies| Some(copies.buffers as f64)).is_some_and(|n| n > 1.5);
            let exposed = move |(blocks, c, g): (f64, f64, f64)| {
                if two { c + (blocks - 1.0) * (c - g).max(0.0) } else { blocks * c }
            };
            Model {
                formula: if two { "c + (L−1)·max(0, c−g) a micro-batch" } else { "L·c a micro-batch" },
                predicted_ms: travel.map(|times| num_micro_batches * exposed(times)),
                published: None,
                why: no_copies,
            }
        }
        Variation::Keep => Model {
            formula: "−(recomputation of B)",
            predicted_ms: mean_phase_ms(measured.paired()[1], Phase::Recompute).map(|ms| -ms),
            published: None,
            why: "recomputation was not measured".into(),
        },
        Variation::Attention => Model {
            formula: "T² → Σt²",
            predicted_ms: None,
            published: None,
            why: format!(
                "visits {:.1} % of the pairs of tokens; what a pair costs is not known",
                100.0 * measured.pair_share
            ),
        },
        Variation::Routing | Variation::RoutingSorted => {
            let [a, b] = measured.paired().map(|blocks| mean_phase_ms(blocks, Phase::Routing));
            Model {
                formula: "−(routing of B − routing of A)",
                predicted_ms: a.zip(b).map(|(a, b)| a - b),
                published: Some(PUBLISHED_ROUTING),
                why: "routing was not measured".into(),
            }
        }
        Variation::Graphs => {
            let launches = |arm: usize| {
                arm_mean(measured.paired()[arm], |steps| mean(steps, |step| Some(step.counters?.launches as f64)))
            };
            Model {
                formula: "the device waits for the host less",
                predicted_ms: mean_phase_ms(measured.paired()[1], Phase::HostWait).map(|ms| -ms),
                published: None,
                why: launches(1).map_or_else(String::new, |n| format!("{n:.0} launches a step in B")),
            }
        }
        Variation::All => Model { formula: "sum", predicted_ms: None, published: None, why: String::new() },
    }
}

/// All of a phase in the mean step of an arm.
fn mean_phase_ms(blocks: &[Block], phase: Phase) -> Option<f64> {
    arm_mean(blocks, |steps| mean(steps, |step| phase_ms(step, phase)))
}

/// A model beside what was measured of the whole step.
fn beside(name: &str, model: Model, report: &CompareReport) -> Prediction {
    let measured = report.pair_differences.mean_ms;
    let half = report.pair_differences.interval_ms.map(|[low, high]| 0.5 * (high - low));
    let [a, b] = report.step_ms;
    Prediction {
        name: name.into(),
        formula: model.formula.into(),
        predicted_ms: model.predicted_ms,
        measured_ms: Some(measured),
        half_interval_ms: half,
        gain_percent: (a > 0.0).then(|| 100.0 * (b / a - 1.0)),
        published: model.published.map(Into::into),
        why: match model.predicted_ms {
            None => model.why,
            Some(predicted) => why(predicted, measured, half, report),
        },
    }
}

/// Why prediction and measurement differ: what became of the phase that the model speaks of, and where the largest part of the rest is.
fn why(predicted: f64, measured: f64, half: Option<f64>, report: &CompareReport) -> String {
    let off = measured - predicted;
    if off.abs() <= CLOSE * predicted.abs() {
        return "as predicted".into();
    }
    let explained = match report.variation {
        Variation::Cache | Variation::CacheFused => Some(Phase::Metadata),
        Variation::Buffers | Variation::Offload => Some(Phase::ExposedCopy),
        Variation::Keep => Some(Phase::Recompute),
        Variation::Routing | Variation::RoutingSorted => Some(Phase::Routing),
        Variation::Graphs => Some(Phase::HostWait),
        Variation::Attention | Variation::All => None,
    };
    let change = |phase: Phase| {
        let of = |arm: usize| report.phases[arm].iter().find(|time| time.phase == phase)?.total_ms();
        of(0).unwrap_or_default() - of(1).unwrap_or_default()
    };
    let beside = |phase: Phase| if explained == Some(phase) { change(phase) - predicted } else { change(phase) };
    let ms = |ms: f64| with_sign(Some(ms), 2);
    let fell = explained.map_or_else(String::new, |phase| {
        let as_predicted = if beside(phase).abs() <= CLOSE * predicted.abs() { "as predicted " } else { "" };
        format!("{} changed {as_predicted}({}); ", phase.name(), ms(change(phase)))
    });
    if off.abs() <= half.unwrap_or_default() {
        return format!("{fell}the step within its interval");
    }
    let kernels = [Phase::Attention, Phase::Mlp, Phase::Moe, Phase::HeadLoss, Phase::Recompute];
    let in_kernels: f64 = kernels.into_iter().filter(|phase| explained != Some(*phase)).map(beside).sum();
    let others = Phase::ALL.into_iter().filter(|phase| !kernels.contains(phase));
    let parts = others.map(|phase| (phase.name(), beside(phase))).chain([("kernels", in_kernels)]);
    let largest = parts.filter(|(_, part)| part * off > 0.0).max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
    match largest {
        Some((name, part)) if part.abs() >= 0.5 * off.abs() => {
            format!("{fell}{} of the {} ms beside it are in {name}", ms(part), ms(off))
        }
        _ => format!("{fell}{} ms beside it, in no one phase", ms(off)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{batch, measured};
    use super::*;
    use crate::tensor::phase::PhaseTime;
    use crate::train::report::CopyReport;

    #[test]
    fn the_cache_saves_the_builds_it_avoids_times_one_build() {
        // One build of a pack against 8, at 2 ms each.
        let measured = measured(Variation::Cache, [(100.0, 1, 2.0), (114.0, 8, 16.0)], None);
        let report = measured.report();
        assert_eq!((report.quantities.build_ms, report.quantities.builds_avoided), (Some(2.0), Some(7.0)));
        let [prediction] = report.predictions.as_slice() else { panic!("{:?}", report.predictions) };
        assert_eq!(prediction.predicted_ms, Some(-14.0));
        assert!((prediction.measured_ms.unwrap() + 14.0).abs() < 0.2);
        assert_eq!(prediction.why, "as predicted");
        assert!(prediction.published.as_ref().unwrap().contains("+14.3 %"));
        assert!((prediction.gain_percent.unwrap() - 14.0).abs() < 0.3);
    }

    #[test]
    fn where_a_saving_goes_is_said() {
        // Metadata take 14 ms less, and the kernels 7 ms more.
        let report = measured(Variation::Cache, [(107.0, 1, 2.0), (114.0, 8, 16.0)], None).report();
        let why = &report.predictions[0].why;
        assert!(why.starts_with("metadata changed as predicted (−14.00); +6.95 of"), "{why}");
        assert!(why.ends_with("ms beside it are in kernels"), "{why}");
    }

    #[test]
    fn two_buffers_hide_the_shorter_of_copy_and_compute() {
        let copies = |buffers, hidden_ms| CopyReport {
            buffers,
            buffer_bytes: 1 << 20,
            blocks: 5,
            host_bytes: 5 << 20,
            d2h_bytes: 0,
            h2d_bytes: 0,
            d2h_ms: 0.0,
            h2d_ms: 30.0,
            copy_ms: 30.0,
            hidden_ms,
            reloads: 10,
            block_backward_ms: Some(4.0),
        };
        // Two micro-batches; c = 3 ms, g = 4 ms, five blocks travel.
        let both = [Some(copies(2, 24.0)), Some(copies(1, 0.0))];
        let report = measured(Variation::Buffers, [(76.0, 1, 2.0), (100.0, 1, 2.0)], Some(both)).report();
        assert_eq!((report.quantities.reload_ms, report.quantities.num_offloaded), (Some(3.0), Some(5)));
        assert_eq!(report.predictions[0].predicted_ms, Some(-2.0 * 4.0 * 3.0));
        // Against none at all, the first copy of each micro-batch is what one waits for.
        let one = [Some(copies(2, 24.0)), None];
        let report = measured(Variation::Offload, [(106.0, 1, 2.0), (100.0, 1, 2.0)], Some(one)).report();
        assert_eq!(report.predictions[0].predicted_ms, Some(2.0 * 3.0));
        let hidden = report.rows.iter().find(|row| row.name == "Copy hidden").unwrap();
        assert_eq!((hidden.a, hidden.b, hidden.difference), (Some(80.0), None, None), "not measured is not zero");
    }

    #[test]
    fn routing_saves_what_its_phase_loses() {
        let mut measured = measured(Variation::Routing, [(100.0, 1, 2.0), (120.0, 1, 2.0)], None);
        let report = measured.report();
        assert_eq!(report.predictions[0].predicted_ms, None);
        assert_eq!(report.predictions[0].why, "routing was not measured");
        for (arm, ms) in [(0, 1.5), (1, 21.5)] {
            for step in measured.blocks[arm].iter_mut().flat_map(|block| &mut block.0) {
                let (forward_ms, backward_ms) = (Some(0.6 * ms), Some(0.4 * ms));
                step.phases.push(PhaseTime { phase: Phase::Routing, forward_ms, backward_ms, step_ms: None });
            }
        }
        let report = measured.report();
        let [prediction] = report.predictions.as_slice() else { panic!("{:?}", report.predictions) };
        assert!((prediction.predicted_ms.unwrap() + 20.0).abs() < 1e-9);
        assert_eq!(prediction.why, "as predicted");
        assert!(prediction.published.as_ref().unwrap().contains("forward +23 %, backward +13 %"));
        let row = report.rows.iter().find(|row| row.name == "Routing").unwrap();
        assert!((row.difference.unwrap() + 20.0).abs() < 1e-9);
        assert!(report.phases[1].iter().any(|time| time.phase == Phase::Routing));
        assert!(report.parity.must_be_bit_equal, "on a CPU all forms add alike");
    }

    #[test]
    fn what_is_not_measured_predicts_nothing() {
        let report = measured(Variation::Buffers, [(90.0, 1, 2.0), (100.0, 1, 2.0)], None).report();
        assert_eq!((report.predictions[0].predicted_ms, report.quantities.reload_ms), (None, None));
        assert!(report.predictions[0].why.contains("nothing was offloaded"));
        let report = measured(Variation::All, [(90.0, 1, 2.0), (100.0, 8, 16.0)], None).report();
        let names: Vec<&str> = report.predictions.iter().map(|prediction| prediction.name.as_str()).collect();
        assert_eq!(names, ["Packing metadata cache", "Variable-length attention", "All together"]);
        assert_eq!(report.predictions[2].predicted_ms, Some(-14.0));
        assert!(report.predictions[2].why.contains("for which there is a figure"));
    }

    #[test]
    fn a_mask_visits_every_pair_and_documents_only_their_own() {
        assert_eq!(pair_share(&[vec![batch(&[4, 4])]]), 0.5);
        assert_eq!(pair_share(&[vec![batch(&[8])]]), 1.0);
    }
}
