//! Numbers in 8 bits as bitsandbytes stores them: blocks with their largest magnitude, and for each number the code of a value of a map.
//!
//! `value = map[code] · absmax[block]`. Source: `create_dynamic_map` and `quantize_blockwise` of bitsandbytes 0.50 (form for the CPU), after
//! Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning".

/// Values of a map.
pub const MAP_LEN: usize = 256;
/// bitsandbytes looks codes up in a table over [−1, 1] with this many entries, so a number next to the middle between two values of the map may
/// get either code. Its form for GPUs compares exactly and differs there.
const GRID: usize = 1 << 16;

/// The signed dynamic map, ascending from −0.993 to 1, without units. For each of seven exponents i it holds the centres of 2^i equal parts of
/// [0.1, 1], times 10^(i−6), with both signs; and 0 and 1.
pub fn dynamic_map() -> [f32; MAP_LEN] {
    let centres = (0..7).flat_map(|exponent| centres(exponent, 1 << exponent));
    ascending(centres.flat_map(|centre| [centre, -centre]))
}

/// The unsigned dynamic map, ascending from 0 to 1, without units: as [`dynamic_map`] with twice as many parts instead of signs.
pub fn unsigned_dynamic_map() -> [f32; MAP_LEN] {
    ascending((0..7).flat_map(|exponent| centres(exponent, 2 << exponent)))
}

/// The centres of `parts` equal parts of [0.1, 1], times 10^(exponent−6).
fn centres(exponent: i32, parts: usize) -> impl Iterator<Item = f32> {
    let scale = 10f64.powi(exponent - 6) as f32;
    (0..parts).map(move |part| (tenth_to_one(part, parts) + tenth_to_one(part + 1, parts)) / 2.0 * scale)
}

/// The values of a map, which are two fewer than it has, with 0 and 1.
fn ascending(values: impl Iterator<Item = f32>) -> [f32; MAP_LEN] {
    let mut map = [0.0; MAP_LEN];
    map[1] = 1.0;
    map[2..].iter_mut().zip(values).for_each(|(place, value)| *place = value);
    map.sort_unstable_by(f32::total_cmp);
    map
}

/// What parts the values of an ascending map: a number above the i-th middle is nearer to value i + 1 than to value i.
pub fn middles(map: &[f32; MAP_LEN]) -> [f32; MAP_LEN - 1] {
    std::array::from_fn(|i| 0.5 * (map[i] + map[i + 1]))
}

/// The code of the value nearest to `x`, the lower one in a middle: as bitsandbytes' forms for GPUs compare, whatever the distance of values.
pub fn nearest(middles: &[f32; MAP_LEN - 1], x: f32) -> u8 {
    middles.partition_point(|middle| *middle < x) as u8
}

/// `torch.linspace(0.1, 1, parts + 1)[i]`: counted from the nearer end, with one rounding for product and sum.
fn tenth_to_one(i: usize, parts: usize) -> f32 {
    let step = (1.0 - 0.1) / parts as f32;
    if i < parts.div_ceil(2) { step.mul_add(i as f32, 0.1) } else { (-step).mul_add((parts - i) as f32, 1.0) }
}

/// Numbers in 8 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized8 {
    /// One code a number.
    pub codes: Vec<u8>,
    /// Largest magnitude of each block, in the numbers' unit.
    pub absmax: Vec<f32>,
}

/// Quantizes finite numbers in blocks of `blocksize` (the last may be shorter) with an ascending `map`. A block of zeros gets code 0, whatever
/// that stands for: times zero it is zero.
pub fn quantize(values: &[f32], map: &[f32; MAP_LEN], blocksize: usize) -> Quantized8 {
    let grid = grid(map);
    let mut codes = vec![0; values.len()];
    let mut absmax = Vec::with_capacity(values.len().div_ceil(blocksize));
    for (codes, block) in codes.chunks_mut(blocksize).zip(values.chunks(blocksize)) {
        let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        absmax.push(largest);
        if largest > 0.0 {
            let inverse = 1.0 / largest;
            for (code, x) in codes.iter_mut().zip(block) {
                let unit = ((x * inverse).clamp(-1.0, 1.0) + 1.0) * 0.5;
                *code = grid[(unit * (GRID - 1) as f32 + 0.5) as usize];
            }
        }
    }
    Quantized8 { codes, absmax }
}

/// The code of each of [`GRID`] equally spaced numbers of [−1, 1]: the nearest value of the map, the lower one in the middle.
fn grid(map: &[f32; MAP_LEN]) -> Vec<u8> {
    let mut code = 0;
    let entry = |i: usize| {
        let x = -1.0 + 2.0 * i as f32 / (GRID - 1) as f32;
        while code < MAP_LEN - 1 && 0.5 * (map[code] + map[code + 1]) < x {
            code += 1;
        }
        code as u8
    };
    (0..GRID).map(entry).collect()
}

/// The numbers that `codes` stand for, in the unit of `absmax`, which has one entry for every `blocksize` codes.
pub fn dequantize<'a>(
    codes: &'a [u8],
    absmax: &'a [f32],
    map: &'a [f32; MAP_LEN],
    blocksize: usize,
) -> impl Iterator<Item = f32> + 'a {
    codes
        .chunks(blocksize)
        .zip(absmax)
        .flat_map(move |(block, scale)| block.iter().map(move |code| map[usize::from(*code)] * scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_ascending_with_zero_and_one() {
        let map = dynamic_map();
        assert!(map.is_sorted_by(|a, b| a < b));
        assert_eq!((map[127], map[255]), (0.0, 1.0));
        assert!((map[0] + 0.993).abs() < 1e-3 && (map[128] - 5.5e-7).abs() < 1e-12);
    }

    #[test]
    fn the_unsigned_map_is_twice_as_fine_and_its_own_values_are_nearest_to_themselves() {
        let map = unsigned_dynamic_map();
        assert!(map.is_sorted_by(|a, b| a < b));
        assert_eq!((map[0], map[255]), (0.0, 1.0));
        assert!((map[1] - 3.25e-7).abs() < 1e-12 && (map[254] - 0.996_484_4).abs() < 1e-6);
        for map in [map, dynamic_map()] {
            let middles = middles(&map);
            assert!(map.iter().enumerate().all(|(code, x)| usize::from(nearest(&middles, *x)) == code));
            assert!(middles.iter().enumerate().all(|(code, x)| usize::from(nearest(&middles, *x)) == code));
            assert_eq!((nearest(&middles, 2.0), nearest(&middles, -2.0)), (255, 0));
        }
    }

    #[test]
    fn values_of_the_map_and_short_blocks_come_back() {
        let map = dynamic_map();
        // The grid is finer than the map only above the smallest exponents.
        let values: Vec<f32> = (0..300).map(|i| map[if i % 100 == 0 { 255 } else { 240 - i % 60 }] * 3.0).collect();
        let q = quantize(&values, &map, 100);
        assert_eq!(q.absmax, [3.0; 3]);
        let back: Vec<f32> = dequantize(&q.codes, &q.absmax, &map, 100).collect();
        assert_eq!(back, values);
        let short = quantize(&values[..101], &map, 100);
        assert_eq!((short.codes.len(), short.absmax.len()), (101, 2));
    }

    #[test]
    fn zeros_are_code_zero() {
        let q = quantize(&[0.0; 3], &dynamic_map(), 2);
        assert_eq!(q, Quantized8 { codes: vec![0; 3], absmax: vec![0.0; 2] });
    }
}
