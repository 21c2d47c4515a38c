"""DeepSpeed engine, training loop, gathering, checkpoints."""
