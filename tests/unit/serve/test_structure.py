"""The grammar of calls, in the form that a model was taught, and of answers that are none."""

import pytest

from penstock.serve.errors import ApiError
from penstock.serve.form_choice import Wanted
from penstock.serve.schema.chat import Tool
from penstock.serve.schema.formats import ChoiceFormat, JsonObjectFormat
from penstock.serve.structure import grammar_of, grammar_of_answer
from penstock.serve.tool_choice import tool_use

TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("now", "measure")]
REQUIRED = tool_use(TOOLS, "required")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_calls_that_need_not_be_made_have_no_grammar(choice):
    assert grammar_of_answer(tool_use(TOOLS, choice), Wanted(), marked=True, several=True) is None


@pytest.mark.parametrize("several", [True, False])
def test_calls_are_marked_where_the_model_marks_them(several):
    marked = grammar_of_answer(REQUIRED, Wanted(), marked=True, several=several)
    plain = grammar_of_answer(REQUIRED, Wanted(), marked=False, several=several)
    assert [grammar.count("<tool_call>") for grammar in (marked, plain)] == [2 if several else 1, 0]


OBJECT = Wanted(JsonObjectFormat(type="json_object"))


def test_an_answer_that_may_be_a_call_or_have_a_form_can_be_either():
    both = grammar_of_answer(tool_use(TOOLS, "auto"), OBJECT, marked=True, several=True)
    assert "| other" in both
    assert "<tool_call>" in both


def test_a_form_is_for_answers_that_are_no_calls():
    assert grammar_of_answer(tool_use(TOOLS, "none"), OBJECT, marked=True, several=True) == grammar_of(OBJECT)
    calls = [grammar_of_answer(REQUIRED, form, marked=True, several=True) for form in (Wanted(), OBJECT)]
    assert calls[0] == calls[1]


def test_a_form_that_is_not_json_does_not_go_with_tools():
    form = Wanted(ChoiceFormat(type="choice", choice=["yes"]), "guided_choice")
    with pytest.raises(ApiError, match="got guided_choice of another form") as refused:
        grammar_of_answer(tool_use(TOOLS, "auto"), form, marked=True, several=True)
    assert refused.value.param == "guided_choice"
