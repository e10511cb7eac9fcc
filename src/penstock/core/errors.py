"""Exception hierarchy: every error that a user can cause says what is wrong, the value, and what to do.

PenstockError                 exit code 1: the work failed
├── UsageError                exit code 2: the command or recipe is wrong; nothing was started
│   ├── ConfigError           a recipe key or value
│   └── GrammarRefused        the grammar of an answer cannot be used
├── InputError                unreadable input text or files
├── CorpusError               missing, truncated or altered token shards
│   ├── CorpusChanged         another corpus than the run was started with
│   └── CorpusExhausted       cap on epochs reached
├── StateMismatch             saved state of another run
├── TransformError            a user's transform of samples failed
├── CheckpointError           a checkpoint cannot be written, read or used
│   └── CheckpointDamaged     its bytes are missing, truncated or altered
├── ModelError                a model folder cannot be opened
├── AnswerFailed              a response ended with an error
├── EngineClosed              the engine accepts no more requests
├── RunnerLost                the engine's model runner is gone
├── PackageMissing            an optional package is not installed
├── RunLocked                 another process is writing the same folder
├── PassStopped               a pass over a corpus was stopped; the run ends as on request
└── PeerLost                  another process of the run ended
"""

import re
from typing import Final

_ABSENT: Final = object()
_SHOWN = 2000
"""Characters of an offending value that a message has, at most: it may be a request of a client."""


class PenstockError(Exception):
    """Error that a user can act on.

    Args:
        what: what is wrong, one sentence without a full stop.
        got: the offending value, appended to the sentence.
        fix: what the user can do, one or two sentences.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: object = _ABSENT, fix: str = "") -> None:
        what = what.removesuffix(".")  # it may quote another message
        value = repr(got)
        value = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        message = what if got is _ABSENT else f"{what} (got {value})"
        end = "" if message.endswith("?") else "."  # a quoted message may end in a hint
        super().__init__(f"{message}{end} {fix}" if fix else f"{message}{end}")


def damaged(name: object, error: Exception) -> str:
    """Return that a file is damaged, and why, with its name once.

    >>> damaged("a.json", PenstockError("a.json is not valid JSON: line 1"))
    'a.json is damaged: it is not valid JSON: line 1'
    """
    why = str(error).removesuffix(".")
    if why.startswith(f"{name} "):
        why = f"it {why.removeprefix(f'{name} ')}"
    return f"{name} is damaged: {why}"


class UsageError(PenstockError):
    """The command line or recipe is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A recipe key or value is wrong."""


class GrammarRefused(UsageError):
    """The grammar of an answer cannot be used."""


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
    """A user's transform of samples failed, or returned an invalid sample."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written, read or used."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's bytes are missing, truncated or altered."""


class ModelError(PenstockError):
    """A model folder cannot be opened."""


class AnswerFailed(PenstockError):
    """A response ended because of an error."""


class EngineClosed(PenstockError):
    """The engine accepts no more requests."""


class RunnerLost(PenstockError):
    """The engine's model runner is gone, because a rank of it ended for example."""


class PackageMissing(PenstockError):
    """A package that a feature needs is not installed."""


class RunLocked(PenstockError):
    """Another process is writing the same folder."""


class PassStopped(PenstockError):
    """A rank was asked to stop in the middle of a pass over a corpus; raised on all ranks."""


class PeerLost(PenstockError):
    """Another process of the run ended; its message has the cause.

    Args:
        got: what gloo or NCCL said.
    """

    SENTENCE = "This process lost contact with the others of its run"
    """Part of the message, by which launchers recognise it."""

    def __init__(self, got: str) -> None:
        super().__init__(self.SENTENCE, got=got, fix="See their messages.")


def nearest(name: str, known: list[str]) -> str:
    """Return a hint with the most similar known name, or with all known names.

    >>> nearest("lerning_rate", ["learning_rate", "betas"])
    "Did you mean 'learning_rate'?"
    >>> nearest("x", ["a", "b"])
    'Known: a, b.'
    >>> nearest("x", [])
    'Known: none.'
    """
    match = near_match(str(name), known)  # the user's value may have any type
    return f"Did you mean {match!r}?" if match else f"Known: {', '.join(sorted(known)) or 'none'}."


def near_match(name: str, known: list[str]) -> str | None:
    """Return the known name that `name` is a likely misspelling of; None if it may be something else.

    A misspelling keeps the numbers, and each word differs by one letter, or two in a long word: missing,
    doubled, wrong, or swapped with its neighbour. Otherwise a single known name that starts with `name`, or
    ends with it as a word, is accepted.


    >>> near_match("optm", ["optim"]), near_match("BestFit", ["best_fit"]), near_match("h200", ["h100"])
    ('optim', 'best_fit', None)
    """
    if name.lower() in _THINGS_OF_THEIR_OWN:
        return None
    slips = {other: _slips(name.lower(), other.lower()) for other in known}
    likely = {other: count for other, count in slips.items() if count is not None}
    if likely:
        return min(likely, key=lambda other: likely[other])
    longer = [other for other in slips if len(name) >= 3 and _is_part(name.lower(), other.lower())]
    return longer[0] if len(longer) == 1 else None


def _is_part(name: str, other: str) -> bool:
    """Return True if a name is a prefix of another (not within a number), or its last words.

    >>> _is_part("llama3-8", "llama3-8b"), _is_part("l40", "l40s"), _is_part("rate", "learning_rate")
    (True, False, True)
    """
    if other.startswith(name):
        after = other[len(name) :][:1]
        return not name[-1].isdigit() or not after.isalnum() or not (name.isalnum() or after.isdigit())
    starts_a_word = not name[0].isalnum() or not other[: -len(name)][-1:].isalnum()
    return other.endswith(name) and starts_a_word


_THINGS_OF_THEIR_OWN: Final = frozenset(
    ("mixtral", "llava", "mllama", "float16", "int8", "int16", "int32", "int64", "adam")
)
"""Names that differ from a known one by one letter but mean something else."""

_WORDS: Final = re.compile(r"[^\W_]+")
_DOUBLED: Final = re.compile(r"([^\W\d_])\1")
_DIGITS: Final = re.compile(r"\d+")


def _slips(name: str, other: str) -> int | None:
    """Return the number of differing letters of two names; None if it is too large for a misspelling."""
    if abs(len(name) - len(other)) > 4 or _DIGITS.findall(name) != _DIGITS.findall(other):
        return None
    words, others = _WORDS.findall(name), _WORDS.findall(other)
    if len(words) != len(others):
        words, others = ["".join(words)], ["".join(others)]
    total = 0
    for word, wanted in zip(words, others, strict=True):
        slips = _distance(word, wanted)
        letters = len(_DIGITS.sub("", wanted))
        shortest = 4 if len(wanted) > letters else 3  # h200 and gh200 are two machines
        doubled = _DOUBLED.sub(r"\1", word) == _DOUBLED.sub(r"\1", wanted)
        if not doubled and slips > (0 if letters < shortest else 1 if letters < 8 else 2):
            return None
        total += slips
    return total if total <= 2 else None


def _distance(a: str, b: str) -> int:
    """Return the edit distance with swaps of neighbours (optimal string alignment)."""
    two_up: list[int] = []
    above = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            least = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                least = min(least, two_up[j - 2] + 1)
            row.append(least)
        two_up, above = above, row
    return above[-1]
