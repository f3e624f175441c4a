//! Backward of SwiGLU together with the adapters around it: what would read gate, up and their gradients again and again is one pass over memory.
//!
//! With `act = silu(gate)·up` between the gate and up projection and the down projection, whose adapters all have rank r:
//! - `d_gate, d_up` in place of gate and up, as [`swiglu::backward_in_place`];
//! - `z_down = s·act·A_downᵀ`, `dA_down += dz_downᵀ·act`: act is made here, and never stored on a GPU;
//! - `dB_gate += d_gateᵀ·z_gate`, `dB_up += d_upᵀ·z_up`;
//! - `dz = s·[d_gate·B_gate, d_up·B_up]`.

use std::mem::offset_of;

use super::adapter::split_rows;
use super::{elementwise, matmul, swiglu};
use crate::tensor::cuda::Launch;
use crate::tensor::{Device, MemoryCategory, Tensor, View};

/// Ranks of the GPU's kernels, with their names and how many columns a block has.
const KERNELS: [Kernel; 2] = [
    Kernel { rank: 16, name: "swiglu_lora_r16", finish: "swiglu_lora_finish_r16", columns: 256 },
    Kernel { rank: 32, name: "swiglu_lora_r32", finish: "swiglu_lora_finish_r32", columns: 128 },
];

/// Rows of a block's tile, and tiles in flight.
const TILE_ROWS: usize = 16;
const STAGES: usize = 2;
/// Threads of a block.
const THREADS: u32 = 256;

/// A kernel for ranks up to `rank`.
struct Kernel {
    rank: usize,
    name: &'static str,
    finish: &'static str,
    columns: usize,
}

impl Kernel {
    /// Tiles of act and of both gradients, three slices of adapters, and three of z; 16 bytes lie behind every row.
    fn shared_bytes(&self) -> u32 {
        let (rows, pitch, z_pitch) = (STAGES * TILE_ROWS, self.columns + 8, self.rank + 8);
        (2 * 3 * ((rows + self.rank) * pitch + rows * z_pitch)) as u32
    }
}

fn kernel(rank: usize) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| rank <= kernel.rank && rank.is_multiple_of(8))
}

/// Whether [`backward`] takes adapters of rank `r`: on a GPU multiples of 8 up to 32.
pub fn takes(device: &Device, r: usize) -> bool {
    matches!(device, Device::Cpu(_)) || kernel(r).is_some()
}

/// Parameters of the kernels, laid out as in `kernels/swiglu_lora.cu`. Addresses are device addresses, strides count values.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct SwigluLoraParams {
    gate_up: u64,
    d_act: u64,
    dz_down: u64,
    z: u64,
    a_down: u64,
    b: u64,
    row_partials: u64,
    column_partials: u64,
    z_down: u64,
    dz: u64,
    da_down: u64,
    db_gate: u64,
    db_up: u64,
    gate_up_stride: i64,
    d_act_stride: i64,
    dz_down_stride: i64,
    z_stride: i64,
    a_stride: i64,
    b_stride: i64,
    z_down_stride: i64,
    dz_stride: i64,
    rows: i32,
    inner: i32,
    r: i32,
    rows_per_block: i32,
    column_blocks: i32,
    row_blocks: i32,
    scale_down: f32,
    scale_gate_up: f32,
}

const _: () = assert!(size_of::<SwigluLoraParams>() == 200);
const _: () = assert!(offset_of!(SwigluLoraParams, gate_up_stride) == 104 && offset_of!(SwigluLoraParams, rows) == 168);

/// The adapters around the activation, and what has come to them so far.
#[derive(Debug, Clone, Copy)]
pub struct Adapters<'a> {
    /// A of the down projection [r, I].
    pub a_down: View<'a>,
    /// B of gate and up [2·I, 2·r]: gate's in the upper left, up's in the lower right, zeros elsewhere.
    pub b: View<'a>,
    /// Gradient of the down projection's z [T, r].
    pub dz_down: View<'a>,
    /// z of gate and up beside each other [T, 2·r].
    pub z: View<'a>,
    /// Scale of the down projection's adapter.
    pub scale_down: f32,
    /// Scale of the adapters of gate and up.
    pub scale_gate_up: f32,
}

/// Gradients of the adapters, f32, to add to.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Of A of the down projection [r, I].
    pub a_down: &'a mut Tensor,
    /// Of B of gate and of up [I, r] each.
    pub b: [&'a mut Tensor; 2],
}

/// From `d_act` [T, I]: the first 2·I columns of `gate_up` [T, ≥2·I + 2·r] become their gradient, and the next 2·r dz; `z_down` [T, r] is
/// assigned; `gradients` accumulate. `r` must be one that the device [`takes`].
pub fn backward(
    device: &Device,
    adapters: &Adapters<'_>,
    d_act: &Tensor,
    gate_up: &mut Tensor,
    z_down: &mut Tensor,
    gradients: Gradients<'_>,
) {
    let (rows, inner, r) = (d_act.rows(), d_act.cols(), z_down.cols());
    let Adapters { a_down, b, dz_down, z, scale_down, scale_gate_up } = *adapters;
    assert!(takes(device, r), "adapters of rank {r}");
    assert_eq!((gate_up.rows(), z_down.rows(), dz_down.rows(), z.rows()), (rows, rows, rows, rows), "rows of an MLP");
    assert_eq!((a_down.rows(), a_down.cols(), dz_down.cols()), (r, inner, r), "the down projection's adapter");
    assert_eq!((b.rows(), b.cols(), z.cols()), (2 * inner, 2 * r, 2 * r), "the adapters of gate and up");
    assert!(2 * (inner + r) <= gate_up.cols(), "no room for dz behind gate and up");
    let Gradients { a_down: da_down, b: [db_gate, db_up] } = gradients;
    assert_eq!((da_down.len(), db_gate.len(), db_up.len()), (r * inner, r * inner, r * inner), "gradients of adapters");
    match device {
        Device::Cpu(_) => {
            let mut act = device.empty(MemoryCategory::Workspace, &[rows, inner]);
            swiglu::forward(device, gate_up.first_columns(2 * inner), &mut act);
            matmul::nt(device, scale_down, &act, a_down, 0.0, &mut *z_down);
            elementwise::round(device, &mut *z_down);
            matmul::tn(device, 1.0, dz_down, &act, 1.0, da_down);
            swiglu::backward_in_place(device, d_act, gate_up.first_columns_mut(2 * inner));
            for (i, db) in [db_gate, db_up].into_iter().enumerate() {
                let dy = gate_up.view().columns(i * inner, inner);
                matmul::tn(device, 1.0, dy, z.columns(i * r, r), 1.0, db);
            }
            matmul::extend_nn(device, scale_gate_up, &mut *gate_up, b);
            elementwise::round(device, gate_up.view_mut().columns(2 * inner, 2 * r));
        }
        Device::Cuda(gpu) => {
            let Some(kernel) = kernel(r) else { return };
            let column_blocks = inner.div_ceil(kernel.columns);
            let (row_blocks, rows_per_block) = split_rows(gpu, column_blocks, rows, TILE_ROWS);
            let partials = |len| device.empty_f32(MemoryCategory::Workspace, &[len]);
            let row_partials = partials(column_blocks * rows * 3 * kernel.rank);
            let column_partials = partials(row_blocks * inner * 3 * kernel.rank);
            let params = SwigluLoraParams {
                gate_up: gate_up.pointer(),
                d_act: d_act.pointer(),
                dz_down: dz_down.pointer(),
                z: z.pointer(),
                a_down: a_down.pointer(),
                b: b.pointer(),
                row_partials: row_partials.pointer(),
                column_partials: column_partials.pointer(),
                z_down: z_down.pointer(),
                dz: gate_up.view().columns(2 * inner, 2 * r).pointer(),
                da_down: da_down.pointer(),
                db_gate: db_gate.pointer(),
                db_up: db_up.pointer(),
                gate_up_stride: gate_up.cols() as i64,
                d_act_stride: d_act.cols() as i64,
                dz_down_stride: dz_down.stride() as i64,
                z_stride: z.stride() as i64,
                a_stride: a_down.stride() as i64,
                b_stride: b.stride() as i64,
                z_down_stride: z_down.cols() as i64,
                dz_stride: gate_up.cols() as i64,
                rows: rows as i32,
                inner: inner as i32,
                r: r as i32,
                rows_per_block: rows_per_block as i32,
                column_blocks: column_blocks as i32,
                row_blocks: row_blocks as i32,
                scale_down,
                scale_gate_up,
            };
            gpu.allow_shared_bytes(kernel.name, kernel.shared_bytes());
            let grid = [column_blocks as u32, row_blocks as u32, 1];
            let launch = Launch { grid, block: THREADS, shared_bytes: kernel.shared_bytes() };
            gpu.launch_struct(kernel.name, launch, &params);
            let values = 3 * kernel.rank * (rows + inner);
            gpu.launch_struct(kernel.finish, Launch::elements(values, 1), &params);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};

    const T: usize = 5;
    const I: usize = 6;
    const R: usize = 2;

    /// `act·W_downᵀ`-like head: the loss is `⟨d_act, act⟩ + ⟨dz_down, s·act·Aᵀ⟩`, with gate and up moved by `s·z·Bᵀ`.
    #[test]
    fn gradients_agree_with_finite_differences() {
        let device = cpu(2);
        let mut v = Values::new(21);
        let (scale_down, scale_gate_up) = (1.5, 0.5);
        let base = v.vec(T * 2 * I);
        let (a, dz_down, z, d_act) = (v.vec(R * I), v.vec(T * R), v.vec(T * 2 * R), v.vec(T * I));
        let (b_gate, b_up) = (v.vec(I * R), v.vec(I * R));
        let tensor = |shape: &[usize], data: &[f32]| device.tensor(MemoryCategory::Workspace, shape, data.to_vec());
        // Gate and up with their adapters: z is scaled already.
        let gate_up = |z: &[f32], b_gate: &[f32], b_up: &[f32]| -> Vec<f32> {
            let adapter = |t: usize, i: usize, b: &[f32], first: usize| -> f32 {
                (0..R).map(|n| z[t * 2 * R + first + n] * b[i * R + n]).sum()
            };
            let value = |at: usize| {
                let (t, column) = (at / (2 * I), at % (2 * I));
                let (b, first) = if column < I { (b_gate, 0) } else { (b_up, R) };
                base[at] + adapter(t, column % I, b, first)
            };
            (0..T * 2 * I).map(value).collect()
        };
        let loss = |z: &[f32], b_gate: &[f32], b_up: &[f32], a: &[f32]| {
            let mut act = device.empty(MemoryCategory::Workspace, &[T, I]);
            swiglu::forward(&device, &tensor(&[T, 2 * I], &gate_up(z, b_gate, b_up)), &mut act);
            let mut z_down = device.empty(MemoryCategory::Workspace, &[T, R]);
            matmul::nt(&device, 1.0, &act, &tensor(&[R, I], a), 0.0, &mut z_down);
            (dot(&d_act, act.f32s()) + dot(&dz_down, z_down.f32s()), z_down)
        };
        // What reaches act: through the base product, and through the adapter.
        let through: Vec<f32> = (0..T * I)
            .map(|at| d_act[at] + (0..R).map(|n| dz_down[at / I * R + n] * a[n * I + at % I]).sum::<f32>())
            .collect();
        let mut tensor_b = vec![0.0; 2 * I * 2 * R];
        for i in 0..I {
            tensor_b[i * 2 * R..][..R].copy_from_slice(&b_gate[i * R..][..R]);
            tensor_b[(I + i) * 2 * R + R..][..R].copy_from_slice(&b_up[i * R..][..R]);
        }
        let mut stored = device.zeros(MemoryCategory::Workspace, &[T, 2 * I + 2 * R + 1]);
        stored.first_columns_mut(2 * I).set(&gate_up(&z, &b_gate, &b_up));
        let [mut da, mut db_gate, mut db_up] =
            [[R, I], [I, R], [I, R]].map(|shape| device.zeros_f32(MemoryCategory::Workspace, &shape));
        let mut z_down = device.empty(MemoryCategory::Workspace, &[T, R]);
        let (a_tensor, b_tensor) = (tensor(&[R, I], &a), tensor(&[2 * I, 2 * R], &tensor_b));
        let (dz_tensor, z_tensor) = (tensor(&[T, R], &dz_down), tensor(&[T, 2 * R], &z));
        let adapters = Adapters {
            a_down: a_tensor.view(),
            b: b_tensor.view(),
            dz_down: dz_tensor.view(),
            z: z_tensor.view(),
            scale_down,
            scale_gate_up,
        };
        let gradients = Gradients { a_down: &mut da, b: [&mut db_gate, &mut db_up] };
        device.run(|| {
            backward(&device, &adapters, &tensor(&[T, I], &through), &mut stored, &mut z_down, gradients);
        });
        assert_gradient("A of down", &a, da.f32s(), |a| loss(&z, &b_gate, &b_up, a).0);
        assert_gradient("B of gate", &b_gate, db_gate.f32s(), |b| loss(&z, b, &b_up, &a).0);
        assert_gradient("B of up", &b_up, db_up.f32s(), |b| loss(&z, &b_gate, b, &a).0);
        // z holds the scale, dz is the gradient of what it was made from.
        let dz: Vec<f32> = stored.view().columns(2 * I, 2 * R).to_vec().iter().map(|x| x / scale_gate_up).collect();
        assert_gradient("z of gate and up", &z, &dz, |z| loss(z, &b_gate, &b_up, &a).0);
        let want: Vec<f32> = loss(&z, &b_gate, &b_up, &a).1.f32s().iter().map(|x| x * scale_down).collect();
        assert_close("z of down", z_down.f32s(), &want, 1e-5);
    }

    #[test]
    fn kernels_are_those_of_the_cuda_source() {
        let source = include_str!("../../kernels/swiglu_lora.cu");
        assert!(
            source.contains(&format!("constexpr int THREADS = {THREADS}, WARPS = THREADS / WARP, TT = {TILE_ROWS};"))
        );
        for kernel in &KERNELS {
            let Kernel { rank, name, finish, columns } = kernel;
            assert!(source.contains(&format!("{name}(SwigluLoraParams p) {{ backward<{rank}, {columns}>(p); }}")));
            assert!(source.contains(&format!("{finish}(SwigluLoraParams p) {{ finish<{rank}>(p); }}")));
            assert!(kernel.shared_bytes() <= 99 << 10, "laptops have 99 KiB");
        }
        assert!(kernel(16).is_some() && kernel(8).is_some() && kernel(24).is_some());
        assert!(kernel(12).is_none() && kernel(40).is_none());
    }
}
