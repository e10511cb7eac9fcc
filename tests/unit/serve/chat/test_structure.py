"""The grammar of calls, in the form that a model was taught, and of answers that are none."""

import re
from types import MappingProxyType

import pytest

from penstock.serve.chat.response_format import (
    AnswerFormat,
    call_form,
    grammar_of,
    grammar_of_answer,
    unmarked_json,
)
from penstock.serve.chat.tools import tool_use
from penstock.serve.errors import ApiError
from penstock.serve.schema.base import ChoiceFormat, JsonObjectFormat
from penstock.serve.schema.chat import NamedFunction, NamedTool, Tool
from penstock.text.chat_template import ChatTemplate

TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("now", "measure")]
REQUIRED = tool_use(TOOLS, "required")
MARKED = call_form(ChatTemplate(source="write <tool_call> around it"))
LISTED = call_form(ChatTemplate(source="write [TOOL_CALLS] before all"))


ANY_TEXT = AnswerFormat()


def grammar_with(use, wanted=ANY_TEXT, *, form=MARKED, added=MappingProxyType({}), several=True):
    return grammar_of_answer(use, wanted, form=form, added=added, several=several)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_calls_that_need_not_be_made_have_no_grammar(choice):
    assert grammar_with(tool_use(TOOLS, choice)) is None


@pytest.mark.parametrize("several", [True, False])
def test_calls_are_marked_where_the_model_marks_them(several):
    marked = grammar_with(REQUIRED, several=several)
    plain = grammar_with(REQUIRED, form=call_form(ChatTemplate(source="no marks")), several=several)
    assert [grammar.count("<tool_call>") for grammar in (marked, plain)] == [2 if several else 1, 0]


def test_marks_that_are_added_tokens_are_those_tokens():
    of_one = grammar_with(REQUIRED, added={"<tool_call>": 7, "</tool_call>": 8})
    assert (of_one.count("<[7]>"), of_one.count("<[8]>"), "tool_call" in of_one) == (2, 2, False)
    assert grammar_with(REQUIRED, form=LISTED, added={"[TOOL_CALLS]": 9}).count("<[9]>") == 1


OBJECT = AnswerFormat(JsonObjectFormat(type="json_object"))


def test_an_answer_that_may_be_a_call_or_have_a_form_can_be_either():
    both = grammar_with(tool_use(TOOLS, "auto"), OBJECT)
    assert "| other" in both
    assert "<tool_call>" in both


def test_a_form_is_for_answers_that_are_no_calls():
    assert grammar_with(tool_use(TOOLS, "none"), OBJECT) == grammar_of(OBJECT)
    calls = [grammar_with(REQUIRED, form) for form in (AnswerFormat(), OBJECT)]
    assert calls[0] == calls[1]


def test_a_form_that_is_not_json_does_not_go_with_tools():
    form = AnswerFormat(ChoiceFormat(type="choice", choice=["yes"]), "guided_choice")
    with pytest.raises(ApiError, match="got guided_choice") as refused:
        grammar_with(tool_use(TOOLS, "auto"), form)
    assert refused.value.param == "guided_choice"


@pytest.mark.parametrize("kind", ["array", "string", ["null", "integer"]])
@pytest.mark.parametrize(
    "choice", ["required", NamedTool(type="function", function=NamedFunction(name="now"))]
)
def test_arguments_that_are_no_object_are_refused_by_function_and_type(kind, choice):
    function = {"name": "now", "parameters": {"type": kind}}
    use = tool_use([Tool.model_validate({"type": "function", "function": function})], choice)
    with pytest.raises(ApiError, match=f"type {re.escape(repr(kind))} for 'now'") as refused:
        grammar_with(use)
    assert refused.value.param == "tools"


def test_json_without_marks_is_content_where_calls_are_marked():
    auto = tool_use(TOOLS, "auto")
    assert unmarked_json(None, auto, MARKED) == "calls"
    assert unmarked_json("grammar", REQUIRED, MARKED) == "calls"
    assert unmarked_json("grammar", auto, MARKED) == "content"
    assert unmarked_json("grammar", auto, None) == "calls or content"
