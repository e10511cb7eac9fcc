"""Drafts change when tokens come, never which."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculation.speculation import accepted_tokens

TOKENS = st.integers(min_value=0, max_value=4)


@given(salt=st.integers(), data=st.data())
def test_an_answer_is_the_same_whatever_is_guessed(salt, data):
    def draw(tokens):
        return hash((salt, tokens)) % 5

    expected = []
    while len(expected) < 20:
        expected.append(draw(tuple(expected)))
    tokens = []
    while len(tokens) < len(expected):
        right = expected[len(tokens) :]
        drafts = data.draw(st.one_of(st.lists(TOKENS, max_size=6), st.just(right), st.just([*right[:2], 9])))
        drawn = [draw((*tokens, *drafts[:index])) for index in range(len(drafts) + 1)]
        added = accepted_tokens(drafts, drawn)
        assert added
        tokens += added
    assert tokens[:20] == expected


def test_right_drafts_all_stand_and_bring_one_token_more():
    assert accepted_tokens([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]


def test_nothing_stands_behind_a_draft_that_fell():
    assert accepted_tokens([1, 2, 3], [1, 9, 3, 4]) == [1, 9]
