//! Layers made of operations: linear with adapters, attention, MLP, norm, embedding, head.
