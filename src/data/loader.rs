//! The loader: a named thread that packs batches ahead of training, in an order fixed by the seed. Stop 4 of the walk.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::example::Example;
use super::pack::{self, PackCounts, PackOptions, PackedBatch, PlannedBatch};
use crate::base::error::Result;

/// Steps that wait on the queue: one being taken, one ready. More would only hold memory.
const QUEUE_STEPS: usize = 2;

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunLength {
    /// Passes over the data; 0.5 is half of one.
    Epochs(f64),
    /// Optimizer steps, over as many passes as they take.
    Steps(u64),
}

/// How examples become steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoaderOptions {
    /// How documents become batches.
    pub pack: PackOptions,
    /// Batches in one optimizer step. The last step of an epoch may have fewer.
    pub grad_accum_steps: usize,
    /// Seed of the order. Each epoch has its own.
    pub seed: u64,
    /// How long to train.
    pub length: RunLength,
}

/// A place in the run: where the next step starts. Saved with a checkpoint, it makes a resumed run go on with the
/// batches it would have had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cursor {
    /// Passes completed.
    pub epoch: u64,
    /// Steps completed in this pass.
    pub step: u64,
    /// Steps completed in all.
    pub total_steps: u64,
}

/// The batches of one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedStep {
    /// Micro-batches, at least one.
    pub batches: Vec<PackedBatch>,
    /// Where the next step starts.
    pub cursor: Cursor,
    /// Passes over the data after this step.
    pub epoch: f64,
}

/// Everything the loader needs, and what is known before it starts.
#[derive(Debug, Clone)]
pub struct LoaderPlan {
    examples: Arc<Vec<Example>>,
    lengths: Arc<Vec<usize>>,
    options: LoaderOptions,
    counts: PackCounts,
    total_steps: u64,
    steps_per_epoch: u64,
}

impl LoaderPlan {
    /// Cuts over-length documents and counts the steps.
    ///
    /// # Errors
    /// When the options make no sense, and when no document is left to train on.
    pub fn new(examples: Vec<Example>, options: LoaderOptions) -> Result<Self> {
        ensure!(options.grad_accum_steps >= 1, "grad_accum_steps is 0; it must be at least 1");
        let (examples, counts) = pack::fit(examples, &options.pack)?;
        ensure!(
            examples.iter().any(|e| !e.input_ids.is_empty()),
            "no document is left to train on: of {} documents {} are longer than pack_len {}, {} of them dropped, {} with nothing to train after the cut; raise pack_len or choose another overlong",
            counts.num_documents,
            counts.num_overlong,
            options.pack.pack_len,
            counts.num_dropped,
            counts.num_unsupervised
        );
        let lengths = pack::lengths(&examples);
        let mut plan = Self {
            examples: Arc::new(examples),
            lengths: Arc::new(lengths),
            options,
            counts,
            total_steps: 0,
            steps_per_epoch: 0,
        };
        plan.steps_per_epoch = plan.steps_of_epoch(0);
        plan.total_steps = match options.length {
            RunLength::Steps(0) => bail!("a run of 0 steps trains nothing"),
            RunLength::Steps(steps) => steps,
            RunLength::Epochs(epochs) => plan.steps_of_epochs(epochs)?,
        };
        Ok(plan)
    }

    fn steps_of_epochs(&self, epochs: f64) -> Result<u64> {
        ensure!(epochs.is_finite() && epochs > 0.0, "epochs is {epochs}; it must be above 0");
        ensure!(epochs <= 1e6, "epochs is {epochs}; it must be at most a million");
        let whole = epochs.floor() as u64;
        // Packing takes the same number of batches in every epoch (it sees only the lengths); padding does not.
        let steps: u64 = if self.options.pack.packing {
            whole * self.steps_per_epoch
        } else {
            (0..whole).map(|epoch| self.steps_of_epoch(epoch)).sum()
        };
        let rest = (epochs - epochs.floor()) * self.steps_of_epoch(whole) as f64;
        // 2.1 epochs of 10 steps are 21 steps, although 2.1 in binary is a little more.
        Ok(steps + (rest - 1e-6).ceil().max(0.0) as u64)
    }

    /// Optimizer steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        self.total_steps
    }

    /// Steps of the first pass (with padding, later passes may differ by a few).
    pub fn steps_per_epoch(&self) -> u64 {
        self.steps_per_epoch
    }

    /// What was cut or left out.
    pub fn counts(&self) -> PackCounts {
        self.counts
    }

    /// The documents that train, cut where they were too long.
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// Tokens of all documents.
    pub fn tokens_per_epoch(&self) -> u64 {
        self.lengths.iter().map(|len| *len as u64).sum()
    }

    /// Most tokens in a batch of the run, padding included: packs of all epochs have the same sizes, padded rows are at most as long as a pack may be.
    pub fn largest_batch(&self) -> usize {
        if !self.options.pack.packing {
            return self.options.pack.pack_len;
        }
        let tokens =
            |batch: &PlannedBatch| batch.documents.iter().map(|document| self.lengths[*document as usize]).sum();
        self.epoch(0).iter().map(tokens).max().unwrap_or(0)
    }

    /// Which documents share a batch in this epoch, in order.
    pub fn epoch(&self, epoch: u64) -> Vec<PlannedBatch> {
        pack::plan(&self.lengths, &self.options.pack, self.options.seed, epoch)
    }

    fn steps_of_epoch(&self, epoch: u64) -> u64 {
        self.epoch(epoch).len().div_ceil(self.options.grad_accum_steps) as u64
    }

    /// Starts the loader's thread at `cursor`.
    ///
    /// # Errors
    /// When the cursor is not a place of this plan (the data or the options have changed since), and when the thread
    /// cannot be started.
    pub fn start(&self, cursor: Cursor) -> Result<Loader> {
        ensure!(
            cursor.step == 0 || cursor.step <= self.steps_of_epoch(cursor.epoch),
            "step {} of epoch {} does not exist: the data or the packing options are not those of the saved run",
            cursor.step,
            cursor.epoch + 1
        );
        let (sender, receiver) = sync_channel(QUEUE_STEPS);
        let plan = self.clone();
        let thread = std::thread::Builder::new()
            .name("loader".into())
            .spawn(move || plan.fill(cursor, &sender))
            .context("the loader's thread could not be started")?;
        Ok(Loader { receiver: Some(receiver), thread: Some(thread) })
    }

    /// Sends step after step until the run is complete or nobody listens.
    fn fill(&self, mut cursor: Cursor, sender: &SyncSender<LoadedStep>) {
        while cursor.total_steps < self.total_steps {
            let planned = self.epoch(cursor.epoch);
            let steps = planned.chunks(self.options.grad_accum_steps);
            let num_steps = steps.len() as u64;
            for group in steps.skip(cursor.step as usize) {
                if cursor.total_steps >= self.total_steps {
                    return;
                }
                let pad_id = self.options.pack.pad_id;
                let batches = group.iter().map(|planned| planned.build(&self.examples, pad_id)).collect();
                cursor.step += 1;
                cursor.total_steps += 1;
                let epoch = cursor.epoch as f64 + cursor.step as f64 / num_steps as f64;
                if sender.send(LoadedStep { batches, cursor, epoch }).is_err() {
                    return;
                }
            }
            cursor = Cursor { epoch: cursor.epoch + 1, step: 0, ..cursor };
        }
    }
}

/// The receiving end of the loader's queue. Dropping it ends the thread.
#[derive(Debug)]
pub struct Loader {
    receiver: Option<Receiver<LoadedStep>>,
    thread: Option<JoinHandle<()>>,
}

impl Loader {
    /// The next step, waiting for it if need be; `None` when the run is complete.
    ///
    /// # Errors
    /// When the loader's thread ended by a defect: the run must not take that for its end.
    pub fn next_step(&mut self) -> Result<Option<LoadedStep>> {
        let received = self.receiver.as_ref().and_then(|receiver| receiver.recv().ok());
        if received.is_none()
            && let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            bail!("the loader's thread ended by a defect; its message is on the terminal");
        }
        Ok(received)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Closing the queue first wakes a thread that waits for room on it.
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::options::Overlong;

    fn examples(n: usize) -> Vec<Example> {
        let rng = crate::base::rng::Philox::new(11, 0);
        let example = |i: usize| {
            let len = 2 + rng.below(i as u64, 30) as usize;
            let input_ids: Vec<i32> = (0..len).map(|t| (i * 100 + t) as i32).collect();
            let labels = (0..len).map(|t| input_ids.get(t + 1).copied().unwrap_or(-100)).collect();
            Example { input_ids, labels }
        };
        (0..n).map(example).collect()
    }

    fn options(packing: bool, length: RunLength) -> LoaderOptions {
        let pack = PackOptions { packing, pack_len: 64, overlong: Overlong::Truncate, pad_id: 0 };
        LoaderOptions { pack, grad_accum_steps: 3, seed: 5, length }
    }

    fn all_steps(plan: &LoaderPlan, cursor: Cursor) -> Vec<LoadedStep> {
        let mut loader = plan.start(cursor).unwrap();
        let mut steps = Vec::new();
        while let Some(step) = loader.next_step().unwrap() {
            steps.push(step);
        }
        assert!(loader.next_step().unwrap().is_none());
        steps
    }

    fn documents(steps: &[LoadedStep]) -> Vec<i32> {
        let batches = steps.iter().flat_map(|s| &s.batches);
        let mut first: Vec<i32> =
            batches.flat_map(|b| b.cu_seqlens[..b.num_seqs()].iter().map(|s| b.input_ids[*s as usize])).collect();
        first.sort_unstable();
        first
    }

    #[test]
    fn every_epoch_has_every_document_once_in_another_order() {
        let plan = LoaderPlan::new(examples(100), options(true, RunLength::Epochs(2.0))).unwrap();
        let steps = all_steps(&plan, Cursor::default());
        assert_eq!(steps.len() as u64, plan.total_steps());
        let (first, second) = steps.split_at(plan.steps_per_epoch() as usize);
        let expected: Vec<i32> = (0..100).map(|i| i * 100).collect();
        assert_eq!((documents(first), documents(second)), (expected.clone(), expected));
        let batches = |steps: &[LoadedStep]| steps.iter().flat_map(|s| s.batches.clone()).collect::<Vec<_>>();
        assert_ne!(batches(first), batches(second));
        let largest = |steps: &[LoadedStep]| batches(steps).iter().map(PackedBatch::total_tokens).max().unwrap();
        assert_eq!([largest(first), largest(second)], [plan.largest_batch(); 2]);
        assert_eq!((first[first.len() - 1].epoch, second[second.len() - 1].epoch), (1.0, 2.0));
        for step in &steps {
            assert!(!step.batches.is_empty() && step.batches.len() <= 3);
            step.batches.iter().for_each(|batch| batch.check().unwrap());
        }
    }

    #[test]
    fn resuming_anywhere_gives_the_same_batches() {
        for packing in [true, false] {
            let plan = LoaderPlan::new(examples(60), options(packing, RunLength::Epochs(2.4))).unwrap();
            let whole = all_steps(&plan, Cursor::default());
            assert_eq!(whole.len() as u64, plan.total_steps());
            for done in 0..whole.len() {
                let cursor = if done == 0 { Cursor::default() } else { whole[done - 1].cursor };
                let text = serde_json::to_string(&cursor).unwrap();
                let cursor: Cursor = serde_json::from_str(&text).unwrap();
                assert_eq!(all_steps(&plan, cursor), whole[done..], "after {done} steps");
            }
        }
    }

    #[test]
    fn lengths_in_epochs_and_steps() {
        let plan = |length| LoaderPlan::new(examples(100), options(true, length));
        let per_epoch = plan(RunLength::Epochs(1.0)).unwrap().total_steps();
        assert!(per_epoch > 4);
        assert_eq!(plan(RunLength::Epochs(3.0)).unwrap().total_steps(), 3 * per_epoch);
        assert_eq!(plan(RunLength::Epochs(1.5)).unwrap().total_steps(), per_epoch + per_epoch.div_ceil(2));
        assert_eq!(plan(RunLength::Epochs(0.001)).unwrap().total_steps(), 1);
        let steps = plan(RunLength::Steps(per_epoch + 2)).unwrap();
        let all = all_steps(&steps, Cursor::default());
        assert_eq!(all.len() as u64, per_epoch + 2);
        assert_eq!(all[all.len() - 1].cursor, Cursor { epoch: 1, step: 2, total_steps: per_epoch + 2 });
        for wrong in [RunLength::Epochs(0.0), RunLength::Epochs(f64::NAN), RunLength::Steps(0)] {
            assert!(plan(wrong).is_err());
        }
    }

    #[test]
    fn packing_takes_the_same_steps_in_every_epoch() {
        let plan = LoaderPlan::new(examples(300), options(true, RunLength::Epochs(1.0))).unwrap();
        let counts: Vec<usize> = (0..20).map(|epoch| plan.epoch(epoch).len()).collect();
        assert!(counts.iter().all(|n| *n == counts[0]), "{counts:?}");
    }

    #[test]
    fn a_dropped_loader_ends_its_thread() {
        let plan = LoaderPlan::new(examples(50), options(true, RunLength::Steps(1_000_000_000))).unwrap();
        let mut loader = plan.start(Cursor::default()).unwrap();
        assert!(loader.next_step().unwrap().is_some());
        // Joins the thread: the test would hang if it went on.
        drop(loader);
        drop(plan.start(Cursor::default()).unwrap());
    }

    #[test]
    fn nothing_to_train_on_says_why() {
        let mut options = options(true, RunLength::Epochs(1.0));
        options.pack.overlong = Overlong::Drop;
        options.pack.pack_len = 2;
        let long: Vec<Example> = examples(20).into_iter().filter(|e| e.input_ids.len() > 2).collect();
        let message = LoaderPlan::new(long, options).unwrap_err().to_string();
        assert!(message.contains("longer than pack_len 2") && message.contains("raise pack_len"), "{message}");
        options.grad_accum_steps = 0;
        assert!(LoaderPlan::new(examples(3), options).unwrap_err().to_string().contains("grad_accum_steps"));
    }

    #[test]
    fn a_cursor_of_other_data_is_refused() {
        let plan = LoaderPlan::new(examples(20), options(true, RunLength::Epochs(1.0))).unwrap();
        let cursor = Cursor { epoch: 0, step: 500, total_steps: 500 };
        assert!(plan.start(cursor).unwrap_err().to_string().contains("not those of the saved run"));
    }
}
