"""Attention kernels: one file each, all answering to the same call."""
