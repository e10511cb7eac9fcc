"""Tuning of a model that was trained before: the [tune] section, and where its frozen weights are kept."""
