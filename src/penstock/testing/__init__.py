"""Test helpers for code built on Penstock: tiny corpora, gloo ranks, loader conformance."""
