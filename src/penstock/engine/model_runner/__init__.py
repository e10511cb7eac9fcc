"""Model runner: one forward pass over a batch and its KV cache."""
