"""Control requests and replies as files in RUN/control; imports no torch.

        request-000007.json         a request: written atomically under a new number, never changed
        answer-000007.json          the reply, written by rank 0 of the job
        request-000007.json.bad     a request that could not be read, moved aside

Replies are part of the run: a job that is killed after it applied a request, and resumes from an earlier
checkpoint, applies it again at the same step. Anyone who may write to the folder can write a request, so it
is parsed as data, with a size limit, and validated.
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from penstock.core import config
from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.core.files import is_locked, sync_directory, write_json

CONTROL_FOLDER = "control"
_MAX_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Largest reply; it holds the weights of all corpora."""
_MAX_REQUESTS = 10**9
"""Larger numbers are of nobody's requests; those after them would have names that are none."""
_MAX_REASON = 500
_NAME = re.compile(r"(request|answer)-(\d{6,12})\.json(\.bad)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """Request to a running job: weights, a skip, an extension, islands, a batch size, to save or to stop."""

    number: int = 0
    """Request number, shared by its reply."""
    weights: dict[str, float] | None = None
    """Shares of some corpora, of one; the others keep their proportions in the rest."""
    at_step: int | None = None
    """Steps after which the weights apply.

    None: as soon as the job reads the request."""
    skip_steps: tuple[int, int] | None = None
    """First step, counted from 1, and the one after the last, whose samples are skipped."""
    extend: Annotated[str | None, "CORPUS"] = None
    """Use the parts that were appended to a corpus."""
    parts: int | None = None
    """Number of parts of that corpus; set by the job, so that all ranks use the same."""
    islands: int | None = None
    """Islands to continue with: replicas that train on their own.

    The job restarts with them after all islands have synced."""
    batch_size: Annotated[int | None, "ROWS"] = None
    """Rows of a step over all processes.

    They hold from the next step on."""
    checkpoint: bool = False
    """Save a checkpoint now."""
    stop: bool = False
    """Save a checkpoint, then end the job."""
    reason: str = ""
    """Note for the run's record."""
    asked_by: str = ""
    """Who asks, for the run's record; not verified."""

    def __post_init__(self) -> None:
        asked = [self.weights, self.skip_steps, self.extend, self.islands, self.batch_size]
        if len(asked) - asked.count(None) + self.checkpoint + self.stop != 1:
            raise UsageError(
                "A request needs exactly one of weights, skip_steps, extend, islands, batch_size, checkpoint "
                "and stop"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError("A step has at least one row", got=self.batch_size)
        if self.islands is not None and self.islands < 1:
            raise UsageError("A run has at least one island", got=self.islands)
        if self.at_step is not None and (self.weights is None or self.at_step < 0):
            raise UsageError("at_step needs weights, and must be zero or more", got=self.at_step)
        if self.weights is not None:
            check_shares(self.weights)
        if self.skip_steps is not None and not 1 <= self.skip_steps[0] < self.skip_steps[1]:
            raise UsageError("skip_steps must be a step, 1 or more, and a later one", got=self.skip_steps)
        for name, text in (("reason", self.reason), ("name", self.asked_by)):
            if len(text) > _MAX_REASON or not text.isprintable():
                raise UsageError(f"A {name} must be one line of at most {_MAX_REASON} characters")

    @property
    def needs_job(self) -> bool:
        """True if it concerns a running job only: the next start does not take it up."""
        return self.stop or self.checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """Outcome of a request."""

    number: int
    taken_up: bool
    said: str
    """Outcome in words."""
    step: int = 0
    """Steps taken at the decision."""
    holds_from: int = 0
    """Steps taken before it applies."""
    until: int | None = None
    """Steps taken before the recipe sets other weights; None: never."""
    weights: dict[str, float] | None = None
    """New weights of all corpora."""
    samples: tuple[int, int] | None = None
    """Ids of skipped samples: the first, and the one after the last."""
    extend: str | None = None
    """Corpus that was extended."""
    parts: int | None = None
    """Its new number of parts."""
    islands: int | None = None
    """Number of islands to restart with, after all islands have synced."""
    batch_size: int | None = None
    """New rows of a step over all ranks."""
    checkpoint: bool = False
    """True if the job saved a checkpoint."""
    stop: bool = False
    """True if the job ended after it."""
    reason: str = ""
    asked_by: str = ""

    @property
    def changes_loader(self) -> bool:
        """True if it is to be applied to the loader again after a resume from an earlier checkpoint."""
        return self.taken_up and not (self.islands or self.stop or self.checkpoint)


def check_shares(weights: Mapping[str, float]) -> None:
    """Raise for shares that are not a valid part of a mixture.

    Raises:
        UsageError: a share is outside [0, 1], or their sum is above 1.
    """
    for name, share in weights.items():
        if not 0 <= share <= 1:
            raise UsageError(f"The share of corpus {name!r} must be between 0 and 1", got=share)
    if not weights or sum(weights.values()) > 1 + 1e-9:
        raise UsageError("Shares must sum to at most 1", got=sum(weights.values()))


def submit(run: Path, request: ControlRequest) -> int:
    """Write a request under a new number; return the number."""
    folder = run / CONTROL_FOLDER
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in asdict(request).items() if value not in (None, 0, "")}
    number = max(_numbers(folder, "request") | _numbers(folder, "answer"), default=0)
    draft = folder / f".request-{secrets.token_hex(8)}.tmp"  # of this call: threads and containers share ids
    draft.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    try:
        while True:
            number += 1
            try:
                os.link(draft, request_file(run, number))  # atomic, and never overwrites another request
            except FileExistsError:
                continue
            sync_directory(folder)
            return number
    finally:
        draft.unlink()


def open_requests(run: Path) -> list[int]:
    """Return the numbers of unanswered requests."""
    folder = run / CONTROL_FOLDER
    if not folder.is_dir():
        return []
    return sorted(_numbers(folder, "request", bad=False) - _numbers(folder, "answer"))


def read_request(run: Path, number: int) -> ControlRequest:
    """Read a request.

    Raises:
        PenstockError: the file is not a valid request.
    """
    raw = _read(request_file(run, number))
    raw["number"] = number
    raw.pop("parts", None)  # set by the job only
    return config.build(ControlRequest, raw)


def set_aside(run: Path, number: int) -> None:
    """Move an unreadable request aside."""
    path = request_file(run, number)
    path.rename(path.with_name(f"{path.name}.bad"))


def answer(run: Path, found: ControlReply) -> None:
    """Write the reply to a request, which completes it."""
    write_json(answer_file(run, found.number), asdict(found))


def read_answer(run: Path, number: int) -> ControlReply | None:
    """Return the reply to a request; None: not answered yet."""
    path = answer_file(run, number)
    found = _read(path, most_bytes=_MAX_ANSWER_BYTES) if path.is_file() else None
    return None if found is None else config.build(ControlReply, found)


def batch_size_of(run: Path, *, step: int) -> int | None:
    """Return the rows of a step that a request has set and that hold after a step; None: the recipe's do."""
    changes = [found for found in answers(run) if found.batch_size is not None]
    if not changes or (changes[-1].until is not None and changes[-1].until <= step):
        return None
    return changes[-1].batch_size


def answered(run: Path) -> set[int]:
    """Return the numbers of answered requests."""
    folder = run / CONTROL_FOLDER
    return _numbers(folder, "answer") if folder.is_dir() else set()


def answers(run: Path) -> list[ControlReply]:
    """Return all replies, in the order of their requests."""
    return [found for number in sorted(answered(run)) if (found := read_answer(run, number)) is not None]


def request_file(run: Path, number: int) -> Path:
    """Return the path of a request."""
    return run / CONTROL_FOLDER / f"request-{number:06d}.json"


def answer_file(run: Path, number: int) -> Path:
    """Return the path of a reply."""
    return run / CONTROL_FOLDER / f"answer-{number:06d}.json"


def _numbers(folder: Path, kind: str, *, bad: bool = True) -> set[int]:
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    found = {int(match[2]) for match in matches if match[1] == kind and (bad or not match[3])}
    return {number for number in found if number <= _MAX_REQUESTS}


_ASK_AGAIN = "Remove it, and ask again with `penstock control`."


def _read(path: Path, *, most_bytes: int = _MAX_BYTES) -> dict[str, Any]:  # Any: JSON values
    """Read a JSON object from an untrusted file: follows no link, blocks on no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise PenstockError(f"{path.name} cannot be read: {error.strerror}", fix=_ASK_AGAIN) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PenstockError(f"{path.name} is not a file", fix=_ASK_AGAIN)
        content = os.read(descriptor, most_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > most_bytes:
        raise PenstockError(f"{path.name} has more than {most_bytes:,} bytes", fix=_ASK_AGAIN)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}", fix=_ASK_AGAIN) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} must contain a JSON object", got=type(value).__name__, fix=_ASK_AGAIN)
    return value


def job_is_running(run: Path) -> bool:
    """True if a job holds the run's lock, on any machine that shares the folder."""
    return is_locked(run)
