"""Learned tokens of published templates are those of the same template with tags of `{% generation %}`."""

import re
from functools import cache, partial

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.data.prepare.chat_records import Side
from penstock.data.prepare.chat_tokens import learned_bits
from penstock.text.chat_template import REASONING_KEYS, ChatTemplate, render
from penstock.text.learned_tokens import Renderer, find_answers
from penstock.text.tokenizer import Tokenizer, train_tokenizer
from tests.examples import examples
from tests.published_templates import COHERE_TOKENS, tagged, without_tags

CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = (
    "User,Assistant,tool calls begin,tool call begin,tool sep,tool call end,tool calls end,"
    "tool outputs begin,tool output begin,tool output end,tool outputs end,end of sentence"
)
MISTRAL = (
    "<s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] </s>"
)
COHERE = ("<BOS_TOKEN>", *COHERE_TOKENS)
SPECIAL = {
    "chatml": CHATML,
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
    "mistral": tuple(MISTRAL.split()),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
    "gemma3": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    "phi3_5": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    "cohere": COHERE,
    "cohere2": COHERE,
    "deepseekv3": tuple(f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>" for name in DEEPSEEK.split(",")),
}
WITH_TOOLS = ("granite", "mistral", "qwen2_5", "qwen3", "qwen3_instruct_2507", "deepseekv3")
HEADERS = {"deepseekv3": {"<\uff5cAssistant\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>"}}
"""Tokens within the tags that are a turn's header: the prompt holds them."""
LINE_ENDS = {
    "qwen2_5": ("<|im_start|>assistant", "<|im_end|>"),
    "qwen3": ("<|im_end|>",),
    "qwen3_instruct_2507": ("<|im_end|>",),
    "gemma3": ("<end_of_turn>",),
    "phi3_5": ("<|end|>",),
}
"""Texts before a line end that is within the tags: those of a header, and end-of-turn tokens."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEXT = st.one_of(
    st.sampled_from(["Hello.", "\n\nHi\n", "3 + 4 = 7", "{}", "assistant\n", "größer 日本 🙂", "a\tb "]),
    st.text(st.characters(exclude_categories=("Cs", "Cn", "Co", "Cc")), max_size=12),
)
NUMBER = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans())
EMPTY = st.one_of(TEXT, st.just(""))


@st.composite
def conversations(draw, *, with_tools, reasons):
    """Return (messages, tools): one to three exchanges. If there are tools, up to three turns with one or two
    calls come before an answer.

    Args:
        reasons: the last turn may have reasoning; earlier ones may in any case.
    """
    tools = TOOLS if with_tools and draw(st.booleans()) else []
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    exchanges = draw(st.integers(1, 3))
    for exchange in range(exchanges):
        messages.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 3)) if tools else 0):
            ids = [f"abcdefgh{number}" for number in range(draw(st.integers(1, 2)))]
            functions = [
                {"name": "weather", "arguments": {"city": draw(TEXT), "days": draw(NUMBER)}} for _ in ids
            ]
            calls = [
                {"id": one, "type": "function", "function": function}
                for one, function in zip(ids, functions, strict=True)
            ]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [
                {"role": "tool", "name": "weather", "content": draw(TEXT), "tool_call_id": one} for one in ids
            ]
        answer = {"role": "assistant", "content": draw(EMPTY)}
        if draw(st.integers(0, 3)) == 0 and (reasons or exchange < exchanges - 1):
            answer[draw(st.sampled_from(REASONING_KEYS))] = draw(TEXT)
        messages.append(answer)
    return messages, tools


@cache
def tokenizer_of(name):
    made = tokenizers.Tokenizer.from_str(
        train_tokenizer(
            ["Hello weather city assistant user system tool_call\n\n"] * 9, vocab_size=300
        ).content.decode()
    )
    made.add_special_tokens(list(SPECIAL[name]))
    return Tokenizer(made.to_str().encode())


@cache
def renderer_of(name, has_tags):
    bos, *_, eos = SPECIAL[name]
    variables = {"bos_token": bos if name != "qwen3" else "", "eos_token": eos}
    source = tagged(name) if has_tags else without_tags(tagged(name))
    template = ChatTemplate(source=source, variables=variables)
    control = re.compile("|".join(map(re.escape, SPECIAL[name])))
    return Renderer(render=partial(render, template=template), control=control, has_tags=has_tags)


def theirs(name, messages, tools):
    """Return the text and the characters within the tags, as transformers finds them."""
    bos, *_, eos = SPECIAL[name]
    [text], [spans] = render_jinja_template(
        [messages],
        tools=tools or None,
        chat_template=tagged(name),
        return_assistant_tokens_mask=True,
        bos_token=bos if name != "qwen3" else "",
        eos_token=eos,
    )
    return text, spans


@pytest.mark.parametrize("name", SPECIAL)
def test_learned_tokens_are_those_within_the_tags(name):
    """By comparing texts, of the template without its tags, and by its tags."""
    tokenizer, renderers = tokenizer_of(name), [renderer_of(name, has_tags) for has_tags in (False, True)]

    @given(conversations(with_tools=name in WITH_TOOLS, reasons=name == "qwen3"))
    @examples(200)
    def law(made):
        messages, tools = made
        tools = [] if name == "deepseekv3" else tools  # whose template has calls, but no tools
        messages, tools = tokenizer.guarded(messages), tokenizer.guarded(tools)
        text, spans = theirs(name, messages, tools)
        [(_, offsets)] = tokenizer.encode_rendered_batch([text])
        inside = np.zeros(len(text) + 1, np.int64)
        for first, past in spans:
            inside[first + 1 : past + 1] = 1
        inside = np.cumsum(inside)
        expected = inside[offsets[:, 1]] > inside[offsets[:, 0]]
        for renderer in renderers:
            found = find_answers(messages, tools, renderer)
            assert found.text == text
            check(name, found, Side(tuple(messages), everyone(found)), offsets, expected)

    law()


def everyone(found):
    return frozenset(answer.message for answer in found.answers)


def check(name, found, side, offsets, expected):
    """Fail if other tokens are learned than expected, but headers and line ends, or no end of a turn."""
    text, ours = found.text, learned_bits(found, side, offsets)
    assert not (ours & ~expected).any()
    for index in np.flatnonzero(expected & ~ours).tolist():
        first, past = offsets[index].tolist()
        written, is_after = text[first:past], text[:first].endswith(LINE_ENDS.get(name, ()))
        assert written in HEADERS.get(name, ()) or (written == "\n" and is_after), written
    for answer in found.answers:  # the end-of-turn token is learned
        assert text[slice(*answer.spans[-1])].endswith(SPECIAL[name])
