"""Corpora: manifest, specification, opening, held-out documents."""
