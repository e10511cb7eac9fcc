"""Speculative decoding: draft tokens from the sequence itself, a draft model, or extra heads."""
