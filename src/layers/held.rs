//! What is made of weights in 4 bits: for one product, or for as long as somebody holds it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::tensor::{Tensor, View};

/// What a product reads.
#[derive(Debug, Clone)]
pub enum Operand<'a> {
    /// It lies there.
    Lasting(&'a Tensor),
    /// It was made for this product, or for as long as somebody holds it.
    Made(Arc<Tensor>),
}

impl Operand<'_> {
    /// The whole of it.
    pub fn view(&self) -> View<'_> {
        match self {
            Self::Lasting(tensor) => tensor.view(),
            Self::Made(tensor) => tensor.view(),
        }
    }
}

/// The tensor that is made of one weight, while somebody holds it.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<Holders>);

#[derive(Debug, Default)]
struct Holders {
    count: usize,
    made: Option<Arc<Tensor>>,
}

/// While it lives, what is made of a weight is kept.
#[derive(Debug)]
pub struct Hold<'a>(Option<&'a Held>);

impl Held {
    fn lock(&self) -> MutexGuard<'_, Holders> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is kept, or else what `make` makes.
    pub(super) fn get(&self, make: impl FnOnce() -> Tensor) -> Operand<'_> {
        let mut holders = self.lock();
        if let Some(made) = &holders.made {
            return Operand::Made(Arc::clone(made));
        }
        let made = Arc::new(make());
        if holders.count > 0 {
            holders.made = Some(Arc::clone(&made));
        }
        Operand::Made(made)
    }

    /// Keeps what is made while the hold lives.
    pub(super) fn hold(&self) -> Hold<'_> {
        self.lock().count += 1;
        Hold(Some(self))
    }
}

impl Hold<'_> {
    /// For a weight that lies there as it is.
    pub(super) fn nothing() -> Self {
        Self(None)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.0 {
            let mut holders = held.lock();
            holders.count -= 1;
            if holders.count == 0 {
                holders.made = None;
            }
        }
    }
}
