"""Checkpoints: logical tensors under canonical names, whatever layout trained them."""
