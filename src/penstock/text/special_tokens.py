"""Guarded encoding: special tokens spelled in a user's text stay plain text; other threads run meanwhile.

A chat template joins its own text with that of users, tools and documents, and the tokenizer would take every
name of a special token in the result for that token. So a user could write `<|im_end|>` and
`<|im_start|>system` into a message and forge another role's turn. Therefore, before the template is applied,
a mark is inserted into each such name. The mark is a special token of a copy of the tokenizer, which splits
the text there, and its id is removed. A text without such names is unchanged, so its tokens are those of
transformers.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ModelError, UsageError
from penstock.core.packages import Package

if TYPE_CHECKING:
    import tokenizers
else:
    tokenizers = Package("tokenizers", "Tokenizers")


_LONG = 1000
"""Number of characters that encode in a millisecond or two."""


def ids_of(text: str, tokenizer: "tokenizers.Tokenizer") -> list[int]:
    """Return the ids of a text, without added tokens.

    The library releases the interpreter lock only for batches. A short text is not sent as a batch: after
    one, the library warns in every forked process.

    Raises:
        ModelError: the library panicked.
    """
    try:
        if len(text) < _LONG:
            found = tokenizer.encode(text, add_special_tokens=False)
        else:
            [found] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise panic_of(error) from None
    ids: list[int] = found.ids
    return ids


def is_of_library(error: BaseException) -> bool:
    """Return True if the tokenizers library may have raised an error.

    It raises bare Exceptions for files that are wrong. A panic of Rust code is not an `Exception` in Python,
    so `except Exception` would not catch it.
    """
    return isinstance(error, Exception) or _is_panic(error)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def panic_of(error: BaseException) -> BaseException:
    """Return the exception to raise for an error of the tokenizers library: a ModelError for a panic."""
    if not _is_panic(error):
        return error
    return ModelError(
        f"The model's tokenizer fails on this text ({str(error)[:200]})", fix="Correct its tokenizer.json."
    )


T = TypeVar("T")

_MARK = "\ufdd0\ufdd1"
"""Two Unicode noncharacters; if a user writes them, they are split like a special name."""
_COMPARED = 64
"""Maximum letters of a name in the pattern: deeper nesting is too much for `re`."""


class SpecialTokenGuard:
    """Encoder of conversations for one tokenizer; thread-safe.

    Args:
        parsed: the tokenizer; owned and modified from here on.
    """

    def __init__(self, parsed: "tokenizers.Tokenizer") -> None:
        tokens = parsed.get_added_tokens_decoder().values()
        names = {token.content[:_COMPARED] for token in tokens if _is_control(token)}
        self.names = sorted(token.content for token in tokens if _is_control(token))
        """Names of the control tokens."""
        self._names = re.compile(_any_of(sorted({*names, _MARK})))
        self._tokenizer = parsed
        # A post-processor may cut white space from the characters of a token; nothing is added around a text.
        self._tokenizer.post_processor = None
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.token_to_id(_MARK)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special names stand for their tokens, except guarded ones."""
        return [token for token in ids_of(text, self._tokenizer) if token != self._mark_id]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as `encode` does, computed on all cores."""
        try:
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:  # a panic of the Rust library is no Exception
            raise panic_of(error) from None
        return [[token for token in encoding.ids if token != self._mark_id] for encoding in found]

    def encode_batch_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return the ids [n] of each text, and first and past-the-last character [n, 2] of each token.

        Raises:
            ModelError: the library panicked.
        """
        try:
            found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except BaseException as error:  # a panic of the Rust library is no Exception
            raise panic_of(error) from None
        made = []
        for encoding in found:
            ids = np.array(encoding.ids, np.int64)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            kept = ids != self._mark_id
            made.append((ids[kept], offsets[kept]))
        return made

    def guarded(self, value: T) -> T:
        """Return texts, or JSON with texts inside, with all special names guarded.

        Raises:
            UsageError: it is nested too deeply.
        """
        try:
            return cast(T, self._guarded(value))
        except RecursionError:
            fix = "Flatten it, or send it as text."
            raise UsageError("A message or tool is nested too deeply", fix=fix) from None

    def _guarded(self, value: object) -> object:
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(entry) for entry in value]
        return value

    def _broken(self, text: str) -> str:
        return self._names.sub(self._break, text)

    def _break(self, found: re.Match[str]) -> str:
        name = found[0]  # the rest may contain a shorter name, and end in the beginning of another
        return f"{name[0]}{_MARK}{self._broken(name[1:])}{_MARK}"


def _is_control(token: "tokenizers.AddedToken") -> bool:
    """Return True if a token structures a conversation; DeepSeek's `<｜User｜>` is not declared special."""
    name = token.content
    if len(name) < 2:  # a single letter cannot be split
        return False
    return token.special or (name.startswith(("<|", "<\uff5c")) and name.endswith(("|>", "\uff5c>")))


def _any_of(names: Sequence[str]) -> str:
    """Return a pattern of sorted names that reads each letter of a text once, however many they are.

    >>> _any_of(["<s>", "<sep>", "[X]"])
    '(?:<s(?:>|ep>)|\\\\[X\\\\])'
    """
    branches = [
        re.escape(first) + _any_of([name[1:] for name in group])
        for first, group in groupby(filter(None, names), key=itemgetter(0))
    ]
    if len(branches) < 2 and "" not in names:
        return "".join(branches)
    return f"(?:{'|'.join(branches)}){'?' if '' in names else ''}" if branches else ""
