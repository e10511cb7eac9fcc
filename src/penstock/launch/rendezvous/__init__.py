"""Rendezvous of an elastic run: which nodes are there, in which order, and since when; behind a key."""
