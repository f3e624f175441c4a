//! Device memory in slabs: best fit with coalescing, reused in stream order, so that a step that has run once allocates nothing again.
//!
//! A device has two arenas: one for what lasts, one for the passes of a model ([`Pool`]). Between two passes all of the second is free, so the
//! addresses that a graph was recorded with are its own while it runs.
//!
//! The same allocations get the same places in one slab whatever its size is, as long as it holds them: the end of a slab is taken last. So what a
//! recording device measures ([`Arena::bytes`]) is what one slab must have ([`Arena::set_first_slab`]), and nothing is lost between slabs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, result};

use super::recording::VirtualMemory;

/// Every block starts at and is a multiple of this many bytes: what vector loads and the matrix library want.
const ALIGN: usize = 512;
/// Smallest slab asked from the driver.
const MIN_SLAB: usize = 64 << 20;
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
    /// As far as slabs were ever used, from their starts: where there is one slab, what it must have for the same allocations.
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
    /// Bytes from its start that were ever used.
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
    /// First addresses of slabs: a range never merges across one.
    slab_starts: BTreeSet<u64>,
    /// One past the last addresses of slabs.
    slab_ends: BTreeSet<u64>,
}

impl FreeList {
    fn add_slab(&mut self, slab: &Slab) {
        self.slab_starts.insert(slab.pointer);
        self.slab_ends.insert(slab.pointer + slab.bytes as u64);
        self.insert(slab.pointer, slab.bytes);
    }

    fn insert(&mut self, pointer: u64, bytes: usize) {
        let (mut pointer, mut bytes) = (pointer, bytes);
        let before = self.by_address.range(..pointer).next_back().map(|(&p, &b)| (p, b));
        if let Some((p, b)) = before.filter(|&(p, b)| p + b as u64 == pointer && !self.slab_starts.contains(&pointer)) {
            self.remove(p, b);
            (pointer, bytes) = (p, b + bytes);
        }
        let end = pointer + bytes as u64;
        if let Some(&b) = self.by_address.get(&end).filter(|_| !self.slab_starts.contains(&end)) {
            self.remove(end, b);
            bytes += b;
        }
        self.by_address.insert(pointer, bytes);
        self.by_size.insert((bytes, pointer));
    }

    fn remove(&mut self, pointer: u64, bytes: usize) {
        self.by_address.remove(&pointer);
        self.by_size.remove(&(bytes, pointer));
    }

    /// The smallest range that fits, lowest address first; the rest goes back. The range at the end of a slab comes last, however small it is.
    fn take(&mut self, bytes: usize) -> Option<u64> {
        let mut fits = self.by_size.range((bytes, 0)..);
        let first = *fits.clone().next()?;
        let inner = fits.find(|(bytes, pointer)| !self.slab_ends.contains(&(pointer + *bytes as u64)));
        let (found, pointer) = inner.copied().unwrap_or(first);
        self.remove(pointer, found);
        if found > bytes {
            self.insert(pointer + bytes as u64, found - bytes);
        }
        Some(pointer)
    }

    fn free_bytes(&self) -> u64 {
        self.by_address.values().map(|&bytes| bytes as u64).sum()
    }
}

impl State {
    fn take(&mut self, bytes: usize) -> Option<u64> {
        let pointer = self.free.take(bytes)?;
        let holds = |slab: &&mut Slab| (slab.pointer..slab.pointer + slab.bytes as u64).contains(&pointer);
        if let Some(slab) = self.slabs.iter_mut().find(holds) {
            slab.reach = slab.reach.max((pointer - slab.pointer) as usize + bytes);
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
        let mut state = self.lock();
        if let Some(pointer) = state.take(bytes) {
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
        state.take(bytes).map(|pointer| Block { pool: self.pool, pointer, bytes }).ok_or(0)
    }

    /// As [`Self::alloc`], of what the arena has: it does not grow.
    pub fn alloc_within(&self, bytes: usize) -> Option<Block> {
        let bytes = bytes.next_multiple_of(ALIGN);
        self.lock().take(bytes).map(|pointer| Block { pool: self.pool, pointer, bytes })
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
                free.slab_starts.remove(&slab.pointer);
                free.slab_ends.remove(&(slab.pointer + slab.bytes as u64));
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
    use super::{FreeList, Slab, State};

    #[test]
    fn ranges_split_and_merge_back_but_never_across_slabs() {
        let mut free = FreeList::default();
        free.slab_starts.extend([0, 4096]);
        free.insert(0, 4096);
        free.insert(4096, 1024);
        assert_eq!(free.by_address.len(), 2, "touching slabs stay apart");
        let a = free.take(512).unwrap();
        assert_eq!(a, 4096, "best fit takes the smaller range");
        let b = free.take(1024).unwrap();
        let c = free.take(1024).unwrap();
        assert_eq!((b, c), (0, 1024));
        free.insert(b, 1024);
        free.insert(c, 1024);
        free.insert(a, 512);
        assert_eq!(free.by_address.iter().map(|(&p, &b)| (p, b)).collect::<Vec<_>>(), [(0, 4096), (4096, 1024)]);
        assert!(free.take(8192).is_none());
        assert_eq!(free.free_bytes(), 5120);
    }

    fn add_slab(state: &mut State, pointer: u64, bytes: usize) {
        let slab = Slab { pointer, bytes, reach: 0 };
        state.free.add_slab(&slab);
        state.slabs.push(slab);
    }

    #[test]
    fn places_do_not_depend_on_the_size_of_a_slab_that_holds_them() {
        // Sizes that are taken, and numbers of those that are given back after each.
        let plan: [(usize, &[usize]); 7] = [(4, &[]), (3, &[]), (6, &[0, 2]), (2, &[]), (7, &[1]), (3, &[3]), (5, &[])];
        let run = |slab_bytes: usize| {
            let mut state = State::default();
            add_slab(&mut state, 1 << 20, slab_bytes);
            let mut taken: Vec<(u64, usize)> = Vec::new();
            for (kib, freed) in plan {
                taken.push((state.take(kib << 10).unwrap(), kib << 10));
                freed.iter().for_each(|&number| state.free.insert(taken[number].0, taken[number].1));
            }
            (taken, state.slabs[0].reach)
        };
        let (places, reach) = run(1 << 40);
        assert!(reach < plan.iter().map(|(kib, _)| kib << 10).sum(), "something is used again");
        for slab_bytes in [reach, reach + 512, 2 * reach] {
            assert_eq!(run(slab_bytes), (places.clone(), reach));
        }
        let mut state = State::default();
        add_slab(&mut state, 1 << 20, reach - 512);
        assert!(plan.into_iter().map_while(|(kib, _)| state.take(kib << 10)).count() < plan.len());
    }

    #[test]
    fn what_was_free_is_free_again_and_so_are_slabs_that_came_later() {
        let mut state = State::default();
        add_slab(&mut state, 0, 8192);
        assert!(state.is_at_rest());
        let kept = [state.free.take(2048).unwrap(), state.free.take(1024).unwrap()];
        assert_eq!(kept, [0, 2048]);
        let between = state.snapshot();
        state.rest();
        assert!(state.is_at_rest());
        // At rest a later pass takes what was in use, and needs more than there is.
        assert_eq!(state.free.take(8192), Some(0));
        assert_eq!(state.free.take(1024), None);
        add_slab(&mut state, 8192, 4096);
        assert!(!state.is_at_rest());
        state.free.insert(0, 8192);
        assert!(state.is_at_rest() && state.is_current(&between));

        state.restore(&between);
        assert!(!state.is_at_rest());
        let free: Vec<_> = state.free.by_address.iter().map(|(&p, &b)| (p, b)).collect();
        assert_eq!(free, [(3072, 5120), (8192, 4096)], "the old slab's rest and the new slab, apart though they touch");
        // What is taken and given back meanwhile merges as ever, and a second restore gives the same.
        let taken = state.free.take(5000).unwrap();
        assert_eq!(taken, 3072);
        state.free.insert(taken, 5000);
        state.rest();
        state.restore(&between);
        assert_eq!(state.free.by_address.iter().map(|(&p, &b)| (p, b)).collect::<Vec<_>>(), free);
    }
}
