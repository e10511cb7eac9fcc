"""Tensor-parallel workers: the processes of one engine on one machine."""
