"""Optimizers: what a recipe may choose (config), the rules, and how the weights they change are stored."""
