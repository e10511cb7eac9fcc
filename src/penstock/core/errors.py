"""The exception tree: every error a user can cause says what is wrong, the value, and what to do.

PenstockError                 exit code 1: the work failed
├── UsageError                exit code 2: the command or recipe is wrong; nothing was started
│   └── ConfigError           a recipe key or value
├── InputError                raw text or files that cannot be read
├── CorpusError               token shards that are missing, truncated or altered
│   ├── CorpusChanged         not the corpus the run was started with
│   └── CorpusExhausted       a capped corpus has no samples left
├── StateMismatch             a saved state that belongs to another run
├── TransformError            a user's transform of samples failed
├── CheckpointError           a checkpoint that cannot be written, read or used
│   └── CheckpointDamaged     one whose bytes are not those that were written
├── ModelError                a model folder that cannot be opened
├── AnswerFailed              an answer that ended because something failed
├── EngineClosed              an engine that takes no more requests
├── RunnerLost                an engine whose network can compute no more
├── RunLocked                 another process is writing the same folder
└── PeerLost                  another process of the run ended; it knows why
"""

from difflib import get_close_matches
from typing import Final

_ABSENT: Final = object()


class PenstockError(Exception):
    """An error a user can act on.

    Args:
        what: what is wrong, one sentence without a full stop.
        got: the offending value, shown after the sentence when given.
        fix: what the user can do, one or two sentences.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = _ABSENT, fix: str = "") -> None:
        what = what.removesuffix(".")  # it may quote another message
        message = what if got is _ABSENT else f"{what} (got {got!r})"
        end = "" if message.endswith("?") else "."  # as a quoted message may
        super().__init__(f"{message}{end} {fix}" if fix else f"{message}{end}")


class UsageError(PenstockError):
    """The command line or recipe is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A recipe key or value is wrong."""


class InputError(PenstockError):
    """Raw input cannot be read."""


class CorpusError(PenstockError):
    """Token shards are missing, truncated or altered."""


class CorpusChanged(CorpusError):
    """The corpus is not the one the run was started with."""


class CorpusExhausted(CorpusError):
    """A corpus with a cap on its epochs has no samples left."""


class StateMismatch(PenstockError):
    """A saved state belongs to another run."""


class TransformError(PenstockError):
    """A user's transform of samples failed, or returned what is no sample."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written, read or used."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's bytes are missing, truncated or altered."""


class ModelError(PenstockError):
    """A model folder cannot be opened."""


class AnswerFailed(PenstockError):
    """An answer ended because something failed."""


class EngineClosed(PenstockError):
    """The engine takes no more requests."""


class RunnerLost(PenstockError):
    """What computes an engine's steps is gone, a rank of it for example."""


class RunLocked(PenstockError):
    """Another process is writing the same folder."""


class PeerLost(PenstockError):
    """Another process of the run ended; that one knows why."""

    def __init__(self) -> None:
        super().__init__("This process lost contact with the others of its run", fix="See what they said.")


def nearest(name: str, known: list[str]) -> str:
    """Return a hint naming the closest known name, or the known names.

    >>> nearest("lerning_rate", ["learning_rate", "betas"])
    "Did you mean 'learning_rate'?"
    >>> nearest("x", ["a", "b"])
    'Known: a, b.'
    """
    match = get_close_matches(str(name), known, n=1)  # what a user wrote may be anything
    return f"Did you mean {match[0]!r}?" if match else f"Known: {', '.join(sorted(known))}."
