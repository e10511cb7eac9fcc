"""Patterns of JSON schemas without look-around, which the grammar library lacks; pure.

A look-ahead at the beginning of an anchored pattern is a second pattern that the text must match too. A
negative one is written as its complement if it is a few characters, as `(?![-+.]*$)` in pydantic's `Decimal`
is. Any other assertion is left out, so that the patterns match more texts than the original.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PART = re.compile(
    r"\\(?:[pP]\{[^}]*+(?:\}|\Z)|x[\da-fA-F]{2}|u[\da-fA-F]{4}|k<\w++>|c[A-Za-z]|\d++|.)"
    r"|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)"
    r"|\((?:\?(?:<?[=!]|>|P?<\w++>|P=\w++|[a-zA-Z-]*+:?))?"
    r"|\{\d*+,?+\d*+\}|.",
    re.DOTALL,
)
"""Linear: what is not closed ends with the pattern."""
_MAX_NEEDED = 16
"""Patterns that are made of look-aheads: the library combines them all."""
_MAX_COMPLEMENT = 32
"""Atoms of a negative look-ahead: the length of its complement grows with their square."""
_ASSERTIONS = frozenset(("(?=", "(?!", "(?<=", "(?<!"))
_BOUNDARIES = frozenset((r"\b", r"\B"))
_BACK_REFERENCE = re.compile(r"\\[1-9]|\\k|\(\?P=")
_SHORTHAND = {r"\d": r"\D", r"\w": r"\W", r"\s": r"\S", r"\D": r"\d", r"\W": r"\w", r"\S": r"\s", ".": r"\n"}


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns that a text must match, each anywhere unless it is anchored."""

    all_of: tuple[str, ...]
    is_exact: bool
    """False: some texts match all of these and not the original."""


def without_look_around(pattern: str) -> Patterns:
    r"""Return a pattern as patterns without look-around.

    >>> without_look_around(r"^(?!-*$)[-a-z]+$").all_of
    ('^[-a-z]+$', '^(?:-*[^\\-])')
    >>> without_look_around(r"^a(?=b)")
    Patterns(all_of=('^a',), is_exact=False)
    """
    parts = _PART.findall(pattern)
    if not (_ASSERTIONS | _BOUNDARIES).intersection(parts) and not any(map(_BACK_REFERENCE.match, parts)):
        return Patterns((pattern,), is_exact=True)
    ends = _group_ends(parts)
    if ends is None or any(map(_BACK_REFERENCE.match, parts)):
        return Patterns((), is_exact=False)
    begin, needed, is_exact = 0, [], True
    if parts[0] == "^" and len(_alternatives(parts)) == 1:
        begin = 1
        while parts[begin : begin + 1] in (["(?="], ["(?!"]):
            if _is_repeated(parts, ends[begin]):
                return Patterns((), is_exact=False)
            inner = parts[begin + 1 : ends[begin]]
            if parts[begin] == "(?=":
                relaxed = _relaxed(inner)
                is_exact &= relaxed == inner
                needed += [] if relaxed is None else [f"^(?:{''.join(relaxed)})"]
            else:
                others = [_complement(one) for one in _alternatives(inner)]
                is_exact &= None not in others
                needed += [one for one in others if one is not None]
            begin = ends[begin] + 1
        is_exact &= len(needed) <= _MAX_NEEDED
        del needed[_MAX_NEEDED:]
    rest = parts[begin:]
    relaxed = _relaxed(rest)
    if relaxed is None:
        return Patterns(tuple(needed), is_exact=False)
    whole = "".join(["^"] * (begin > 0) + relaxed)
    return Patterns((whole, *needed), is_exact=is_exact and relaxed == rest)


def _group_ends(parts: Sequence[str]) -> dict[int, int] | None:
    """Return where each group ends; None: parentheses do not match."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for at, part in enumerate(parts):
        if part.startswith("("):
            opened.append(at)
        elif part == ")":
            if not opened:
                return None
            ends[opened.pop()] = at
    return None if opened else ends


def _alternatives(parts: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    depth = 0
    for part in parts:
        depth += part.startswith("(") - (part == ")")
        if part == "|" and depth == 0:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _relaxed(parts: list[str]) -> list[str] | None:
    """Return a pattern without its assertions; None: one is repeated."""
    ends = _group_ends(parts) or {}
    found: list[str] = []
    at = 0
    while at < len(parts):
        is_assertion = parts[at] in _ASSERTIONS
        if is_assertion or parts[at] in _BOUNDARIES:
            end = ends[at] if is_assertion else at
            if _is_repeated(parts, end):
                return None
            at = end + 1
        else:
            found.append(parts[at])
            at += 1
    return found


def _is_repeated(parts: Sequence[str], at: int) -> bool:
    return any(part in ("*", "+", "?") or part.startswith("{") for part in parts[at + 1 : at + 2])


def _complement(parts: list[str]) -> str | None:
    r"""Return a pattern of the texts that do not begin with a match; None: it has no simple one.

    >>> _complement(["a", "b"]), _complement([".", "*", "a"])
    ('^(?:(?:[^a]|$)|a(?:[^b]|$))', '^[^\\na]*(?:\\n|$)')
    """
    body = parts[1:] if parts[:1] == ["^"] else parts
    is_whole = body[-1:] == ["$"]
    body = body[:-1] if is_whole else body
    if body[:2] == [".", "*"] and len(body) == 3 and not is_whole:
        others = _others(body[2])
        if others is None or not others.startswith("[^"):
            return None
        begin = r"\]" if others[2] == "]" else others[2]
        return rf"^[^\n{begin}{others[3:]}*(?:\n|$)"
    repeated = None
    if is_whole and body[-1:] in (["*"], ["+"]) and len(body) > 1:
        repeated = body[-2]
        body = [*body[:-2], *([repeated] if body[-1] == "+" else [])]
    if len(body) > _MAX_COMPLEMENT:
        return None
    excluded = [_others(one) for one in body]
    after = None if repeated is None else _others(repeated)
    if None in excluded or (repeated is not None and after is None) or not (body or repeated):
        return None
    choices = [f"{''.join(body[:n])}(?:{other}|$)" for n, other in enumerate(excluded)]
    if repeated is not None:
        choices.append(f"{''.join(body)}{repeated}*{after}")
    elif is_whole:
        choices.append("".join(body) + r"[\s\S]")
    return f"^(?:{'|'.join(choices)})"


def _others(atom: str) -> str | None:
    """Return the class of the characters that one atom does not match; None: it is no character."""
    if atom in _SHORTHAND:
        return _SHORTHAND[atom]
    if atom.startswith("[^"):
        return (r"[\^" if atom[2] == "^" else f"[{atom[2]}") + atom[3:]
    if atom.startswith("["):
        return f"[^{atom[1:]}"
    if atom.startswith("\\"):
        is_class = re.match(r"\\[pPcAzZbBkG\d]", atom)
        return None if is_class else f"[^{atom}]"
    is_special = atom.startswith(("(", "{")) or atom in tuple("^$|)*+?")
    return None if is_special else f"[^{re.escape(atom)}]"
