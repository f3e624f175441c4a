//! The tiled attention kernels: their sizes, and which of them serve a model on a card.

/// One compiled kernel. Sizes as in `kernels/attention_forward.cu` and `kernels/attention_backward.cu`; a test compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kernel {
    pub name: &'static str,
    /// Head size it pads to.
    head_dim: usize,
    /// Query heads of one block (a divisor of the GQA group); 1 for key kernels, whose blocks serve a key head.
    pub heads: usize,
    /// Rows of a tile in its work list.
    pub rows: usize,
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Whether it wants the SM of a data-center card: several such blocks do not fit in 100 KB.
    large: bool,
}

const fn kernel(
    name: &'static str,
    head_dim: usize,
    heads: usize,
    rows: usize,
    threads: u32,
    shared_bytes: u32,
    large: bool,
) -> Kernel {
    Kernel { name, head_dim, heads, rows, threads, shared_bytes, large }
}

/// Best first among those that fit.
const FORWARD: [Kernel; 10] = [
    kernel("attention_forward_d64_h4", 64, 4, 32, 128, 40_960, true),
    kernel("attention_forward_d64_h4_small", 64, 4, 16, 128, 16_384, false),
    kernel("attention_forward_d64", 64, 1, 64, 128, 16_384, false),
    kernel("attention_forward_d96_h4", 96, 4, 32, 128, 81_920, false),
    kernel("attention_forward_d96", 96, 1, 128, 128, 81_920, false),
    kernel("attention_forward_d128_h4", 128, 4, 32, 128, 65_536, true),
    kernel("attention_forward_d128_h4_small", 128, 4, 32, 256, 65_536, false),
    kernel("attention_forward_d128_h2", 128, 2, 64, 128, 65_536, true),
    kernel("attention_forward_d128", 128, 1, 128, 128, 65_536, true),
    kernel("attention_forward_d128_small", 128, 1, 128, 256, 65_536, false),
];

/// Best first among those that fit.
const QUERY: [Kernel; 8] = [
    kernel("attention_backward_query_d64_h4", 64, 4, 16, 128, 32_768, false),
    kernel("attention_backward_query_d64", 64, 1, 64, 128, 32_768, false),
    kernel("attention_backward_query_d96_h4", 96, 4, 16, 128, 49_152, false),
    kernel("attention_backward_query_d96", 96, 1, 64, 128, 49_152, false),
    kernel("attention_backward_query_d128_h4", 128, 4, 32, 128, 98_304, true),
    kernel("attention_backward_query_d128_h4_small", 128, 4, 16, 128, 49_152, false),
    kernel("attention_backward_query_d128_h2", 128, 2, 32, 128, 49_152, false),
    kernel("attention_backward_query_d128", 128, 1, 64, 128, 49_152, false),
];

const KEY: [Kernel; 3] = [
    kernel("attention_backward_key_d64", 64, 1, 128, 128, 49_920, false),
    kernel("attention_backward_key_d96", 96, 1, 64, 128, 49_920, false),
    kernel("attention_backward_key_d128", 128, 1, 64, 128, 49_920, false),
];

/// By a dense mask. Best first among those that fit. Heads share no tile: in the full square each fills its own.
const MASKED_FORWARD: [Kernel; 4] = [
    kernel("attention_forward_d64_masked", 64, 1, 128, 128, 40_960, true),
    kernel("attention_forward_d64_masked_small", 64, 1, 64, 128, 16_384, false),
    kernel("attention_forward_d128_masked", 128, 1, 128, 128, 65_536, true),
    kernel("attention_forward_d128_masked_small", 128, 1, 128, 256, 65_536, false),
];

/// By a dense mask. Best first among those that fit.
const MASKED_QUERY: [Kernel; 3] = [
    kernel("attention_backward_query_d64_masked", 64, 1, 64, 128, 32_768, false),
    kernel("attention_backward_query_d128_masked", 128, 1, 128, 128, 98_304, true),
    kernel("attention_backward_query_d128_masked_small", 128, 1, 64, 128, 49_152, false),
];

const MASKED_KEY: [Kernel; 2] = [
    kernel("attention_backward_key_d64_masked", 64, 1, 128, 128, 50_688, false),
    kernel("attention_backward_key_d128_masked", 128, 1, 64, 128, 50_176, false),
];

/// What decides which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Documents and window.
    Varlen,
    /// A dense mask.
    Masked,
}

/// Shared memory a block may have on a card whose SM holds several blocks of the large kernels, in bytes.
const LARGE_SHARED_BYTES: u32 = 160 << 10;

/// The kernels of one model on one card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KernelSet {
    pub forward: Kernel,
    pub query: Kernel,
    pub key: Kernel,
}

impl KernelSet {
    /// The best kernels for heads of `head_dim` in GQA groups of `group`, where a block may have `max_shared_bytes`; `None` when the tiled
    /// kernels do not take this head size.
    pub fn choose(path: Path, head_dim: usize, group: usize, max_shared_bytes: u32) -> Option<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(8) {
            return None;
        }
        let (sizes, forward, query, key): (&[usize], &[Kernel], &[Kernel], &[Kernel]) = match path {
            Path::Varlen => (&[64, 96, 128], &FORWARD, &QUERY, &KEY),
            Path::Masked => (&[64, 128], &MASKED_FORWARD, &MASKED_QUERY, &MASKED_KEY),
        };
        let padded = sizes.iter().copied().find(|&size| head_dim <= size)?;
        let large = max_shared_bytes >= LARGE_SHARED_BYTES;
        let best = |kernels: &[Kernel]| {
            let fits = |k: &&Kernel| k.head_dim == padded && group.is_multiple_of(k.heads) && (large || !k.large);
            kernels.iter().find(fits).copied()
        };
        Some(Self { forward: best(forward)?, query: best(query)?, key: best(key)? })
    }

    /// All three.
    #[cfg(test)]
    pub fn each(&self) -> [Kernel; 3] {
        [self.forward, self.query, self.key]
    }
}

/// Blocks of the key kernel a multiprocessor below which a group's query heads are divided over several, and the most that makes of them. A
/// multiprocessor holds two at once.
const FEW_KEY_BLOCKS: usize = 4;
const MOST_KEY_BLOCKS: usize = 8;

/// How many blocks share the `group` query heads of a key head, where one for each key tile and key head makes `blocks`, on a card of `num_sms`
/// multiprocessors. Each block walks over its heads one after the other, so with few blocks the longest document alone would decide the time.
/// The answer divides `group`. It depends on sizes and the card only, never on the documents: the same batch gives the same bits.
pub(super) fn key_parts(group: usize, blocks: usize, num_sms: usize) -> usize {
    if blocks >= FEW_KEY_BLOCKS * num_sms {
        return 1;
    }
    let fits = |parts: &usize| group.is_multiple_of(*parts) && blocks * parts <= MOST_KEY_BLOCKS * num_sms;
    (1..=group).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::super::work_list::{self, KEY_HEIGHTS, QUERY_HEIGHTS, Side};
    use super::*;

    /// The tables repeat what the CUDA sources say, so the sources are read here and every number is derived again.
    #[test]
    fn sizes_are_those_of_the_cuda_sources() {
        let sources = [
            include_str!("../../../kernels/attention_forward.cu"),
            include_str!("../../../kernels/attention_backward.cu"),
        ];
        let mut seen = 0;
        let lines: Vec<&str> = sources.iter().flat_map(|source| source.lines()).collect();
        for pair in lines.windows(2).filter(|pair| pair[0].starts_with("using ") && pair[0].contains('<')) {
            let (shape, arguments) = pair[0].split_once(" = ").unwrap().1.split_once('<').unwrap();
            let name = pair[1].split_once(") ").unwrap().1.split_once('(').unwrap().0;
            let mut n: Vec<usize> = arguments
                .trim_end_matches(">;")
                .split(", ")
                .map(|x| x.parse().unwrap_or(usize::from(x == "true")))
                .collect();
            // The last argument, false where it is left out, says whether a dense mask decides.
            let masked = n.len() == if shape == "ForwardShape" { 8 } else { 9 };
            if masked {
                assert_eq!(n.pop(), Some(1), "{name}");
            }
            // Values of a row in shared memory: whole lines of 128 bytes.
            let pitch = if n[0] <= 64 { 64 } else { 128 };
            let (heads, rows, warps, values, extra) = match (shape, &n[..]) {
                ("ForwardShape", &[_, rows, heads, step, stages, warps, registers]) => {
                    let (stream, own) = (2 * stages * step, rows);
                    let values = if registers == 1 { stream.max(own) } else { stream + own };
                    (heads, rows / heads, warps, values, 0)
                }
                ("QueryShape", &[_, rows, heads, step, _, stages, warps, registers]) => {
                    let (stream, own) = (2 * stages * step, 2 * rows);
                    let values = if registers == 1 { stream.max(own) } else { stream + own };
                    (heads, rows / heads, warps, values, 0)
                }
                ("KeyShape", &[_, rows, step, _, stages, warps, k, v]) => {
                    let (stream, kept) = (2 * stages * step, 2 - k - v);
                    // lse, D, and the first key of a query row or the mask of the tile's keys.
                    let numbers = 2 + if masked { rows / 32 } else { 1 };
                    (1, rows, warps, kept * rows + stream.max((2 - kept) * rows), 4 * stages * numbers * step)
                }
                other => panic!("{other:?}"),
            };
            let table: &[Kernel] = match (shape, masked) {
                ("ForwardShape", false) => &FORWARD,
                ("ForwardShape", true) => &MASKED_FORWARD,
                ("QueryShape", false) => &QUERY,
                ("QueryShape", true) => &MASKED_QUERY,
                (_, false) => &KEY,
                (_, true) => &MASKED_KEY,
            };
            let found = table.iter().find(|kernel| kernel.name == name).unwrap_or_else(|| panic!("{name}"));
            let shared = (2 * values * pitch + extra) as u32;
            assert_eq!(
                (found.head_dim, found.heads, found.rows, found.threads, found.shared_bytes),
                (n[0], heads, rows, 32 * warps as u32, shared),
                "{name}"
            );
            seen += 1;
        }
        let masked = MASKED_FORWARD.len() + MASKED_QUERY.len() + MASKED_KEY.len();
        assert_eq!(seen, FORWARD.len() + QUERY.len() + KEY.len() + masked);
    }

    #[test]
    fn query_heads_are_divided_where_key_tiles_are_few() {
        // Llama-3.2-1B: tiles of 128 keys, 8 key heads, groups of 4.
        let parts = |tokens, num_sms| key_parts(4, 8 * work_list::place(Side::Key, 128, tokens).capacity, num_sms);
        assert_eq!([512, 2048, 4096, 8192].map(|tokens| parts(tokens, 132)), [4, 4, 2, 1]);
        assert_eq!([512, 2048, 4096, 8192].map(|tokens| parts(tokens, 24)), [2, 1, 1, 1]);
        for group in 1..=16 {
            for (blocks, num_sms) in (1..600).flat_map(|blocks| [1, 24, 132].map(|sms| (blocks, sms))) {
                let parts = key_parts(group, blocks, num_sms);
                assert_eq!(group % parts, 0);
                let few = blocks < 4 * num_sms;
                assert!(if few { parts * blocks <= 8 * num_sms } else { parts == 1 });
                let more = (parts + 1..=group).any(|more| group % more == 0 && more * blocks <= 8 * num_sms);
                assert!(!few || !more, "group {group}, {blocks} blocks, {num_sms} multiprocessors: {parts} parts");
            }
        }
        // A prime group is divided wholly or not at all.
        assert_eq!([264, 353].map(|blocks| key_parts(3, blocks, 132)), [3, 1]);
        assert_eq!(key_parts(1, 1, 132), 1);
    }

    #[test]
    fn every_head_size_and_group_has_kernels_that_fit() {
        for head_dim in (8..=128).step_by(8) {
            for group in 1..=16 {
                for (path, max_shared_bytes) in [Path::Varlen, Path::Masked]
                    .into_iter()
                    .flat_map(|path| [99 << 10, 163 << 10, 227 << 10].map(|bytes| (path, bytes)))
                {
                    let set = KernelSet::choose(path, head_dim, group, max_shared_bytes).unwrap();
                    for kernel in set.each() {
                        // Room for what the kernels hold statically: row statistics, and two places for 128 keys of the mask.
                        assert!(kernel.shared_bytes + (6 << 10) <= max_shared_bytes, "{kernel:?}");
                        assert!(group % kernel.heads == 0 && head_dim <= kernel.head_dim, "{kernel:?}");
                    }
                    assert!(QUERY_HEIGHTS.contains(&set.forward.rows) && QUERY_HEIGHTS.contains(&set.query.rows));
                    assert!(KEY_HEIGHTS.contains(&set.key.rows));
                }
            }
        }
        assert_eq!(KernelSet::choose(Path::Masked, 136, 1, 227 << 10), None);
        assert_eq!(KernelSet::choose(Path::Varlen, 20, 1, 227 << 10), None);
        assert_eq!(
            KernelSet::choose(Path::Varlen, 128, 4, 227 << 10).unwrap().forward.name,
            "attention_forward_d128_h4"
        );
        assert_eq!(
            KernelSet::choose(Path::Varlen, 128, 4, 99 << 10).unwrap().forward.name,
            "attention_forward_d128_h4_small"
        );
        assert_eq!(
            KernelSet::choose(Path::Varlen, 64, 3, 99 << 10).unwrap().query.name,
            "attention_backward_query_d64"
        );
    }
}
