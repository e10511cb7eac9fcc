"""Corpus specs as users write them: a folder, an address, or FORMAT:PATH with options.

    corpora/web                                    a folder; the format follows from its files
    s3://bucket/web                                the same in an object store
    olmo:/data/dolma,dtype=uint32,eos_id=100257    files of another tool
    synthetic:tokens=1e14,mean_document=900        computed tokens, no files
    text:/data/web,tokenizer=tokenizer.json        text, tokenized while it is read (text_corpus.py)

An existing path is always read as a path, whatever it looks like.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UsageError, nearest
from penstock.data.formats import FORMATS

SYNTHETIC = "synthetic"
TEXT = "text"

TEXT_OPTIONS = {
    "tokenizer": "a tokenizer.json, or a folder that contains one",
    "cache": "folder for the tokens",
    "column": "field of a JSON line, or column of a Parquet, Arrow or MDS file, that holds the document",
    "html": "extract (the default): the main text of HTML pages; keep: their mark-up",
    "first_part_tokens": "tokens of the first part; each further part has twice as many",
    "part_tokens": "tokens of the largest parts",
    "max_errors": "number of rejected inputs that are tolerated",
    "max_document_bytes": "larger documents are rejected",
    "zstd_long": "largest window of .zst inputs, as a power of 2",
}
"""Options of a corpus of text, with their help."""

COMMON_OPTIONS = {
    "vocab_size": "every token id is below it",
    "eos_id": "token stored after each document",
}
"""Options of every file format, with their help."""

GRAMMAR = "FORMAT:PATH[,option=value,...]"

_PREFIX = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):(?!//)(.*)", re.DOTALL)
_OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([^/]*)", re.DOTALL)
_ANY_OPTION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spec:
    """Parsed corpus spec: format, location and options."""

    format: str | None
    """Row of FORMATS; None: detected from the files."""
    location: str
    """Path or address; empty for a synthetic corpus."""
    options: Mapping[str, str]
    """Options after the path, as strings."""


def parse_spec(text: str) -> Spec:
    """Parse a corpus spec.

    Raises:
        UsageError: an unknown format or option, or a repeated option.


    >>> parse_spec("olmo:/data/dolma,dtype=uint32").options
    {'dtype': 'uint32'}
    """
    match = _PREFIX.fullmatch(text)
    if match is None or Path(text).exists():
        return Spec(None, text, {})
    name, rest = match.groups()
    if name == TEXT:
        location, pairs = _split_text(rest)
        return Spec(TEXT, location, _options(TEXT, pairs))
    if name not in FORMATS:
        fix = f"{nearest(name, [*FORMATS, TEXT])} Write {GRAMMAR}, or a path that exists."
        raise UsageError(f"Corpus {text} has an unknown format", got=name, fix=fix)
    location, pairs = ("", rest.split(",")) if name == SYNTHETIC else _split(rest)
    return Spec(name, location, _options(name, [pair for pair in pairs if pair]))


def absolute(text: str) -> str:
    """Return the spec with absolute paths, valid in any working directory; an address stays as it is.


    >>> absolute("s3://bucket/web"), absolute("synthetic:tokens=1e9")
    ('s3://bucket/web', 'synthetic:tokens=1e9')
    >>> absolute("text:/a.jsonl,tokenizer=/t.json")
    'text:/a.jsonl,tokenizer=/t.json'
    """
    spec = parse_spec(text)
    if not spec.location or "://" in spec.location:
        return text
    head = f"{spec.format}:" if spec.format else ""
    options = text[len(head) + len(spec.location) :]
    if spec.format == TEXT:
        named = {
            name: _absolute(value) if name in ("tokenizer", "cache") else value
            for name, value in spec.options.items()
        }
        options = "".join(f",{name}={value}" for name, value in named.items())
    return f"{head}{_absolute(spec.location)}{options}"


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100  not resolve: a link's name tells its format


def _split(rest: str) -> tuple[str, list[str]]:
    """Split a path from the options after it; the path may contain commas."""
    if rest and Path(rest).exists():
        return rest, []
    path, *pairs = rest.split(",")
    while pairs and not all(_OPTION.fullmatch(pair) for pair in pairs):
        path = f"{path},{pairs.pop(0)}"
    if not path:
        raise UsageError("A corpus has no path", got=rest, fix=f"Write {GRAMMAR}.")
    return path, pairs


def _split_text(rest: str) -> tuple[str, list[str]]:
    """Split a path from the options after it; the options may be paths."""
    if Path(rest).exists():
        return rest, []
    path, *pairs = re.split(r",(?=[A-Za-z_][A-Za-z0-9_]*=)", rest)
    if not path:
        raise UsageError("A corpus has no path", got=rest, fix="Write text:PATH,tokenizer=FILE.")
    return path, pairs


def _options(name: str, pairs: list[str]) -> dict[str, str]:
    if name == "arrow":
        known: dict[str, str] = {}
    elif name == TEXT:
        known = TEXT_OPTIONS
    else:
        known = dict(FORMATS[name].options) | ({} if name == SYNTHETIC else COMMON_OPTIONS)
    options: dict[str, str] = {}
    for pair in pairs:
        match = (_ANY_OPTION if name == TEXT else _OPTION).fullmatch(pair)
        if match is None:
            raise UsageError("An option of a corpus is written option=value", got=pair)
        key, value = match[1], match[2].strip()
        if key not in known:
            hint = nearest(key, list(known)) if known else "It has none."
            raise UsageError(f"Format {name} has no such option", got=key, fix=hint)
        if key in options:
            raise UsageError(f"Option {key} of a corpus is given twice", got=",".join(pairs))
        options[key] = value
    return dict(sorted(options.items()))
