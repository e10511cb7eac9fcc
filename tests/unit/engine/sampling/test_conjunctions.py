"""Schemas whose patterns cannot be combined in seconds are refused before they are compiled."""

import pytest

from penstock.core.errors import UsageError
from penstock.engine.sampling.conjunctions import MAX_PATTERNS
from penstock.engine.sampling.schema_keywords import enforceable


def patterns(number):
    return [{"pattern": f"k{i}"} for i in range(number)]


def of_property(schemas):
    return {"allOf": [{"properties": {"a": one}} for one in schemas]}


def of_items(schemas):
    return {"items": {"type": "string"}, "allOf": [{"items": one} for one in schemas]}


def referred(schemas):
    definitions = {f"d{i}": one for i, one in enumerate(schemas)}
    return {"properties": {"a": {"allOf": [{"$ref": f"#/$defs/{name}"} for name in definitions]}}} | {
        "$defs": definitions
    }


def chained(schemas):
    definitions = {
        f"d{i}": {**one, "allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i, one in enumerate(schemas)
    }
    return {"items": {"$ref": "#/$defs/d0"}, "$defs": {**definitions, f"d{len(schemas)}": {}}}


def looking_ahead(schemas):
    return {"allOf": [{"pattern": f"^(?={one['pattern']})"} for one in schemas]}


FORMS = [lambda schemas: {"anyOf": [{"allOf": schemas}]}, of_property, of_items, referred, chained]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_with_too_many_patterns_is_refused_wherever_they_are(form):
    enforceable(form(patterns(MAX_PATTERNS)), strict=True)
    for number in (MAX_PATTERNS + 1, 750):
        with pytest.raises(UsageError, match="guided_json: a value must match too many schemas at once"):
            enforceable(form(patterns(number)), strict=False, at="guided_json")


def test_patterns_that_are_made_of_look_aheads_count():
    with pytest.raises(UsageError, match="at most 16 patterns"):
        enforceable(looking_ahead(patterns(MAX_PATTERNS)), strict=False)


def test_patterns_of_different_texts_do_not_count_together():
    each = {f"p{i}": one for i, one in enumerate(patterns(750))}
    enforceable({"properties": each}, strict=True)
    enforceable({"anyOf": patterns(750)}, strict=True)
    enforceable({"allOf": [{"properties": {name: one}} for name, one in each.items()]}, strict=True)


def test_a_recursive_schema_is_counted_once():
    node = {"properties": {"value": {"pattern": "a"}, "next": {"$ref": "#"}}, "allOf": [{"$ref": "#"}]}
    enforceable(node, strict=True)


def test_many_references_to_one_large_conjunction_are_refused_in_bounded_work():
    large = {"allOf": [{"minLength": i} for i in range(1000)]}
    schema = {"prefixItems": [{"$ref": "#/$defs/a"}] * 1000, "$defs": {"a": large}}
    with pytest.raises(UsageError, match="too many schemas"):
        enforceable(schema, strict=False)
