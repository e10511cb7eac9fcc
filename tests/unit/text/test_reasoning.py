"""Reasoning in published templates: under any of its names, in tool conversations, and empty."""

import re
from functools import partial

import pytest
from tests.published_templates import OF_TRL
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.core.errors import UsageError
from penstock.text.chat_template import REASONING_KEYS, ChatTemplate, render
from penstock.text.learned_tokens import Renderer, find_answers

CONTROL = re.compile(
    r"<\|[\w ]+\|?>|<[\w ]+\|>|</?think>|<start_of_turn>|<end_of_turn>|<bos>|<eos>|<\uff5c\S+?\uff5c>"
)
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "W", "parameters": {}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "three", "name": "weather", "tool_call_id": "abcdefghi"}


def asked(text):
    return {"role": "user", "content": text}


def answered(text, **keys):
    return {"role": "assistant", "content": text, **keys}


def called(**keys):
    return {"role": "assistant", "content": "", "tool_calls": [CALL], **keys}


def learned(name, messages, tools=()):
    """Return the learned text of each turn, of the template `name`; its text is that of transformers."""
    return learned_of((OF_TRL / f"{name}.jinja").read_text(), messages, tools)


def learned_of(source, messages, tools=()):
    template = ChatTemplate(source=source, variables=TOKENS)
    renderer = Renderer(
        render=partial(render, template=template), control=CONTROL, has_tags="generation %}" in source
    )
    found = find_answers(messages, tools, renderer)
    [text], _ = render_jinja_template([messages], tools=list(tools) or None, chat_template=source, **TOKENS)
    assert found.text == text
    return ["".join(found.text[slice(*span)] for span in answer.spans) for answer in found.answers]


REASONED = {
    "qwen3": "<think>\nWhy.\n</think>\n\nBye<|im_end|>",
    "qwen3_5_think": "Why.\n</think>\n\nBye<|im_end|>",
    "gptoss": "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant<|channel|>final<|message|>"
    "Bye<|return|>",
    "lfm2_2_5_v2": "<think>Why.</think>Bye<|im_end|>",
    "nemotron_3_nano": "Why.\n</think>\nBye<|im_end|>",
    "nemotron_3_ultra": "Why.</think>Bye<|im_end|>",
}
"""Learned text of a turn with reasoning. What the generation prompt opens is not learned."""


@pytest.mark.parametrize("key", REASONING_KEYS)
@pytest.mark.parametrize("name", REASONED)
def test_reasoning_is_learned_whatever_its_key(name, key):
    assert learned(name, [asked("Hi"), answered("Bye", **{key: "Why."})]) == [REASONED[name]]


EMPTY = {
    "qwen3": "<think>\n\n</think>\n\nBye<|im_end|>",
    "qwen3_5_think": "\n</think>\n\nBye<|im_end|>",
    "nemotron_3_nano": "</think>Bye<|im_end|>",
    "nemotron_3_nano_training": "</think>Bye<|im_end|>",
    "nemotron_3_super": "</think>Bye<|im_end|>",
    "nemotron_3_5_lightning": "</think>Bye<|im_end|>",
}
"""Learned text of a last turn without reasoning: the model must close the thought that its prompt opens."""


@pytest.mark.parametrize("name", EMPTY)
def test_the_close_of_an_empty_thought_is_learned(name):
    assert learned(name, [asked("Hi"), answered("Bye")]) == [EMPTY[name]]


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "gemma3", "cohere", "deepseek_r1_distill"])
@pytest.mark.parametrize("said", [{"reasoning": "Why."}, {"content": "<think>Why.</think>Bye"}])
def test_reasoning_of_the_last_turn_that_is_dropped_is_refused(name, said):
    turn = {**answered("Bye"), **said}
    if name != "deepseek_r1_distill" and "content" in said:
        assert "Why." in learned(name, [asked("Hi"), turn])[0]  # they write the content as it is
        return
    with pytest.raises(UsageError, match=r"drops the reasoning of the last turn, message 2 \(got 'Why\.'\)"):
        learned(name, [asked("Hi"), turn])


IN_TOOLS = {
    "gptoss": [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        "<|channel|>final<|message|>Three.<|end|>",
        "<|channel|>final<|message|>Bye<|return|>",
    ],
    "gemma4_v3": [
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>',
        "Three.<turn|>",
        "Bye<turn|>",
    ],
}


@pytest.mark.parametrize("name", IN_TOOLS)
def test_calls_whose_reasoning_the_template_drops_later_are_found(name):
    talk = [asked("Rome?"), called(thinking="Ask."), RESULT, answered("Three."), asked("Oh"), answered("Bye")]
    assert learned(name, talk, TOOLS) == IN_TOOLS[name]


def test_calls_before_an_answer_lose_their_reasoning_in_gpt_oss_and_are_found():
    talk = [asked("Rome?"), called(reasoning="Ask."), RESULT, called(reasoning="Again."), RESULT]
    calls = learned("gptoss", [*talk, answered("Three.", reasoning="Seen.")], TOOLS)
    assert calls[:2] == IN_TOOLS["gptoss"][:1] * 2
    assert calls[2].startswith("<|channel|>analysis<|message|>Seen.<|end|>")


CLOSED = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ OPEN ~ m.reasoning_content ~ '</think>' }}{% else %}"
    "{{ '</think>' ~ AFTER }}{% endif %}{% endif %}{{ m.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' ~ OPEN }}{% endif %}"
)
"""A thought that was not thought is closed without being opened, as in GLM 4.7."""


@pytest.mark.parametrize("opening", ["<think>", "<think>\n", "\n<think>"])
@pytest.mark.parametrize("after", ["", "\n", "\n\n"])
def test_a_closing_tag_alone_is_learned_in_every_turn_with_what_follows(opening, after):
    source = CLOSED.replace("OPEN", repr(opening)).replace("AFTER", repr(after))
    talk = [asked("Hi"), answered("Bye"), asked("</think>"), answered("Oh", thinking="Why."), asked("a")]
    found = learned_of(source, [*talk, answered("</x>")])
    close = f"</think>{after}"
    assert found == [f"{close}Bye<|end|>", "Why.</think>Oh<|end|>", f"{close}</x><|end|>"]


DROPS = (
    "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content.split('</think>')[-1] ~ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(
    "turn",
    [
        answered("<think>4</think>2 + 2 = 4"),
        answered("2 + 2 = 4", reasoning="4"),
        answered("<think>Bye</think>Bye"),
        answered("Bye", thinking="Bye"),
    ],
)
def test_dropped_reasoning_that_is_a_part_of_what_is_said_is_refused(turn):
    with pytest.raises(UsageError, match="drops the reasoning of the last turn, message 2"):
        learned_of(DROPS, [asked("Hi"), turn])


@pytest.mark.parametrize("value", [["Why."], {"text": "Why."}, 4, True])
@pytest.mark.parametrize("key", REASONING_KEYS)
def test_reasoning_that_is_no_text_is_refused(key, value):
    with pytest.raises(UsageError, match="A message has reasoning that is not text"):
        learned("qwen3", [asked("Hi"), answered("Bye", **{key: value})])
