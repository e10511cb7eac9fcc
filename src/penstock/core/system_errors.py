"""Operating-system errors as messages for users: the operation, the path, and the remedy."""

import errno
import os
from pathlib import Path

_REMEDIES = {
    errno.EDQUOT: "Your quota is used up: delete what you no longer need, or write to another disk.",
    errno.EMFILE: "Raise the limit of open files with `ulimit -n 65536`, then run the same command again.",
    errno.ENFILE: "The machine has too many files open: end processes that hold them, or raise fs.file-max.",
    errno.ENOMEM: "The machine is out of memory: end other processes, or use a smaller model or batch.",
    errno.EIO: "The disk, or the network to it, failed: see `dmesg`, then run the same command again.",
    errno.ESTALE: "The shared folder was mounted again: change into it again, and run the same command.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ELOOP: "Its links are circular: name the file itself.",
    errno.EXDEV: "Choose paths on one file system.",
}


def in_words(error: OSError) -> str:
    """Return a one-paragraph message; a path is examined again to find which part of it is wrong.

    >>> in_words(OSError(errno.ENAMETOOLONG, "File name too long", "aaaa"))
    'File name too long: aaaa. Choose a shorter name.'
    """
    said = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOSPC:
        where = f" for {_shown(error)}" if error.filename is not None else ""
        remedy = "Free some space (`df -h` shows where) and run the same command again."
        return f"No space left on device{where}. {remedy}"
    if not isinstance(error.filename, str | bytes | os.PathLike):
        remedy = _REMEDIES.get(error.errno or 0, "")
        return f"{said}. {remedy}".rstrip()
    path = _final(Path(os.fsdecode(error.filename)))
    explain = _EXPLAINED.get(error.errno or 0)
    remedy = _REMEDIES.get(error.errno or 0, "")
    return explain(path) if explain else f"{said}: {_shown(error)}. {remedy}".rstrip()


def _shown(error: OSError) -> str:
    names = [
        name for name in (error.filename, error.filename2) if isinstance(name, str | bytes | os.PathLike)
    ]
    return " -> ".join(os.fsencode(name).decode(errors="backslashreplace") for name in names)


def _final(path: Path) -> Path:
    """Return the final path of a temporary file; see `temporary_beside` in files.py."""
    name = path.name
    return (
        path.with_name(name[1:-4]) if name.startswith(".") and name.endswith(".tmp") and name[1:-4] else path
    )


def _name(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _not_a_folder(path: Path) -> str:
    culprit = next((part for part in reversed((path, *path.parents)) if _is_file(part)), None)
    if culprit is None:
        return f"{_name(path)} exists already. Name another, or move it away."
    return (
        f"{_name(culprit)} is a file, and a folder of that name is needed"
        f"{'' if culprit == path else f' for {_name(path)}'}. Name another folder, or move the file away."
    )


def _no_file(path: Path) -> str:
    if path.is_symlink():
        target = _name(path.readlink())
        return f"{_name(path)} is a link to {target}, which does not exist. Restore that, or name another."
    missing = next((part for part in reversed(path.parents) if not part.exists()), None)
    if missing is not None and missing != path:
        return f"{_name(path)} does not exist, nor does its folder {_name(missing)}. Check the path."
    where = "" if path.is_absolute() else f"; it is relative to {Path.cwd()}"
    return f"{_name(path)} does not exist. Check the path{where}."


def _is_folder(path: Path) -> str:
    return f"{_name(path)} is a folder, and a file is needed there. Name a file."


def _read_only(path: Path) -> str:
    return (
        f"{_name(path)} cannot be written: its file system is read-only. Name a writable path, "
        "or mount it for writing."
    )


def _not_allowed(path: Path) -> str:
    standing = next((part for part in (path, *path.parents) if _exists(part)), path)
    if standing != path or (standing.is_dir() and os.access(standing, os.R_OK)):
        what, needed = f"Nothing may be written in {_name(standing)}", "u+w"
    elif os.access(standing, os.R_OK):
        what, needed = f"{_name(path)} may not be written", "u+w"
    else:
        what, needed = f"{_name(path)} may not be read", "u+r"
    return (
        f"{what}: permission denied. Name another path, or ask its owner for access "
        f"(`ls -ld` shows the owner, `chmod {needed}` allows it)."
    )


def _is_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a parent folder cannot be entered
        return False


_EXPLAINED = {
    errno.EEXIST: _not_a_folder,
    errno.ENOTDIR: _not_a_folder,
    errno.ENOENT: _no_file,
    errno.EISDIR: _is_folder,
    errno.EROFS: _read_only,
    errno.EACCES: _not_allowed,
    errno.EPERM: _not_allowed,
}
