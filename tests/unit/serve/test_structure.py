"""The grammar of calls that must be made, in the form that a model was taught."""

import pytest

from penstock.serve.schema.chat import Tool
from penstock.serve.structure import grammar_of_calls
from penstock.serve.tool_choice import tool_use

TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("now", "measure")]
REQUIRED = tool_use(TOOLS, "required")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_calls_that_need_not_be_made_have_no_grammar(choice):
    assert grammar_of_calls(tool_use(TOOLS, choice), marked=True, several=True) is None


@pytest.mark.parametrize("several", [True, False])
def test_calls_are_marked_where_the_model_marks_them(several):
    marked = grammar_of_calls(REQUIRED, marked=True, several=several)
    plain = grammar_of_calls(REQUIRED, marked=False, several=several)
    assert [grammar.count("<tool_call>") for grammar in (marked, plain)] == [2 if several else 1, 0]
