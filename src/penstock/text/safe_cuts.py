"""Safe cuts: where a long text can be encoded in pieces that have the ids of the whole.

A cut is a space between two letters; the right piece begins with the space. It is safe if

- no added token can match across it, or end at it;
- the normalizer maps the text on each side of it whatever is on the other side;
- a pre-tokenizer splits there in every context, or else the model is a BPE without an entry that holds the
  letter followed by the space, so that no merge crosses the cut.

These are properties of the tokenizer's rules, read from its JSON. A rule that this file does not know leaves
no safe cut: the text is encoded as a whole.

Many tokenizers do something to the beginning of a text: they add or strip a space. So a piece is encoded
behind the letter before it, and the ids of that letter are dropped.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

Rule = Mapping[str, Any]  # Any: a part of a tokenizer.json

_LETTER = r"(?![\u0d00-\u3040\ud7a4-\U0010ffff])[^\W\d_]"  # of scripts whose letters stand alone
_CUT = re.compile(rf"(?<={_LETTER})(?= {_LETTER})")

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_CHARWISE = (*_FORMS, "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer")
_AT_THE_ENDS = ("Prepend", "Strip")
_SPACES = (" {2,}", r"\s{2,}", r"\s{2,}|[\n\r\t]", r"[\n\r\t]", r"\n")
"""Patterns of normalizers that match no single space and no letter."""

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANK = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_GPT2 = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORD_PATTERNS = frozenset(
    {
        rf"'s|'t|'re|'ve|'m|'ll|'d|{_GPT2}",
        rf"'(?:[sdmt]|ll|ve|re)|{_GPT2}",
        *(
            pattern.replace("DIGITS", digits)
            for digits in (r"\p{N}", r"\p{N}{1,3}")
            for pattern in (
                rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANK}",
                rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|DIGITS"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANK}",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?"
                rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?|DIGITS"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANK}",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|DIGITS"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANK}",
            )
        ),
        rf"{_MARKS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANK}",
    }
)
"""Published patterns of words (GPT-2, GPT-4, GPT-4o, Llama 3, Qwen, Mistral, DeepSeek). In each, every
alternative ends before a space that follows a letter, and one begins with that space."""
_CLASSES = frozenset({r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", r"[\r\n]"})
"""Patterns of characters of one class, which has no space in it: they match no text across a cut."""


class SafeCuts:
    """Places at which a tokenizer's texts can be cut.

    Args:
        normalize: the tokenizer's normalizer.
        separator: what it makes of a space.
        barred: letters that end an added token, after which no cut is safe.
        known: letters after which a cut is safe; None: all that are not barred.
    """

    def __init__(
        self,
        normalize: Callable[[str], str],
        *,
        separator: str,
        barred: frozenset[str],
        known: frozenset[str] | None,
    ) -> None:
        self._normalize, self._separator = normalize, separator
        self._barred, self._known = barred, known
        self._is_safe = lru_cache(maxsize=2**16)(self._judge)

    def places(self, text: str, *, size: int) -> Iterator[int]:
        """Yield ascending cuts that leave pieces of at least `size` characters, but for the last."""
        start = 0
        while start + size < len(text):
            cuts = (found.start() for found in _CUT.finditer(text, start + size))
            place = next((cut for cut in cuts if self._is_safe(text[cut - 1], text[cut + 1])), None)
            if place is None:
                return
            yield place
            start = place

    def _judge(self, before: str, after: str) -> bool:
        """Return True if a space between these letters is a safe cut."""
        left = self._normalize(before)
        both = self._normalize(f"{before} {after}")
        if not left or not both.startswith(left + self._separator):
            return False
        last, first = left[-1], both[len(left) + 1 : len(left) + 2]
        if not (last.isalpha() and first.isalpha()) or {before, last} & self._barred:
            return False
        return self._known is None or last in self._known


def safe_cuts(content: Rule, normalize: Callable[[str], str]) -> SafeCuts | None:
    """Return the safe cuts of a tokenizer that encodes names of special tokens as text; None: it has none.

    Args:
        content: its tokenizer.json.
        normalize: its normalizer.
    """
    matched = [token for token in content.get("added_tokens") or () if not token["special"]]
    separator = _after_normalizer(content.get("normalizer"), " ")
    if separator is None:
        return None
    names = {form for token in matched for form in (token["content"], normalize(token["content"]))}
    if any(_spans_cut(name, (" ", separator)) for name in names):
        return None
    barred = frozenset(name[-1] for name in names if name)
    found = _after_pre_tokenizer(content.get("pre_tokenizer"), separator)
    if found is None:
        return None
    if found == _SPLIT:
        return SafeCuts(normalize, separator=separator, barred=barred, known=None)
    model = content["model"]
    changing = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(name) for name in changing) or found not in model["vocab"]:
        return None
    letters = frozenset(name for name in model["vocab"] if len(name) == 1)
    joined = {name[at - 1] for name in model["vocab"] for at in range(1, len(name)) if name[at] == found}
    return SafeCuts(normalize, separator=separator, barred=barred, known=letters - joined)


def _spans_cut(name: str, separators: Sequence[str]) -> bool:
    """Return True if a name holds a separator behind another character.

    >>> [_spans_cut(name, (" ",)) for name in ("a b", " b", "   ")]
    [True, False, False]
    """
    return any(name[at] in separators and name[at - 1] not in separators for at in range(1, len(name)))


def _is_apart(pattern: str, separator: str) -> bool:
    """Return True if matches of a text never include the letter or the separator at a cut."""
    return bool(pattern) and separator not in pattern and not any(letter.isalpha() for letter in pattern)


def _after_normalizer(rule: Rule | None, separator: str) -> str | None:
    """Return what a normalizer makes of the space of a cut; None if the cut is not safe under it."""
    match rule:
        case None:
            return separator
        case {"type": "Sequence", "normalizers": steps}:
            for step in steps:
                if (found := _after_normalizer(step, separator)) is None:
                    return None
                separator = found
            return separator
        case {"type": kind} if kind in _CHARWISE or kind in _AT_THE_ENDS:
            return separator
        case {"type": "Replace", "pattern": {"String": pattern}, "content": by} if pattern == separator:
            return by if by in (" ", "\u2581") else None
        case {"type": "Replace", "pattern": {"String": pattern}}:
            is_letter = len(pattern) == 1 and pattern != separator  # which `SafeCuts` tries
            return separator if is_letter or _is_apart(pattern, separator) else None
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": by} if separator == " ":
            return separator if pattern in _SPACES or (pattern, by) == (r"\s+", " ") else None
    return None


_SPLIT = ""
"""Result of `_after_pre_tokenizer` if it splits at the cut."""


def _after_pre_tokenizer(rule: Rule | None, separator: str) -> str | None:
    """Return what a pre-tokenizer makes of the separator; None if the cut is not safe under it.

    _SPLIT: it splits there, so that what follows works on each side alone.
    """
    for step in () if rule is None else rule.get("pretokenizers", [rule]):
        found = _after_step(step, separator)
        if found is None or found == _SPLIT:
            return found
        separator = found
    return separator


def _after_step(rule: Rule, separator: str) -> str | None:
    match rule:
        case {"type": "Sequence"}:
            return _after_pre_tokenizer(rule, separator)
        case {"type": "ByteLevel" | "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer"}:
            return _SPLIT if separator == " " and rule.get("use_regex", True) else None
        case {"type": "Metaspace", "replacement": mark}:
            if separator not in (" ", mark) or mark.isalpha():
                return None
            return _SPLIT if rule.get("split", True) else str(mark)
        case {"type": "CharDelimiterSplit", "delimiter": mark}:
            return _SPLIT if mark == separator else separator
        case {"type": "Digits" | "Punctuation"}:
            return separator
        case {"type": "Split"}:
            return _after_split(rule, separator)
    return None


def _after_split(rule: Rule, separator: str) -> str | None:
    match rule:
        case {"pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}:
            keeps_matches = (behavior, invert) in (("Isolated", False), ("Removed", True))
            if pattern in WORD_PATTERNS and separator == " " and keeps_matches:
                return _SPLIT
            return separator if pattern in _CLASSES and (behavior, invert) == ("Isolated", False) else None
        case {"pattern": {"String": pattern}, "behavior": behavior, "invert": False}:
            if pattern == separator:
                return _SPLIT if behavior in ("Removed", "Isolated", "MergedWithNext", "Contiguous") else None
            return separator if _is_apart(pattern, separator) else None
    return None
