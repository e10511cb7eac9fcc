"""Sampling: grammars and penalties change the logits, filters and a random number choose the token."""
