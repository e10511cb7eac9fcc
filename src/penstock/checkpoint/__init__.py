"""Checkpoints: write, read and retain those of a run; import and export Hugging Face folders."""
