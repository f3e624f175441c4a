//! Matrices inside tensors: some of the rows and columns of one, without a copy.

use super::dtype::DType;
use super::storage::Tensor;

/// Where a matrix lies in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    /// Number of its first value in the tensor.
    offset: usize,
    rows: usize,
    cols: usize,
    /// Values between the starts of its rows.
    stride: usize,
}

impl Region {
    fn whole(tensor: &Tensor) -> Self {
        Self { offset: 0, rows: tensor.rows(), cols: tensor.cols(), stride: tensor.cols() }
    }

    fn columns(self, from: usize, count: usize) -> Self {
        assert!(from + count <= self.cols, "columns {from}..{} of {}", from + count, self.cols);
        Self { offset: self.offset + from, cols: count, ..self }
    }

    fn row_range(self, from: usize, count: usize) -> Self {
        assert!(from + count <= self.rows, "rows {from}..{} of {}", from + count, self.rows);
        Self { offset: self.offset + from * self.stride, rows: count, ..self }
    }

    /// From its first value to its last: the rows of the last one end with its own columns.
    fn range(self) -> std::ops::Range<usize> {
        let len = if self.rows == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols };
        self.offset..self.offset + len
    }
}

/// A matrix inside a tensor, to read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    tensor: &'a Tensor,
    region: Region,
}

/// A matrix inside a tensor, to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    tensor: &'a mut Tensor,
    region: Region,
}

impl Tensor {
    /// The whole tensor as a matrix of its last dimension.
    pub fn view(&self) -> View<'_> {
        View { tensor: self, region: Region::whole(self) }
    }

    /// As [`Self::view`], to write.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let region = Region::whole(self);
        ViewMut { tensor: self, region }
    }

    /// Columns `0..count` of every row.
    pub fn first_columns(&self, count: usize) -> View<'_> {
        self.view().columns(0, count)
    }

    /// As [`Self::first_columns`], to write.
    pub fn first_columns_mut(&mut self, count: usize) -> ViewMut<'_> {
        self.view_mut().columns(0, count)
    }
}

impl<'a> View<'a> {
    /// Columns `from..from + count`.
    pub fn columns(self, from: usize, count: usize) -> Self {
        Self { region: self.region.columns(from, count), ..self }
    }

    /// Rows `from..from + count`.
    pub fn row_range(self, from: usize, count: usize) -> Self {
        Self { region: self.region.row_range(from, count), ..self }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.region.rows
    }

    /// Values a row.
    pub fn cols(&self) -> usize {
        self.region.cols
    }

    /// Values between the starts of rows.
    pub fn stride(&self) -> usize {
        self.region.stride
    }

    /// Whether the rows follow each other without a gap.
    pub fn is_contiguous(&self) -> bool {
        self.region.cols == self.region.stride || self.region.rows <= 1
    }

    /// Format of the values.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// On the CPU, the values from its first to its last, those between its rows included.
    pub fn f32s(&self) -> &'a [f32] {
        &self.tensor.f32s()[self.region.range()]
    }

    /// Row `row` on the CPU.
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.f32s()[row * self.region.stride..][..self.region.cols]
    }

    /// Address of its first value on a GPU.
    pub fn pointer(&self) -> u64 {
        self.tensor.pointer() + (self.region.offset * self.tensor.dtype().num_bytes()) as u64
    }

    /// A copy of the values on the host, row after row. From a GPU this waits for the device.
    pub fn to_vec(&self) -> Vec<f32> {
        let Region { offset, rows, cols, stride } = self.region;
        self.tensor.read_rows(offset, rows, cols, stride)
    }
}

impl<'a> ViewMut<'a> {
    /// Columns `from..from + count`.
    pub fn columns(self, from: usize, count: usize) -> Self {
        Self { region: self.region.columns(from, count), ..self }
    }

    /// Rows `from..from + count`.
    pub fn row_range(self, from: usize, count: usize) -> Self {
        Self { region: self.region.row_range(from, count), ..self }
    }

    /// The same matrix for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { tensor: self.tensor, region: self.region }
    }

    /// The same matrix, to read.
    pub fn as_view(&self) -> View<'_> {
        View { tensor: self.tensor, region: self.region }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.region.rows
    }

    /// Values a row.
    pub fn cols(&self) -> usize {
        self.region.cols
    }

    /// Values between the starts of rows.
    pub fn stride(&self) -> usize {
        self.region.stride
    }

    /// Format of the values.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// On the CPU, the values from its first to its last, those between its rows included.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        let range = self.region.range();
        &mut self.tensor.f32s_mut()[range]
    }

    /// As [`Self::f32s_mut`], for as long as the tensor is borrowed.
    pub fn into_f32s(self) -> &'a mut [f32] {
        let range = self.region.range();
        &mut self.tensor.f32s_mut()[range]
    }

    /// Address of its first value on a GPU.
    pub fn pointer(&self) -> u64 {
        self.as_view().pointer()
    }

    /// Replaces the values, given row after row.
    pub fn set(&mut self, values: &[f32]) {
        let Region { offset, rows, cols, stride } = self.region;
        self.tensor.write_rows(offset, rows, cols, stride, values);
    }

    /// As [`Self::set`], from bf16 as files hold it: two little-endian bytes a value.
    pub fn set_bf16(&mut self, bytes: &[u8]) {
        let Region { offset, rows, cols, stride } = self.region;
        self.tensor.write_bf16_rows(offset, rows, cols, stride, bytes);
    }
}

impl<'a> From<&'a Tensor> for View<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        tensor.view()
    }
}

impl<'a> From<&'a mut Tensor> for ViewMut<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        tensor.view_mut()
    }
}

#[cfg(test)]
mod tests {
    use crate::tensor::{Device, MemoryCategory, Precision};

    #[test]
    fn a_block_is_read_and_written_in_place() {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let mut x = device.tensor(MemoryCategory::Workspace, &[3, 4], (0..12).map(|i| i as f32).collect());
        let block = x.view().row_range(1, 2).columns(1, 2);
        assert_eq!((block.rows(), block.cols(), block.stride(), block.is_contiguous()), (2, 2, 4, false));
        assert_eq!(block.to_vec(), [5.0, 6.0, 9.0, 10.0]);
        assert_eq!(block.f32s(), [5.0, 6.0, 7.0, 8.0, 9.0, 10.0], "to its last value, not to the end of its last row");
        assert_eq!(block.row(1), [9.0, 10.0]);
        x.view_mut().row_range(1, 2).columns(1, 2).set(&[-1.0, -2.0, -3.0, -4.0]);
        assert_eq!(x.f32s(), [0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -2.0, 7.0, 8.0, -3.0, -4.0, 11.0]);
        assert!(x.view().row_range(1, 2).is_contiguous());
        // 1.5 and −2 in bf16.
        x.view_mut().row_range(2, 1).columns(0, 2).set_bf16(&[0xC0, 0x3F, 0x00, 0xC0]);
        assert_eq!(x.f32s()[8..], [1.5, -2.0, -4.0, 11.0]);
    }

    #[test]
    #[should_panic(expected = "columns 3..5 of 4")]
    fn columns_end_with_the_matrix() {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let x = device.zeros(MemoryCategory::Workspace, &[3, 4]);
        let _ = x.view().columns(3, 2);
    }
}
