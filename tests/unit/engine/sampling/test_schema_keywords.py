"""Keywords of JSON schemas: annotations go, what the library lacks is said otherwise or named."""

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UsageError
from penstock.engine.sampling.grammar_text import json_schema, regex, tool_calls
from penstock.engine.sampling.grammars import GrammarCompiler
from penstock.engine.sampling.schema_keywords import FORMATS, enforceable, place
from penstock.text.tokenizer import train_tokenizer
from tests.examples import examples

TOKENIZER = train_tokenizer(["a"] * 3, vocab_size=257)
END = 0
GRAMMARS = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids={END})
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 1.5, "a", "bb"]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=3),
    max_leaves=4,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
COUNTS = st.integers(0, 3)


def keywords_with(each):
    some, several = st.lists(NAMES, max_size=2), st.dictionaries(NAMES, each, max_size=2)
    return {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "properties": several,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": each,
        "items": each,
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "anyOf": st.lists(each, min_size=1, max_size=2),
        "oneOf": st.lists(each, min_size=1, max_size=2),
        "not": each,
        "if": each,
        "then": each,
        "else": each,
        "contains": each,
        "minContains": COUNTS,
        "maxContains": COUNTS,
        "uniqueItems": st.booleans(),
        "propertyNames": st.booleans()
        | st.sampled_from(
            [{}, {"pattern": "^a"}, {"enum": ["a", "b"]}, {"type": "string"}, {"maxLength": 1}]
        ),
        "dependentRequired": st.dictionaries(NAMES, some.map(lambda names: sorted(set(names))), max_size=2),
        "dependentSchemas": several,
        "unevaluatedProperties": each,
        "unevaluatedItems": each,
        "format": st.sampled_from(["color", "date", "int32"]),
        "contentEncoding": st.just("base64"),
        "examples": st.lists(VALUES, max_size=1),
    }


SCHEMAS = st.recursive(
    st.booleans() | st.just({}),
    lambda each: st.lists(st.sampled_from(sorted(keywords_with(each))), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords_with(each)[name] for name in names})
    ),
    max_leaves=6,
).filter(lambda schema: isinstance(schema, dict))


def accepts(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=1, max_size=12))
@examples(1500)
def test_what_is_enforced_says_the_same_and_what_is_not_is_named(schema, values):
    found = enforceable(schema, strict=False)
    assert enforceable(found.schema, strict=True).schema == found.schema
    for value in values:
        if not found.not_enforced:
            assert accepts(found.schema, value) == accepts(schema, value)
        else:
            assert accepts(found.schema, value) or not accepts(schema, value)


OPEN = {"properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize("closed", [False, {"type": "string"}])
@pytest.mark.parametrize(
    "schema",
    [
        {"if": {"properties": {"a": {"const": 1}}}, "then": OPEN, "unevaluatedProperties": False},
        {"if": OPEN, "unevaluatedProperties": False},
        {"if": {"required": ["c"]}, "else": OPEN, "unevaluatedProperties": False},
        {"dependentSchemas": {"a": OPEN}, "unevaluatedProperties": False},
        {"contains": {"const": 1}, "unevaluatedItems": False},
        {"contains": {"const": 1}, "minContains": 0, "unevaluatedItems": False},
        {"propertyNames": {"pattern": "^a"}, "unevaluatedProperties": False},
        {"propertyNames": {"enum": ["a"]}, "unevaluatedProperties": False},
        {"propertyNames": {"pattern": "^a"}, "not": {"required": ["c"]}, "unevaluatedProperties": False},
        {
            "$defs": {"o": {"$dynamicAnchor": "o", **OPEN}},
            "$dynamicRef": "#o",
            "unevaluatedProperties": False,
        },
    ],
)
def test_a_schema_that_closes_others_never_becomes_tighter(schema, closed):
    key = next(key for key in schema if key.startswith("unevaluated"))
    schema = {**schema, key: closed}
    found = enforceable(schema, strict=False)
    for value in ({}, {"a": 1}, {"a": 1, "b": 2}, {"ab": "x"}, {"ab": 1}, {"a": "x"}, [], [1], [1, 2], ["a"]):
        wanted, got = accepts(schema, value), accepts(found.schema, value)
        assert got >= wanted if found.not_enforced else got == wanted


def of_kind(kind):
    return {"type": "object", "properties": {"k": kind}, "required": ["k"]}


KINDS = {
    "a": of_kind({"const": "a"}),
    "b": of_kind({"const": "b"}),
    "c": of_kind({"$ref": "#/$defs/name"}),
    "d": of_kind({"type": "string"}),
    "e": {"$ref": "#/$defs/e"},
    "name": {"enum": ["c", "cc"]},
}


@pytest.mark.parametrize(
    ("schema", "not_enforced"),
    [
        ({"type": "string", "format": "hal"}, ()),
        ({"contentEncoding": "base64", "contentMediaType": "image/png", "examples": ["a"]}, ()),
        ({"$schema": "mine", "title": "a", "x-mine": {"not": {}}, "const": {"not": {}}}, ()),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems at #",)),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ()),
        ({"properties": {"a/b": {"items": {"not": {}}}}}, ("not at #/properties/a~1b/items",)),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ()),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf at #",)),
        (
            {"oneOf": [
                {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in "ab"
            ]},
            (),
        ),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/b"}]}], "$defs": KINDS}, ()),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}], "$defs": KINDS}, ()),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/d"}], "$defs": KINDS}, ("oneOf at #",)),
        ({"oneOf": [{"$ref": "#/$defs/e"}, {"$ref": "#/$defs/a"}], "$defs": KINDS}, ("oneOf at #",)),
        ({"$recursiveAnchor": True, "properties": {"a": {"$recursiveRef": "#"}}}, ()),
        ({"dependentRequired": {name: ["x"] for name in "abcd"}}, ("dependentRequired at #",)),
        ({"if": {"type": "object"}, "then": {"required": ["a"]}}, ("if at #",)),
        ({"$defs": {"a": {"$dynamicAnchor": "x", "type": "null"}}, "$dynamicRef": "#x"}, ()),
        ({"contains": 5, "propertyNames": "a", "dependentRequired": 1, "oneOf": {}, "items": 3},
         ("contains at #", "propertyNames at #", "dependentRequired at #")),
    ],
)  # fmt: skip
def test_keywords_that_are_not_enforced_are_named_with_their_paths(schema, not_enforced):
    assert enforceable(schema, strict=False).not_enforced == not_enforced
    if not_enforced:
        with pytest.raises(UsageError, match="cannot be enforced") as refused:
            enforceable(schema, strict=True, at="guided_json")
        keyword, _, pointer = not_enforced[0].partition(" at ")
        assert f"{keyword} at {place('guided_json', pointer)}" in str(refused.value)


@pytest.mark.parametrize("form", [*sorted(FORMATS), "regex", "json-pointer", "idn-email", "password"])
def test_formats_are_enforced_or_annotations(form):
    GRAMMARS.matcher(json_schema({"type": "string", "format": form}))
    assert ("format" in enforceable({"format": form}, strict=True).schema) == (form in FORMATS)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"dependentRequired": {"a": ["b"], "b": ["c"]}}, ["{}", '{"b":1,"c":1}'], ['{"a":1}', '{"b":1}']),
        ({"dependencies": {"a": ["b"]}}, ["{}", '{"a":1,"b":1}'], ['{"a":1}']),
        ({"propertyNames": {"pattern": "^a"}}, ["{}", '{"ab":1}'], ['{"b":1}']),
        ({"propertyNames": {"enum": ["a", "b"]}}, ["{}", '{"a":1}'], ['{"c":1}']),
        ({"type": "array", "contains": {}, "minContains": 2}, ["[1,2]"], ["[1]"]),
        ({"$defs": {"a": {"$dynamicAnchor": "x", "type": "null"}}, "$dynamicRef": "#x"}, ["null"], ["1"]),
        ({"oneOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, ['{"a":1}'], []),
    ],
)  # fmt: skip
def test_the_library_holds_answers_to_what_was_rewritten(schema, yes, no):
    schema = schema if "type" in schema or "$defs" in schema else {"type": "object", **schema}
    schema = enforceable(schema, strict=False).schema
    for text, is_right in (*((text, True) for text in yes), *((text, False) for text in no)):
        assert matches(json_schema(schema), text) == is_right


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("end", ["", "#"])
@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12"])
def test_a_dialect_is_known_in_every_spelling_and_two_of_them_in_one_schema(draft, end, scheme):
    part = {"$schema": f"{scheme}://json-schema.org/{draft}/schema{end}", "type": "integer"}
    for schema in (
        part,
        {"$schema": "http://json-schema.org/draft-07/schema", "items": part, "type": "array"},
    ):
        GRAMMARS.matcher(json_schema(schema))


@pytest.mark.parametrize(
    ("keyword", "value", "pointer"),
    [
        ("contains", {"type": "integer"}, ""),
        ("not", {"type": "integer"}, ""),
        ("if", {"properties": {"a": {"type": "integer"}}}, "/properties/a"),
        ("propertyNames", {"type": "integer"}, ""),
        ("oneOf", [{"type": "integer"}, {"type": "number"}], "/0"),
        ("dependentSchemas", {"a/b": {"type": "integer"}}, "/a~1b"),
        ("unevaluatedItems", {"type": "integer"}, ""),
    ],
)
def test_references_into_keywords_that_are_rewritten_are_found(keyword, value, pointer):
    ref = {"$ref": f"#/properties/x/{keyword}{pointer}"}
    schema = {"type": "object", "properties": {"x": {keyword: value}, "y": ref}, "required": ["y"]}
    taken = enforceable({**schema, "additionalProperties": False}, strict=False).schema
    for text, is_right in (('{"y":5}', True), ('{"y":"a"}', False)):
        assert matches(json_schema(taken), text) == is_right
        call = f'{{"name": "f", "arguments": {text}}}'
        assert matches(tool_calls({"f": taken}), call) == is_right


@pytest.mark.parametrize(
    "pattern", ["(", "a(?=b)", "[z-a]", "a{2,1}", r"(a+)\1", r"\p{Foo}", "[^\\x00-\\U0010FFFF]"]
)
def test_a_wrong_regex_is_quoted_as_it_was_given(pattern):
    with pytest.raises(UsageError, match="The regular expression cannot be used: ") as refused:
        GRAMMARS.matcher(regex(pattern))
    assert f"(got {pattern!r})" in str(refused.value)
    assert not re.search(r"start:|at \d+\(|in regex|Bias", str(refused.value))


DEFS = {"z": {"type": "integer"}}
NEEDS_A = {"type": "object", "required": ["a"], "$defs": DEFS}
BY_POINTER = {**NEEDS_A, "properties": {"a": {"$ref": "#/$defs/z"}}}


@pytest.mark.parametrize(
    "schema",
    [
        BY_POINTER,
        {"$id": "https://x.example/y", **BY_POINTER},
        {"$id": "y.json", **BY_POINTER},
        {"$id": "https://x.example", **NEEDS_A, "properties": {"a": {"$ref": "https://x.example#/$defs/z"}}},
        {**NEEDS_A, "properties": {"a": {"$id": "n", "$ref": "#/$defs/w", "$defs": {"w": DEFS["z"]}}}},
        {**NEEDS_A, "properties": {"a": {"allOf": [{"$ref": "#/$defs/z"}]}}},
    ],
)  # fmt: skip
def test_references_of_parameters_lead_where_they_lead_without_the_other_tools(schema):
    grammar = tool_calls({"other": {"type": "object", "$defs": {"z": {"type": "string"}}}, "f": schema})
    for arguments in ('{"a": 1}', '{"a": "x"}'):
        is_right = arguments == '{"a": 1}'
        assert matches(grammar, f'{{"name": "f", "arguments": {arguments}}}') == is_right


@pytest.mark.parametrize("value", [{"$ref": "#/x"}, {"$ref": "#"}, [{"$ref": "#/$defs/z"}], {"$id": "#/a"}])
@pytest.mark.parametrize("form", ["const", "enum", "property"])
def test_values_that_look_like_references_stay(value, form):
    part = {"const": value} if form != "enum" else {"enum": [value]}
    name = "$ref" if form == "property" else "a"
    schema = {"type": "object", "properties": {name: part}, "required": [name]}
    call = {"name": "f", "arguments": {name: value}}
    assert matches(tool_calls({"f": schema}), json.dumps(call))


def matches(grammar, text):
    tokens = TOKENIZER.encode(text)
    matcher = GRAMMARS.matcher(grammar)
    return all(matcher.allowed(tokens[:n])[token] for n, token in enumerate([*tokens, END]))


@pytest.mark.parametrize(
    "names",
    [
        {"$ref": "#/$defs/A", "pattern": "^b"},
        {"allOf": [{"pattern": "c$"}], "pattern": "^b"},
        {"$ref": "#/nothing", "allOf": [{"maxLength": 3}]},
        {"minLength": True},
        {"pattern": "^(?=a)b"},
    ],
)
def test_a_rule_of_names_that_is_not_enforced_whole_is_named(names):
    schema = {"type": "object", "propertyNames": names, "$defs": {"A": {"pattern": "c$"}}}
    assert enforceable(schema, strict=False).not_enforced == ("propertyNames at #",)


def test_the_work_for_a_schema_grows_with_its_length():
    constants = [{"const": i} for i in range(3000)]
    assert enforceable({"oneOf": constants}, strict=True)
    kinds = [{"type": "object", "required": ["a"], "properties": {"a": one}} for one in constants]
    assert enforceable({"oneOf": kinds}, strict=False).not_enforced == ("oneOf at #",)
    references = [{"$ref": f"#/not/anyOf/{i}"} for i in range(3000)]
    found = enforceable({"not": {"anyOf": constants}, "anyOf": references}, strict=False)
    assert len(found.schema["$defs"]) == 64
