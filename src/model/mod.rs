//! The transformer: configuration, blocks, named parameters, loading, generation.
