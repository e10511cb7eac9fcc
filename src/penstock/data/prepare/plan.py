"""Plan of a preparation: options, input files, parts, and the differences between two plans.

The plan determines every byte of the corpus, so it is stored in the folder before the first shard, and a
later run may continue only under the same plan. `max_errors` is not part of it: it decides whether the result
is accepted, not what it is.

Training can begin when the first part is finished, so the first one is small; each further one has twice the
tokens, up to the full size. Up to the size of a shard, a part is one shard; a larger part is several full
shards. Sizes depend only on the number of a shard, so a restarted run cuts the rest as the killed one would
have. They are upper limits: a shard ends before the document that does not fit.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.core.errors import CorpusError, UsageError, nearest
from penstock.core.files import TOKENIZER_FILE, write_atomic
from penstock.core.units import Count
from penstock.data.prepare.byte_streams import MAX_ZSTD_LONG, MIN_ZSTD_LONG, ZSTD_LONG
from penstock.data.prepare.chat_records import FIELDS
from penstock.data.prepare.html import HtmlRule
from penstock.text.tokenizer import MAX_IDS, MIN_VOCAB

FILE = "inputs.jsonl"
VERSION = 1

Kind = Literal["text", "jsonl", "csv", "parquet", "arrow", "mds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """Input file with the properties that identify it."""

    path: str
    """Path as the user gave it, or the user's folder joined with the path inside it."""
    kind: Kind
    """Reader of the file."""
    bytes: int
    """Size on disk."""
    mtime_ns: int
    """Time of the last change in nanoseconds; with the size it shows whether the file has changed."""


FIRST_PART_TOKENS = 1_000_000
"""Size of the default first part: tokenized within seconds on two cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Maximum sizes of shards and parts in tokens, all at least 1."""

    first_part_tokens: int
    """Maximum tokens of the first part."""
    part_tokens: int
    """Maximum tokens of the largest parts."""
    shard_tokens: int
    """Maximum tokens of a shard."""

    def shard_limit(self, shard: int) -> int:
        """Return the maximum tokens of a shard.

        >>> growth = Growth(first_part_tokens=10, part_tokens=70, shard_tokens=30)
        >>> [growth.shard_limit(shard) for shard in range(5)]
        [10, 20, 30, 30, 30]
        """
        return min(self.first_part_tokens << min(shard, 64), self.shard_tokens, self.part_tokens)

    def part_ends(self, num_shards: int, *, done: bool) -> tuple[int, ...]:
        """Return the number of shards at the end of each complete part.

        Args:
            num_shards: number of finished shards.
            done: True if there will be no more shards, so the last part is complete too.


        >>> growth = Growth(first_part_tokens=10, part_tokens=70, shard_tokens=30)
        >>> growth.part_ends(8, done=False), growth.part_ends(8, done=True)
        ((1, 2, 3, 5, 7), (1, 2, 3, 5, 7, 8))
        """
        ends = [end for end in self._ends(num_shards) if end <= num_shards]
        if done and num_shards > (ends[-1] if ends else 0):
            ends.append(num_shards)
        return tuple(ends)

    def _ends(self, num_shards: int) -> Iterator[int]:
        end = part = 0
        while end < num_shards:
            tokens = min(self.first_part_tokens << min(part, 64), self.part_tokens)
            end += max(1, tokens // self.shard_tokens)
            part += 1
            yield end


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Options of conversations: how a template writes them, and what is learned."""

    template: Path | None = None
    """Template of conversations, in Jinja. None: the one in the tokenizer's folder."""
    train_on: Literal["all_assistant", "last"] = "all_assistant"
    """Turns of conversations that are learned: all of the assistant, or the last one."""
    max_tokens: Count | None = None
    """Tokens of conversations that a row of the training run holds. None: any number."""
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    """Treatment of conversations longer than that; those that are dropped or cut at the end are counted."""
    markers_as_text: bool = False
    """Store special tokens of conversations that the vocabulary lacks as text, instead of refusing them."""
    fields: str = ""
    """Names of the records' own fields and the known ones that they stand for, as OWN=KNOWN,OWN=KNOWN."""
    join_turns: bool = False
    """Join consecutive turns of one role, with an empty line between, instead of refusing them."""

    @property
    def field_names(self) -> dict[str, str]:
        """`fields` by the records' own names."""
        pairs = (pair.partition("=") for pair in self.fields.split(",") if pair.strip())
        return {own.strip(): known.strip() for own, _, known in pairs}

    def _check_fields(self) -> None:
        pairs = [pair for pair in self.fields.split(",") if pair.strip()]
        for pair in pairs:
            own, _, known = (part.strip() for part in pair.partition("="))
            if not own or not known or "=" in known:
                raise UsageError(
                    "--fields takes OWN=KNOWN,OWN=KNOWN",
                    got=pair,
                    fix="Commas separate pairs: --fields question=prompt,answer=completion.",
                )
            if known not in FIELDS:
                raise UsageError(
                    f"--fields {pair.strip()} names no known field",
                    got=known,
                    fix=nearest(known, list(FIELDS)),
                )
        names = self.field_names
        if len(names) < len(pairs) or len({*names.values()}) < len(pairs):
            raise UsageError("--fields names a field twice", got=self.fields, fix="Name each field once.")

    def __post_init__(self) -> None:
        self._check_fields()
        if self.max_tokens is not None and self.max_tokens < 2:
            raise UsageError("--max-tokens must be at least 2", got=self.max_tokens)
        if self.max_tokens is None and self.too_long != "refuse":
            raise UsageError(
                f"--too-long {self.too_long} needs the length of a row",
                fix="Add --max-tokens N, with the sequence_length of the recipe.",
            )
        if self.template is not None and not self.template.is_file():
            raise UsageError(f"--chat-template {self.template} is no file", fix="Give a Jinja file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Options of a preparation: raw text to token shards."""

    tokenizer: Path | None = None
    """A tokenizer.json; None: train one."""
    train_tokenizer: Count | None = None
    """Train a byte-level BPE tokenizer with this many entries on up to 64 MiB of inputs. None: use a given
    one."""
    shard_tokens: Count = 100_000_000
    """Maximum tokens per shard, except for a single larger document.

    One shard is held in memory (2 or 4 bytes per token), and a killed run repeats at most one shard."""
    text_column: str = "text"
    """Field of a JSON line, or column of a CSV, Parquet, Arrow or MDS file, that contains the document."""
    html: HtmlRule = "extract"
    """Store the main text of HTML pages, or keep their mark-up."""
    max_document_bytes: Count = 256 * 2**20
    """Maximum size of a document; larger ones are rejected and listed.

    Reading one takes a few times its size in memory."""
    zstd_long: int = ZSTD_LONG
    """Largest window of a .zst input, as a power of 2: files made with `zstd --long=31` need 31.

    Reading one takes that much memory."""
    max_errors: Count = 0
    """Rejected inputs that are tolerated; with more, the corpus is not declared complete."""
    stream: bool = False
    """Cut the corpus into parts that training may read while the rest is prepared."""
    first_part_tokens: Count = FIRST_PART_TOKENS
    """Maximum tokens of the first part with --stream; each further part has twice as many."""
    part_tokens: Count | None = None
    """Maximum tokens of the largest parts with --stream. None: as many as a shard.

    The first epoch is shuffled within parts."""
    chat: ChatConfig | None = None
    """Settings for reading conversations; None: the inputs are text."""

    def __post_init__(self) -> None:
        if self.chat is not None and self.tokenizer is None:
            raise UsageError(
                "--chat needs the tokenizer and the template of a model", fix="Give --tokenizer FOLDER."
            )
        if (self.tokenizer is None) == (self.train_tokenizer is None):
            fix = "Give --tokenizer FILE to use that one, or --train-tokenizer 4096 to train one."
            raise UsageError("Exactly one of --tokenizer and --train-tokenizer is needed", fix=fix)
        if self.tokenizer is not None and not self.tokenizer.is_file():
            state = f"has no {TOKENIZER_FILE}" if self.tokenizer.is_dir() else "does not exist"
            fix = "Give the path of a tokenizer.json, or --train-tokenizer VOCAB to train one."
            raise UsageError(f"Tokenizer {self.tokenizer} {state}", fix=fix)
        if self.train_tokenizer is not None and self.train_tokenizer < MIN_VOCAB:
            fix = f"Use at least {MIN_VOCAB}: the 256 bytes and the end token."
            raise UsageError("--train-tokenizer is too small", got=self.train_tokenizer, fix=fix)
        if self.train_tokenizer is not None and self.train_tokenizer > MAX_IDS:
            fix = f"Use at most {MAX_IDS:,}; the largest of published models have some 260,000 entries."
            raise UsageError("--train-tokenizer is too large", got=f"{self.train_tokenizer:,}", fix=fix)
        if self.html not in get_args(HtmlRule):
            raise UsageError("--html must be extract or keep", got=self.html)
        if not MIN_ZSTD_LONG <= self.zstd_long <= MAX_ZSTD_LONG:
            raise UsageError(
                f"--zstd-long must be from {MIN_ZSTD_LONG} to {MAX_ZSTD_LONG}",
                got=self.zstd_long,
                fix="zstd -lv FILE shows the window of a file.",
            )
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
        """Sizes of the corpus's parts; None: it is one part."""
        if not self.stream:
            return None
        largest = self.part_tokens or self.shard_tokens
        first, shard = min(self.first_part_tokens, largest), min(self.shard_tokens, largest)
        return Growth(first_part_tokens=first, part_tokens=largest, shard_tokens=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationPlan:
    """Plan of a preparation: everything that determines the bytes of the corpus."""

    options: dict[str, str | int]
    """Command-line option -> value; a given tokenizer is recorded by its fingerprint."""
    files: tuple[InputFile, ...]
    """Input files in reading order."""

    @property
    def input_bytes(self) -> int:
        """Bytes of all input files."""
        return sum(file.bytes for file in self.files)


def make_plan(
    config: PrepareConfig,
    files: tuple[InputFile, ...],
    *,
    tokenizer: str | None,
    chat: Mapping[str, str | int] | None = None,
) -> PreparationPlan:
    """Return the plan of a configuration.

    Args:
        tokenizer: fingerprint of the given tokenizer; None if one is to be trained.
        chat: options of conversations, in place of the column of texts.
    """
    options: dict[str, str | int] = {
        "shard-tokens": config.shard_tokens,
        "text-column": config.text_column,
        "max-document-bytes": config.max_document_bytes,
    }
    if config.html != "extract":
        options["html"] = config.html
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
    if chat is not None:
        del options["text-column"]
        options |= chat
    return PreparationPlan(options=options, files=files)


def save_plan(folder: Path, plan: PreparationPlan) -> None:
    """Write the plan durably: a line of options, then a line for each input file."""
    rows: list[dict[str, Any]] = [{"version": VERSION, "options": plan.options}]
    rows += [asdict(file) for file in plan.files]
    write_atomic(folder / FILE, "".join(json.dumps(row) + "\n" for row in rows))


def load_plan(folder: Path) -> PreparationPlan | None:
    """Read the plan of a folder; None if there is none.

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
        return PreparationPlan(options=head["options"], files=tuple(InputFile(**row) for row in rows))
    except (ValueError, TypeError, KeyError) as error:
        fix = "Use --restart to prepare the folder again, or another --out."
        raise CorpusError(f"{path} is damaged ({error})", fix=fix) from None


def differences(old: PreparationPlan, new: PreparationPlan) -> list[str]:
    """Return the differences between two plans as messages; empty if they are equal.

    >>> old = PreparationPlan(options={"shard-tokens": 10, "train-tokenizer": 300}, files=())
    >>> differences(old, PreparationPlan(options={"shard-tokens": 20, "tokenizer": "ab"}, files=()))
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
        yield "the inputs are in another order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a preparation; counts include the work of earlier runs."""

    stage: str
    """Present stage of the work."""
    done_bytes: int = 0
    """Input bytes read; of compressed files, the stored bytes."""
    total_bytes: int = 0
    """Input bytes of the whole plan."""
    tokens: int = 0
    """Tokens written."""
    documents: int = 0
    """Documents accepted."""
    shards: int = 0
    """Finished shards; an interruption now loses the work since the last of them."""
    rejected: int = 0
    """Inputs rejected."""


TOKENISING = "tokenise"
"""Stage that writes the shards."""

OnProgress = Callable[[Progress], None]
