"""Checkpoints: runs written, read and kept, and Hugging Face folders both ways."""
