"""Layers as plain PyTorch modules; the attention kernel is an argument of the forward pass."""
