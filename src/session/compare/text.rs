//! A comparison as text for a terminal.

use std::fmt::Write as _;

use super::report::{CompareReport, Difference, Effect, Prediction, Quantities};
use crate::tensor::phase::Phase;

/// What is shown where nothing was measured.
pub(super) const NOT_MEASURED: &str = "—";

/// The whole report: verdict, differences, phases, predictions, settings, notes.
pub fn text(report: &CompareReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, report: &CompareReport) -> std::fmt::Result {
    let [a, b] = &report.arms;
    writeln!(out, "{} · {} · {}", report.title, report.model, report.device)?;
    writeln!(out, "{} · {}", report.workload, pairs(report))?;
    writeln!(out, "{}: {}; {}: {}", a.label, a.description, b.label, b.description)?;
    writeln!(out, "\n{}\n{}\n", report.verdict.sentence, report.verdict.detail)?;
    table_line(out, ["", &a.label, &b.label, "A − B", "95 % interval", "%", ""])?;
    for row in &report.rows {
        let effect = match row.effect() {
            Effect::Gain => "better",
            Effect::Cost => "worse",
            Effect::None => "",
        };
        let [a, b, difference] = [value(row, row.a), value(row, row.b), signed(row, row.difference)];
        table_line(out, [&label(row), &a, &b, &difference, &interval(row), &percent(row), effect])?;
    }
    writeln!(out, "\n{:<24}{:>12}{:>12}{:>12}", "phase, ms", "A", "B", "A − B")?;
    for (name, [a, b]) in phases(report) {
        let difference = with_sign(a.zip(b).map(|(a, b)| a - b), 3);
        writeln!(out, "{name:<24}{:>12}{:>12}{difference:>12}", ms(a, 3), ms(b, 3))?;
    }
    writeln!(out, "\npredicted against measured, A − B in ms ({})", quantities(&report.quantities))?;
    for prediction in &report.predictions {
        writeln!(
            out,
            "{:<36}{:<40}{:>10}{:>10} {:<9} {}",
            prediction.name,
            prediction.formula,
            with_sign(prediction.predicted_ms, 2),
            with_sign(prediction.measured_ms, 2),
            half_interval(prediction),
            prediction.why
        )?;
        if let Some(published) = &prediction.published {
            writeln!(out, "    published: {published}{}", here(prediction))?;
        }
    }
    writeln!(out, "\nsettings that differ")?;
    for setting in &report.settings {
        writeln!(out, "{:<36}{:>14}{:>14}", setting.field, setting.a, setting.b)?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}

/// A line of the table of differences.
fn table_line(out: &mut String, cells: [&str; 7]) -> std::fmt::Result {
    let [name, a, b, difference, interval, percent, effect] = cells;
    let line = format!("{name:<24}{a:>12}{b:>12}{difference:>12}  {interval:<24}{percent:>8}  {effect}");
    writeln!(out, "{}", line.trim_end())
}

/// `20 pairs of 5 steps, order A B B A`, or how many of them are done.
pub(super) fn pairs(report: &CompareReport) -> String {
    let CompareReport { pairs, pairs_planned, steps_per_block, .. } = report;
    let plural = |n: usize, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
    let of = if pairs < pairs_planned { format!(" of {pairs_planned}") } else { String::new() };
    format!("{}{of} of {}, order A B B A", plural(*pairs, "pair"), plural(*steps_per_block, "step"))
}

/// `Step, ms`.
pub(super) fn label(row: &Difference) -> String {
    if row.unit.is_empty() { row.name.clone() } else { format!("{}, {}", row.name, row.unit) }
}

/// A value of a row with its decimals.
pub(super) fn value(row: &Difference, value: Option<f64>) -> String {
    value.map_or_else(|| NOT_MEASURED.into(), |value| format!("{value:.*}", row.decimals))
}

/// As [`value`], with its sign.
pub(super) fn signed(row: &Difference, value: Option<f64>) -> String {
    with_sign(value, row.decimals)
}

/// A difference with its sign; what rounds to nothing has none.
pub(super) fn with_sign(value: Option<f64>, decimals: usize) -> String {
    let Some(value) = value else { return NOT_MEASURED.into() };
    let text = format!("{value:+.decimals$}");
    let is_zero = text.chars().all(|c| matches!(c, '+' | '-' | '0' | '.'));
    if is_zero { text[1..].to_owned() } else { text.replace('-', "−") }
}

/// The interval of a row in words.
pub(super) fn interval(row: &Difference) -> String {
    match row.interval {
        Some([low, high]) => format!("{} to {}", signed(row, Some(low)), signed(row, Some(high))),
        None if row.exact && row.difference.is_some() => "exact".into(),
        None => NOT_MEASURED.into(),
    }
}

/// The ratio of a row in percent.
pub(super) fn percent(row: &Difference) -> String {
    with_sign(row.percent, 1)
}

/// What is to be set beside a published gain.
pub(super) fn here(prediction: &Prediction) -> String {
    let gain = prediction.gain_percent.map(|gain| with_sign(Some(gain), 2));
    gain.map_or_else(String::new, |gain| format!("; here steps/s {gain} %"))
}

/// `±0.9`, or nothing.
pub(super) fn half_interval(prediction: &Prediction) -> String {
    prediction.half_interval_ms.map_or_else(String::new, |half| format!("±{half:.2}"))
}

fn ms(ms: Option<f64>, decimals: usize) -> String {
    ms.map_or_else(|| NOT_MEASURED.into(), |ms| format!("{ms:.decimals$}"))
}

/// The phases that either arm has, in milliseconds, and what no phase claims.
pub(super) fn phases(report: &CompareReport) -> Vec<(&'static str, [Option<f64>; 2])> {
    let of = |arm: usize, phase| report.phases[arm].iter().find(|time| time.phase == phase)?.total_ms();
    let all = Phase::ALL.into_iter().map(|phase| (phase.name(), [of(0, phase), of(1, phase)]));
    let known = all.filter(|(_, times)| times.iter().flatten().any(|ms| *ms > 0.0));
    known.chain([("not attributed", report.not_attributed_ms.map(Some))]).collect()
}

/// `2 micro-batches`, with a decimal where their number varies.
pub(super) fn micro_batches(num: f64) -> String {
    let decimals = usize::from(num.fract() != 0.0);
    format!("{num:.decimals$} micro-batch{}", if num == 1.0 { "" } else { "es" })
}

/// The run's own numbers in a line.
pub(super) fn quantities(quantities: &Quantities) -> String {
    let Quantities {
        num_blocks,
        num_micro_batches,
        num_offloaded,
        build_ms,
        reload_ms,
        block_backward_ms,
        step_ms,
        ..
    } = quantities;
    let ms = |name: &str, value: &Option<f64>| match value {
        Some(value) => format!("{name} {value:.3} ms"),
        None => format!("{name} not measured"),
    };
    let travel = num_offloaded.map_or_else(String::new, |n| format!(", {n} offloaded"));
    format!(
        "L {num_blocks}{travel}, {} a step, {}, {}, {}, T {step_ms:.2} ms",
        if *num_micro_batches == 1.0 {
            "1 micro-batch".into()
        } else {
            format!("{num_micro_batches:.1} micro-batches")
        },
        ms("c", reload_ms),
        ms("g", block_backward_ms),
        ms("s", build_ms)
    )
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;

    #[test]
    fn the_text_holds_all_that_was_found() {
        let report = report();
        let text = text(&report);
        for row in &report.rows {
            assert!(text.contains(&label(row)), "{} in {text}", row.name);
        }
        for part in [
            report.verdict.sentence.as_str(),
            "3 pairs of 4 of 2 steps, order A B B A",
            "not attributed",
            "c not measured",
            "optimizations.metadata_cache                  \"on\"         \"off\"",
            "published: steps/s +14.3 %",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let step = text.lines().find(|line| line.starts_with("Step, ms")).unwrap();
        assert!(step.ends_with("better"), "{step}");
    }
}
