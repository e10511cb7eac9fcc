"""Sections of a recipe: every key with its default and validation; no torch."""
