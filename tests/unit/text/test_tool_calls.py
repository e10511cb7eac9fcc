"""Tool calls in published templates: several in a turn, and several turns in a row."""

import re

import pytest
from tests.published_templates import OF_TRL
from tests.unit.text.test_reasoning import TOKENS, TOOLS, answered, asked, learned
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.core.errors import UsageError


def calling(*cities, **keys):
    """Return a turn that calls the tool for each city."""
    calls = [
        {
            "id": f"call{city:>5}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for city in cities
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **keys}


def result(city, text):
    return {"role": "tool", "content": text, "name": "weather", "tool_call_id": f"call{city:>5}"}


ROME, OSLO = result("Rome", "three"), result("Oslo", "four")
TALKS = {
    "in a row": [asked("Q"), calling("Rome"), ROME, calling("Oslo"), OSLO, answered("Bye")],
    "equal ones": [asked("Q"), calling("Rome"), ROME, calling("Rome"), ROME, answered("Bye")],
    "at once": [asked("Q"), calling("Rome", "Oslo"), ROME, OSLO, answered("Bye")],
    "at once, in a row": [
        *(asked("Q"), calling("Rome", "Oslo"), ROME, OSLO, calling("Oslo", "Rome"), OSLO, ROME),
        *(answered("Bye"), asked("And?"), calling("Rome"), ROME, calling("Oslo"), OSLO, answered("Fin")),
    ],
    "without an answer": [asked("Q"), calling("Rome"), ROME, calling("Oslo")],
    "without an answer to a result": [asked("Q"), calling("Rome"), ROME, calling("Oslo"), OSLO],
}


def gemma_call(*cities):
    calls = "".join(f'<|tool_call>call:weather{{city:<|"|>{city}<|"|>}}<tool_call|>' for city in cities)
    return f"{calls}<|tool_response>"


IN_GEMMA = {
    "in a row": [gemma_call("Rome"), gemma_call("Oslo"), "Bye<turn|>"],
    "equal ones": [gemma_call("Rome"), gemma_call("Rome"), "Bye<turn|>"],
    "at once": [gemma_call("Rome", "Oslo"), "Bye<turn|>"],
    "at once, in a row": [
        *(gemma_call("Rome", "Oslo"), gemma_call("Oslo", "Rome"), "Bye<turn|>"),
        *(gemma_call("Rome"), gemma_call("Oslo"), "Fin<turn|>"),
    ],
    "without an answer": [gemma_call("Rome"), gemma_call("Oslo")],
    "without an answer to a result": [gemma_call("Rome"), gemma_call("Oslo")],
}
"""Learned text. Results are written into the turn of the model, which goes on after them without a header."""


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"])
def test_calls_of_gemma_are_learned_and_results_within_its_turn_are_not(name, talk):
    assert learned(name, TALKS[talk], TOOLS) == IN_GEMMA[talk]


HEADERS = re.compile(r"<\|start\|>assistant|<\|tool_response>|</?think>|\s")
"""Where trl's templates differ: headers, Gemma's token that ends a call, empty thoughts, white space."""
ONE_AT_ONCE = {"gptoss"}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize(
    "name",
    ["diffusion_gemma", "gptoss", "muse_glimmer", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_8"],
)
def test_calls_are_learned_as_transformers_finds_them_by_the_tags_of_trl(name, talk):
    if name in ONE_AT_ONCE and "at once" in talk:
        with pytest.raises(UsageError, match=r"drops or changes an argument of the tool call of message 2"):
            learned(name, TALKS[talk], TOOLS)
        return
    [text], [spans] = render_jinja_template(
        [TALKS[talk]],
        tools=TOOLS,
        chat_template=(OF_TRL / f"{name}_training.jinja").read_text(),
        return_assistant_tokens_mask=True,
        **TOKENS,
    )
    theirs = "".join(text[slice(*span)] for span in spans)
    assert HEADERS.sub("", "".join(learned(name, TALKS[talk], TOOLS))) == HEADERS.sub("", theirs)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"])
def test_text_that_a_template_moves_behind_the_results_is_refused(name):
    talk = [asked("Q"), calling("Rome", content="Look."), ROME, answered("Bye")]
    with pytest.raises(
        UsageError, match=r"results of tools before the text of the turn .*message 2 \(got 'Look"
    ):
        learned(name, talk, TOOLS)
