"""Folders of the runs that this user has launched from here: links in the user's state, one for each run."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from penstock.core import env


def remember(run: Path) -> None:
    """Note the folder of a run; without a home that can be written, nothing is noted."""
    with suppress(OSError, RuntimeError):
        links = _links()
        links.mkdir(parents=True, exist_ok=True)
        (links / hashlib.blake2b(os.fsencode(run), digest_size=12).hexdigest()).symlink_to(run)


def known_runs() -> list[Path]:
    """Return the noted folders that are there; links to folders that were removed are deleted."""
    found = []
    with suppress(OSError, RuntimeError):
        for link in _links().iterdir():
            with suppress(OSError):  # an entry that is no link, or whose file system fails, hides no other
                run = link.readlink()
                if run.is_dir():
                    found.append(run)
                elif run.parent.is_dir():  # else its file system may not be mounted now
                    link.unlink()
    return found


def _links() -> Path:
    base = env.variable("XDG_STATE_HOME")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "penstock" / "runs"
