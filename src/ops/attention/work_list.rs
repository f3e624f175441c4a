//! Work lists of the tiled GPU kernels: which tiles there are, longest first, and the first key of every row.
//!
//! One buffer of i32, whose layout depends on the number of rows alone, so that a CUDA graph recorded for one batch serves every batch of
//! that many rows: `first_key` [T], the numbers of tiles, then room for the tiles of every height a kernel has.

/// Heights of query tiles, over all kernels.
pub(super) const QUERY_HEIGHTS: [usize; 4] = [16, 32, 64, 128];
/// Heights of key tiles, over all kernels.
pub(super) const KEY_HEIGHTS: [usize; 2] = [64, 128];

const NUM_LISTS: usize = QUERY_HEIGHTS.len() + KEY_HEIGHTS.len();
/// Numbers of one tile: first row, one past the last, and the same for the other side.
const TILE_LEN: usize = 4;
/// Tiles are read as 16 bytes, so everything starts at a multiple of four numbers.
const ALIGNMENT: usize = 4;

/// Which side's rows a tile holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// Query rows; the other side is their keys.
    Query,
    /// Key rows; the other side is the queries that see them.
    Key,
}

/// Where one list lies in the buffer, in numbers from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ListPlace {
    /// The number of tiles.
    pub count: usize,
    /// The tiles.
    pub tiles: usize,
    /// Most tiles there can be: the grid's size.
    pub capacity: usize,
}

/// Where the list of `side` with tiles of `height` rows lies in the buffer of a batch with `total_tokens` rows. `height` is one of
/// [`QUERY_HEIGHTS`] or [`KEY_HEIGHTS`].
pub(super) fn place(side: Side, height: usize, total_tokens: usize) -> ListPlace {
    let Some(index) = lists().position(|list| list == (side, height)) else {
        unreachable!("a test checks that every kernel's height is listed, {height} is not")
    };
    let counts = total_tokens.next_multiple_of(ALIGNMENT);
    let before: usize = lists().take(index).map(|(_, height)| TILE_LEN * capacity(height, total_tokens)).sum();
    let tiles = counts + NUM_LISTS.next_multiple_of(ALIGNMENT) + before;
    ListPlace { count: counts + index, tiles, capacity: capacity(height, total_tokens) }
}

fn lists() -> impl Iterator<Item = (Side, usize)> {
    let of = |side| move |height: &usize| (side, *height);
    QUERY_HEIGHTS.iter().map(of(Side::Query)).chain(KEY_HEIGHTS.iter().map(of(Side::Key)))
}

/// Any two neighbours hold more rows than one tile can (see [`cut`]).
fn capacity(height: usize, total_tokens: usize) -> usize {
    2 * total_tokens / height + 1
}

/// Cuts the rows into tiles of at most `height`. Short documents share a tile and the end of a long one takes the next ones in, but only
/// whole: a document is cut only where it fills a tile.
fn cut(cu_seqlens: &[i32], height: usize) -> Vec<(usize, usize)> {
    let mut tiles = Vec::new();
    // First row that is in no tile yet.
    let mut start = 0;
    for bounds in cu_seqlens.windows(2) {
        let (seq_start, seq_end) = (bounds[0] as usize, bounds[1] as usize);
        if seq_end - start > height && start < seq_start {
            tiles.push((start, seq_start));
            start = seq_start;
        }
        while seq_end - start > height {
            tiles.push((start, start + height));
            start += height;
        }
    }
    let total = cu_seqlens.last().map_or(0, |&end| end as usize);
    if start < total {
        tiles.push((start, total));
    }
    tiles
}

/// What rows a tile meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Those that documents and window let it see.
    Documents,
    /// All: a dense mask decides.
    Square,
}

fn documents(cu_seqlens: &[i32]) -> impl Iterator<Item = (usize, usize)> {
    cu_seqlens.windows(2).map(|bounds| (bounds[0] as usize, bounds[1] as usize))
}

/// The first key that each row sees [T], from `cu_seqlens` [num_seqs + 1]. `window` counts the query itself; `usize::MAX` is full attention.
pub(super) fn first_keys(cu_seqlens: &[i32], window: usize) -> Vec<usize> {
    documents(cu_seqlens)
        .flat_map(|(start, end)| (start..end).map(move |row| (row + 1).saturating_sub(window).max(start)))
        .collect()
}

/// Builds the buffer from `cu_seqlens` and `window` as [`first_keys`] takes them.
pub(super) fn build(cu_seqlens: &[i32], window: usize, reach: Reach) -> Vec<i32> {
    let total = cu_seqlens.last().map_or(0, |&end| end as usize);
    let first_key = first_keys(cu_seqlens, window);
    // One past the last query that sees each row as a key.
    let query_end: Vec<usize> = documents(cu_seqlens)
        .flat_map(|(start, end)| (start..end).map(move |row| row.saturating_add(window).min(end)))
        .collect();

    let mut buffer: Vec<i32> = first_key.iter().map(|&key| key as i32).collect();
    for (side, height) in lists() {
        let place = place(side, height, total);
        let runs = match reach {
            Reach::Documents => cut(cu_seqlens, height),
            Reach::Square => cut(&[0, total as i32], height),
        };
        let mut tiles: Vec<[usize; TILE_LEN]> = runs
            .into_iter()
            .map(|(start, end)| match (reach, side) {
                (Reach::Documents, Side::Query) => [start, end, first_key[start], end],
                (Reach::Documents, Side::Key) => [start, end, start, query_end[end - 1]],
                (Reach::Square, _) => [start, end, 0, total],
            })
            .collect();
        // Longest first, so that no long tile starts when the others are nearly done.
        tiles.sort_by_key(|&[_, _, other_start, other_end]| std::cmp::Reverse(other_end - other_start));
        buffer.resize(place.tiles + TILE_LEN * place.capacity, 0);
        buffer[place.count] = tiles.len() as i32;
        for (to, from) in buffer[place.tiles..].iter_mut().zip(tiles.as_flattened()) {
            *to = *from as i32;
        }
    }
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiles(buffer: &[i32], side: Side, height: usize, total: usize) -> Vec<[usize; 4]> {
        let place = place(side, height, total);
        let count = buffer[place.count] as usize;
        assert!(count <= place.capacity, "{count} tiles of {height} rows, room for {}", place.capacity);
        assert_eq!(place.tiles % ALIGNMENT, 0);
        let numbers = &buffer[place.tiles..place.tiles + TILE_LEN * count];
        numbers.as_chunks::<4>().0.iter().map(|tile| tile.map(|x| x as usize)).collect()
    }

    #[test]
    fn tiles_and_first_keys_describe_exactly_the_dense_mask() {
        for window in [usize::MAX, 1, 2, 63, 64, 65, 200] {
            let cu_seqlens = [0, 1, 1, 2, 40, 171, 300, 301, 429];
            let total = 429;
            let buffer = build(&cu_seqlens, window, Reach::Documents);
            let document = |row: usize| cu_seqlens.iter().filter(|&&start| start as usize <= row).count();
            let dense = |q: usize, k: usize| document(q) == document(k) && k <= q && q - k < window;
            let sees = |q: usize, k: usize| k <= q && buffer[q] as usize <= k;
            for (side, height) in lists() {
                let tiles = tiles(&buffer, side, height, total);
                let mut covered = vec![0; total];
                let mut pairs = vec![false; total * total];
                for &[start, end, other_start, other_end] in &tiles {
                    assert!(start < end && end - start <= height);
                    covered[start..end].iter_mut().for_each(|times| *times += 1);
                    for row in start..end {
                        for other in other_start..other_end {
                            let (q, k) = if side == Side::Query { (row, other) } else { (other, row) };
                            pairs[q * total + k] = sees(q, k);
                        }
                    }
                }
                assert!(covered.iter().all(|&times| times == 1), "{side:?} {height}: each row once");
                for (q, k) in (0..total).flat_map(|q| (0..total).map(move |k| (q, k))) {
                    assert_eq!(pairs[q * total + k], dense(q, k), "{side:?} {height}, window {window}: {q} {k}");
                }
                assert!(tiles.is_sorted_by_key(|tile| std::cmp::Reverse(tile[3] - tile[2])), "longest first");
            }
        }
    }

    #[test]
    fn tiles_of_the_square_are_aligned_and_meet_every_row() {
        for total in [1, 63, 300] {
            let buffer = build(&[0, 1, total], 5, Reach::Square);
            for (side, height) in lists() {
                let mut tiles = tiles(&buffer, side, height, total as usize);
                tiles.sort_unstable();
                assert_eq!(tiles.len(), (total as usize).div_ceil(height));
                for (i, [start, end, other_start, other_end]) in tiles.into_iter().enumerate() {
                    // Masked key kernels read the words of a tile's keys as one piece.
                    assert_eq!((start, other_start, other_end), (i * height, 0, total as usize));
                    assert_eq!(end, (start + height).min(total as usize));
                }
            }
        }
    }

    #[test]
    fn one_token_documents_share_tiles_and_the_lists_never_outgrow_their_room() {
        let ones: Vec<i32> = (0..=8000).collect();
        let buffer = build(&ones, usize::MAX, Reach::Documents);
        assert_eq!(tiles(&buffer, Side::Query, 128, 8000).len(), 63);
        // One row more than a tile, again and again: the worst case for the number of tiles.
        for height in [16, 32, 64, 128] {
            let awkward: Vec<i32> = (0..50).map(|i| i * (height + 1)).collect();
            let buffer = build(&awkward, usize::MAX, Reach::Documents);
            for (side, height) in lists() {
                tiles(&buffer, side, height, *awkward.last().unwrap() as usize);
            }
        }
    }
}
