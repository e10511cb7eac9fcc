"""Input files of a preparation: files given by the user, and folders walked in byte order.

A folder contributes its files with the selected suffixes. Names that start with a dot or match an exclusion
are left out with everything below them, and links to folders are not followed (they may be circular). Omitted
entries are counted by reason, for the summary.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa

from penstock.core.errors import InputError, PenstockError, UsageError
from penstock.data.formats.choice import no_tokens, text_columns, token_lists
from penstock.data.prepare.plan import InputFile, Kind

_PLAIN = ".txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml"
_CODE = (
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .rs .go .java .kt .scala .swift .cs .fs .js .jsx"
    " .mjs .ts .tsx .vue .css .scss .rb .php .pl .pm .lua .r .jl .m .hs .ml .mli .ex .exs .erl .clj .lisp .el"
    " .scm .sh .bash .zsh .fish .ps1 .sql .proto .toml .yaml .yml .ini .cfg .cmake .mk .gradle .nix .tf"
    " .dockerfile .asm .s .f90 .zig"
)
_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
_READ_PACKED = (".gz", ".zst")
_PACKED = (*_READ_PACKED, ".bz2", ".xz")
_KINDS: dict[str, Kind] = {
    f"{suffix}{packed}": "jsonl" for suffix in _LINES for packed in ("", *_READ_PACKED)
}
_KINDS[_PARQUET] = "parquet"

_TEXT = (*f"{_PLAIN} {_CODE}".split(), *_LINES)
PLAIN_SUFFIXES = (*_TEXT, _PARQUET)
"""DEFAULT_SUFFIXES without those of compressed files."""

DEFAULT_SUFFIXES = (*PLAIN_SUFFIXES, *(f"{suffix}{packed}" for suffix in _TEXT for packed in _READ_PACKED))
"""Suffixes of the files of a folder that are read unless --suffix is given."""

Skipped = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selection of entries of a folder."""

    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    """Suffixes of file names, in any case."""
    exclude: tuple[str, ...] = ()
    """Globs matched against the name of a file or folder or, if they contain a slash, its path in the
    input."""
    never: Path | None = None
    """Folder that is never read: the output, which may be inside an input."""


def kind_of(path: str) -> Kind:
    """Return the reader of a file, by its name; the default is one text document.

    >>> kind_of("web.JSONL.zst"), kind_of("a/b.parquet"), kind_of("notes.txt.gz")
    ('jsonl', 'parquet', 'text')
    """
    return next((kind for suffix, kind in _KINDS.items() if path.lower().endswith(suffix)), "text")


def find_inputs(paths: Sequence[str], selection: Selection) -> tuple[tuple[InputFile, ...], Skipped]:
    """Return the input files in reading order, and the number of omitted entries by reason.

    Raises:
        UsageError: a path is missing or given twice, or no file matches.
        InputError: a folder cannot be listed.
    """
    skipped: Skipped = Counter()
    files: dict[str, InputFile] = {}
    if "" in paths:  # a shell variable that is not set
        raise UsageError("An input is an empty path", fix="Name files or folders of text.")
    for path in paths:
        for file in _files_of(path, selection, skipped):
            key = os.path.abspath(file.path)  # noqa: PTH100  Path.absolute keeps "..", so would miss repeats
            if key in files:
                raise UsageError(
                    f"Input {shown(file.path)} is given twice", fix="Name each file or folder once."
                )
            files[key] = file
    if not files and skipped["suffix .arrow"]:
        found = (file for path in paths for file in Path(path).rglob("*.arrow"))
        raise _no_text(str(min(found, key=lambda file: ("train" not in file.parts, file))))
    if not files:
        passed = "; ".join(f"{reason}: {count:,}" for reason, count in skipped.most_common(5))
        why = f"omitted: {passed}" if passed else "empty"
        raise UsageError(
            f"No input file in {' '.join(map(shown, paths))} ({why})",
            fix="Name files of text, or choose the files of a folder with --suffix, as in --suffix .log.",
        )
    return tuple(files.values()), skipped


def shown(path: str) -> str:
    """Return a path that any terminal can print; bytes that are not text are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _files_of(path: str, selection: Selection, skipped: Skipped) -> Iterator[InputFile]:
    if Path(path).is_dir():
        yield from _walk(path, selection, skipped)
    elif Path(path).is_file():
        if path.lower().endswith(".arrow"):
            raise _no_text(path)
        yield _described(path)
    else:
        state = "is neither a file nor a folder" if Path(path).exists() else "does not exist"
        raise UsageError(f"Input {shown(path)} {state}", fix="Name files or folders of text.")


def _no_text(path: str) -> PenstockError:
    """Return the error for an Arrow file; the fix depends on whether it contains token ids or text."""
    try:
        with pa.memory_map(path) as file:
            schema = pa.ipc.open_stream(file).schema
    except (pa.ArrowException, OSError):  # Penstock's own shards are not Arrow streams
        schema = pa.schema([])
    if text_columns(schema) and not token_lists(schema):
        return no_tokens(schema, {}, name=shown(path))
    return UsageError(
        f"{shown(path)} is an Arrow file, and Arrow files are not read as text",
        fix="If it holds token ids, its folder is a corpus as it is: `penstock data describe FOLDER`.",
    )


def _walk(root: str, selection: Selection, skipped: Skipped) -> Iterator[InputFile]:
    """Yield the selected files below a folder, depth first, names in byte order."""
    never = selection.never.resolve() if selection.never else None
    waiting = _entries(root)
    while waiting:
        entry = waiting.pop()
        inside = os.path.relpath(entry.path, root)
        is_folder = entry.is_dir()
        if entry.name.startswith("."):
            skipped["names that start with a dot"] += 1
        elif any(fnmatchcase(inside if "/" in p else entry.name, p.rstrip("/")) for p in selection.exclude):
            skipped["excluded"] += 1
        elif is_folder and entry.is_symlink():
            skipped["links to folders"] += 1
        elif is_folder:
            if never is None or Path(entry.path).resolve() != never:
                waiting += _entries(entry.path)
        elif not entry.name.lower().endswith(selection.suffixes):
            skipped[f"suffix {_suffix(entry.name)}"] += 1
        elif entry.is_file() or entry.is_symlink():
            yield _described(entry.path)
        else:
            skipped["sockets, pipes and devices"] += 1


def _suffix(name: str) -> str:
    """Return the suffix of a name, including that of its compression.

    >>> _suffix("web.2024.JSON.gz"), _suffix("v1.2.png"), _suffix("a.gz"), _suffix("LICENSE")
    ('.json.gz', '.png', '.gz', 'none')
    """
    last = Path(name).suffix.lower()
    inner = Path(Path(name).stem).suffix.lower() if last in _PACKED else ""
    return f"{inner}{last}" or "none"


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    """Return a folder's entries in descending byte order, so that popping yields them ascending."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: os.fsencode(entry.name), reverse=True)
    except OSError as error:
        fix = "Make it readable, or leave it out with --exclude."
        raise InputError(f"Folder {shown(folder)} cannot be listed ({error.strerror})", fix=fix) from None


def _described(path: str) -> InputFile:
    try:
        status = Path(path).stat()
        size, mtime_ns = status.st_size, status.st_mtime_ns
    except OSError:  # a broken link: kept, so that it is listed as unreadable
        size, mtime_ns = 0, 0
    return InputFile(path=path, kind=kind_of(path), bytes=size, mtime_ns=mtime_ns)
