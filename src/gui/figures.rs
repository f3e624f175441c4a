//! Numbers and times as the window writes them.

use jiff::{Timestamp, tz::TimeZone};

/// What stands for a value that does not exist.
pub const NONE: &str = "—";

/// Loss with four significant digits: `3.142`, `0.9213`, `12.35`.
pub fn loss(value: f64) -> String {
    significant(value, 4)
}

/// `value` with `digits` significant digits, without an exponent.
fn significant(value: f64, digits: i32) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "NaN".into() } else { format!("{}∞", if value < 0.0 { "−" } else { "" }) };
    }
    let magnitude = if value == 0.0 { 0 } else { value.abs().log10().floor() as i32 };
    let decimals = (digits - 1 - magnitude).clamp(0, 8) as usize;
    minus(format!("{value:.decimals$}"))
}

/// A learning rate: `2.0e-4`.
pub fn rate(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value:.2e}").replace("e-", "e−") }
}

/// Milliseconds with one decimal and grouped thousands; `<0.1` for less than that, `0` for a measured zero.
pub fn ms(value: f64) -> String {
    if value == 0.0 {
        "0".into()
    } else if value < 0.05 {
        "<0.1".into()
    } else {
        grouped(value, 1)
    }
}

/// A duration in milliseconds, as value and unit: ms below ten seconds, else seconds.
pub fn duration(value_ms: f64) -> (String, &'static str) {
    if value_ms < 10_000.0 { (grouped(value_ms, 1), "ms") } else { (grouped(value_ms / 1e3, 1), "s") }
}

/// GiB with two decimals; `<0.01` for less than that.
pub fn gib(bytes: u64) -> String {
    let value = bytes as f64 / f64::from(1 << 30);
    if bytes == 0 {
        "0".into()
    } else if value < 0.005 {
        "<0.01".into()
    } else {
        grouped(value, 2)
    }
}

/// `value` with `decimals` decimals and commas between thousands.
pub fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, rest) = text.split_once('.').map_or((text.as_str(), None), |(w, r)| (w, Some(r)));
    let whole = whole.parse().map_or_else(|_| whole.to_owned(), crate::base::units::count);
    let sign = if value < 0.0 { "−" } else { "" };
    match rest {
        Some(rest) => format!("{sign}{whole}.{rest}"),
        None => format!("{sign}{whole}"),
    }
}

/// `value` with `decimals` decimals and its sign, unless that is zero: `+1.1`, `−286`, `0.0`.
pub fn signed(value: f64, decimals: usize) -> String {
    let text = grouped(value.abs(), decimals);
    match (text.chars().all(|c| matches!(c, '0' | '.')), value < 0.0) {
        (true, _) => text,
        (false, true) => format!("−{text}"),
        (false, false) => format!("+{text}"),
    }
}

fn minus(text: String) -> String {
    text.replacen('-', "−", 1)
}

/// The local time of day: `14:51:09`.
pub fn time_of_day(unix_ms: i64) -> String {
    zoned(unix_ms).map_or_else(|| NONE.into(), |time| time.strftime("%H:%M:%S").to_string())
}

/// How long ago something was, in words, for a list: `12 min ago`, `yesterday`, `3 days ago`, `Tue 24 Nov`.
pub fn ago(unix_ms: i64, now_ms: i64) -> String {
    let minutes = (now_ms - unix_ms).max(0) / 60_000;
    let days = match (zoned(unix_ms), zoned(now_ms)) {
        (Some(then), Some(now)) => now.date().since(then.date()).map_or(0, |span| i64::from(span.get_days())),
        _ => minutes / 1440,
    };
    match (minutes, days) {
        (0, _) => "just now".into(),
        (1..60, _) => format!("{minutes} min ago"),
        (_, 0) => format!("{} h ago", minutes / 60),
        (_, 1) => "yesterday".into(),
        (_, 2..7) => format!("{days} days ago"),
        _ => zoned(unix_ms).map_or_else(|| NONE.into(), |time| time.strftime("%a %-d %b %Y").to_string()),
    }
}

/// Milliseconds since the Unix epoch.
pub fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

fn zoned(unix_ms: i64) -> Option<jiff::Zoned> {
    Some(Timestamp::from_millisecond(unix_ms).ok()?.to_zoned(TimeZone::system()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_keep_four_digits() {
        assert_eq!(loss(3.44159), "3.442");
        assert_eq!(loss(0.92131), "0.9213");
        assert_eq!(loss(12.3456), "12.35");
        assert_eq!(loss(0.0), "0.000");
        assert_eq!(loss(-1.5), "−1.500");
        assert_eq!(loss(f64::NAN), "NaN");
    }

    #[test]
    fn zero_small_and_large_milliseconds_differ() {
        assert_eq!([ms(0.0), ms(0.01), ms(12.34), ms(5321.06)], ["0", "<0.1", "12.3", "5,321.1"]);
        assert_eq!(duration(703.04), ("703.0".into(), "ms"));
        assert_eq!(duration(12_340.0), ("12.3".into(), "s"));
    }

    #[test]
    fn changes_have_a_sign() {
        assert_eq!(
            [signed(1.06, 1), signed(-1286.3, 0), signed(-0.04, 1), signed(0.0, 2)],
            ["+1.1", "−1,286", "0.0", "0.00"]
        );
    }

    #[test]
    fn sizes_have_two_decimals() {
        assert_eq!([gib(0), gib(1000), gib(3 << 29)], ["0", "<0.01", "1.50"]);
    }

    #[test]
    fn ages_are_words() {
        let now = 1_700_000_000_000;
        assert_eq!(ago(now - 5_000, now), "just now");
        assert_eq!(ago(now - 12 * 60_000, now), "12 min ago");
        assert_eq!(ago(now - 86_400_000, now), "yesterday");
        assert_eq!(ago(now - 3 * 86_400_000, now), "3 days ago");
    }
}
