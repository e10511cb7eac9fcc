"""Read what /proc and /sys say of this machine."""

from pathlib import Path


def text_of(path: Path) -> str:
    """Return a file's text without the space around it; empty where there is none to read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """Return the whole number in a file; None where there is none, or the word "max" stands for no limit."""
    text = text_of(path)
    return int(text) if text.isdecimal() else None
