"""Input files of a preparation: files given by the user, and folders walked in byte order.

A folder contributes its files with the selected suffixes. Names that start with a dot or match an exclusion
are left out with everything below them, and links to folders are not followed (they may be circular). Omitted
entries are counted by reason, for the summary.

Folders of Hugging Face datasets (`save_to_disk`) and of MDS shards (MosaicML Streaming) are known by their
index files. Of one with several splits only `train` is read, and of Arrow files only those that belong to it.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.core.errors import InputError, PenstockError, UsageError
from penstock.data.formats.damaged import Malformed
from penstock.data.formats.dataset_state import INDICES, STATE, data_files, selection_error
from penstock.data.formats.mds_layout import CODECS
from penstock.data.prepare.chat_records import FORMS
from penstock.data.prepare.columnar import columns_of
from penstock.data.prepare.plan import InputFile, Kind

_PLAIN = ".txt .text .md .markdown .rst .adoc .org .tex .html .htm .xml"
_CODE = (
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .rs .go .java .kt .scala .swift .cs .fs .js .jsx"
    " .mjs .ts .tsx .vue .rb .php .pl .pm .lua .r .jl .m .hs .ml .mli .ex .exs .erl .clj .lisp .el"
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
_KINDS |= {f"{suffix}{packed}": "csv" for suffix in (".csv", ".tsv") for packed in ("", *_READ_PACKED)}
_KINDS[_PARQUET] = "parquet"
_ARROW, _MDS = ".arrow", (".mds", *(f".mds.{codec}" for codec in CODECS))
_KINDS |= {_ARROW: "arrow", **dict.fromkeys(_MDS, "mds")}

_TEXT = (*f"{_PLAIN} {_CODE}".split(), *_LINES)
PLAIN_SUFFIXES = (*_TEXT, _PARQUET, _ARROW, ".mds")
"""DEFAULT_SUFFIXES without those of compressed files."""

DEFAULT_SUFFIXES = (
    *PLAIN_SUFFIXES,
    *_MDS[1:],
    *(f"{suffix}{packed}" for suffix in _TEXT for packed in _READ_PACKED),
)
"""Suffixes of the files of a folder that are read unless --suffix is given."""

_SPLITS, _INDEX = "dataset_dict.json", "index.json"
_HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}
_UNUSABLE = "tables without text"

Skipped = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selection of entries of a folder."""

    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    """Suffixes of file names, in any case."""
    exclude: tuple[str, ...] = ()
    """Globs matched against the name of a file or folder or, if they contain a slash, its path in the
    input."""
    chat_columns: tuple[str, ...] = ()
    """Columns of conversations, if tables of those are of interest, and not of text."""
    never: Path | None = None
    """Folder that is never read: the output, which may be inside an input."""


def kind_of(path: str) -> Kind:
    """Return the reader of a file, by its name; the default is one text document.

    >>> kind_of("web.JSONL.zst"), kind_of("a/b.parquet"), kind_of("notes.txt.gz")
    ('jsonl', 'parquet', 'text')
    """
    return next((kind for suffix, kind in _KINDS.items() if path.lower().endswith(suffix)), "text")


def is_json(path: str) -> bool:
    """Return True if the name of a file is that of JSON; it may hold a list, or lines.

    >>> is_json("chats.json.gz"), is_json("chats.jsonl")
    (True, False)
    """
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith(".json")


def is_code(path: str) -> bool:
    """Return True if the name of a file is that of a program, in which HTML is part of the text.

    >>> is_code("page.php"), is_code("page.html")
    (True, False)
    """
    return path.lower().removesuffix(".gz").removesuffix(".zst").endswith(tuple(_CODE.split()))


def find_inputs(paths: Sequence[str], selection: Selection) -> tuple[tuple[InputFile, ...], Skipped]:
    """Return the input files in reading order, and the number of omitted entries by reason.

    Raises:
        UsageError: a path is missing or given twice, or no file matches.
        InputError: a folder cannot be listed.
        CorpusError: a dataset's rows are a selection of those in its files.
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
    if not files and (skipped[_UNUSABLE] or skipped["suffix .arrow"]):
        found = (f for path in paths for f in Path(path).rglob("*") if f.name.endswith((_ARROW, *_MDS)))
        first = min(found, key=lambda f: ("train" not in f.parts, f.name.startswith("cache-"), f))
        raise _unusable(str(first), chat=selection.chat_columns)
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
        is_table, chat = kind_of(path) in ("arrow", "mds"), selection.chat_columns
        if is_table and not _is_usable(path, chat=chat, broken=not path.endswith(_ARROW)):
            raise _unusable(path, chat=chat)
        if path.endswith(_ARROW):
            folder = Path(path).parent
            _check_state(str(folder), {name for name in (STATE, INDICES) if (folder / name).is_file()})
        yield _described(path)
    else:
        state = "is neither a file nor a folder" if Path(path).exists() else "does not exist"
        raise UsageError(f"Input {shown(path)} {state}", fix="Name files or folders of text.")


def _is_usable(path: str, *, chat: Collection[str], broken: bool = True) -> bool:
    """Return True if a table has a column of text, or one of conversations.

    Args:
        chat: columns of conversations; empty: of text.
        broken: returned if it cannot be read. True: it is then listed as unreadable.
    """
    try:
        columns = columns_of(path, kind_of(path))
    except (Malformed, OSError):
        return broken
    return bool(columns.kinds.keys() & set(chat)) if chat else bool(columns.texts)


def _unusable(path: str, *, chat: Collection[str]) -> PenstockError:
    """Return the error for a table without text, which may hold token ids, or without conversations."""
    try:
        columns = str(columns_of(path, kind_of(path)))
    except (Malformed, OSError):  # Penstock's own shards are Arrow of another kind
        columns = "no columns"
    if chat:
        return UsageError(
            f"{shown(path)} has no column of conversations",
            got=columns,
            fix=f"Columns need to be {FORMS}. --fields OWN=KNOWN names others.",
        )
    return UsageError(
        f"{shown(path)} has no column of text",
        got=columns,
        fix="If it holds token ids, its folder is a corpus as it is: `penstock data describe FOLDER`.",
    )


def _walk(root: str, selection: Selection, skipped: Skipped) -> Iterator[InputFile]:
    """Yield the selected files below a folder, depth first, names in byte order."""
    never = selection.never.resolve() if selection.never else None
    waiting, usable = _entries(root, skipped), dict[str, bool]()
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
                waiting += _entries(entry.path, skipped)
        elif not entry.name.lower().endswith(selection.suffixes):
            skipped[f"suffix {_suffix(entry.name)}"] += 1
        elif kind_of(entry.name) in ("arrow", "mds") and not _folder_is_usable(entry.path, usable, selection):
            skipped[_UNUSABLE] += 1
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


def _folder_is_usable(path: str, known: dict[str, bool], selection: Selection) -> bool:
    """Return `_is_usable` of the first table of a file's folder: those beside it have the same columns."""
    folder = os.path.dirname(path)  # noqa: PTH120  a text, for speed
    if folder not in known:
        known[folder] = _is_usable(path, chat=selection.chat_columns)
    return known[folder]


def _entries(folder: str, skipped: Skipped) -> list["os.DirEntry[str]"]:
    """Return a folder's entries in descending byte order, so that popping yields them ascending.

    Raises:
        UsageError: it has several splits, and none is `train`.
        CorpusError: it is a dataset whose rows are a selection of those in its files.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: os.fsencode(entry.name), reverse=True)
    except OSError as error:
        fix = "Make it readable, or leave it out with --exclude."
        raise InputError(f"Folder {shown(folder)} cannot be listed ({error.strerror})", fix=fix) from None
    names = {entry.name for entry in found}
    left_out = {
        "suffix .arrow": {
            name for name in names if name.endswith(_ARROW) and not _is_of_dataset(name, names)
        },
        "packed copies of MDS shards": {name for name in names if _unpacked_name(name) in names - {name}},
        "splits other than train": _other_splits(folder, names),
    }
    for reason, some in left_out.items():
        if some:
            skipped[reason] += len(some)
    if any(_is_of_dataset(name, names) for name in names):
        _check_state(folder, names)
    gone = set().union(*left_out.values())
    return [entry for entry in found if entry.name not in gone]


def _is_of_dataset(name: str, beside: set[str]) -> bool:
    """Return True if an Arrow file holds rows of a dataset; its caches have other names."""
    return STATE in beside and re.fullmatch(r"(data-\d+-of-\d+|dataset)\.arrow", name) is not None


def _check_state(folder: str, names: set[str]) -> None:
    """Refuse a dataset whose rows are a selection of those in its files.

    Raises:
        CorpusError: with its folder.
    """
    if STATE not in names:
        return
    if INDICES in names:
        raise selection_error(shown(folder))
    try:
        content = (Path(folder) / STATE).read_bytes()
    except OSError as error:
        raise InputError(
            f"{shown(folder)}/{STATE} cannot be read ({error.strerror})", fix="Make it readable."
        ) from None
    data_files(content, shown(f"{folder}/{STATE}"))


def _unpacked_name(name: str) -> str:
    return name.rpartition(".")[0] if name.endswith(_MDS[1:]) else name


def _other_splits(folder: str, names: set[str]) -> set[str]:
    """Return the folders of splits that are not for training.

    >>> _other_splits(".", {"train", "notes.txt"})
    set()
    """
    splits = {n for n in names if any((Path(folder) / n / index).is_file() for index in (STATE, _INDEX))}
    if "train" in splits:
        return splits - {"train"} if _SPLITS in names else splits & _HELD_OUT
    if _SPLITS in names and len(splits) > 1:
        raise UsageError(
            f"{shown(folder)} has {len(splits)} splits, and which is for training is not known",
            got=", ".join(sorted(splits)[:8]),
            fix="Name the folder of one split.",
        )
    return set()


def _described(path: str) -> InputFile:
    try:
        status = Path(path).stat()
        size, mtime_ns = status.st_size, status.st_mtime_ns
    except OSError:  # a broken link: kept, so that it is listed as unreadable
        size, mtime_ns = 0, 0
    return InputFile(path=path, kind=kind_of(path), bytes=size, mtime_ns=mtime_ns)
