"""Prompt lookup: what followed last time, found without reading the text again."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation.ngram import SIZES, NgramIndex

TEXTS = st.lists(st.integers(min_value=0, max_value=2), max_size=60)


def searched(tokens, num):
    """The same, by looking at every position."""
    for size in SIZES:
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                repeated = tokens[start:]
                return tuple((repeated * num)[:num])
    return ()


@given(TEXTS, st.lists(st.integers(min_value=1, max_value=9), max_size=8), st.integers(1, 6))
def test_the_table_finds_what_a_search_of_the_whole_text_finds(tokens, steps, num):
    index, length = NgramIndex(), 0
    for step in [*steps, len(tokens)]:
        length = min(len(tokens), length + step)
        assert index.following(tokens[:length], num) == searched(tokens[:length], num)


def test_a_match_at_the_end_is_taken_to_repeat():
    assert NgramIndex().following([9, 1, 2, 1, 2, 1], 5) == (2, 1, 2, 1, 2)


def test_a_new_text_has_no_drafts():
    assert NgramIndex().following([1, 2, 3, 4], 4) == ()


def test_large_token_ids_are_not_mixed_up():
    large = 2**23
    assert NgramIndex().following([0, large, 5, 1, 0, 1, 0, large], 1) == (5,)
