"""Servers whose /metrics pages the console draws: asked while somebody looks, kept for an hour."""
