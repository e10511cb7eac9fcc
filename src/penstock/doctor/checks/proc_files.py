"""Readers of /proc and /sys."""

from pathlib import Path


def text_of(path: Path) -> str:
    """Return a file's text without surrounding space; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """Return the integer in a file; None if there is none, or if it is "max" (no limit)."""
    text = text_of(path)
    return int(text) if text.isdecimal() else None
