"""Recipes: every key of a TOML recipe with its default, loading and validation; no torch."""
