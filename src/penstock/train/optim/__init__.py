"""Optimizers: recipe keys, update rules, and the storage of weights."""
