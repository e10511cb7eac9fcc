"""Text processing: tokenizers and chat templates; no torch."""
