"""Layers: plain PyTorch modules whose attention kernel is handed to them."""
