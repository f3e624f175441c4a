//! Means and the 95 % interval of paired differences, by Student's t distribution.

/// Mean; `None` of nothing.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The 95 % interval of the mean of independent values; `None` with fewer than two.
pub(super) fn interval(values: &[f64]) -> Option<[f64; 2]> {
    if values.len() < 2 {
        return None;
    }
    let (n, mean) = (values.len() as f64, mean(values)?);
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let half = quantile_975(values.len() - 1) * (variance / n).sqrt();
    Some([mean - half, mean + half])
}

/// The value that Student's t with `freedom` ≥ 1 degrees of freedom stays below with probability 0.975.
fn quantile_975(freedom: usize) -> f64 {
    // 12.71 with one degree of freedom, and less with more.
    let (mut low, mut high) = (0.0, 13.0);
    // 60 halvings leave less than the distance between two numbers of that size.
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if within(middle, freedom) < 0.95 { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// Probability that Student's t with `freedom` degrees of freedom lies between −t and t: Abramowitz and Stegun, 26.7.3 and 26.7.4. All terms are positive.
fn within(t: f64, freedom: usize) -> f64 {
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let is_odd = freedom % 2 == 1;
    // Powers of the cosine, each with the product of the ratios before it: 1, 1/2·cos², … or cos, 2/3·cos³, …
    let mut term = if is_odd { cos } else { 1.0 };
    let mut sum = 0.0;
    let mut power = if is_odd { 1 } else { 0 };
    while power + 2 <= freedom {
        sum += term;
        power += 2;
        term *= cos * cos * (power - 1) as f64 / power as f64;
    }
    if is_odd { std::f64::consts::FRAC_2_PI * (angle + sin * sum) } else { sin * sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        let table = [
            (1, 12.706_205),
            (2, 4.302_653),
            (3, 3.182_446),
            (4, 2.776_445),
            (5, 2.570_582),
            (9, 2.262_157),
            (10, 2.228_139),
            (19, 2.093_024),
            (29, 2.045_230),
            (30, 2.042_272),
            (39, 2.022_691),
            (100, 1.983_972),
            (1000, 1.962_339),
        ];
        for (freedom, want) in table {
            let got = quantile_975(freedom);
            assert!((got - want).abs() < 1e-5, "{freedom}: {got}, not {want}");
        }
    }

    #[test]
    fn an_interval_is_as_wide_as_the_values_scatter() {
        assert_eq!(interval(&[1.0]), None);
        assert_eq!(interval(&[2.5; 4]), Some([2.5, 2.5]));
        // Mean 3, standard deviation √2.5, five values.
        let [low, high] = interval(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert!((low - 1.036_757).abs() < 1e-5 && (high - 4.963_243).abs() < 1e-5, "{low} to {high}");
        // Far from zero nothing is lost.
        let [low, high] = interval(&[1e9 + 1.0, 1e9 + 3.0]).unwrap();
        assert!((low - (1e9 + 2.0 - 12.706_205)).abs() < 1e-3 && (high + low - 2e9 - 4.0).abs() < 1e-3);
    }
}
