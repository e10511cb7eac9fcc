"""Laws of calls under a grammar: what the grammar accepts is returned as calls, and a stream joins to it."""

import json
from itertools import pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.engine.request import OutputDelta
from penstock.engine.sampling.grammars import GrammarCompiler
from penstock.serve.chat.json_scan import is_object
from penstock.serve.chat.response_format import AnswerFormat, grammar_of_answer, unmarked_json
from penstock.serve.chat.tool_parsers import JSON_FORMS, MARKS
from penstock.serve.chat.tools import tool_use
from penstock.serve.chat.writer import ChatWriter, joined
from penstock.serve.schema.base import JsonSchema, JsonSchemaFormat
from penstock.serve.schema.chat import AllowedChoice, NamedTool, Tool
from penstock.text.tokenizer import train_tokenizer
from tests.examples import examples

# Every byte is a token, so that a grammar may be followed by any text.
TOKENIZER = train_tokenizer(["a"] * 3, vocab_size=257)
END = 0
GRAMMARS = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids={END})

LIMIT = 900  # bytes of an answer
LURES = [
    *sorted(MARKS - {""}), "1e999", "-1E+400", "9" * 400, "0.0e-999", "[" * 40, '{"":', '"name"', "<", '": "',
    '{"name": "f", "arguments": {', '"arguments"', "\\n", "\\u0000", "\\\\", '\\"', "\u00e9\U0001f600", "```",
]  # fmt: skip
"""Texts that a parser of calls may stumble over; a random answer tries one at many of its bytes."""
CLOSERS = [b'"', b"}", b"]", b"0", b"e", b"l", b"u"]

LEAVES = st.sampled_from(
    [{}, {"type": "number"}, {"type": "integer"}, {"type": "string"}, {"type": "object"}, {"type": "array"},
     {"type": ["string", "null"]}, {"enum": [1, "</tool_call>", None]},
     {"const": {"name": "f", "arguments": {}}}]
)  # fmt: skip
NAMES = st.sampled_from(["a", "name", "arguments", "parameters", "</tool_call>", 'q"', "\u00e9"])


def _object(fields):
    return {"type": "object", "properties": fields, "required": sorted(fields)[:1]}


VALUES = st.recursive(
    LEAVES,
    lambda each: (
        st.dictionaries(NAMES, each, max_size=2).map(_object)
        | each.map(lambda items: {"type": "array", "items": items})
        | st.lists(each, min_size=1, max_size=2).map(lambda some: {"anyOf": some})
    ),
    max_leaves=4,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3).map(_object)
PARAMETERS = (
    st.none()
    | OBJECTS
    | OBJECTS.map(lambda schema: {key: value for key, value in schema.items() if key != "type"})
    | st.just({"type": ["object", "null"]})
    | VALUES.map(
        lambda value: {"$defs": {"v": value}, "properties": {"a": {"$ref": "#/$defs/v"}}, "required": ["a"]}
    )
)
TOOLS = st.dictionaries(st.sampled_from(["f", "look_up", "a.b-c"]), PARAMETERS, min_size=1, max_size=2).map(
    lambda found: [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})
        for name, parameters in found.items()
    ]
)
FORMS = st.sampled_from([None, *JSON_FORMS])


def written(grammar, rng):
    """Return a random text that a grammar accepts as a whole; None: it did not come to an end."""
    matcher, tokens, lure = GRAMMARS.matcher(grammar), [], []
    closers = [TOKENIZER.encode(closer.decode())[0] for closer in CLOSERS]
    while len(tokens) < LIMIT:
        allowed = matcher.allowed(tokens)
        if allowed[END] and (rng.random() < 0.5 or allowed.sum() == 1):
            return TOKENIZER.decode(tokens)
        closing = [token for token in closers if allowed[token]]
        if not lure and rng.random() < 0.3:
            lure = TOKENIZER.encode(LURES[rng.integers(len(LURES))])
        if lure and allowed[lure[0]]:
            tokens.append(lure.pop(0))
            continue
        lure = []
        allowed[END] = False
        if closing and (rng.random() < 0.3 or len(tokens) > LIMIT // 3):
            tokens.append(closing[0])
        else:
            tokens.append(int(rng.choice(np.flatnonzero(allowed))))
    return None


def read(text, use, *, cuts=(), streams, unmarked, finish="stop", reason=None):
    """Return the message of an answer that came in pieces, and why it ended."""
    writer = ChatWriter(0, names=None, use=use, unmarked=unmarked, streams=streams)
    ends = [0, *sorted(cuts), len(text)]
    pieces = [OutputDelta(request_id=0, text=text[a:b]) for a, b in pairwise(ends)]
    pieces[-1] = OutputDelta(request_id=0, text=text[ends[-2] :], finish=finish, stop_reason=reason)
    choice = joined(0, [writer.take(piece) for piece in pieces])
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", calls, choice.finish_reason


def check_cut(text, use, data, *, unmarked):
    """Cut an answer anywhere, by its length or by a stop text: streamed and whole it is the same."""
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = data.draw(st.just(range(len(text))) | st.lists(st.integers(0, len(text)), max_size=12))
    finish, reason = data.draw(st.sampled_from([("length", None), ("stop", "stop text")]))
    whole = read(text, use, streams=False, unmarked=unmarked, finish=finish, reason=reason)
    assert read(text, use, cuts=cuts, streams=True, unmarked=unmarked, finish=finish, reason=reason) == whole
    is_whole = bool(whole[1]) and all(is_object(arguments) for _, arguments in whole[1])
    assert whole[2] == (finish if finish == "length" or not is_whole else "tool_calls")
    return whole[1]


def arguments_of(text):
    """Return a JSON object as Python's reader has it, numbers as they are written."""
    return json.loads(text, parse_float=str, parse_int=str)


@given(
    tools=TOOLS, form=FORMS, mode=st.sampled_from(["required", "named", "allowed"]), several=st.booleans(),
    seed=st.integers(0, 2**32 - 1), data=st.data(),
)  # fmt: skip
@examples(90)
def test_what_the_grammar_of_calls_accepts_is_calls_and_a_stream_joins_to_them(
    tools, form, mode, several, seed, data
):
    first = {"type": "function", "function": {"name": tools[0].function.name}}
    choice = {
        "required": "required",
        "named": NamedTool.model_validate(first),
        "allowed": AllowedChoice.model_validate(
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [first]}}
        ),
    }[mode]
    use = tool_use(tools, choice)
    grammar = grammar_of_answer(use, AnswerFormat(), form=form, added={}, several=several)
    text = written(grammar, np.random.default_rng(seed))
    assume(text is not None)
    unmarked = unmarked_json(grammar, use, form)
    content, calls, finish = read(text, use, streams=False, unmarked=unmarked)
    assert (content, finish) == ("", "tool_calls")
    assert calls
    assert several or len(calls) == 1
    for name, arguments in calls:
        assert name in use.schemas
        assert arguments in text
        assert isinstance(arguments_of(arguments), dict)
    cuts = data.draw(st.just(range(len(text))) | st.lists(st.integers(0, len(text)), max_size=12))
    assert read(text, use, cuts=cuts, streams=True, unmarked=unmarked) == (content, calls, finish)
    assert read(text, use, cuts=cuts, streams=False, unmarked=unmarked) == (content, calls, finish)
    begun = check_cut(text, use, data, unmarked=unmarked)
    assert begun[:-1] == calls[: max(len(begun) - 1, 0)]


CALL_LIKE = {
    "type": "object",
    "properties": {"name": {"const": "f"}, "arguments": {"type": "object"}, "more": {}},
    "required": ["name", "arguments"],
}


@given(
    tools=TOOLS, form=FORMS, several=st.booleans(), seed=st.integers(0, 2**32 - 1), data=st.data(),
    schema=OBJECTS | st.sampled_from([CALL_LIKE, {"type": "array", "items": CALL_LIKE}]),
)  # fmt: skip
@examples(90)
def test_a_stream_joins_to_an_answer_that_is_a_call_or_follows_a_schema(
    tools, form, several, schema, seed, data
):
    use = tool_use(tools, "auto")
    json_schema = JsonSchema.model_validate({"name": "x", "schema": schema})
    wanted = AnswerFormat(JsonSchemaFormat(type="json_schema", json_schema=json_schema))
    grammar = grammar_of_answer(use, wanted, form=form, added={}, several=several)
    text = written(grammar, np.random.default_rng(seed))
    assume(text is not None)
    unmarked = unmarked_json(grammar, use, form)
    content, calls, finish = read(text, use, streams=False, unmarked=unmarked)
    if form is not None:
        is_call = text.startswith(form.begin)
        assert (content, bool(calls)) == ("" if is_call else text, is_call)
    else:
        assert content == ("" if calls else text)
    cuts = data.draw(st.just(range(len(text))) | st.lists(st.integers(0, len(text)), max_size=12))
    assert read(text, use, cuts=cuts, streams=True, unmarked=unmarked) == (content, calls, finish)
    check_cut(text, use, data, unmarked=unmarked)
