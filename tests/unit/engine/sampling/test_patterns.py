"""Patterns without look-around match what the originals match, or more."""

import itertools
import re

import pytest

from penstock.engine.sampling.patterns import without_look_around

TEXTS = ["".join(text) for n in range(5) for text in itertools.product("ab.-+0\n(", repeat=n)]
EXACT = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!a)b?",
    r"^(?!ab)[ab.]*$",
    r"^(?!ab$)[ab.]*$",
    r"^(?!a|b0)[ab0]*$",
    r"^(?!.*a)[ab\n]*$",
    r"^(?!.*[ab])",
    r"^(?=.*a)(?=.*b)[ab.]{2,4}$",
    r"^(?=.*a)(?!b)[ab.]*$",
    r"^(?!a+$)[ab]+$",
    r"^(?!a0*$)[ab0]+$",
    r"^(?![^a]*$)[ab]*$",
    r"^(?!\.|\()",
    r"^(?!\d|-).$",
    r"[(?=]",
    r"\(?a",
]
RELAXED = [
    r"^(?!a|b)0|a$",
    r"^(?!(?:a|b)0)[ab0]*$",
    r"^(?!a{2})[ab]*$",
    r"^(?!ab*0)[ab0]*$",
    r"^(?!.*[^a])a",
    r"^(?!$)[ab]*$",
    r"^(?!)a",
    r"^(?=a(?!b))[ab0]*",
    r"^(?=a)?b",
    r"^a(?=b)b?",
    r"^((?!a).)*$",
    r"^.*(?<!a)$",
    r"(?<=a)b",
    r"(?!a)b",
    r"\ba\b",
    r"^(?:\b)*a",
    r"(a)\1",
    r"(?P<x>a|b)(?P=x)",
]


@pytest.mark.parametrize("pattern", EXACT + RELAXED)
def test_the_texts_that_a_pattern_matches(pattern):
    found = without_look_around(pattern)
    assert found.is_exact == (pattern in EXACT)
    # in Python a $ also matches before a last \n
    wanted, *needed = (re.compile(one.replace("$", r"\Z")) for one in (pattern, *found.all_of))
    assert not any(re.search(r"\(\?<?[=!]", one.replace("[(?=]", "")) for one in found.all_of)
    for text in TEXTS:
        is_matched = all(one.search(text) for one in needed)
        assert (
            is_matched == bool(wanted.search(text))
            if found.is_exact
            else is_matched >= bool(wanted.search(text))
        )


@pytest.mark.parametrize("pattern", ["(", ")", "(?=a", "a)(?!b", "[", "\\"])
def test_a_pattern_that_is_none_is_left_to_the_library(pattern):
    assert without_look_around(pattern).all_of in ((pattern,), ())
