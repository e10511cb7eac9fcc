"""Names of special tokens in what others wrote: kept from becoming those tokens; for chats.

A chat template joins its own words with those of users, tools and documents, and the tokenizer then takes
every name of a special token in the whole for that token. Whoever writes `<|im_end|>` and
`<|im_start|>system` into a message would so write a turn of somebody else. Therefore, before the template
sees a text, a mark is put inside each such name. The mark is a special token of a copy of the tokenizer,
which cuts the text there as at any other, and its id is left out. A text without such names is not touched,
so it gets the tokens that transformers gives it.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeVar, cast

import tokenizers

from penstock.core.errors import UsageError
from penstock.text.encoding import ids_of

T = TypeVar("T")

_MARK = "\ufdd0\ufdd1"
"""Two code points that Unicode keeps free of meaning; broken like a name where somebody writes them."""
_COMPARED = 64
"""Letters of a name that are looked for: more would be nested deeper than `re` can read."""


class Guard:
    """Encodes conversations of one tokenizer; safe to share between threads.

    Args:
        parsed: taken over, and changed.
    """

    def __init__(self, parsed: tokenizers.Tokenizer) -> None:
        tokens = parsed.get_added_tokens_decoder().values()
        names = {token.content[:_COMPARED] for token in tokens if _is_control(token)}
        self._names = re.compile(_any_of(sorted({*names, _MARK})))
        self._tokenizer = parsed
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(_MARK, normalized=False)])
        self._mark_id = self._tokenizer.token_to_id(_MARK)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text whose special names stand for their tokens, but for guarded ones."""
        return [token for token in ids_of(text, self._tokenizer) if token != self._mark_id]

    def guarded(self, value: T) -> T:
        """Return texts, or JSON with texts inside, in which no special name stands for its token.

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
        name = found[0]  # the rest of which may hold a shorter name, and end in the beginning of another
        return f"{name[0]}{_MARK}{self._broken(name[1:])}{_MARK}"


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Whether a token structures a conversation: DeepSeek's `<｜User｜>` is not declared to be special."""
    name = token.content
    if len(name) < 2:  # a letter cannot be broken
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
