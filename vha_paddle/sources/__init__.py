"""Checkpoints of whatever origin, read as one thing: a model section and its tensors under our names."""
