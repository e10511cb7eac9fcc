"""Many mixtures in few bytes: each is a word of one text, in base 36.

    1z4/1/0:ej,8m,4n

is: 71 x 36 + 40 steps after the mixture before, for reason 1, of the corpora in order 0, with those counts.
What is as it was in the word before is left out: steps of the same length, the reason, the order. Two hundred
mixtures of three corpora in thousandths are some 2,000 characters of JSON.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Mix = Sequence[tuple[int, Mapping[str, int], str]]

_WORD = re.compile(
    r"([0-9a-z]{0,13})(?:/([0-9a-z]{1,6})/([0-9a-z]{1,6}))?:([0-9a-z]{1,6}(?:,[0-9a-z]{1,6})*)"
)


def packed(mix: Mix) -> dict[str, Any]:  # Any: JSON values
    """Return mixtures (first step, count of each corpus, reason) as JSON values.

    >>> packed([(0, {"a": 1, "b": 1}, "recipe"), (50, {"a": 40, "b": 1}, "told")])["words"]
    '0/0/0:1,1 1e/1/0:14,1'
    """
    orders = _numbered(tuple(slots) for _, slots, _ in mix)
    reasons = _numbered(reason for _, _, reason in mix)
    words, last, gap, head = [], 0, "", ""
    for step, slots, reason in mix:
        now = _base36(step - last), f"/{_base36(reasons[reason])}/{_base36(orders[tuple(slots)])}"
        counts = ",".join(map(_base36, slots.values()))
        words.append(f"{'' if now[0] == gap else now[0]}{'' if now[1] == head else now[1]}:{counts}")
        last, (gap, head) = step, now
    return {"orders": [list(order) for order in orders], "reasons": list(reasons), "words": " ".join(words)}


def unpacked(values: Mapping[str, Any]) -> list[list[Any]]:
    """Return what was packed, as lists: [first step, [[corpus, count], ...], reason].

    Raises:
        ValueError: this was never packed.

    >>> unpacked({"orders": [["a"]], "reasons": ["recipe", "told"], "words": "0/0/0:1 1e/1/0:2 :3"})
    [[0, [['a', 1]], 'recipe'], [50, [['a', 2]], 'told'], [100, [['a', 3]], 'told']]
    """
    orders, reasons, words = (values.get(key) for key in ("orders", "reasons", "words"))
    if not (isinstance(orders, list) and isinstance(reasons, list) and isinstance(words, str)):
        raise ValueError("orders and reasons must be lists, words a text")
    mix, step, gap, reason, order = [], 0, 0, "", []
    for number, word in enumerate(words.split(" ")):
        match = _WORD.fullmatch(word)
        if match is None or (not number and not match[2]):
            raise ValueError(f"word {number} is {word[:40]!r}")
        gap = int(match[1], 36) if match[1] else gap
        if match[2]:
            why, of = int(match[2], 36), int(match[3], 36)
            if why >= len(reasons) or of >= len(orders):
                raise ValueError(f"word {number} names reason {why} and order {of}")
            reason, order = reasons[why], orders[of]
        counts = [int(count, 36) for count in match[4].split(",")]
        if not isinstance(order, list) or len(counts) != len(order):
            raise ValueError(f"word {number} has {len(counts)} counts")
        step += gap
        mix.append([step, [list(pair) for pair in zip(order, counts, strict=True)], reason])
    return mix


def _numbered(values: Iterable[T]) -> dict[T, int]:
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


def _base36(number: int) -> str:
    """Return a whole number in base 36, as int(text, 36) reads it."""
    digits = ""
    while number or not digits:
        number, digit = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[digit] + digits
    return digits
