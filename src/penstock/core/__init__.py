"""Foundations with no machine learning in them; each file could be a library of its own."""
