"""Pods of a run on Kubernetes: what they are, and what runs in each."""
