//! Bytes on a device: numbers of 8 bits and fewer, whose meaning is that of the operation that reads them.

use super::cuda::{CudaBuffer, Pitched};
use super::memory::Charge;

/// Bytes, owned, on one device.
#[derive(Debug)]
pub struct Bytes {
    storage: ByteStorage,
    len: usize,
    _charge: Charge,
}

#[derive(Debug)]
pub(super) enum ByteStorage {
    Host(Vec<u8>),
    Cuda(CudaBuffer),
}

fn whole(len: usize) -> Pitched {
    Pitched { rows: 1, row_bytes: len, pitch: len }
}

impl Bytes {
    /// Wraps `len` bytes that were just allocated.
    pub(super) fn from_parts(storage: ByteStorage, len: usize, charge: Charge) -> Self {
        Self { storage, len, _charge: charge }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes on the CPU. CPU forms of operations get no other kind.
    pub fn u8s(&self) -> &[u8] {
        match &self.storage {
            ByteStorage::Host(data) => data,
            ByteStorage::Cuda(_) => unreachable!("a CPU form was given GPU bytes"),
        }
    }

    /// The bytes on the CPU, to change.
    pub fn u8s_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            ByteStorage::Host(data) => data,
            ByteStorage::Cuda(_) => unreachable!("a CPU form was given GPU bytes"),
        }
    }

    /// Address on the GPU. Launchers get no other kind.
    pub fn pointer(&self) -> u64 {
        match &self.storage {
            ByteStorage::Host(_) => unreachable!("a launcher was given CPU bytes"),
            ByteStorage::Cuda(buffer) => buffer.pointer(),
        }
    }

    /// A copy on the host. From a GPU this waits for the device.
    pub fn to_vec(&self) -> Vec<u8> {
        match &self.storage {
            ByteStorage::Host(data) => data.clone(),
            ByteStorage::Cuda(buffer) => buffer.read(0, whole(self.len)),
        }
    }

    /// Replaces all of them. `bytes.len()` must be theirs.
    pub fn set(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "bytes of another number");
        match &mut self.storage {
            ByteStorage::Host(data) => data.copy_from_slice(bytes),
            ByteStorage::Cuda(buffer) => buffer.write(0, whole(self.len), bytes),
        }
    }
}
