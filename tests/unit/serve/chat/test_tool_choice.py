"""Which tools a model is told of, and which it may or must call."""

import pytest

from penstock.serve.chat.tools import tool_use
from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import ChatRequest

NAMES = ["now", "measure", "open"]
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]


def use_of(choice, tools=TOOLS):
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    asked = ChatRequest.model_validate(body)
    return tool_use(asked.tools or (), asked.tool_choice)


def names_of(tools):
    return [tool.function.name for tool in tools]


def some(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "told", "allowed", "must_call", "forced"),
    [
        (None, NAMES, NAMES, False, None),
        ("auto", NAMES, NAMES, False, None),
        ("none", [], [], False, None),
        ("required", NAMES, NAMES, True, None),
        (TOOLS[1], NAMES, NAMES, True, "measure"),
        (some("auto", "open", "now"), NAMES, ["now", "open"], False, None),
        (some("required", "open"), NAMES, ["open"], True, None),
    ],
)
def test_a_choice_says_what_may_and_what_must_be_called(choice, told, allowed, must_call, forced):
    use = use_of(choice)
    assert (names_of(use.told), names_of(use.allowed)) == (told, allowed)
    assert (use.must_call, use.forced) == (must_call, forced)
    assert list(use.schemas) == allowed


@pytest.mark.parametrize(
    ("choice", "tools", "param", "said"),
    [
        ("required", [], "tool_choice", "there are no tools"),
        (some("auto", "now"), [], "tool_choice", "there are no tools"),
        (some("auto", "now", "close"), TOOLS, "tool_choice", "'close', which is not one of the tools"),
        ({"type": "function", "function": {"name": "close"}}, TOOLS, "tool_choice", "'close'"),
        ("auto", [TOOLS[0], TOOLS[0]], "tools", "Two tools have one name"),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice, tools, param, said):
    with pytest.raises(ApiError, match=said) as refused:
        use_of(choice, tools)
    assert (refused.value.status, refused.value.param) == (400, param)
