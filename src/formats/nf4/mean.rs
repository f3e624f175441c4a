//! The mean of f32 numbers as PyTorch's CPU sums it, on which the bytes of double quantization depend.

/// Numbers that are summed side by side: four rows of a vector of eight.
const WIDTH: usize = 32;
const VECTOR: usize = 8;
/// Sums of sums: what has added up enough numbers goes to the level above, so that rounding does not grow with the length.
const LEVELS: usize = 4;

/// The mean, in the unit of `values`; NaN for none. Equal to `torch.mean` on one thread: with more, PyTorch splits beyond 32,768 numbers by the number
/// of threads. Source: `aten/src/ATen/native/cpu/SumKernel.cpp` of PyTorch 2.15 (`cascade_sum`, vectors of 256 bits).
pub(super) fn mean(values: &[f32]) -> f32 {
    let (rows, rest) = values.as_chunks::<WIDTH>();
    let mut lanes = cascade(rows);
    let (vectors, tail) = rest.as_chunks::<VECTOR>();
    for vector in vectors {
        lanes.iter_mut().zip(vector).for_each(|(lane, x)| *lane += x);
    }
    let (first, others) = lanes.split_at_mut(VECTOR);
    for other in others.as_chunks::<VECTOR>().0 {
        first.iter_mut().zip(other).for_each(|(lane, x)| *lane += x);
    }
    let sum = tail.iter().chain(first.iter()).fold(0f32, |sum, x| sum + x);
    sum / values.len() as f32
}

/// Sums the rows column by column. Level 0 takes single rows; after 2^power of them it is added to level 1 and starts anew, and so on.
fn cascade(rows: &[[f32; WIDTH]]) -> [f32; WIDTH] {
    let ceil_log2 = rows.len().max(1).next_power_of_two().trailing_zeros() as usize;
    let power = (ceil_log2 / LEVELS).max(4);
    let mut sums = [[0f32; WIDTH]; LEVELS];
    let add = |sums: &mut [[f32; WIDTH]; LEVELS], to: usize, row: &[f32; WIDTH]| {
        sums[to].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
    };
    for (i, row) in rows.iter().enumerate() {
        add(&mut sums, 0, row);
        for level in 1..LEVELS {
            if !(i + 1).is_multiple_of(1 << (level * power)) {
                break;
            }
            let below = std::mem::replace(&mut sums[level - 1], [0.0; WIDTH]);
            add(&mut sums, level, &below);
        }
    }
    for level in 1..LEVELS {
        let above = sums[level];
        add(&mut sums, 0, &above);
    }
    sums[0]
}
