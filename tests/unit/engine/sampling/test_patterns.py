"""Patterns without look-around match what the originals match, or more."""

import itertools
import json
import re

import pytest

from penstock.engine.sampling.grammar_text import json_schema
from penstock.engine.sampling.grammars import GrammarCompiler
from penstock.engine.sampling.patterns import without_look_around
from penstock.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["a"] * 3, vocab_size=257)
END = 0
GRAMMARS = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids={END})

TEXTS = ["".join(text) for n in range(5) for text in itertools.product("ab.-+0\n(^]", repeat=n)]
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
    r"^(?!.*[b-])[ab.-]*$",
    r"^(?!.*[]a])[]ab]*$",
    r"^(?![^^]b)[a^b]*$",
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


@pytest.mark.parametrize("pattern", EXACT)
def test_the_library_enforces_what_is_said_to_be_exact(pattern):
    grammar = json_schema({"type": "string", "pattern": pattern})
    wanted = re.compile(pattern.replace("$", r"\Z"))
    for text in TEXTS[:200]:
        tokens, matcher = [*TOKENIZER.encode(json.dumps(text)), END], GRAMMARS.matcher(grammar)
        is_allowed = all(matcher.allowed(tokens[:n])[token] for n, token in enumerate(tokens))
        assert is_allowed == bool(wanted.search(text)), text


@pytest.mark.parametrize("pattern", ["(", ")", "(?=a", "a)(?!b", "[", "\\"])
def test_a_pattern_that_is_none_is_left_to_the_library(pattern):
    assert without_look_around(pattern).all_of in ((pattern,), ())


@pytest.mark.parametrize("part", ["[", r"\p{", "{1", "(?=a)", "(?<a", r"\k<a", "a|", "a", "[^]"])
def test_a_long_pattern_is_read_in_linear_time_and_gives_few_short_ones(part):
    for pattern in (f"^(?!{part * 8_000}", f"^(?!{part * 8_000})b", "^" + f"(?={part})" * 8_000):
        found = without_look_around(pattern)
        assert len(found.all_of) <= 17
        assert sum(map(len, found.all_of)) <= len(pattern) + 17


def test_what_is_not_made_of_many_look_aheads_is_said():
    assert without_look_around("^" + "(?=.*a)" * 16 + "b").is_exact
    assert not without_look_around("^" + "(?=.*a)" * 17 + "b").is_exact
    assert without_look_around("^(?!" + "a" * 32 + ")b").is_exact
    assert not without_look_around("^(?!" + "a" * 33 + ")b").is_exact
