"""Speculative decoding: draft tokens from the sequence itself, or from extra heads."""
