//! Random numbers by counter: Philox4x32-10, for shuffling, dropout and initialization.
//!
//! A block is a pure function of (seed, stream, counter): any thread can make any part of a sequence, in any order,
//! and a resumed run gets the numbers it would have got.

/// Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
    stream: [u32; 2],
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

impl Philox {
    /// A generator: `seed` is the key, `stream` keeps sequences of the same seed apart.
    pub const fn new(seed: u64, stream: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream: [stream as u32, (stream >> 32) as u32] }
    }

    /// The four numbers of block `counter`. The counter words are `[counter low, counter high, stream low, stream high]`.
    pub const fn block(&self, counter: u64) -> [u32; 4] {
        philox4x32_10([counter as u32, (counter >> 32) as u32, self.stream[0], self.stream[1]], self.key)
    }

    /// Number `index` of the sequence, uniform in [0, 1) with 24 bits. Block `index / 4`, word `index % 4`.
    pub const fn uniform(&self, index: u64) -> f32 {
        unit_f32(self.block(index / 4)[(index % 4) as usize])
    }

    /// A number below `bound` from block `counter`; 0 when `bound` is 0.
    ///
    /// 64 random bits scaled down by a multiplication: the bias is below `bound` / 2⁶⁴.
    pub const fn below(&self, counter: u64, bound: u64) -> u64 {
        let [a, b, ..] = self.block(counter);
        let bits = (a as u64) | ((b as u64) << 32);
        ((bits as u128 * bound as u128) >> 64) as u64
    }

    /// Shuffles `items` (Fisher–Yates; swap `i` uses block `i`).
    pub fn shuffle<T>(&self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64, i as u64 + 1) as usize);
        }
    }
}

/// The upper 24 bits of `word` as a number in [0, 1).
pub const fn unit_f32(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

const fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut round = 0;
    while round < ROUNDS {
        let p0 = MULTIPLIERS[0] as u64 * counter[0] as u64;
        let p1 = MULTIPLIERS[1] as u64 * counter[2] as u64;
        counter =
            [(p1 >> 32) as u32 ^ counter[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ counter[3] ^ key[1], p0 as u32];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        round += 1;
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123 (`kat_vectors`, philox4x32 10).
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let key = [0xa409_3822, 0x299f_31d0];
        let answer = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox4x32_10(pi, key), answer);
        let rng = Philox::new(0x299f_31d0_a409_3822, 0x0370_7344_1319_8a2e);
        assert_eq!(rng.block(0x85a3_08d3_243f_6a88), answer);
    }

    #[test]
    fn uniform_stays_in_the_unit_interval_with_the_right_mean() {
        assert_eq!(unit_f32(0), 0.0);
        assert!(unit_f32(u32::MAX) < 1.0);
        let rng = Philox::new(7, 1);
        let n = 20_000;
        let mean = (0..n).map(|i| f64::from(rng.uniform(i))).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.01, "mean {mean}");
    }

    #[test]
    fn shuffle_is_a_permutation_fixed_by_seed_and_stream() {
        let shuffled = |seed, stream| {
            let mut items: Vec<u32> = (0..500).collect();
            Philox::new(seed, stream).shuffle(&mut items);
            items
        };
        let a = shuffled(1, 0);
        assert_eq!(a, shuffled(1, 0));
        assert_ne!(a, shuffled(2, 0));
        assert_ne!(a, shuffled(1, 1));
        let mut sorted = a.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..500).collect::<Vec<_>>());
        assert!(a.iter().enumerate().filter(|(i, v)| *i as u32 == **v).count() < 10);
    }

    #[test]
    fn below_covers_its_range_evenly() {
        let rng = Philox::new(3, 9);
        let mut counts = [0; 7];
        for i in 0..7_000 {
            counts[rng.below(i, 7) as usize] += 1;
        }
        assert!(counts.iter().all(|c| (850..1150).contains(c)), "{counts:?}");
        assert_eq!(rng.below(0, 0), 0);
    }
}
