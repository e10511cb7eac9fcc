"""Texts of grammars: what they say, and what is refused before anything is compiled."""

import json

import pytest

from penstock.core.errors import UsageError
from penstock.engine.sampling import grammar_text


def test_equal_demands_are_equal_texts():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert grammar_text.json_schema(schema) == grammar_text.json_schema(json.loads(json.dumps(schema)))
    assert grammar_text.json_schema(schema) != grammar_text.json_object()


def test_a_schema_cannot_loosen_how_it_is_enforced():
    written = grammar_text.json_schema({"type": "integer", "x-guidance": {"lenient": True}})
    assert "lenient" not in written


def test_a_long_grammar_is_refused():
    with pytest.raises(UsageError, match=r"too long \(got '70,0\d\d bytes'\)\. Use at most 65,536"):
        grammar_text.regex("a" * 70_000)


def test_a_schema_too_deep_to_write_is_refused():
    schema = {"type": "string"}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nested too deeply"):
        grammar_text.json_schema(schema)


@pytest.mark.parametrize(
    "numbers", [[100003, 100004], [1e-9, 1], ["1e999", 1], [997, 991, 983]], ids=lambda numbers: str(numbers)
)
def test_multiples_that_take_too_many_states_are_refused(numbers):
    schema = {"anyOf": [{"type": "number", "multipleOf": number} for number in numbers]}
    text = json.dumps(schema).replace('"1e999"', "1e999")
    with pytest.raises(UsageError, match="least common multiple of all multipleOf"):
        grammar_text.lark(f"start: %json {text}")
    escaped = text.replace("multipleOf", "multiple\\u004ff")
    with pytest.raises(UsageError, match="least common multiple of all multipleOf"):
        grammar_text.lark(f"start: %json {escaped}")


@pytest.mark.parametrize("number", [5, 0.01, 0.5, 100, 0, 1000])
def test_multiples_of_daily_use_are_accepted(number):
    grammar_text.json_schema({"anyOf": [{"multipleOf": number}, {"multipleOf": 4}]})


def test_nothing_to_choose_from_or_to_call_is_refused():
    with pytest.raises(UsageError, match="needs alternatives"):
        grammar_text.choice([])
    with pytest.raises(UsageError, match="needs functions"):
        grammar_text.tool_calls({})


def test_a_schema_of_calls_that_is_nested_too_deeply_is_refused():
    deep = {}
    for _ in range(5_000):
        deep = {"properties": deep}
    with pytest.raises(UsageError, match="A schema is nested too deeply"):
        grammar_text.tool_calls({"add": deep})
