"""Shipped aids for testing what is built on Penstock: tiny corpora, gloo ranks."""
