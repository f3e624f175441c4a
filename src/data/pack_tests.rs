//! Properties of packing.

use proptest::prelude::*;

use super::*;

const PAD: i32 = -7;

fn options(pack_len: usize, overlong: Overlong) -> PackOptions {
    PackOptions { packing: true, pack_len, overlong, pad_id: PAD }
}

/// A document whose tokens occur in no other, every second one trained.
fn document(first: i32, len: usize) -> Example {
    let input_ids: Vec<i32> = (first..first + len as i32).collect();
    let labels = (0..len).map(|t| if t + 1 < len && t % 2 == 0 { input_ids[t + 1] } else { IGNORE_INDEX }).collect();
    Example { input_ids, labels }
}

fn documents(lengths: &[usize]) -> Vec<Example> {
    let mut first = 0;
    let make = |len: &usize| {
        let example = document(first, *len);
        first += *len as i32;
        example
    };
    lengths.iter().map(make).collect()
}

/// Tokens of the batches without padding, sorted.
fn tokens(batches: &[PackedBatch]) -> Vec<i32> {
    let mut all: Vec<i32> = batches.iter().flat_map(|b| b.input_ids.iter().copied()).filter(|id| *id != PAD).collect();
    all.sort_unstable();
    all
}

/// Every supervised (token, next token) pair, sorted: what the loss sees.
fn targets<'a>(pairs: impl Iterator<Item = (&'a Vec<i32>, &'a Vec<i32>)>) -> Vec<(i32, i32)> {
    let mut all: Vec<_> = pairs
        .flat_map(|(ids, labels)| ids.iter().copied().zip(labels.iter().copied()))
        .filter(|(_, label)| *label != IGNORE_INDEX)
        .collect();
    all.sort_unstable();
    all
}

/// First-fit in the given order, the simplest packing there is.
fn first_fit(lengths: &[usize], pack_len: usize) -> usize {
    let mut rooms: Vec<usize> = Vec::new();
    for len in lengths.iter().filter(|l| **l > 0) {
        match rooms.iter_mut().find(|room| **room >= *len) {
            Some(room) => *room -= len,
            None => rooms.push(pack_len - len),
        }
    }
    rooms.len()
}

fn overlong() -> impl Strategy<Value = Overlong> {
    prop_oneof![Just(Overlong::Truncate), Just(Overlong::Split), Just(Overlong::Drop)]
}

proptest! {
    #[test]
    fn every_token_is_in_exactly_one_batch(
        lens in prop::collection::vec(0usize..64, 0..80), pack_len in 64usize..200, seed: u64, packing: bool,
    ) {
        let examples = documents(&lens);
        let options = options(pack_len, Overlong::Truncate);
        let packed = if packing { pack(&examples, &options, seed) } else { pad(&examples, &options, seed) }.unwrap();
        prop_assert_eq!(tokens(&packed.batches), (0..lens.iter().sum::<usize>() as i32).collect::<Vec<_>>());
        prop_assert_eq!(
            targets(packed.batches.iter().map(|b| (&b.input_ids, &b.labels))),
            targets(examples.iter().map(|e| (&e.input_ids, &e.labels)))
        );
        let padding: usize = packed.batches.iter().map(|b| b.num_padding_tokens).sum();
        let all: usize = packed.batches.iter().map(PackedBatch::total_tokens).sum();
        prop_assert_eq!(all - padding, lens.iter().sum::<usize>());
        prop_assert!(!packing || padding == 0);
        for batch in &packed.batches {
            batch.check().unwrap();
            prop_assert!(batch.total_tokens() <= pack_len && batch.total_tokens() > 0);
        }
    }

    #[test]
    fn long_documents_are_cut_as_told_and_counted(
        lens in prop::collection::vec(1usize..100, 0..40), pack_len in 2usize..40, mode in overlong(), packing: bool,
    ) {
        let examples = documents(&lens);
        let options = options(pack_len, mode);
        let packed = if packing { pack(&examples, &options, 1) } else { pad(&examples, &options, 1) }.unwrap();
        let long = lens.iter().filter(|l| **l > pack_len).count();
        let counts = packed.counts;
        prop_assert_eq!(counts.num_documents, lens.len());
        prop_assert_eq!(counts.num_overlong, long);
        let by_mode = (counts.num_truncated, counts.num_split, counts.num_dropped);
        prop_assert_eq!(by_mode, match mode {
            Overlong::Truncate => (long, 0, 0),
            Overlong::Split => (0, long, 0),
            Overlong::Drop => (0, 0, long),
        });
        let kept = tokens(&packed.batches);
        prop_assert_eq!(kept.len() + counts.num_lost_tokens, lens.iter().sum::<usize>());
        prop_assert!(kept.windows(2).all(|w| w[0] < w[1]), "a token occurs twice");
        for batch in &packed.batches {
            batch.check().unwrap();
            prop_assert!(batch.total_tokens() <= pack_len);
        }
    }

    #[test]
    fn best_fit_decreasing_keeps_its_bound(lens in prop::collection::vec(1usize..=100, 1..200), seed: u64) {
        let batches = plan(&lens, &options(100, Overlong::Truncate), seed, 0);
        let lower_bound = lens.iter().sum::<usize>().div_ceil(100);
        // At most 11/9 of the optimum plus one, and first-fit is no better than the optimum.
        prop_assert!(batches.len() >= lower_bound);
        prop_assert!(batches.len() <= first_fit(&lens, 100) * 11 / 9 + 1);
        let sums: Vec<usize> =
            batches.iter().map(|b| b.documents.iter().map(|d| lens[*d as usize]).sum::<usize>()).collect();
        prop_assert!(sums.iter().filter(|s| **s <= 50).count() <= 1, "two batches could be one: {sums:?}");
    }

    #[test]
    fn plans_are_a_function_of_seed_and_epoch(lens in prop::collection::vec(1usize..50, 30..60), seed: u64) {
        let options = options(64, Overlong::Truncate);
        prop_assert_eq!(plan(&lens, &options, seed, 3), plan(&lens, &options, seed, 3));
        prop_assert_ne!(plan(&lens, &options, seed, 3), plan(&lens, &options, seed, 4));
        prop_assert_ne!(plan(&lens, &options, seed, 3), plan(&lens, &options, seed.wrapping_add(1), 3));
    }

    /// Masking at the boundaries again changes nothing: no label ever looked over one.
    #[test]
    fn masking_boundaries_is_idempotent(lens in prop::collection::vec(1usize..90, 1..40), pack_len in 2usize..60) {
        for batch in pack(&documents(&lens), &options(pack_len, Overlong::Split), 5).unwrap().batches {
            let mut labels = batch.labels.clone();
            for end in &batch.cu_seqlens[1..] {
                labels[*end as usize - 1] = IGNORE_INDEX;
            }
            prop_assert_eq!(labels, batch.labels);
        }
    }
}

#[test]
fn a_small_case_by_hand() {
    let packed = pack(&documents(&[3, 7, 2, 8]), &options(10, Overlong::Truncate), 0).unwrap();
    let mut shapes: Vec<Vec<i32>> = packed.batches.iter().map(|b| b.cu_seqlens.clone()).collect();
    shapes.sort();
    assert_eq!(shapes, [vec![0, 7, 10], vec![0, 8, 10]]);
    let batch = packed.batches.iter().find(|b| b.max_seqlen == 8).unwrap();
    assert_eq!(batch.input_ids, [12, 13, 14, 15, 16, 17, 18, 19, 10, 11]);
    assert_eq!(batch.labels, [13, -100, 15, -100, 17, -100, 19, -100, 11, -100]);
    assert_eq!(batch.position_ids, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]);
    assert_eq!(batch.num_label_tokens, 5);
}

#[test]
fn padding_is_a_sequence_of_its_own() {
    let planned = PlannedBatch { documents: vec![0, 1], padded_to: 5 };
    let batch = planned.build(&documents(&[5, 3]), PAD);
    assert_eq!(batch.cu_seqlens, [0, 5, 8, 10]);
    assert_eq!(batch.input_ids[8..], [PAD, PAD]);
    assert_eq!(batch.position_ids[5..], [0, 1, 2, 0, 1]);
    assert_eq!((batch.num_padding_tokens, batch.max_seqlen), (2, 5));
    batch.check().unwrap();
}

#[test]
fn a_document_cut_before_its_answer_is_left_out() {
    let example =
        Example { input_ids: (0..10).collect(), labels: (0..10).map(|t| if t == 8 { 9 } else { -100 }).collect() };
    let truncated = pack(std::slice::from_ref(&example), &options(6, Overlong::Truncate), 0).unwrap();
    assert!(truncated.batches.is_empty());
    assert_eq!((truncated.counts.num_unsupervised, truncated.counts.num_lost_tokens), (1, 10));
    let split = pack(&[example], &options(6, Overlong::Split), 0).unwrap();
    assert_eq!((split.batches.len(), split.counts.num_unsupervised, split.counts.num_lost_tokens), (1, 1, 6));
}

proptest! {
    #[test]
    fn joined_batches_hold_the_sequences_of_each(
        lengths in prop::collection::vec(1usize..40, 1..30),
        packing in any::<bool>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let options = PackOptions { packing, ..options(64, Overlong::Truncate) };
        let batches = super::batches(&documents(&lengths), &options, 3).unwrap().batches;
        let joined = PackedBatch::joined(&batches);
        joined.check().unwrap();
        // A sequence: ids, labels and positions.
        let sequences = |batch: &PackedBatch| -> Vec<_> {
            let of = |bounds: &[i32]| {
                let range = bounds[0] as usize..bounds[1] as usize;
                let [ids, labels, positions] =
                    [&batch.input_ids, &batch.labels, &batch.position_ids].map(|all| all[range.clone()].to_vec());
                (ids, labels, positions)
            };
            batch.cu_seqlens.windows(2).map(of).collect()
        };
        prop_assert_eq!(sequences(&joined), batches.iter().flat_map(sequences).collect::<Vec<_>>());
        let sum = |of: fn(&PackedBatch) -> usize| batches.iter().map(of).sum::<usize>();
        prop_assert_eq!(joined.num_label_tokens, sum(|b| b.num_label_tokens));
        prop_assert_eq!(joined.num_padding_tokens, sum(|b| b.num_padding_tokens));
        // In whatever groups they are joined.
        let at = cut.index(batches.len() + 1);
        let groups = [PackedBatch::joined(&batches[..at]), PackedBatch::joined(&batches[at..])];
        prop_assert_eq!(PackedBatch::joined(&groups), joined);
    }
}

#[test]
fn check_finds_what_is_broken() {
    let good = PackedBatch::from_examples(&documents(&[4, 3]));
    good.check().unwrap();
    let broken = |change: &dyn Fn(&mut PackedBatch)| {
        let mut batch = good.clone();
        change(&mut batch);
        batch.check().unwrap_err().to_string()
    };
    assert!(broken(&|b| b.labels[3] = b.input_ids[4]).contains("label 4 of token 3"));
    assert!(broken(&|b| b.position_ids[4] = 4).contains("position"));
    assert!(broken(&|b| b.cu_seqlens[1] = 0).contains("empty"));
    assert!(broken(&|b| b.cu_seqlens[2] = 6).contains("does not end"));
    assert!(broken(&|b| b.max_seqlen = 7).contains("max_seqlen"));
    assert!(broken(&|b| b.num_label_tokens += 1).contains("num_label_tokens"));
}

#[test]
fn a_pack_length_without_a_next_token_is_refused() {
    assert!(pack(&documents(&[4]), &options(1, Overlong::Split), 0).unwrap_err().to_string().contains("at least 2"));
}

#[test]
fn a_hundred_thousand_documents_pack_tightly() {
    let rng = Philox::new(1, 2);
    let lens: Vec<usize> = (0..100_000).map(|i| 20 + rng.below(i, 480) as usize).collect();
    let batches = plan(&lens, &options(2048, Overlong::Truncate), 0, 0);
    let lower_bound = lens.iter().sum::<usize>().div_ceil(2048);
    assert!(
        batches.len() <= lower_bound + lower_bound / 1000,
        "{} batches, at least {lower_bound} needed",
        batches.len()
    );
}
