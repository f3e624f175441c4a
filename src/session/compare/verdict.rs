//! A comparison in one sentence.

use super::report::{CompareReport, Parity, Verdict, VerdictKind};
use crate::base::units;

/// Differences of memory below this, in bytes, are not worth a word.
const MEMORY_WORTH_A_WORD: u64 = 1 << 20;

/// Before anything is known.
pub(super) fn pending() -> Verdict {
    Verdict { kind: VerdictKind::NoDifference, sentence: String::new(), detail: String::new() }
}

/// What came out.
pub(super) fn verdict(report: &CompareReport) -> Verdict {
    let (kind, sentence) = if !report.parity.holds() {
        let sentence = if report.parity.repeats {
            "The arms do not learn the same, which they must: whatever the times say, this is a defect."
        } else {
            "An arm does not repeat its own results, which it must: whatever the times say, this is a defect."
        };
        (VerdictKind::ResultsDiffer, sentence.to_owned())
    } else {
        let (kind, speed) = speed(report);
        let learning = learning(&report.parity);
        let rest = match (kind, memory(report)) {
            (VerdictKind::NoDifference, Some(memory)) => format!("; on {memory} and {learning}"),
            (VerdictKind::NoDifference, None) => format!("; on {learning}"),
            (_, Some(memory)) => format!(", {memory}, and {learning}"),
            (_, None) => format!(" and {learning}"),
        };
        (kind, format!("{speed}{rest}."))
    };
    Verdict { kind, sentence, detail: format!("{} {}", times(report), results(&report.parity)) }
}

fn speed(report: &CompareReport) -> (VerdictKind, String) {
    let [a, b] = report.step_ms;
    match report.pair_differences.interval_ms {
        Some([_, high]) if high < 0.0 => (VerdictKind::Faster, format!("On is {}", times_as(b / a, "fast", "faster"))),
        Some([low, _]) if low > 0.0 => {
            (VerdictKind::Slower, format!("Slower here: on is {}", times_as(a / b, "slow", "slower")))
        }
        Some([low, high]) => {
            let (shorter, longer) = (-100.0 * low / b, 100.0 * high / b);
            let range = format!("a step is between {shorter:.1} % shorter and {longer:.1} % longer");
            (VerdictKind::NoDifference, format!("No measurable difference: {range}"))
        }
        None => (VerdictKind::NoDifference, "No measurable difference: one pair cannot tell it from chance".into()),
    }
}

/// `1.51 times as fast`, or `2.3 % faster` where that says more.
fn times_as(ratio: f64, plain: &str, comparative: &str) -> String {
    if ratio >= 1.1 {
        format!("{ratio:.2} times as {plain}")
    } else {
        format!("{:.1} % {comparative}", 100.0 * (ratio - 1.0))
    }
}

fn memory(report: &CompareReport) -> Option<String> {
    let [a, b] = report.memory.map(|memory| memory.peak_bytes);
    let what = if a < b { "less" } else { "more" };
    let worth = a.abs_diff(b) >= MEMORY_WORTH_A_WORD.max(b / 1000);
    worth.then(|| format!("takes {} {what} memory", units::bytes(a.abs_diff(b))))
}

fn learning(parity: &Parity) -> &'static str {
    if parity.bit_equal { "learns the same" } else { "learns the same up to rounding" }
}

fn times(report: &CompareReport) -> String {
    let mean = report.pair_differences.mean_ms;
    let interval = |low, high| format!(" (95 % interval {} to {})", ms(low), ms(high));
    match report.pair_differences.interval_ms {
        Some([low, high]) if high < 0.0 => format!("{} ms less a step{}.", ms(-mean), interval(-high, -low)),
        Some([low, high]) if low > 0.0 => format!("{} ms more a step{}.", ms(mean), interval(low, high)),
        Some([low, high]) => format!("A − B is {} ms a step{}.", ms(mean), interval(low, high)),
        None => format!("A − B is {} ms a step.", ms(mean)),
    }
}

/// With as many decimals as its size bears.
fn ms(ms: f64) -> String {
    let decimals = match ms.abs() {
        size if size >= 100.0 => 0,
        size if size >= 1.0 => 2,
        _ => 4,
    };
    format!("{ms:.decimals$}").replace('-', "−")
}

fn results(parity: &Parity) -> String {
    let Parity { max_loss_difference: loss, max_grad_norm_difference: norm, .. } = parity;
    if parity.bit_equal && parity.repeats {
        "Every loss and gradient norm has the same bits.".into()
    } else if parity.bit_equal {
        "The first blocks of both arms agree; later ones of an arm do not agree with its first.".into()
    } else {
        format!("Losses differ by at most {loss:.2e}, gradient norms by at most {:.2e} %.", 100.0 * norm)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::report;
    use super::*;

    fn with(differences: &[f64], bytes: [u64; 2]) -> Verdict {
        let mut report = report();
        report.set_pairs(differences);
        for (memory, bytes) in report.memory.iter_mut().zip(bytes) {
            memory.peak_bytes = bytes;
        }
        verdict(&report)
    }

    #[test]
    fn faster_slower_and_neither_are_told_apart() {
        let gib = 1 << 30;
        let faster = with(&[-360.0, -364.0, -357.0, -361.0], [9 * gib, 11 * gib]);
        assert_eq!(faster.kind, VerdictKind::Faster);
        assert_eq!(faster.sentence, "On is 1.51 times as fast, takes 2.00 GiB less memory, and learns the same.");
        assert!(faster.detail.starts_with("360 ms less a step (95 % interval 356 to 365)."), "{}", faster.detail);
        let slower = with(&[20.0, 21.0, 22.0], [gib, gib]);
        assert_eq!(slower.kind, VerdictKind::Slower);
        assert_eq!(slower.sentence, "Slower here: on is 2.0 % slower and learns the same.");
        let neither = with(&[-1.0, 1.5, -0.5], [gib, gib]);
        assert_eq!(neither.kind, VerdictKind::NoDifference);
        assert_eq!(
            neither.sentence,
            "No measurable difference: a step is between 0.3 % shorter and 0.3 % longer; on learns the same."
        );
        assert!(neither.detail.starts_with("A − B is 0.0000 ms a step (95 % interval "), "{}", neither.detail);
        assert_eq!(with(&[-300.0], [gib, gib]).kind, VerdictKind::NoDifference, "one pair tells nothing");
    }

    #[test]
    fn results_that_differ_come_before_any_speed() {
        let mut report = report();
        report.set_pairs(&[-360.0, -364.0]);
        report.parity.bit_equal = false;
        report.parity.max_loss_difference = 1e-9;
        assert_eq!(verdict(&report).kind, VerdictKind::ResultsDiffer, "the least difference counts where none may be");
        report.parity.must_be_bit_equal = false;
        assert!(verdict(&report).sentence.ends_with("and learns the same up to rounding."));
        report.parity.max_loss_difference = 0.1;
        assert_eq!(verdict(&report).kind, VerdictKind::ResultsDiffer);
        report.parity = Parity { bit_equal: true, repeats: false, ..report.parity };
        assert!(verdict(&report).sentence.contains("does not repeat"));
    }
}
