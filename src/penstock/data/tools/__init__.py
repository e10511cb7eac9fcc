"""Tools on corpora: describe, verify, convert."""
