//! Comparisons as one HTML file that needs nothing else: style and plots are in it, scripts are not.

use std::fmt::Write as _;

use super::plots;
use super::report::{CompareReport, Effect, VerdictKind};
use super::text::{
    NOT_MEASURED, half_interval, here, interval, label, pairs, percent, phases, quantities, signed, value, with_sign,
};

const STYLE: &str = include_str!("../../../assets/compare/report.css");

/// The page: a part for each report.
pub fn html(reports: &[CompareReport]) -> String {
    let title = match reports {
        [one] => escape(&format!("{} · {}", one.title, one.model)),
        _ => "Paired comparisons".into(),
    };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title} · Tandem</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n"
    );
    for report in reports {
        part(&mut page, report);
    }
    page + "</main>\n</body>\n</html>\n"
}

/// Text as HTML shows it, in elements and in attributes.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            _ => escaped.push(c),
        }
    }
    escaped
}

fn part(page: &mut String, report: &CompareReport) {
    let verdict = &report.verdict;
    let kind = match verdict.kind {
        VerdictKind::Faster => "faster",
        VerdictKind::Slower => "slower",
        VerdictKind::NoDifference => "no_difference",
        VerdictKind::ResultsDiffer => "results_differ",
    };
    *page += &format!(
        "<header><h1>{}</h1><p>{} · {} · {} · {}</p></header>\n\
         <div class=\"verdict {kind}\"><p>{}</p><p>{}</p><p>{}</p></div>\n<div class=\"tiles\">\n",
        escape(&report.title),
        escape(&report.model),
        escape(&report.device),
        escape(&report.workload),
        escape(&pairs(report)),
        escape(&verdict.sentence),
        escape(&verdict.detail),
        report.arms.each_ref().map(|arm| escape(&format!("{}: {}", arm.label, arm.description))).join(" · "),
    );
    let counted = report.pairs * report.steps_per_block;
    let caption = format!("mean of {counted} steps each, paired t; green is better, amber is a cost");
    tile(page, "Differences", &caption, &differences(report));
    tile(page, "Loss, overlaid", "A solid, B dashed; the steps of one block", &plots::losses(report));
    tile(page, "Phases of the mean step", "A − B in ms below; hatched is not attributed", &phase_table(report));
    tile(page, "Every pair, A − B in ms", "line: mean, band: 95 % interval", &plots::pairs(report));
    tile(page, "Predicted against measured", &quantities(&report.quantities), &predictions(report));
    tile(page, "Settings that differ", "fields of run.toml", &settings(report));
    *page += "</div>\n";
}

/// A tile; `body` is HTML, the rest is text.
fn tile(page: &mut String, title: &str, caption: &str, body: &str) {
    *page += &format!(
        "<section><h2>{} <small>{}</small></h2><div class=\"scroll\">{body}</div></section>\n",
        escape(title),
        escape(caption)
    );
}

fn head(columns: &[&str]) -> String {
    let cells: String = columns.iter().map(|column| format!("<th>{}</th>", escape(column))).collect();
    format!("<table><thead><tr>{cells}</tr></thead><tbody>")
}

fn differences(report: &CompareReport) -> String {
    let [a, b] = report.arms.each_ref().map(|arm| arm.label.as_str());
    let mut table = head(&["", a, b, "A − B", "95 % interval", "%", "±100 %"]);
    for row in &report.rows {
        let class = match row.effect() {
            Effect::Gain => " class=\"gain\"",
            Effect::Cost => " class=\"cost\"",
            Effect::None => "",
        };
        let cells = [value(row, row.b), signed(row, row.difference), interval(row)].map(|cell| escape(&cell));
        let [b, difference, interval] = cells;
        // Writing to a string cannot fail.
        let _ = write!(
            table,
            "<tr><td>{}</td><td class=\"strong\">{}</td><td>{b}</td><td class=\"strong\">{difference}</td>\
             <td>{interval}</td><td{class}>{}</td><td>{}</td></tr>",
            escape(&label(row)),
            escape(&value(row, row.a)),
            escape(&percent(row)),
            plots::interval_bar(row)
        );
    }
    table + "</tbody></table>"
}

fn phase_table(report: &CompareReport) -> String {
    let mut body = plots::phase_bars(report) + &head(&["phase", "A, ms", "B, ms", "A − B, ms"]);
    let ms = |ms: Option<f64>| ms.map_or_else(|| NOT_MEASURED.into(), |ms| format!("{ms:.3}"));
    for (name, [a, b]) in phases(report) {
        let difference = with_sign(a.zip(b).map(|(a, b)| a - b), 3);
        let _ = write!(
            body,
            "<tr><td><span class=\"key {}\"></span>{name}</td><td>{}</td><td>{}</td><td class=\"strong\">{difference}</td></tr>",
            plots::phase_class(name),
            ms(a),
            ms(b)
        );
    }
    body + "</tbody></table>"
}

fn predictions(report: &CompareReport) -> String {
    let mut table = head(&["A − B in ms", "model", "predicted", "measured", "95 %"]);
    for prediction in &report.predictions {
        let _ = write!(
            table,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"strong\">{}</td><td>{}</td></tr>",
            escape(&prediction.name),
            escape(&prediction.formula),
            with_sign(prediction.predicted_ms, 2),
            with_sign(prediction.measured_ms, 2),
            half_interval(prediction),
        );
        let published = prediction.published.as_ref();
        let published = published.map(|published| format!("published: {published}{}", here(prediction)));
        for line in [Some(&prediction.why), published.as_ref()].into_iter().flatten() {
            let _ = write!(table, "<tr class=\"why\"><td colspan=\"5\">{}</td></tr>", escape(line));
        }
    }
    table + "</tbody></table>"
}

fn settings(report: &CompareReport) -> String {
    let [a, b] = report.arms.each_ref().map(|arm| arm.label.as_str());
    let mut table = head(&["", a, b]);
    for setting in &report.settings {
        let cells =
            [&setting.field, &setting.a, &setting.b].map(|cell| format!("<td><code>{}</code></td>", escape(cell)));
        let _ = write!(table, "<tr>{}</tr>", cells.join(""));
    }
    table += "</tbody></table>";
    for note in &report.notes {
        let _ = write!(table, "<p>{}</p>", escape(note));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;

    #[test]
    fn the_page_holds_all_that_was_found_and_nothing_from_elsewhere() {
        let report = report();
        let page = html(std::slice::from_ref(&report));
        for row in &report.rows {
            assert!(page.contains(&format!("<td>{}</td>", label(row))), "{}", row.name);
        }
        for part in [
            &report.verdict.sentence,
            "Every pair",
            "phase-metadata",
            &report.predictions[0].why,
            "optimizations.metadata_cache",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(!page.contains("<script") && !page.contains("http:") && !page.contains("https:"));
        assert!(!page.contains("NaN") && !page.contains("inf"), "plots hold only figures");
        assert_eq!(page.matches("<circle").count(), 3, "every pair is a point");
        assert_eq!(page.matches("<section>").count(), page.matches("</section>").count());
        assert_eq!(html(&[report.clone(), report]).matches("<header>").count(), 2);
    }

    #[test]
    fn text_is_shown_and_never_read_as_html() {
        let mut report = report();
        let evil = "<script>alert(\"x\" & 'y')</script>";
        report.title = evil.into();
        report.notes.push(evil.into());
        report.rows[0].name = evil.into();
        report.settings[0].a = evil.into();
        report.arms[0].label = evil.into();
        let page = html(&[report]);
        assert!(!page.contains("<script"));
        assert!(page.contains("&lt;script&gt;alert(&quot;x&quot; &amp; &#39;y&#39;)&lt;/script&gt;"));
        assert!(page.contains("tiny &lt;model&gt;"));
    }

    #[test]
    fn one_pair_of_one_step_still_makes_a_page() {
        let mut report = report();
        report.set_pairs(&[-1.0]);
        report.losses = [vec![1.0], vec![1.0]];
        let page = html(&[report]);
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }
}
