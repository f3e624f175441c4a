//! The optimizer's work on a GPU over all trainable tensors at once: clearing gradients, their norm, the update. A launch each.

use std::mem::offset_of;

use super::adamw::AdamWParams;
use super::adamw8::{self, Moment8};
use super::norm::ClipValues;
use crate::kernel_args;
use crate::tensor::cuda::{CudaBuffer, Launch, ReadSlot, Readback};
use crate::tensor::{Device, Gpu, MemoryCategory, Tensor, View};

/// Values a block works on; the kernels have the same number.
const CHUNK: usize = 16_384;

/// The state before the first update.
const INITIAL: [f32; 4] = [0.0, 1.0, 1.0, 0.0];

/// One trainable tensor, laid out as in `kernels/adamw.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Entry {
    param: u64,
    working: u64,
    grad: u64,
    /// Moments in f32, or their codes where `m_absmax` is an address.
    m: u64,
    v: u64,
    m_absmax: u64,
    v_absmax: u64,
    n: i64,
    /// Values between rows of `working`.
    working_stride: i64,
    /// Values a row of `working` has.
    working_cols: i32,
    decays: i32,
}

const _: () = assert!(size_of::<Entry>() == 80 && offset_of!(Entry, n) == 56 && offset_of!(Entry, decays) == 76);

/// A run of values of one tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Chunk {
    tensor: i32,
    number: i32,
}

/// One trainable tensor; all parts have as many values, without gaps and in f32 but for `working`.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// Value.
    pub param: &'a Tensor,
    /// Copy of the value that products read, where that is another tensor.
    pub working: Option<View<'a>>,
    /// Gradient.
    pub grad: View<'a>,
    /// First and second moment.
    pub moments: Moments<'a>,
    /// Whether weight decay acts on it.
    pub decays: bool,
}

/// The moments of a tensor, first and second.
#[derive(Debug, Clone, Copy)]
pub enum Moments<'a> {
    /// f32.
    F32([&'a Tensor; 2]),
    /// In 8 bits.
    Blockwise8([&'a Moment8; 2]),
}

fn entry(member: Member<'_>) -> Entry {
    let n = member.param.len();
    let fits = |part: &View<'_>| part.rows() * part.cols() == n;
    assert!(fits(&member.grad) && member.working.as_ref().is_none_or(fits), "shapes of an optimizer's tensors");
    assert!(member.grad.is_contiguous(), "gradients have no gaps");
    let ([m, v], [m_absmax, v_absmax]) = match member.moments {
        Moments::F32(moments) => {
            assert!(moments.iter().all(|moment| moment.len() == n), "shapes of moments");
            (moments.map(Tensor::pointer), [0; 2])
        }
        Moments::Blockwise8(moments) => {
            let blocks = n.div_ceil(adamw8::BLOCK);
            let fits =
                |moment: &&Moment8| moment.codes.len() == blocks * adamw8::BLOCK && moment.absmax.len() == blocks;
            assert!(moments.iter().all(fits), "shapes of moments in 8 bits");
            (moments.map(|moment| moment.codes.pointer()), moments.map(|moment| moment.absmax.pointer()))
        }
    };
    Entry {
        param: member.param.pointer(),
        working: member.working.map_or(0, |working| working.pointer()),
        working_stride: member.working.map_or(0, |working| working.stride() as i64),
        working_cols: member.working.map_or(0, |working| working.cols() as i32),
        grad: member.grad.pointer(),
        m,
        v,
        m_absmax,
        v_absmax,
        n: n as i64,
        decays: i32::from(member.decays),
    }
}

/// The work list of one tensor.
fn chunks(tensor: i32, entry: &Entry) -> impl Iterator<Item = Chunk> + use<> {
    (0..(entry.n as usize).div_ceil(CHUNK)).map(move |number| Chunk { tensor, number: number as i32 })
}

/// The table of trainable tensors and its work list, in device memory. The tensors must stay where they are.
#[derive(Debug)]
pub struct MultiTensor {
    entries: CudaBuffer,
    num_entries: usize,
    chunks: CudaBuffer,
    num_chunks: usize,
    /// The maps of moments in 8 bits.
    maps: Tensor,
    partials: Tensor,
    /// {norm, factor on the gradient, 1 if the update may happen, sum of losses}. Once an update may not happen, none may any more: the host
    /// hears of it when the next one is queued already.
    state: Tensor,
    readback: Readback,
}

impl MultiTensor {
    /// Builds the table.
    pub fn new<'a>(device: &Device, gpu: &Gpu, members: impl Iterator<Item = Member<'a>>) -> Self {
        let entries: Vec<Entry> = members.map(entry).collect();
        let chunks: Vec<Chunk> = (0..).zip(&entries).flat_map(|(tensor, entry)| chunks(tensor, entry)).collect();
        let category = MemoryCategory::Optimizer;
        let [on_entries, on_chunks] =
            [size_of_val(entries.as_slice()), size_of_val(chunks.as_slice())].map(|bytes| gpu.alloc(category, bytes));
        gpu.upload(on_entries.pointer(), &entries);
        gpu.upload(on_chunks.pointer(), &chunks);
        Self {
            entries: on_entries,
            num_entries: entries.len(),
            num_chunks: chunks.len(),
            chunks: on_chunks,
            maps: device.tensor_f32(category, &[adamw8::TABLES_LEN], adamw8::tables()),
            partials: device.empty_f32(category, &[chunks.len()]),
            state: device.tensor_f32(category, &[4], INITIAL.to_vec()),
            readback: Readback::new(gpu, INITIAL.to_vec()),
        }
    }

    /// Names other tensors from now on, as many and as large as before. What is queued works on those before.
    pub fn set_members<'a>(&mut self, gpu: &Gpu, members: impl Iterator<Item = Member<'a>>) {
        let entries: Vec<Entry> = members.map(entry).collect();
        assert_eq!(entries.len(), self.num_entries, "tensors of a table");
        gpu.upload(self.entries.pointer(), &entries);
    }

    /// Queues clearing of all gradients.
    pub fn clear_gradients(&self, gpu: &Gpu) {
        gpu.launch("clear_gradients", self.launch(), kernel_args![self.entries.pointer(), self.chunks.pointer()]);
    }

    /// Queues the norm of the gradients, the clip factor for `max_norm` (0: none), the finite flag in which `loss_sum` [1] takes part, and
    /// one update, which is left out on the device where something is not finite, then or at any step before.
    pub fn step(&self, gpu: &Gpu, p: &AdamWParams, loss_sum: &Tensor, max_norm: f64) {
        let (entries, chunks) = (self.entries.pointer(), self.chunks.pointer());
        let (partials, state) = (self.partials.pointer(), self.state.pointer());
        gpu.launch("sum_of_squares", self.launch(), kernel_args![entries, chunks, partials]);
        let args = kernel_args![partials, self.num_chunks as i32, loss_sum.pointer(), max_norm as f32, state];
        gpu.launch("clip_state", Launch::new(1, 1024), args);
        let c = p.constants();
        let args = kernel_args![
            entries,
            chunks,
            state,
            self.maps.pointer(),
            c.step_size,
            c.decay,
            c.beta1,
            c.one_minus_beta1,
            c.beta2,
            c.one_minus_beta2,
            c.root_correction2,
            c.eps
        ];
        gpu.launch("adamw", self.launch(), args);
    }

    /// Queues a copy of what clipping found.
    pub fn queue_read(&self) -> ReadSlot {
        self.readback.queue(self.state.pointer())
    }

    /// What clipping found, when the device has passed the copy.
    pub fn read(&self, slot: ReadSlot) -> ClipValues {
        let values = self.readback.read(slot);
        ClipValues {
            norm: f64::from(values[0]),
            scale: values[1],
            finite: values[2] != 0.0,
            loss_sum: f64::from(values[3]),
        }
    }

    fn launch(&self) -> Launch {
        Launch::new(self.num_chunks, 512)
    }
}
