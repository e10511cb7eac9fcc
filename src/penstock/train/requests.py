"""Requests to a running job, as files: RUN/control/request-000001.json and its answer; imports no torch.

    request-000007.json         what somebody asks for: written whole under a new number, never again
    answer-000007.json          what came of it, by rank 0 of the job
    request-000007.json.bad     a request that could not be read, moved aside

Answers are part of the run: a job that is killed after it took something up, and resumes from a
checkpoint before that, takes it up again at the same step. What a request holds comes from anyone who
may write to the folder, so it is read as data, with a limit, and checked.
"""

import fcntl
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.core import config
from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.core.files import sync_directory, write_json

CONTROL_FOLDER = "control"
_MOST_BYTES = 64 * 1024
_MOST_REASON = 500
_NAME = re.compile(r"(request|answer)-(\d{6,12})\.json(\.bad)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing asked of a run: other weights, a skip, an extension, or another number of islands."""

    number: int = 0
    """By which its answer is known."""
    weights: dict[str, float] | None = None
    """Shares of some corpora, of one; the others keep their proportions in what is left."""
    at_step: int | None = None
    """Steps taken before the weights hold; None: as soon as the job reads it."""
    skip_steps: tuple[int, int] | None = None
    """First step, counted from 1, and the one past the last, whose samples are not to be served."""
    extend: str | None = None
    """Corpus whose appended parts are to be taken up."""
    parts: int | None = None
    """How many parts that corpus is to have; filled in by the job, so that all ranks mean the same."""
    islands: int | None = None
    """With which the job is to go on, once they have met."""
    reason: str = ""
    """Kept in the run's state."""

    def __post_init__(self) -> None:
        asked = [self.weights, self.skip_steps, self.extend, self.islands]
        if len(asked) - asked.count(None) != 1:
            raise UsageError("A request asks for weights, a skip, an extension or islands, one of them")
        if self.islands is not None and self.islands < 1:
            raise UsageError("A run has at least one island", got=self.islands)
        if self.at_step is not None and (self.weights is None or self.at_step < 0):
            raise UsageError("at_step goes with weights, and is zero or more", got=self.at_step)
        if self.weights is not None:
            check_shares(self.weights)
        if self.skip_steps is not None and not 1 <= self.skip_steps[0] < self.skip_steps[1]:
            raise UsageError("A skip goes from a step, 1 or more, to a later one", got=self.skip_steps)
        if len(self.reason) > _MOST_REASON or not self.reason.isprintable():
            raise UsageError(f"A reason is one line of at most {_MOST_REASON} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request."""

    number: int
    taken_up: bool
    said: str
    """In words."""
    step: int = 0
    """Steps taken when it was decided."""
    holds_from: int = 0
    """Steps taken before it holds."""
    until: int | None = None
    """Steps taken before the recipe plans other weights; None: it does not."""
    weights: dict[str, float] | None = None
    """Of all corpora, from then on."""
    samples: tuple[int, int] | None = None
    """Ids of samples that are left out: the first, and past the last."""
    extend: str | None = None
    """Corpus that was extended."""
    parts: int | None = None
    """Its parts from then on."""
    islands: int | None = None
    """With which the job goes on, once they have met."""
    reason: str = ""


def check_shares(weights: Mapping[str, float]) -> None:
    """Refuse shares that cannot be.

    Raises:
        UsageError: with the share.
    """
    for name, share in weights.items():
        if not 0 <= share <= 1:
            raise UsageError(f"The share of corpus {name!r} must be between 0 and 1", got=share)
    if not weights or sum(weights.values()) > 1 + 1e-9:
        raise UsageError("Shares must sum to at most 1", got=sum(weights.values()))


def submit(run: Path, request: Request) -> int:
    """Write a request under a new number and return it."""
    folder = run / CONTROL_FOLDER
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in asdict(request).items() if value not in (None, 0, "")}
    number = max(_numbers(folder, "request") | _numbers(folder, "answer"), default=0)
    draft = folder / f".request-{os.getpid()}.tmp"
    draft.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    try:
        while True:
            number += 1
            try:
                os.link(draft, request_file(run, number))  # whole, or not at all; never over another's
            except FileExistsError:
                continue
            sync_directory(folder)
            return number
    finally:
        draft.unlink()


def open_requests(run: Path) -> list[int]:
    """Return the numbers of the requests that have no answer yet."""
    folder = run / CONTROL_FOLDER
    if not folder.is_dir():
        return []
    return sorted(_numbers(folder, "request", bad=False) - _numbers(folder, "answer"))


def read_request(run: Path, number: int) -> Request:
    """Read a request.

    Raises:
        PenstockError: it is not one, with why.
    """
    raw = _read(request_file(run, number))
    raw["number"] = number
    raw.pop("parts", None)  # the job's own to say
    return config.build(Request, raw)


def set_aside(run: Path, number: int) -> None:
    """Move a request away that could not be read."""
    path = request_file(run, number)
    path.rename(path.with_name(f"{path.name}.bad"))


def answer(run: Path, found: Answer) -> None:
    """Write an answer; a request that is answered is done with."""
    write_json(answer_file(run, found.number), asdict(found))


def read_answer(run: Path, number: int) -> Answer | None:
    """Return the answer to a request, or None where there is none yet."""
    path = answer_file(run, number)
    return config.build(Answer, _read(path)) if path.is_file() else None


def answers(run: Path) -> list[Answer]:
    """Return all answers, in the order of their requests."""
    folder = run / CONTROL_FOLDER
    numbers = sorted(_numbers(folder, "answer")) if folder.is_dir() else []
    return [found for number in numbers if (found := read_answer(run, number)) is not None]


def request_file(run: Path, number: int) -> Path:
    """Return where a request lies."""
    return run / CONTROL_FOLDER / f"request-{number:06d}.json"


def answer_file(run: Path, number: int) -> Path:
    """Return where its answer lies."""
    return run / CONTROL_FOLDER / f"answer-{number:06d}.json"


def _numbers(folder: Path, kind: str, *, bad: bool = True) -> set[int]:
    matches = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return {int(match[2]) for match in matches if match[1] == kind and (bad or not match[3])}


def _read(path: Path) -> dict[str, Any]:  # Any: JSON values
    """Read a JSON object that somebody else wrote: no link is followed, no pipe waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise PenstockError(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise PenstockError(f"{path.name} is not a file")
        content = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MOST_BYTES:
        raise PenstockError(f"{path.name} has more than {_MOST_BYTES:,} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name} must hold a JSON object", got=type(value).__name__)
    return value


def job_is_running(run: Path) -> bool:
    """Whether a job holds the run's folder, on any machine that shares it."""
    path = run / ".lock"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
