"""Functions of tensors as graphs of ATen operators: traced, simplified, guarded and run."""
