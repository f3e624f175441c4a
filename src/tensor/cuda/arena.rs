//! Device memory in slabs: best fit with coalescing, reused in stream order, so that a step that has run once allocates nothing again.
//!
//! A device has two arenas: one for what lasts, one for the passes of a model ([`Pool`]). Between two passes all of the second is free, so the
//! addresses that a graph was recorded with are its own while it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, result};

/// Every block starts at and is a multiple of this many bytes: what vector loads and the matrix library want.
const ALIGN: usize = 512;
/// Smallest slab asked from the driver.
const MIN_SLAB: usize = 64 << 20;

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
    context: Arc<CudaContext>,
    /// Most bytes the process may hold on the card, the context's own memory included.
    limit_bytes: Option<u64>,
    state: Mutex<State>,
    allocations: AtomicU64,
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
}

impl FreeList {
    fn add_slab(&mut self, slab: &Slab) {
        self.slab_starts.insert(slab.pointer);
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

    /// The smallest range that fits, lowest address first; the rest goes back.
    fn take(&mut self, bytes: usize) -> Option<u64> {
        let &(found, pointer) = self.by_size.range((bytes, 0)..).next()?;
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
    /// An empty arena. `limit_bytes` bounds what the process may hold on the card.
    pub fn new(pool: Pool, context: Arc<CudaContext>, limit_bytes: Option<u64>) -> Self {
        Self { pool, context, limit_bytes, state: Mutex::default(), allocations: AtomicU64::new(0) }
    }

    /// Memory for `bytes` bytes.
    ///
    /// # Errors
    /// The bytes that are free, when neither the free list nor the driver has room.
    pub fn alloc(&self, bytes: usize) -> Result<Block, u64> {
        let bytes = bytes.next_multiple_of(ALIGN);
        let mut state = self.lock();
        if let Some(pointer) = state.free.take(bytes) {
            return Ok(Block { pool: self.pool, pointer, bytes });
        }
        let slab = self.grow(bytes.max(MIN_SLAB)).or_else(|| self.grow(bytes.next_multiple_of(2 << 20)));
        let Some(slab) = slab else {
            let free = self.room();
            return Err(free + state.free.free_bytes());
        };
        state.free.add_slab(&slab);
        state.slabs.push(slab);
        state.free.take(bytes).map(|pointer| Block { pool: self.pool, pointer, bytes }).ok_or(0)
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
                // SAFETY: allocated by `grow`, wholly unused, and the device is idle.
                let _ = unsafe { result::memory_free(slab.pointer) };
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
        self.context.bind_to_thread().ok()?;
        self.allocations.fetch_add(1, Ordering::Relaxed);
        // SAFETY: a plain allocation; freed in `trim` and in `drop`.
        let pointer = unsafe { result::malloc_sync(bytes) }.ok()?;
        Some(Slab { pointer, bytes })
    }

    /// Bytes of the arena that nobody uses.
    pub fn free_bytes(&self) -> u64 {
        self.lock().free.free_bytes()
    }

    /// Bytes that may still be asked from the driver.
    pub fn room(&self) -> u64 {
        let Ok((free, total)) = self.context.mem_get_info() else { return 0 };
        match self.limit_bytes {
            None => free as u64,
            Some(limit) => limit.saturating_sub((total - free) as u64).min(free as u64),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() || self.context.synchronize().is_err() {
            return;
        }
        for slab in self.lock().slabs.drain(..) {
            // SAFETY: no tensor is left (each holds the device, which holds the arena) and the device is idle.
            let _ = unsafe { result::memory_free(slab.pointer) };
        }
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
        let slab = Slab { pointer, bytes };
        state.free.add_slab(&slab);
        state.slabs.push(slab);
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
