"""Checksums of rows in a run's sample logs, which an audit compares; imports no torch."""
