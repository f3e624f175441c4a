//! Loops over slices of f32 that the compiler turns into vector code: sums and maxima in sixteen lanes, and an exponential without branches.
//!
//! The order of every sum depends on the length alone, and nothing is contracted to fused operations: results are the same on every machine
//! and with every number of threads.

/// Running sums or maxima that a loop keeps: two registers of AVX2.
const LANES: usize = 16;

/// Defines a function that is compiled twice, for any processor and for those with AVX2 (vectors of eight values instead of four), and
/// chooses when it is called. Functions that its loops call must be `#[inline(always)]`. Both give the same bits.
macro_rules! vectorized {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)? $body:block) => {
        $(#[$attribute])*
        $visibility fn $name($($argument: $type),*) $(-> $output)? {
            #[inline(always)]
            fn for_any($($argument: $type),*) $(-> $output)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn for_avx2($($argument: $type),*) $(-> $output)? {
                    for_any($($argument),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the feature the function was compiled for.
                    return unsafe { for_avx2($($argument),*) };
                }
            }
            for_any($($argument),*)
        }
    };
}
pub(crate) use vectorized;

/// `Σ a·b`: more accurate than one running sum.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// The largest value; −∞ where there is none. NaN is passed over.
pub(crate) fn max(xs: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, larger);
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.into_iter().fold(rest, larger)
}

vectorized! {
    /// `Σ exp(x − shift)`.
    pub(crate) fn sum_exp(xs: &[f32], shift: f32) -> f32 {
        let mut sums = [0.0f32; LANES];
        let chunks = xs.chunks_exact(LANES);
        let rest: f32 = chunks.remainder().iter().map(|x| exp(x - shift)).sum();
        for chunk in chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += exp(x - shift);
            }
        }
        sums.iter().sum::<f32>() + rest
    }
}

vectorized! {
    /// `x = exp(x − shift)` for each value, and their sum: that of [`sum_exp`].
    pub(crate) fn exp_in_place(xs: &mut [f32], shift: f32) -> f32 {
        let mut sums = [0.0f32; LANES];
        let mut chunks = xs.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *x = exp(*x - shift);
                *sum += *x;
            }
        }
        let mut rest = 0.0;
        for x in chunks.into_remainder() {
            *x = exp(*x - shift);
            rest += *x;
        }
        sums.iter().sum::<f32>() + rest
    }
}

vectorized! {
    /// One row of attention's backward pass, in place: scores become `P = exp(S − lse)`, and `d_scores` `dS = P⊙(dP − delta)`.
    pub(crate) fn softmax_gradient(scores: &mut [f32], d_scores: &mut [f32], lse: f32, delta: f32) {
        for (p, ds) in scores.iter_mut().zip(d_scores) {
            *p = exp(*p - lse);
            *ds = *p * (*ds - delta);
        }
    }
}

/// `e^x` within 1.2 units in the last place of the true value, over the whole range: 0 for −∞, ∞ above 88.73, NaN for NaN.
///
/// `e^x = 2^n·e^r` with `n` the nearest whole number to `x/ln 2`, and the polynomial of the Cephes library's `expf` for `|r| ≤ ln 2 / 2`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or ∞ anyhow. Comparisons that NaN fails, so that it passes through.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5·2²³ leaves no bit for a fraction: the sum's low bits are the rounded whole number.
    const ROUND: f32 = 12_582_912.0;
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let n_f32 = rounded - ROUND;
    // ln 2 in two parts, the first short enough that n times it is exact.
    let r = x - n_f32 * (355.0 / 512.0) + n_f32 * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let e = p * (r * r) + r + 1.0;
    // 2^n in two factors: n reaches −150 and 128, more than one exponent holds.
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    e * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let unit = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        let mut worst = (0.0, 0.0);
        // Every 997th bit pattern from the smallest normal result to the largest finite one, both signs.
        let positive = (0..88.72f32.to_bits()).step_by(997).map(f32::from_bits);
        for x in positive.flat_map(|x| [x, -x]).filter(|x| *x > -87.33) {
            let error = ulps(exp(x), f64::from(x).exp());
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 < 1.2, "{} units in the last place at {}", worst.0, worst.1);
        // Denormal results have one unit, the smallest denormal.
        for i in 0..1000 {
            let x = -87.33 - 16.0 * i as f32 / 1000.0;
            let error = (f64::from(exp(x)) - f64::from(x).exp()).abs() / f64::from(f32::from_bits(1));
            assert!(error <= 1.0, "{x}: {error}");
        }
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!([exp(0.0), exp(-0.0), exp(f32::NEG_INFINITY), exp(-1e30)], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!([exp(f32::INFINITY), exp(1e30), exp(88.73)], [f32::INFINITY; 3]);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_maxima_of_any_length() {
        for len in [0usize, 1, 15, 16, 17, 100] {
            let xs: Vec<f32> = (0..len).map(|i| ((i * 37) % 101) as f32 / 10.0 - 5.0).collect();
            let largest = xs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&xs), largest);
            let shift = 1.0;
            let want: f64 = xs.iter().map(|&x| f64::from(x - shift).exp()).sum();
            let sum = sum_exp(&xs, shift);
            assert!((f64::from(sum) - want).abs() <= 1e-6 * want, "{len}: {sum} {want}");
            let mut written = xs.clone();
            assert_eq!(exp_in_place(&mut written, shift).to_bits(), sum.to_bits(), "{len}");
            assert!(written.iter().zip(&xs).all(|(&y, &x)| y == exp(x - shift)));
        }
        assert_eq!(max(&[f32::NAN, 2.0, f32::NAN]), 2.0, "NaN is passed over");
    }
}
