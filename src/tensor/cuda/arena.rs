//! Device memory in slabs: best fit with coalescing, reused in stream order, so that a step that has run once allocates nothing again.
//!
//! A device has two arenas: one for what lasts, one for the passes of a model ([`Pool`]). Between two passes all of the second is free, so the
//! addresses that a graph was recorded with are its own while it runs.
//!
//! A slab is used from both ends: large blocks lie at its beginning, small ones of a pass at its end, so that small ones that stay do not part the room
//! of large ones. What is free in the middle is taken last. So the same allocations get the same places whatever the size of a slab is, as long as it
//! holds them: what a recording device measures ([`Arena::bytes`]) is what one slab must have ([`Arena::set_first_slab`]), and nothing is lost between
//! slabs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, result};

use super::recording::VirtualMemory;

/// Every block starts at and is a multiple of this many bytes: what vector loads and the matrix library want.
const ALIGN: usize = 512;
/// Smallest slab asked from the driver.
const MIN_SLAB: usize = 64 << 20;
/// Blocks of a pass that are smaller lie at the end of a slab. With it the slabs of QLoRA steps of models of 8 and 14 billion parameters (8,192 to 80,000
/// tokens) were 4 to 11 MiB larger than what was in use at one time; without the two ends, 40 to 512 MiB.
const SMALL: usize = 128 << 20;
/// What the driver gives is a multiple of this many bytes.
const GRANULE: usize = 2 << 20;

/// What an arena is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Weights, optimizer state, batches: what outlives a pass.
    Lasting,
    /// What one pass over a batch allocates and frees.
    Pass,
}

/// Memory of one device for one purpose.
pub struct Arena {
    pool: Pool,
    memory: Memory,
    state: Mutex<State>,
    allocations: AtomicU64,
    /// Bytes of the slab that an empty arena asks for first.
    first_slab: AtomicU64,
}

/// Where slabs come from.
pub(super) enum Memory {
    /// The driver.
    Driver {
        /// Context of the device.
        context: Arc<CudaContext>,
        /// Most bytes the process may hold on the card, the context's own memory included.
        limit_bytes: Option<u64>,
    },
    /// Nowhere: a recording device.
    Virtual(Arc<VirtualMemory>),
}

/// Bytes of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaBytes {
    /// Held in slabs.
    pub slabs: u64,
    /// As far as slabs were ever used, from their ends: where there is one slab, what it must have for the same allocations.
    pub reach: u64,
}

#[derive(Default)]
struct State {
    slabs: Vec<Slab>,
    free: FreeList,
    /// Counts the times slabs went back to the driver.
    generation: u64,
    /// Whether addresses that look free may be those of a graph under way.
    held: bool,
}

/// What was free at one moment, to be so again: the memory in use between two recorded graphs.
#[derive(Debug, Clone)]
pub struct Snapshot {
    free: FreeList,
    num_slabs: usize,
    generation: u64,
}

struct Slab {
    pointer: u64,
    bytes: usize,
    /// Bytes from its ends that were ever used at one time.
    reach: usize,
}

/// A piece of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    pool: Pool,
    pointer: u64,
    bytes: usize,
}

impl Block {
    /// The arena it came from.
    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// Device address.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }
}

/// Free ranges by address and by size. Ranges of different slabs never touch: the driver leaves gaps, and slabs are kept apart by their ends.
#[derive(Debug, Clone, Default)]
struct FreeList {
    by_address: BTreeMap<u64, usize>,
    by_size: BTreeSet<(usize, u64)>,
    /// Slabs by their first address: a range never merges across one.
    slabs: BTreeMap<u64, Bounds>,
}

/// A slab as its free ranges see it.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// One past its last address.
    end: u64,
    /// Where the free range in the middle starts, or, where there is none, where the blocks of both ends meet.
    middle: u64,
}

/// Where in a slab a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    First,
    Last,
}

impl FreeList {
    fn add_slab(&mut self, slab: &Slab) {
        let (pointer, end) = (slab.pointer, slab.pointer + slab.bytes as u64);
        self.slabs.insert(pointer, Bounds { end, middle: pointer });
        self.insert(pointer, slab.bytes);
    }

    /// Bounds of the slab that holds an address.
    fn bounds(&self, pointer: u64) -> Bounds {
        let slab = self.slabs.range(..=pointer).next_back();
        slab.map_or(Bounds { end: pointer, middle: pointer }, |(_, bounds)| *bounds)
    }

    fn set_middle(&mut self, pointer: u64, middle: u64) {
        if let Some((_, bounds)) = self.slabs.range_mut(..=pointer).next_back() {
            bounds.middle = middle;
        }
    }

    /// Bytes that are free in the middle of the slab that holds an address.
    fn middle_bytes(&self, pointer: u64) -> usize {
        let Bounds { end, middle } = self.bounds(pointer);
        // Where all is in use, the ends may meet at the first address of another slab.
        if middle < end { self.by_address.get(&middle).copied().unwrap_or(0) } else { 0 }
    }

    fn insert(&mut self, pointer: u64, bytes: usize) {
        let (mut pointer, mut bytes) = (pointer, bytes);
        let before = self.by_address.range(..pointer).next_back().map(|(&p, &b)| (p, b));
        if let Some((p, b)) = before.filter(|&(p, b)| p + b as u64 == pointer && !self.slabs.contains_key(&pointer)) {
            self.remove(p, b);
            (pointer, bytes) = (p, b + bytes);
        }
        let end = pointer + bytes as u64;
        if let Some(&b) = self.by_address.get(&end).filter(|_| !self.slabs.contains_key(&end)) {
            self.remove(end, b);
            bytes += b;
        }
        self.by_address.insert(pointer, bytes);
        self.by_size.insert((bytes, pointer));
        if (pointer..=pointer + bytes as u64).contains(&self.bounds(pointer).middle) {
            self.set_middle(pointer, pointer);
        }
    }

    fn remove(&mut self, pointer: u64, bytes: usize) {
        self.by_address.remove(&pointer);
        self.by_size.remove(&(bytes, pointer));
    }

    /// Which end of its slab a free range belongs to; `None` for the one in the middle.
    fn end_of(&self, pointer: u64) -> Option<End> {
        let middle = self.bounds(pointer).middle;
        match pointer.cmp(&middle) {
            std::cmp::Ordering::Less => Some(End::First),
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => Some(End::Last),
        }
    }

    /// A place of `bytes` bytes at an end of a slab: of the ranges there the smallest that fits, lowest address first; else the end of the free middle of
    /// a slab; else wherever there is room. The rest goes back.
    fn take(&mut self, bytes: usize, end: End) -> Option<u64> {
        let mut fits = self.by_size.range((bytes, 0)..);
        let find = |wanted: Option<End>| fits.clone().find(|(_, pointer)| self.end_of(*pointer) == wanted).copied();
        let found = find(Some(end)).or_else(|| find(None));
        let (found, start) = found.or_else(|| fits.next().copied())?;
        let is_middle = self.end_of(start).is_none();
        self.remove(start, found);
        let rest = found - bytes;
        let (pointer, rest_at) = match end {
            End::First => (start, start + bytes as u64),
            End::Last => (start + rest as u64, start),
        };
        if rest > 0 {
            self.by_address.insert(rest_at, rest);
            self.by_size.insert((rest, rest_at));
        }
        if is_middle {
            // The rest is the middle; where nothing is left, the ends meet behind what was taken or before it.
            self.set_middle(start, if end == End::First { start + bytes as u64 } else { start });
        }
        Some(pointer)
    }

    fn free_bytes(&self) -> u64 {
        self.by_address.values().map(|&bytes| bytes as u64).sum()
    }
}

impl State {
    fn take(&mut self, bytes: usize, end: End) -> Option<u64> {
        let pointer = self.free.take(bytes, end)?;
        let holds = |slab: &&mut Slab| (slab.pointer..slab.pointer + slab.bytes as u64).contains(&pointer);
        let middle_bytes = self.free.middle_bytes(pointer);
        if let Some(slab) = self.slabs.iter_mut().find(holds) {
            slab.reach = slab.reach.max(slab.bytes - middle_bytes);
        }
        Some(pointer)
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { free: self.free.clone(), num_slabs: self.slabs.len(), generation: self.generation }
    }

    fn is_current(&self, snapshot: &Snapshot) -> bool {
        self.generation == snapshot.generation
    }

    /// Whether every slab is wholly free.
    fn is_at_rest(&self) -> bool {
        self.free.by_address.len() == self.slabs.len()
            && self.slabs.iter().all(|slab| self.free.by_address.get(&slab.pointer) == Some(&slab.bytes))
    }

    /// Makes free what was free then; slabs that came later are free too.
    fn restore(&mut self, snapshot: &Snapshot) {
        self.free = snapshot.free.clone();
        self.slabs[snapshot.num_slabs..].iter().for_each(|slab| self.free.add_slab(slab));
    }

    /// Makes everything free.
    fn rest(&mut self) {
        self.free = FreeList::default();
        self.slabs.iter().for_each(|slab| self.free.add_slab(slab));
    }
}

impl Arena {
    /// An empty arena.
    pub(super) fn new(pool: Pool, memory: Memory) -> Self {
        Self { pool, memory, state: Mutex::default(), allocations: AtomicU64::new(0), first_slab: AtomicU64::new(0) }
    }

    /// Lets the arena, whenever it is empty, begin with one slab of at least `bytes` bytes where there is room for it.
    pub fn set_first_slab(&self, bytes: u64) {
        self.first_slab.store(bytes, Ordering::Relaxed);
    }

    /// Memory for `bytes` bytes.
    ///
    /// # Errors
    /// The bytes that are free, when neither the free list nor the driver has room.
    pub fn alloc(&self, bytes: usize) -> Result<Block, u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let (mut state, end) = (self.lock(), self.end_for(bytes));
        if let Some(pointer) = state.take(bytes, end) {
            return Ok(Block { pool: self.pool, pointer, bytes });
        }
        let (usual, least) = (bytes.max(MIN_SLAB), bytes.next_multiple_of(GRANULE));
        let first = if state.slabs.is_empty() { self.first_slab.load(Ordering::Relaxed) as usize } else { 0 };
        let first = (first >= bytes).then(|| self.grow(first)).flatten();
        let slab = first.or_else(|| self.grow(usual)).or_else(|| self.grow(least));
        let Some(slab) = slab else {
            let free = self.room();
            return Err(free + state.free.free_bytes());
        };
        state.free.add_slab(&slab);
        state.slabs.push(slab);
        state.take(bytes, end).map(|pointer| Block { pool: self.pool, pointer, bytes }).ok_or(0)
    }

    /// The end of a slab for a block of that size. What lasts is hardly given back, and so parts nothing.
    fn end_for(&self, bytes: usize) -> End {
        if self.pool == Pool::Pass && bytes < SMALL { End::Last } else { End::First }
    }

    /// As [`Self::alloc`], of what the arena has: it does not grow.
    pub fn alloc_within(&self, bytes: usize) -> Option<Block> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let end = self.end_for(bytes);
        self.lock().take(bytes, end).map(|pointer| Block { pool: self.pool, pointer, bytes })
    }

    /// Gives a block back. Work that was queued on it before runs before whatever gets it next.
    pub fn free(&self, block: Block) {
        self.lock().free.insert(block.pointer, block.bytes);
    }

    /// What is free now.
    pub fn snapshot(&self) -> Snapshot {
        self.lock().snapshot()
    }

    /// Whether all the memory of that time is still there: graphs that were recorded then may run.
    pub fn is_current(&self, snapshot: &Snapshot) -> bool {
        self.lock().is_current(snapshot)
    }

    /// Makes free what was free then, until [`Self::release`]; no slab goes back to the driver meanwhile. `snapshot` must be current, and nothing
    /// may be in use.
    pub fn hold(&self, snapshot: &Snapshot) {
        let mut state = self.lock();
        assert!(state.is_current(snapshot) && state.is_at_rest(), "a graph's memory is in use by something else");
        state.restore(snapshot);
        state.held = true;
    }

    /// Ends [`Self::hold`]: everything is free.
    pub fn release(&self) {
        let mut state = self.lock();
        state.rest();
        state.held = false;
    }

    /// Returns slabs that are wholly free to the driver. The device must be idle. Snapshots from before are not current any more.
    pub fn trim(&self) {
        let mut state = self.lock();
        let State { slabs, free, generation, held } = &mut *state;
        if *held {
            return;
        }
        let num_slabs = slabs.len();
        slabs.retain(|slab| {
            let whole = free.by_address.get(&slab.pointer).is_some_and(|&bytes| bytes == slab.bytes);
            if whole {
                free.remove(slab.pointer, slab.bytes);
                free.slabs.remove(&slab.pointer);
                self.memory.give_back(slab);
            }
            !whole
        });
        *generation += u64::from(slabs.len() < num_slabs);
    }

    /// Driver allocations made so far.
    pub fn num_allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    fn grow(&self, bytes: usize) -> Option<Slab> {
        if (bytes as u64) > self.room() {
            return None;
        }
        let pointer = match &self.memory {
            Memory::Driver { context, .. } => {
                context.bind_to_thread().ok()?;
                self.allocations.fetch_add(1, Ordering::Relaxed);
                // SAFETY: a plain allocation; freed in `Memory::give_back`.
                unsafe { result::malloc_sync(bytes) }.ok()?
            }
            Memory::Virtual(memory) => {
                self.allocations.fetch_add(1, Ordering::Relaxed);
                memory.grant(bytes as u64)?
            }
        };
        Some(Slab { pointer, bytes, reach: 0 })
    }

    /// Its slabs, and how far they were used.
    pub fn bytes(&self) -> ArenaBytes {
        let state = self.lock();
        let sum = |of: fn(&Slab) -> usize| state.slabs.iter().map(|slab| of(slab) as u64).sum();
        ArenaBytes { slabs: sum(|slab| slab.bytes.next_multiple_of(GRANULE)), reach: sum(|slab| slab.reach) }
    }

    /// Bytes of the arena that nobody uses.
    pub fn free_bytes(&self) -> u64 {
        self.lock().free.free_bytes()
    }

    /// Bytes that may still be asked from the driver.
    pub fn room(&self) -> u64 {
        match &self.memory {
            Memory::Driver { context, limit_bytes } => {
                let Ok((free, total)) = context.mem_get_info() else { return 0 };
                match limit_bytes {
                    None => free as u64,
                    Some(limit) => limit.saturating_sub((total - free) as u64).min(free as u64),
                }
            }
            Memory::Virtual(memory) => memory.room(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Returns a slab of which nothing is used, on an idle device.
    fn give_back(&self, slab: &Slab) {
        match self {
            // SAFETY: allocated by `Arena::grow`, wholly unused, and the device is idle.
            Self::Driver { .. } => drop(unsafe { result::memory_free(slab.pointer) }),
            Self::Virtual(memory) => memory.give_back(slab.bytes as u64),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Memory::Driver { context, .. } = &self.memory
            && (context.bind_to_thread().is_err() || context.synchronize().is_err())
        {
            return;
        }
        // No tensor is left: each holds the device, which holds the arena.
        self.lock().slabs.drain(..).for_each(|slab| self.memory.give_back(&slab));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{End, FreeList, Slab, State};

    #[test]
    fn ranges_split_and_merge_back_but_never_across_slabs() {
        let mut free = FreeList::default();
        free.add_slab(&Slab { pointer: 0, bytes: 4096, reach: 0 });
        free.add_slab(&Slab { pointer: 4096, bytes: 1024, reach: 0 });
        assert_eq!(free.by_address.len(), 2, "touching slabs stay apart");
        let a = free.take(512, End::First).unwrap();
        assert_eq!(a, 4096, "best fit takes the smaller range");
        let b = free.take(1024, End::First).unwrap();
        let c = free.take(1024, End::First).unwrap();
        assert_eq!((b, c), (0, 1024));
        free.insert(b, 1024);
        free.insert(c, 1024);
        free.insert(a, 512);
        assert_eq!(free.by_address.iter().map(|(&p, &b)| (p, b)).collect::<Vec<_>>(), [(0, 4096), (4096, 1024)]);
        assert!(free.take(8192, End::First).is_none() && free.take(8192, End::Last).is_none());
        assert_eq!(free.free_bytes(), 5120);
    }

    fn add_slab(state: &mut State, pointer: u64, bytes: usize) {
        let slab = Slab { pointer, bytes, reach: 0 };
        state.free.add_slab(&slab);
        state.slabs.push(slab);
    }

    /// Takes and gives back blocks as `plan` says (sizes in KiB, and numbers of those that are given back after each), small ones at the end. Gives the
    /// places, those at the end from there, and the reach.
    fn run(plan: &[(usize, Vec<usize>)], slab_bytes: usize) -> Option<(Vec<u64>, usize)> {
        let (mut state, first) = (State::default(), 1 << 20);
        add_slab(&mut state, first, slab_bytes);
        let mut taken: Vec<Option<(u64, usize)>> = Vec::new();
        let mut places = Vec::new();
        for (kib, freed) in plan {
            let (bytes, end) = (kib << 10, if *kib < 4 { End::Last } else { End::First });
            let pointer = state.take(bytes, end)?;
            let range = pointer..pointer + bytes as u64;
            let apart = |&(p, b): &(u64, usize)| p + b as u64 <= range.start || range.end <= p;
            assert!(taken.iter().flatten().all(apart), "{range:?} is in use");
            taken.push(Some((pointer, bytes)));
            places.push(if end == End::First { pointer - first } else { first + slab_bytes as u64 - pointer });
            for &number in freed {
                if let Some((pointer, bytes)) = taken.get_mut(number).and_then(Option::take) {
                    state.free.insert(pointer, bytes);
                }
            }
        }
        let reach = state.slabs[0].reach;
        taken.iter().flatten().for_each(|&(pointer, bytes)| state.free.insert(pointer, bytes));
        assert!(state.is_at_rest(), "everything was given back");
        Some((places, reach))
    }

    proptest! {
        #[test]
        fn places_do_not_depend_on_the_size_of_a_slab_that_holds_them(
            plan in prop::collection::vec((1usize..10, prop::collection::vec(0usize..40, 0..3)), 1..40),
        ) {
            let unbounded = run(&plan, 1 << 40).unwrap();
            let reach = unbounded.1;
            prop_assert!(reach <= plan.iter().map(|(kib, _)| kib << 10).sum());
            for slab_bytes in [reach, reach + 512, 2 * reach] {
                prop_assert_eq!(run(&plan, slab_bytes), Some(unbounded.clone()));
            }
        }
    }

    #[test]
    fn small_blocks_that_stay_do_not_part_the_room_of_large_ones() {
        let mut state = State::default();
        add_slab(&mut state, 0, 1 << 20);
        let (large, small) = (state.take(8192, End::First).unwrap(), state.take(512, End::Last).unwrap());
        state.free.insert(large, 8192);
        assert_eq!((state.take(9216, End::First), small), (Some(0), (1 << 20) - 512));
        assert_eq!(state.slabs[0].reach, 9216 + 512);
        // Where the middle is used up, the ends meet, and what is given back there is the middle again.
        let middle = (1 << 20) - 512 - 9216;
        assert_eq!(state.take(middle, End::Last), Some(9216));
        add_slab(&mut state, 1 << 20, 4096);
        assert_eq!(state.free.middle_bytes(0), 0);
        state.free.insert(9216, middle);
        assert_eq!(state.free.middle_bytes(0), middle);
        assert_eq!(state.take(512, End::Last), Some((1 << 20) + 3584), "the smallest middle that fits");
    }

    #[test]
    fn what_was_free_is_free_again_and_so_are_slabs_that_came_later() {
        let mut state = State::default();
        add_slab(&mut state, 0, 8192);
        assert!(state.is_at_rest());
        let kept = [state.free.take(2048, End::First).unwrap(), state.free.take(1024, End::First).unwrap()];
        assert_eq!(kept, [0, 2048]);
        let between = state.snapshot();
        state.rest();
        assert!(state.is_at_rest());
        // At rest a later pass takes what was in use, and needs more than there is.
        assert_eq!(state.free.take(8192, End::First), Some(0));
        assert_eq!(state.free.take(1024, End::First), None);
        add_slab(&mut state, 8192, 4096);
        assert!(!state.is_at_rest());
        state.free.insert(0, 8192);
        assert!(state.is_at_rest() && state.is_current(&between));

        state.restore(&between);
        assert!(!state.is_at_rest());
        let free: Vec<_> = state.free.by_address.iter().map(|(&p, &b)| (p, b)).collect();
        assert_eq!(free, [(3072, 5120), (8192, 4096)], "the old slab's rest and the new slab, apart though they touch");
        // What is taken and given back meanwhile merges as ever, and a second restore gives the same.
        let taken = state.free.take(5000, End::First).unwrap();
        assert_eq!(taken, 3072);
        state.free.insert(taken, 5000);
        state.rest();
        state.restore(&between);
        assert_eq!(state.free.by_address.iter().map(|(&p, &b)| (p, b)).collect::<Vec<_>>(), free);
    }
}
