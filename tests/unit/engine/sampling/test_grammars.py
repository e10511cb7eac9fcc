"""Answers held to grammars: the tokens allowed at each step, drafts, bad and costly grammars."""

import json
import re
import threading

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from penstock.core.errors import UsageError
from penstock.engine.request import Request
from penstock.engine.sampling import grammars as grammars_module
from penstock.engine.sampling.grammar_text import choice, json_object, json_schema, lark, regex, tool_calls
from penstock.engine.sampling.grammars import MAX_COMPILED, GrammarCompiler
from penstock.text.tokenizer import Tokenizer, train_tokenizer

TEXTS = ['the penstock feeds the turbine, größer {"a": 1, "name": [true, null]}'] * 9
TOKENIZER = train_tokenizer(TEXTS, vocab_size=400)
VOCAB, END = 450, 0
"""The model has more logits than its tokenizer has tokens, as padded matrices make it."""


@pytest.fixture(scope="module")
def grammars():
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END})


def asked(grammar, *, stop_ids=(END,)):
    return Request(prompt=(1,), max_tokens=1, grammar=grammar, stop_ids=frozenset(stop_ids))


def compiled(grammars, grammar):
    grammars.check(asked(grammar))


def written(grammars, grammar, *, seed, limit=400, tokenizer=TOKENIZER, end=END):
    """Return a random answer under a grammar, and whether it came to its end."""
    matcher, rng, tokens = grammars.matcher(grammar), np.random.default_rng(seed), []
    while len(tokens) < limit:
        allowed = np.flatnonzero(matcher.allowed(tokens))
        token = int(end if end in allowed and rng.random() < 0.3 else rng.choice(allowed))
        if token == end:
            return tokenizer.decode(tokens), True
        tokens.append(token)
    return tokenizer.decode(tokens), False


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", r"(ab|c/d)+", r"[a-zß]{2,5} \"x\"", r"(yes|no)\.?"])
def test_texts_match_their_regular_expression(grammars, pattern):
    for seed in range(20):
        text, ended = written(grammars, regex(pattern), seed=seed)
        assert ended
        assert re.fullmatch(pattern, text)


def test_every_choice_is_reached_and_nothing_else(grammars):
    options = ["yes", "no", 'a "quote"\n', "größer"]
    found = {written(grammars, choice(options), seed=seed)[0] for seed in range(60)}
    assert found == set(options)


def test_any_json_object_is_an_object(grammars):
    texts = [
        text for seed in range(60) for text, ended in [written(grammars, json_object(), seed=seed)] if ended
    ]
    assert len(texts) > 20
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_calls_name_a_function_and_its_arguments(grammars):
    schemas = {
        "now": {},
        "add": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    }
    grammar = tool_calls(schemas, begin=("<call>\n",), end=("\n</call>",), several=True)
    names = set()
    for seed in range(20):
        text, ended = written(grammars, grammar, seed=seed, limit=2000)
        for call in re.findall(r"<call>\n(.*?)\n</call>", text, re.DOTALL) if ended else ():
            value = json.loads(call)
            names.add(value["name"])
            assert list(value) == ["name", "arguments"]
            assert value["name"] != "add" or isinstance(value["arguments"]["x"], bool)
    assert names == set(schemas)


@pytest.mark.parametrize("marks", [{}, {"begin": ("<call>\n",), "end": ("\n</call>",)}])
def test_arguments_may_refer_to_their_own_parts_and_calls_have_an_alternative(grammars, marks):
    point = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    schema = {"$ref": "#/$defs/P", "$defs": {"P": {**point, "additionalProperties": False}}}
    answer = {
        **schema,
        "$defs": {"P": {**point, "required": ["name"], "properties": {"name": {"enum": [5]}}}},
    }
    answer["$defs"]["P"]["additionalProperties"] = False
    grammar = tool_calls({"add": schema, "take.2-3": schema}, several=True, instead=answer, **marks)
    found = [written(grammars, grammar, seed=seed, limit=2000) for seed in range(30)]
    texts = [re.sub(r"</?call>\n?", "", text) for text, ended in found if ended]
    values = [json.loads(line) for text in texts for line in text.strip().split("\n")]
    calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
    assert {call["name"] for call in calls} == {"add", "take.2-3", 5}
    assert all(isinstance(call["arguments"]["x"], bool) for call in calls if call != {"name": 5})


def test_arguments_may_hold_themselves(grammars):
    tree = {"type": "object", "properties": {"of": {"$ref": "#"}}, "additionalProperties": False}
    texts = [written(grammars, tool_calls({"grow": tree}), seed=seed)[0] for seed in range(20)]
    assert any('"of"' in text for text in texts)
    assert all(set(json.loads(text)["arguments"]) <= {"of"} for text in texts)


def test_calls_without_marks_are_one_or_a_list(grammars):
    schemas = {"now": {"type": "object", "properties": {}, "additionalProperties": False}}
    several, single = tool_calls(schemas, several=True), tool_calls(schemas)
    found = [written(grammars, several, seed=seed, limit=2000) for seed in range(20)]
    values = [json.loads(text) for text, ended in found if ended]
    assert {type(value) for value in values} == {dict, list}
    assert all(
        value["name"] == "now"
        for entry in values
        for value in (entry if isinstance(entry, list) else [entry])
    )
    assert all(isinstance(json.loads(written(grammars, single, seed=seed)[0]), dict) for seed in range(5))


def test_spaces_cannot_go_on_for_ever(grammars):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(20):
        text, ended = written(grammars, json_schema(schema), seed=seed)
        assert ended
        assert len(text) <= len('{"a": false, "b": null}')


def test_a_grammar_of_rules_within_rules_is_followed(grammars):
    grammar = lark('start: "(" start ")" | "x"')
    for seed in range(20):
        text, ended = written(grammars, grammar, seed=seed)
        assert not ended or text.count("(") == text.count(")")


def test_the_end_is_allowed_only_where_the_grammar_is_complete(grammars):
    matcher = grammars.matcher(regex("ab?"))
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    assert np.flatnonzero(matcher.allowed([])).tolist() == [a]
    assert np.flatnonzero(matcher.allowed([a])).tolist() == sorted([END, b])
    assert np.flatnonzero(matcher.allowed([a, b])).tolist() == [END]


def test_drafts_are_looked_past_and_taken_back(grammars):
    matcher, plain = grammars.matcher(regex("[ab]*c")), grammars.matcher(regex("[ab]*c"))
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    ends = np.flatnonzero(matcher.allowed([a], [b, c]))
    assert ends.tolist() == [END]
    assert isinstance(matcher.allowed([a], [c, END, a]), np.ndarray)  # nothing follows an end
    assert isinstance(matcher.allowed([a], [399, 399]), np.ndarray)  # not allowed: never drawn, so no matter
    assert np.array_equal(matcher.allowed([a, a]), plain.allowed([a, a]))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex("("), "cannot be used: unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (lark("start: nothing"), "nothing"),
        (lark('begin: "a"'), "start"),
        (lark('start: start "a"'), "NoExtension"),
        (json_schema({"type": "whole"}), "Invalid type: whole"),
        (json_schema({"$ref": "https://example.com/schema.json"}), "does not fetch"),
        (json_schema({"properties": {"a": False}, "required": ["a"], "type": "object"}), "unsatisfiable"),
        (regex("a?" * 30_000), "too big"),
    ],
)
def test_a_bad_or_costly_grammar_is_refused_with_the_reason(grammars, grammar, reason):
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(UsageError, match=reason):
            compiled(grammars, grammar)


def test_the_reason_does_not_quote_the_grammar_of_calls(grammars):
    wrong = {"properties": {"private": {"type": "whole"}, "a": {"$ref": "#/$defs/b"}}}
    for schema, reason in (
        (wrong, "The grammar cannot be used: Invalid type: whole. "),
        ({"$ref": "#/$defs/b"}, "The grammar cannot be used: Pointer '#/$defs/b' does not exist. "),
    ):
        with pytest.raises(UsageError) as refused:
            compiled(grammars, tool_calls({"f": schema}, begin=("<call>",)))
        assert str(refused.value) == f"{reason}Correct or simplify it."


def test_long_chains_of_rules_do_not_end_the_process(grammars):
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "x"'
    assert written(grammars, lark(chain), seed=0) == ("x", True)
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array"} for i in range(900)}
    compiled(grammars, json_schema({"$ref": "#/$defs/d0", "$defs": {**links, "d900": {"type": "null"}}}))


def test_a_grammar_that_becomes_too_large_on_the_way_says_so(grammars):
    matcher = grammars.matcher(regex("a*b*" * 400 + "c"))
    a = TOKENIZER.encode("a")[0]
    found = [matcher.allowed([a] * n) for n in range(30)]
    reasons = [reason for reason in found if isinstance(reason, str)]
    assert reasons
    assert all(reason.startswith("The grammar could not be followed: ") for reason in reasons)


def test_a_compilation_without_end_is_given_up(monkeypatch):
    grammars, going, waits = (
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END}),
        threading.Event(),
        [],
    )
    monkeypatch.setattr(grammars_module, "_COMPILE_S", 0.01)
    monkeypatch.setattr(grammars, "_compile", lambda _: waits.append(going.wait()))
    with pytest.raises(UsageError, match="more than 0 s to compile"):
        compiled(grammars, regex("x"))
    with pytest.raises(UsageError, match="more than 0 s"):  # at once: no second thread is lost
        compiled(grammars, regex("x"))
    going.set()
    for thread in threading.enumerate():
        if thread.name == "penstock-grammar":
            thread.join()
    assert len(waits) == 1


def test_nothing_is_compiled_beside_two_compilations_that_were_given_up(monkeypatch):
    grammars = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END})
    compiled(grammars, regex("known"))
    inner, going = grammars._compile, threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(grammars_module, "_COMPILE_S", 0.01)
        patched.setattr(grammars, "_compile", lambda _: going.wait())
        for name in "ab":
            with pytest.raises(UsageError, match="more than 0 s to compile"):
                compiled(grammars, regex(name))
    with pytest.raises(UsageError, match="while others take too long"):
        compiled(grammars, regex("c"))
    compiled(grammars, regex("known"))
    going.set()
    for thread in grammars._given_up:
        thread.join()
    compiled(grammars, regex("c"))  # was not remembered as refused
    assert grammars._compile == inner


def test_the_least_recently_used_grammar_goes_first():
    grammars, texts = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END}), []
    inner = grammars._compile
    grammars._compile = lambda grammar: texts.append(grammar) or inner(grammar)
    for n in range(MAX_COMPILED + 1):
        compiled(grammars, choice([str(n)]))
        compiled(grammars, choice(["0"]))
    assert len(texts) == MAX_COMPILED + 1
    compiled(grammars, choice(["1"]))
    assert texts[-1] == choice(["1"])


def test_the_grammar_of_an_open_request_is_kept_whatever_comes():
    grammars, texts = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END}), []
    inner = grammars._compile
    grammars._compile = lambda grammar: texts.append(grammar) or inner(grammar)
    asked = [Request(prompt=(1,), max_tokens=5, grammar=choice([name])) for name in ("a", "b", "b")]
    for request in asked:
        compiled(grammars, request.grammar)
        grammars.hold(request)
    for n in range(MAX_COMPILED + 2):
        compiled(grammars, choice([str(n)]))
    num_compiled = len(texts)
    grammars.release(asked[1])  # one of two
    for request in asked:
        compiled(grammars, request.grammar)
    assert len(texts) == num_compiled
    for request in (asked[0], asked[2]):
        grammars.release(request)
    for n in range(MAX_COMPILED):
        compiled(grammars, choice([f"later {n}"]))
    compiled(grammars, asked[0].grammar)
    assert texts[-1] == asked[0].grammar


def test_threads_share_one_compilation():
    grammars, texts = GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END}), []
    inner = grammars._compile
    grammars._compile = lambda grammar: texts.append(grammar) or inner(grammar)
    threads = [threading.Thread(target=compiled, args=(grammars, json_object())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 1


def test_a_model_without_an_end_token_takes_no_grammar():
    with pytest.raises(UsageError, match="no end token"):
        compiled(GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids=()), regex("x"))


def sentencepiece_like():
    """Return a tokenizer as Llama 2's file has it: spaces as U+2581, bytes as <0x..>, no pre-tokenizer."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *'abcdef0123456789{}":',
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(tokenizer.to_str().encode())


def test_a_tokenizer_with_bytes_as_tokens_is_followed():
    tokenizer = sentencepiece_like()
    grammars = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_ids={2})
    for seed in range(10):
        text, ended = written(grammars, regex("[a-f]{3} ß?[0-9]+"), seed=seed, tokenizer=tokenizer, end=2)
        assert not ended or re.fullmatch("[a-f]{3} ß?[0-9]+", text)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(
        UsageError, match=r"need the package llguidance\. Install it: pip install 'penstock\[serve\]'"
    ):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB, end_ids={END}).check(asked(regex("x")))


def test_an_answer_whose_end_would_not_be_seen_is_refused(grammars):
    with pytest.raises(UsageError, match=r"missing in stop_ids \(got \[7\]\)\. Add \[0\]"):
        grammars.check(asked(regex("x"), stop_ids=[7]))
