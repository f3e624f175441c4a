//! What leaves a run: adapters in PEFT format.
