"""Core utilities without machine learning; each file could be a library of its own."""
