"""Grammars of requests whose adapters have other tokens or other ends."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from penstock.core.errors import InputError, UsageError
from penstock.engine.request import Request
from penstock.engine.sampling.grammar_text import lark, regex
from penstock.engine.sampling.grammars_of_adapters import GrammarsOfAdapters
from penstock.engine.text_processor import TextProcessor
from penstock.text.tokenizer import train_tokenizer

BASE = train_tokenizer(["the penstock feeds the turbine"] * 9, vocab_size=300)
ROWS = 320
"""Of the model, which has more than its tokenizer has tokens."""
CALL = "<call>"


def grown(folder):
    """Write a folder with the tokenizer of an adapter that was tuned with a new token; return the token."""
    folder.mkdir()
    parsed = tokenizers.Tokenizer.from_str(BASE.content.decode())
    parsed.add_special_tokens([f"<filler {i}>" for i in range(ROWS - parsed.get_vocab_size())])
    parsed.add_special_tokens([CALL])
    parsed.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 301}))
    return parsed.token_to_id(CALL)


@pytest.fixture
def texts(tmp_path):
    model = TextProcessor(tokenizer=BASE, stop_ids=frozenset({0}))
    assert grown(tmp_path / "grown") == ROWS
    model.add_adapter("grown", tmp_path / "grown")
    (tmp_path / "plain").mkdir()
    model.add_adapter("plain", tmp_path / "plain")
    return model


@pytest.fixture
def grammars(texts):
    made = GrammarsOfAdapters(texts, vocab_size=ROWS)
    made.add("grown", texts.of("grown"), vocab_size=ROWS + 1)
    made.add("plain", texts.of("plain"), vocab_size=ROWS)
    return made


def asked(texts, grammar, adapter):
    stop_ids = texts.of(adapter).stop_ids
    return Request(prompt=(1,), max_tokens=1, grammar=grammar, stop_ids=stop_ids, adapter=adapter)


def test_a_grammar_may_name_a_token_of_its_adapter_only(texts, grammars):
    named = lark(f"start: <[{ROWS}]>")
    request = asked(texts, named, "grown")
    grammars.check(request)
    matcher = grammars.matcher(request)
    assert np.flatnonzero(matcher.allowed([])).tolist() == [ROWS]
    assert np.flatnonzero(matcher.allowed([ROWS])).tolist() == [0, 301]
    for adapter in (None, "plain"):
        with pytest.raises(UsageError, match="grammar cannot be used"):
            grammars.check(asked(texts, named, adapter))


def test_answers_end_where_their_adapters_do(texts, grammars):
    done = BASE.encode("xx")
    for adapter, ends in ((None, {0}), ("plain", {0}), ("grown", {0, 301})):
        request = asked(texts, regex("xx"), adapter)
        assert request.stop_ids == ends
        assert set(np.flatnonzero(grammars.matcher(request).allowed(done))) == ends


def test_adapters_alike_share_what_was_compiled_and_an_adapter_takes_its_own_with_it(texts, grammars):
    for adapter in (None, "plain", "grown"):
        request = asked(texts, regex("x"), adapter)
        grammars.check(request)
        grammars.hold(request)
        grammars.release(request)
    of = {adapter: compiler for adapter, (_, compiler) in grammars._compilers.items()}
    assert of["plain"] is of[None] is not of["grown"]
    grammars.remove("plain")
    grammars.remove("grown")
    grammars.check(asked(texts, regex("x"), None))
    for adapter in ("plain", "grown"):  # removed while another thread asks
        with pytest.raises(UsageError, match=f"Unknown adapter .got '{adapter}'"):
            grammars.check(asked(texts, regex("x"), adapter))


def test_an_adapter_is_written_with_its_own_template_and_tokenizer(texts, tmp_path):
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "tokenizer.json").write_bytes((tmp_path / "grown" / "tokenizer.json").read_bytes())
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}" + CALL + "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    model = replace(texts, template=replace(texts.template, variables={"eos_token": "<|endoftext|>"}))
    model.add_adapter("chat", tmp_path / "chat")
    turn = [{"role": "user", "content": f"the {CALL} turbine"}]
    own = model.of("chat")
    assert own.encode_chat(turn)[0] == ROWS
    assert own.encode_chat(turn).count(ROWS) == 1, "a client cannot write the token"
    assert own.encode_chat(turn)[-1] == BASE.eos_id, "a variable that the folder lacks is the model's"
    assert max(model.encode_chat(turn)) < ROWS
    assert own.stream(shown=[ROWS]).push(ROWS) == CALL
    assert model.of("plain").tokenizer is model.tokenizer
    model.remove_adapter("chat")
    assert model.of("chat") is model


def test_a_folder_whose_tokenizer_cannot_be_read_is_not_added(texts, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="Not a tokenizer"):
        texts.add_adapter("bad", tmp_path / "bad")
    assert "bad" not in texts.adapters
