"""Two thousand answers of a random model at temperature 1, each parsed by what its grammar stands for."""

import json
import random
import re

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.core.errors import UsageError
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.sampling.grammar_text import choice, json_object, json_schema, lark, regex
from penstock.engine.sampling_params import GREEDY, Params, Sampling
from penstock.text.tokenizer import train_tokenizer

TEXTS = ['{"name": "größe", "list": [1, 2.5, true, null], "key": "value"}, the penstock feeds'] * 9
CONFIG = {
    "vocab_size": 420,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": None,
}
TABLE = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 5000},
        "kind": {"enum": ["pump", "valve", 3, None]},
        "when": {"type": "string", "format": "uuid"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/part"}, {"type": "null"}]},
    },
    "required": ["id", "kind", "next"],
    "additionalProperties": False,
    "$defs": {
        "part": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
                "ok": {"type": "boolean"},
            },
            "required": ["code"],
            "additionalProperties": False,
        }
    },
}
PATTERNS = [r"\d{4}-\d{2}-\d{2}", r"(pump|valve)( [a-z]{1,3}){0,3}", r"[A-Z]+/[^/]{2}\?", "größ(e|er)"]


def any_schema(rng, depth=0):
    """Draw a schema at random."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "array", "object", "anyOf"]
    kind = rng.choice(kinds if depth < 3 else kinds[:6])
    inner = [any_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))] if kind in kinds[6:] else []
    match kind:
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 900)}
        case "string":
            return {"type": kind, "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "enum":
            return {"enum": rng.sample(["a", "ß\n", 7, None, True, [1], {"x": 2}], rng.randint(1, 4))}
        case "array":
            return {
                "type": kind,
                "items": inner[0],
                "minItems": rng.randint(0, 1),
                "maxItems": rng.randint(1, 3),
            }
        case "object":
            properties = {f"{'pqr'[i]}{i}": schema for i, schema in enumerate(inner)}
            required = rng.sample(sorted(properties), rng.randint(0, len(inner)))
            return {
                "type": kind,
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": inner}
    return {"type": kind}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(path)
    train_tokenizer(TEXTS, vocab_size=400).save(path / "tokenizer.json")
    with LLM(path, EngineConfig(device="cpu", max_sequences=64, cache_gib=0.01)) as llm:
        yield llm


def answers(llm, grammar, *, number=60, max_tokens=200, **sampling):
    """Return (text, finish) of answers at temperature 1."""
    drawn = Sampling(temperature=1.0, top_p=1.0, **sampling)
    params = Params(grammar=grammar, num_answers=number, max_tokens=max_tokens, sampling=drawn)
    return [(a.text, a.finish) for a in llm.generate("the penstock", params)[0].answers]


def test_answers_to_random_schemas_are_valid(llm):
    rng, num_ended = random.Random(0), 0
    for _ in range(50):
        schema = any_schema(rng)
        check = jsonschema.Draft202012Validator(schema)
        for text, finish in answers(llm, json_schema(schema), number=20):
            if finish == "stop":
                check.validate(json.loads(text))
                num_ended += 1
            else:
                assert finish == "length"
    assert num_ended >= 900  # of 1,000: numbers and strings may go on beyond 200 tokens


def test_answers_to_a_schema_of_daily_use_are_valid(llm):
    check = jsonschema.Draft202012Validator(TABLE, format_checker=jsonschema.FormatChecker())
    ended = [text for text, finish in answers(llm, json_schema(TABLE), number=300) if finish == "stop"]
    assert len(ended) > 250
    for text in ended:
        check.validate(json.loads(text))


def test_any_object_parses(llm):
    ended = [text for text, finish in answers(llm, json_object(), number=200) if finish == "stop"]
    assert len(ended) > 60
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_answers_match_a_regular_expression(llm, pattern):
    found = answers(llm, regex(pattern), number=150)
    assert {finish for _, finish in found} <= {"stop", "length"}
    ended = [text for text, finish in found if finish == "stop"]
    assert len(ended) > 100
    assert all(re.fullmatch(pattern, text) for text in ended)


def test_answers_follow_a_grammar_of_nested_rules(llm):
    grammar = lark('start: sum\nsum: part (("+" | "-") part)*\npart: /[0-9]{1,3}/ | "(" sum ")"')
    ended = [text for text, finish in answers(llm, grammar, number=150) if finish == "stop"]
    assert len(ended) > 75
    for text in ended:
        assert re.fullmatch(r"[-+()0-9]+", text)
        assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


def test_greedy_answers_are_the_likeliest_that_are_allowed(llm):
    params = Params(grammar=choice(["pump", "valve", "gate"]), sampling=GREEDY)
    (answer,) = llm.generate("the penstock", params)[0].answers
    assert answer.text in {"pump", "valve", "gate"}
    assert answer.finish == "stop"
    again = llm.generate(["x", "the penstock", "y z"], params)[1].answers[0]
    assert again.text == answer.text


def test_an_answer_that_was_cut_says_so(llm):
    found = answers(llm, json_schema(TABLE), number=4, max_tokens=5)
    assert {finish for _, finish in found} == {"length"}
    with pytest.raises(ValueError):  # noqa: PT011, no words of ours
        json.loads(found[0][0])


def test_a_grammar_alone_says_where_an_answer_ends(llm):
    with pytest.raises(UsageError, match=r"min_tokens cannot be combined with a grammar.*\(got 50\)"):
        answers(llm, regex("ab"), number=1, min_tokens=50)


def test_a_grammar_that_becomes_too_large_ends_its_own_answer_only(llm):
    grown = Params(
        grammar=regex("a*b*" * 400 + "c"),
        max_tokens=50,
        sampling=Sampling(temperature=0, logit_bias={llm.text_processor.encode("a")[0]: 100.0}),
    )
    with pytest.raises(UsageError, match=r"grammar could not be followed.*Simplify it"):
        llm.generate("the penstock", grown)
    assert (
        llm.generate("the penstock", Params(max_tokens=3, sampling=GREEDY))[0].answers[0].finish == "length"
    )
    assert llm.thread.stats().used_blocks == 0


def test_a_bad_grammar_is_refused_before_it_is_queued(llm):
    with pytest.raises(UsageError, match="cannot be used: unclosed group"):
        llm.generate("the penstock", Params(grammar=regex("(")))
