"""Families of models, one file each: the keys of their `config.json`, and how their tensors are stored."""
