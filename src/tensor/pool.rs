//! Reuse of the CPU engine's buffers: mapping fresh pages for every block and step costs more than the work in them.
//!
//! Batches differ in their number of tokens, so buffers come in size classes (eight an octave): one class serves all packs
//! that are about full. What is free is bounded by what was in use at one time; the longest unused goes first.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Freed buffers that wait to be used again.
#[derive(Debug, Default)]
pub(super) struct CpuPool {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By class, the latest last.
    free: HashMap<usize, Vec<Free>>,
    /// Values in `free`.
    free_len: usize,
    /// Values in use.
    used_len: usize,
    /// Most values in use at one time.
    most_used_len: usize,
    /// Counts the buffers that came back.
    returned: u64,
}

#[derive(Debug)]
struct Free {
    data: Vec<f32>,
    /// Which return it was: the smallest is the longest unused.
    returned: u64,
}

/// Values a buffer has room for that must hold `len`: at most an eighth more.
fn class(len: usize) -> usize {
    match len.checked_ilog2() {
        None | Some(0..=5) => len,
        Some(octave) => len.next_multiple_of(1 << (octave - 3)),
    }
}

impl CpuPool {
    /// A buffer of `len` values, and whether they are all zero (else they are whatever was left in it).
    pub(super) fn take(&self, len: usize) -> (Vec<f32>, bool) {
        if len == 0 {
            return (Vec::new(), true);
        }
        let class = class(len);
        let found = {
            let mut state = self.lock();
            state.used_len += class;
            state.most_used_len = state.most_used_len.max(state.used_len);
            let found = state.free.get_mut(&class).and_then(Vec::pop);
            if found.is_some() {
                state.free_len -= class;
            }
            found
        };
        match found {
            Some(Free { mut data, .. }) => {
                data.resize(len, 0.0);
                (data, false)
            }
            None => {
                let mut data = vec![0.0; class];
                data.truncate(len);
                (data, true)
            }
        }
    }

    /// Takes a buffer back. One that did not come from [`CpuPool::take`] is freed, unless its room is that of a class.
    pub(super) fn give_back(&self, data: Vec<f32>) {
        let room = data.capacity();
        if room == 0 || class(room) != room {
            return;
        }
        let evicted = {
            let mut state = self.lock();
            state.used_len = state.used_len.saturating_sub(room);
            state.returned += 1;
            let returned = state.returned;
            state.free.entry(room).or_default().push(Free { data, returned });
            state.free_len += room;
            state.evict()
        };
        // Unmapping takes time, so it is done outside the lock.
        drop(evicted);
    }

    /// Frees everything that is not in use.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        state.free_len = 0;
        let free = std::mem::take(&mut state.free);
        drop(state);
        drop(free);
    }

    /// The state is valid also after a panic of another holder: no step of it can fail halfway.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes out what exceeds the bound: used and free together stay within 5/4 of the most that was in use.
    fn evict(&mut self) -> Vec<Free> {
        let mut evicted = Vec::new();
        while self.free_len + self.used_len > self.most_used_len / 4 * 5 {
            let oldest = |(&class, list): (&usize, &Vec<Free>)| list.first().map(|free| (free.returned, class));
            let Some((_, class)) = self.free.iter().filter_map(oldest).min() else { break };
            let Some(list) = self.free.get_mut(&class) else { break };
            evicted.push(list.remove(0));
            if list.is_empty() {
                self.free.remove(&class);
            }
            self.free_len -= class;
        }
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_an_eighth_at_most_and_are_their_own_class() {
        for len in (1..5000).chain([1_572_864, 1_555_456, 50_000_000]) {
            let class = class(len);
            assert!(class >= len && (class - len) * 8 <= len, "{len} {class}");
            assert_eq!(super::class(class), class);
        }
        assert_eq!(class(1013 * 576), class(1024 * 576), "packs that are about full share their buffers");
    }

    #[test]
    fn a_buffer_is_used_again_for_other_lengths_of_its_class() {
        let pool = CpuPool::default();
        let (mut data, is_zero) = pool.take(1000);
        assert!(is_zero && data.iter().all(|x| *x == 0.0));
        data.fill(7.0);
        let address = data.as_ptr();
        pool.give_back(data);
        let (data, is_zero) = pool.take(1010);
        assert_eq!((data.len(), data.as_ptr(), is_zero), (1010, address, false));
    }

    #[test]
    fn what_is_free_is_bounded_when_lengths_keep_changing() {
        let pool = CpuPool::default();
        let step = |tokens: usize| {
            let kept: Vec<_> = (0..30).map(|_| pool.take(tokens * 64).0).collect();
            kept.into_iter().for_each(|data| pool.give_back(data));
        };
        step(1024);
        let most = 30 * class(1024 * 64);
        for tokens in (8..1024).rev().step_by(7) {
            step(tokens);
            let state = pool.lock();
            let held: usize = state.free.iter().map(|(class, list)| class * list.len()).sum();
            assert_eq!(held, state.free_len, "the count of free values is right");
            assert!(held <= most / 4 * 5, "{tokens} tokens: {held} values are held for {most} in use");
            assert_eq!(state.used_len, 0);
        }
    }

    #[test]
    fn the_longest_unused_goes_first() {
        let pool = CpuPool::default();
        let [old, young] = [640, 1280].map(|len| pool.take(len).0);
        pool.give_back(old);
        pool.give_back(young);
        // In use at most 1920 values, so 2400 may be held: 1920 + 640 are too many.
        let (more, _) = pool.take(576);
        pool.give_back(more);
        let state = pool.lock();
        let mut classes: Vec<usize> = state.free.keys().copied().collect();
        classes.sort_unstable();
        assert_eq!(classes, [576, 1280]);
    }

    #[test]
    fn foreign_buffers_are_not_kept() {
        let pool = CpuPool::default();
        pool.give_back(vec![0.0; 1001]);
        pool.give_back(Vec::new());
        assert_eq!(pool.lock().free_len, 0);
    }
}
