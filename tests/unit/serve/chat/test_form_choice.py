"""The form of an answer, under OpenAI's name and under vLLM's."""

import json

import pytest

from penstock.serve.chat.response_format import wanted_form
from penstock.serve.errors import ApiError
from penstock.serve.schema.completions import CompletionRequest

SCHEMA = {"type": "integer"}


def wanted(**said):
    return wanted_form(CompletionRequest.model_validate({"prompt": "a", **said}))


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("json", SCHEMA, {"type": "json_schema", "schema": SCHEMA}),
        ("json", json.dumps(SCHEMA), {"type": "json_schema", "schema": SCHEMA}),
        ("regex", "a+", {"type": "regex", "regex": "a+"}),
        ("choice", ["a"], {"type": "choice", "choice": ["a"]}),
        ("grammar", 'start: "a"', {"type": "grammar", "grammar": 'start: "a"'}),
    ],
    ids=["json", "JSON in a text", "regex", "choice", "grammar"],
)
@pytest.mark.parametrize("key", ["guided_{}", "structured_outputs.{}"])
def test_each_form_has_its_names(key, name, value, form):
    key = key.format(name)
    found = wanted(**({key: value} if key.startswith("guided") else {"structured_outputs": {name: value}}))
    written = found.form.model_dump(by_alias=True, exclude_none=True)
    if "json_schema" in written:
        written["schema"] = written.pop("json_schema")["schema"]
    assert (found.key, written) == (key, form)


def test_any_object_and_any_text_have_their_names():
    assert wanted(structured_outputs={"json_object": True}).form.type == "json_object"
    assert wanted(structured_outputs={"json_object": False}).form is None
    assert wanted(response_format={"type": "text"}).form is None
    assert wanted().form is None


@pytest.mark.parametrize(
    ("said", "param", "why"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex and guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}},
            "structured_outputs.json",
            "one form",
        ),
        ({"guided_json": "[1"}, "guided_json", r"not a JSON object \(got '\[1'\)"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json", "not a JSON object"),
    ],
)
def test_two_forms_and_none_are_refused(said, param, why):
    with pytest.raises(ApiError, match=why) as refused:
        wanted(**said)
    assert refused.value.param == param
