//! Matrices that several parameters share: a projection's weights, one below the other, with its adapters beside and below them (see `projection`).
//!
//! A matrix is whole, one tensor, or packed: its weights stay in 4 bits, its adapters are tensors of their own, and products read a tensor that is made
//! of them each time. Made matrices can be held for as long as several products of a block read them.

use super::held::{Held, Hold, Operand};
use super::parameter::Part;
use crate::formats::nf4::Nf4;
use crate::ops::elementwise;
use crate::ops::nf4::{self, Border, Nf4Weight};
use crate::tensor::{Device, MemoryCategory, Tensor, View, ViewMut};

/// A shared matrix.
#[derive(Debug)]
pub(super) struct Matrix {
    values: Values,
    /// Rows and columns of the gradients that are computed at once: the adapters' A, one below the other.
    pub(super) stacked: (usize, usize),
}

#[derive(Debug)]
enum Values {
    Whole(Tensor),
    Packed(Packed),
}

/// A matrix whose weights are in NF4.
#[derive(Debug)]
struct Packed {
    /// Each with its first row.
    weights: Vec<(usize, Nf4Weight)>,
    /// Rows of all weights, and their columns.
    shape: (usize, usize),
    adapters: Option<Adapters>,
    /// The matrix that is made of it.
    held: Held,
}

/// What products read of the adapters.
#[derive(Debug)]
struct Adapters {
    /// [N, R].
    b: Tensor,
    /// [R, in].
    a: Tensor,
}

impl Packed {
    fn rank(&self) -> usize {
        self.adapters.as_ref().map_or(0, |adapters| adapters.a.rows())
    }

    fn make(&self, device: &Device) -> Tensor {
        let ((rows, cols), r) = (self.shape, self.rank());
        let mut out = device.empty(MemoryCategory::Workspace, &[rows + r, device.stride(cols + r)]);
        let weights: Vec<(usize, &Nf4Weight)> = self.weights.iter().map(|(row, weight)| (*row, weight)).collect();
        let border = self.adapters.as_ref().map(|Adapters { a, b }| Border { b: b.view(), a: a.view() });
        nf4::dequantize(device, &weights, border, &mut out);
        out
    }

    /// The weight that is this part; `None` for a part of the adapters.
    fn weight(&self, part: &Part) -> Option<&Nf4Weight> {
        let at = |(row, weight): &&(usize, Nf4Weight)| {
            part.col == 0 && (*row, weight.shape()) == (part.row, [part.rows, part.cols])
        };
        self.weights.iter().find(at).map(|(_, weight)| weight)
    }

    /// Where a part of the adapters lies: whether in B (else in A), its first row and column there.
    fn place(&self, part: &Part) -> (bool, usize, usize) {
        let (rows, cols) = self.shape;
        match part.col.checked_sub(cols) {
            Some(col) => (true, part.row, col),
            None => {
                assert!(part.row >= rows, "weights in 4 bits are no place");
                (false, part.row - rows, part.col)
            }
        }
    }
}

impl Matrix {
    /// A whole matrix of zeros.
    pub(super) fn whole(device: &Device, rows: usize, cols: usize) -> Self {
        Self { values: Values::Whole(device.zeros(MemoryCategory::Weights, &[rows, cols])), stacked: (0, 0) }
    }

    /// A packed matrix of weights with `cols` columns and those rows, without adapters. The weights are not set.
    pub(super) fn packed(device: &Device, rows: &[usize], cols: usize, double: bool) -> Self {
        let mut first = 0;
        let weight = |&rows: &usize| {
            let weight = (first, Nf4Weight::room(device, rows, cols, double));
            first += rows;
            weight
        };
        let weights = rows.iter().map(weight).collect();
        let shape = (first, cols);
        let values = Values::Packed(Packed { weights, shape, adapters: None, held: Held::default() });
        Self { values, stacked: (0, 0) }
    }

    /// Room for `columns` columns of adapters beside and below weights of `rows` rows and `cols` columns; what is held stays, the rest is zero.
    pub(super) fn make_room(&mut self, device: &Device, (rows, cols): (usize, usize), columns: usize) {
        match &mut self.values {
            Values::Whole(tensor) => {
                let (all_rows, all_cols) = (rows + columns, device.stride(cols + columns));
                if all_rows > tensor.rows() || all_cols > tensor.cols() {
                    *tensor = grown(device, tensor, all_rows, all_cols);
                }
            }
            Values::Packed(packed) if columns > packed.rank() => {
                let zeros = |shape: &[usize]| device.zeros(MemoryCategory::Adapters, shape);
                let room = Adapters { b: zeros(&[rows, columns]), a: zeros(&[columns, cols]) };
                packed.adapters = Some(match packed.adapters.take() {
                    None => room,
                    Some(Adapters { b, a }) => {
                        Adapters { b: grown(device, &b, rows, columns), a: grown(device, &a, columns, cols) }
                    }
                });
            }
            Values::Packed(_) => {}
        }
    }

    /// What products read. Of a packed matrix it is made, unless somebody holds it.
    pub(super) fn operand(&self, device: &Device) -> Operand<'_> {
        match &self.values {
            Values::Whole(tensor) => Operand::Lasting(tensor),
            Values::Packed(packed) => packed.held.get(|| packed.make(device)),
        }
    }

    /// Keeps what is made of a packed matrix for as long as the hold lives.
    pub(super) fn hold(&self) -> Hold<'_> {
        match &self.values {
            Values::Whole(_) => Hold::nothing(),
            Values::Packed(packed) => packed.held.hold(),
        }
    }

    /// A part; of a packed matrix, one of the adapters' block beside or below the weights.
    pub(super) fn view(&self, part: &Part) -> View<'_> {
        let (tensor, row, col) = match &self.values {
            Values::Whole(tensor) => (tensor, part.row, part.col),
            Values::Packed(packed) => {
                let (is_b, row, col) = packed.place(part);
                let Some(Adapters { b, a }) = &packed.adapters else { unreachable!("there are no adapters yet") };
                (if is_b { b } else { a }, row, col)
            }
        };
        tensor.view().row_range(row, part.rows).columns(col, part.cols)
    }

    /// As [`Self::view`], to write.
    pub(super) fn view_mut(&mut self, part: &Part) -> ViewMut<'_> {
        let (tensor, row, col) = match &mut self.values {
            Values::Whole(tensor) => (tensor, part.row, part.col),
            Values::Packed(packed) => {
                let (is_b, row, col) = packed.place(part);
                let Some(Adapters { b, a }) = &mut packed.adapters else { unreachable!("there are no adapters yet") };
                (if is_b { b } else { a }, row, col)
            }
        };
        tensor.view_mut().row_range(row, part.rows).columns(col, part.cols)
    }

    /// The weight in NF4 that is this part; `None` where it is none.
    pub(super) fn nf4(&self, part: &Part) -> Option<&Nf4Weight> {
        match &self.values {
            Values::Whole(_) => None,
            Values::Packed(packed) => packed.weight(part),
        }
    }

    /// Sets the weight in NF4 that is this part.
    pub(super) fn set_nf4(&mut self, device: &Device, part: &Part, weight: &Nf4<'_>) {
        let Values::Packed(packed) = &mut self.values else { unreachable!("the matrix is whole") };
        let found = packed.weights.iter_mut().find(|(row, _)| part.col == 0 && *row == part.row);
        let Some((_, found)) = found else { unreachable!("a part of the adapters is not in 4 bits") };
        found.set(device, weight);
    }
}

/// A tensor with more rows and columns; what it holds stays where it is, the rest is zero.
fn grown(device: &Device, before: &Tensor, rows: usize, cols: usize) -> Tensor {
    let (held_rows, held_cols) = (before.rows(), before.cols());
    let mut grown = device.zeros(before.category(), &[rows.max(held_rows), cols.max(held_cols)]);
    let into = grown.view_mut().row_range(0, held_rows).columns(0, held_cols);
    elementwise::copy(device, before, into);
    grown
}
