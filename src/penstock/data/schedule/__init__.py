"""Data schedule: which corpus, weight, sequence length and batch size hold from which step on."""
