//! Numbers as people read them: bytes, durations, counts.

/// Bytes in binary units with two decimals from KiB on: `98.36 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// A limit in GiB as bytes; 0 or less is none.
pub fn gib(limit: f64) -> Option<u64> {
    (limit > 0.0).then_some((limit * f64::from(1 << 30)) as u64)
}

/// A count with thousands separated by commas: `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A duration in seconds as `h:mm:ss`, or `m:ss` below an hour.
pub fn clock(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    let (h, m, s) = (s / 3600, s / 60 % 60, s % 60);
    if h > 0 { format!("{h}:{m:02}:{s:02}") } else { format!("{m}:{s:02}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_keep_small_numbers_exact() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(98_362_432), "93.81 MiB");
    }

    #[test]
    fn counts_are_grouped() {
        assert_eq!(count(1), "1");
        assert_eq!(count(1_000), "1,000");
        assert_eq!(count(134_515_008), "134,515,008");
    }

    #[test]
    fn clocks_grow_an_hour_field() {
        assert_eq!(clock(59.6), "1:00");
        assert_eq!(clock(3_661.0), "1:01:01");
    }
}
