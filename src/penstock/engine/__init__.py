"""Answers from a model, many at once: whose turn it is, the network over pages, what is drawn, text."""
