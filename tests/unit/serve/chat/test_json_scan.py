"""JSON located in a text: what Python's reader takes is found, and what it takes no more is, too."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.serve.chat.json_scan import children, is_object, value_end
from tests.examples import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
)
PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    "\\",
    "1",
    "-",
    ".",
    "e",
    "0",
    "true",
    "nul",
    " ",
    "\n",
    "\u0661",
]
SOUP = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(value=JSON, rest=st.sampled_from(["", " ", ", 2", "}"]), indent=st.none() | st.integers(0, 2))
def test_a_value_ends_where_it_was_written_to(value, rest, indent):
    text = json.dumps(value, indent=indent)
    assert value_end(f"  {text}{rest}", 0) == 2 + len(text) or isinstance(value, int | float)
    if isinstance(value, dict | list):
        parts = [json.loads(text[begin:end]) for begin, end in children(text, 0)]
        assert parts == (
            [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        )


@given(text=SOUP)
@example("[1,]")
@example('{"a"}')
@example("]")
@example("01")
@examples(1000)
def test_what_is_no_json_for_python_is_none_here(text):
    try:
        found = isinstance(json.loads(text), dict)
    except ValueError:
        found = None
    try:
        is_whole = not text[value_end(text, 0) :].strip()
    except ValueError:
        is_whole = False
    assert is_whole == (found is not None)
    assert is_object(text) == bool(found)


@pytest.mark.parametrize(
    "value", ["1e999", "-1E+400", "9" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000]
)
def test_numbers_of_any_size_and_values_of_any_depth_are_found(value):
    assert is_object(f'{{"a": {value}}}')
    assert not is_object(f'{{"a": {value}')


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", '"\n"', '"\\x"', '"\\u12g4"', "+1", ".5", "1."]
)
def test_what_the_standard_does_not_have_is_no_value(text):
    assert not is_object(f'{{"a": {text}}}')
