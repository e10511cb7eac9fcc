"""Attention kernels, one file each, with one call signature."""
