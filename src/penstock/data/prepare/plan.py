"""The plan of a preparation: its options and its input files, and what differs between two plans.

The plan decides every byte of the corpus, so it is stored in the folder before the first shard, and
a later run may continue only under the same plan. `max_errors` is no part of it: it decides whether
the result is accepted, not what it is.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import CorpusError, UsageError
from penstock.core.files import write_atomic
from penstock.data.prepare.parts import FIRST_PART_TOKENS, Growth
from penstock.text.tokenizer import MIN_VOCAB

FILE = "inputs.jsonl"
VERSION = 1

Kind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file to read."""

    path: str
    """As the user gave it, or the user's folder joined with the path inside it."""
    kind: Kind
    """Which reader understands it."""
    bytes: int
    """Size on disk."""
    mtime_ns: int
    """Time of the last change; with the size, what tells that the file is still the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """How raw text becomes token shards."""

    tokenizer: Path | None = None
    """A tokenizer.json to use, or None to train one."""
    train_tokenizer: int | None = None
    """Vocabulary of the tokenizer to train, or None to use a given one."""
    shard_tokens: int = 100_000_000
    """Tokens per shard at most, but for a document that is larger by itself. One shard is held in
    memory (2 or 4 bytes a token), and a killed run repeats at most one shard."""
    text_column: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the document."""
    max_document_bytes: int = 256 * 2**20
    """Larger documents are rejected and listed. Reading one takes a few times its size in memory."""
    max_errors: int = 0
    """Rejected inputs that are tolerated; with more, the corpus is not declared complete."""
    stream: bool = False
    """Cut the corpus into parts (see parts.py) that may be read while the rest is prepared."""
    first_part_tokens: int = FIRST_PART_TOKENS
    """Tokens of the first part of a streamed corpus at most; each further one has twice as many."""
    part_tokens: int | None = None
    """Tokens of its largest parts at most; None: as many as a shard. The first pass is shuffled within
    parts."""

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            fix = "Give --tokenizer FILE to use that one, or --train-tokenizer 4096 to train one."
            raise UsageError("Exactly one of --tokenizer and --train-tokenizer is needed", fix=fix)
        if self.tokenizer is not None and not self.tokenizer.is_file():
            state = "is a folder" if self.tokenizer.is_dir() else "does not exist"
            fix = "Give the path of a tokenizer.json, or --train-tokenizer VOCAB to train one."
            raise UsageError(f"Tokenizer {self.tokenizer} {state}", fix=fix)
        if self.train_tokenizer is not None and self.train_tokenizer < MIN_VOCAB:
            fix = f"Use at least {MIN_VOCAB}: the 256 bytes and the end token."
            raise UsageError("--train-tokenizer is too small", got=self.train_tokenizer, fix=fix)
        for name, least in (
            ("shard_tokens", 1),
            ("max_document_bytes", 1),
            ("max_errors", 0),
            ("first_part_tokens", 1),
            ("part_tokens", 1),
        ):
            if getattr(self, name) is not None and getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} must be at least {least}", got=getattr(self, name))

    @property
    def growth(self) -> Growth | None:
        """How the corpus is cut into parts; None: it is all one."""
        if not self.stream:
            return None
        largest = self.part_tokens or self.shard_tokens
        first, shard = min(self.first_part_tokens, largest), min(self.shard_tokens, largest)
        return Growth(first_part_tokens=first, part_tokens=largest, shard_tokens=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides the bytes of the corpus."""

    options: dict[str, str | int]
    """Option name on the command line -> value; a given tokenizer by its fingerprint."""
    files: tuple[InputFile, ...]
    """In reading order."""

    @property
    def input_bytes(self) -> int:
        """Bytes of all input files."""
        return sum(file.bytes for file in self.files)


def make_plan(config: PrepareConfig, files: tuple[InputFile, ...], *, tokenizer: str | None) -> Plan:
    """Return the plan of a configuration.

    Args:
        tokenizer: fingerprint of the given tokenizer; None when one is to be trained.
    """
    options: dict[str, str | int] = {
        "shard-tokens": config.shard_tokens,
        "text-column": config.text_column,
        "max-document-bytes": config.max_document_bytes,
    }
    if growth := config.growth:
        options |= {
            "stream": "set",
            "first-part-tokens": growth.first_part_tokens,
            "part-tokens": growth.part_tokens,
        }
    if tokenizer is not None:
        options["tokenizer"] = tokenizer
    elif config.train_tokenizer is not None:
        options["train-tokenizer"] = config.train_tokenizer
    return Plan(options=options, files=files)


def save_plan(folder: Path, plan: Plan) -> None:
    """Write the plan durably: a line of options, then a line for each input file."""
    rows: list[dict[str, Any]] = [{"version": VERSION, "options": plan.options}]
    rows += [asdict(file) for file in plan.files]
    write_atomic(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows))


def load_plan(folder: Path) -> Plan | None:
    """Read the plan of a folder, or None where there is none.

    Raises:
        CorpusError: the file is damaged or of another version.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        head, *rows = (json.loads(line) for line in path.read_bytes().splitlines())
        if head["version"] != VERSION:
            raise ValueError(f"version {head['version']}, this program writes {VERSION}")
        return Plan(options=head["options"], files=tuple(InputFile(**row) for row in rows))
    except (ValueError, TypeError, KeyError) as error:
        fix = "Use --restart to prepare the folder again, or another --out."
        raise CorpusError(f"{path} is damaged ({error})", fix=fix) from None


def differences(old: Plan, new: Plan) -> list[str]:
    """Say in what a new plan departs from an old one; empty when they are the same.

    >>> old = Plan(options={"shard-tokens": 10, "train-tokenizer": 300}, files=())
    >>> differences(old, Plan(options={"shard-tokens": 20, "tokenizer": "ab"}, files=()))
    ['--shard-tokens was 10, now 20', '--train-tokenizer was 300, now unset', '--tokenizer was unset, now ab']
    """
    found = []
    for name in dict.fromkeys([*old.options, *new.options]):
        was, now = old.options.get(name, "unset"), new.options.get(name, "unset")
        if was != now:
            found.append(f"--{name} was {was}, now {now}")
    return [*found, *_file_differences(old.files, new.files)]


def _file_differences(old: tuple[InputFile, ...], new: tuple[InputFile, ...]) -> Iterator[str]:
    before, after = {f.path: f for f in old}, {f.path: f for f in new}
    groups = {
        "removed": [path for path in before if path not in after],
        "added": [path for path in after if path not in before],
        "changed": [path for path in after if path in before and after[path] != before[path]],
    }
    for word, paths in groups.items():
        if paths:
            more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            yield f"input {word}: {paths[0]}{more}"
    if not any(groups.values()) and old != new:
        yield "the inputs come in another order"
