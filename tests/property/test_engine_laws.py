"""Whatever else is asked, and however steps are cut: a request's tokens are those it gets alone.

With keys and values of 8 bits that holds where each key-value head has more than four query heads. Where it
has fewer, few rows are attended in another order than many, and a code may be the next one
(docs/explanation/inference.md): log-probabilities then change by little, and a token only where another was
as likely.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.hf import save_pretrained
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request, TokenLogprob
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.engine.scheduling.groups import blocks_of, cache_groups, rows_of
from penstock.models.decoder.model import Decoder
from tests.examples import examples
from tests.families import small_llama

CONTEXT = 64
SMALL = {"vocab_size": 97, "max_position_embeddings": CONTEXT}
MODELS = {
    "llama": small_llama(**SMALL),
    "windows": small_llama(**SMALL, model_type="qwen2", sliding_window=9, max_window_layers=1),
    "windows only": small_llama(**SMALL, model_type="mistral", sliding_window=9),
    "many query heads": small_llama(
        **SMALL,
        hidden_size=80,
        num_attention_heads=10,
        model_type="qwen2",
        sliding_window=9,
        max_window_layers=1,
    ),
}
ROW_BYTES = {"auto": 8 * 4, "int8": 8 + 4}  # of a head: float32 numbers, or codes and a scale
KINDS = [("llama", "auto"), ("windows", "auto"), ("windows only", "auto"), ("many query heads", "int8")]
CLOSE = 0.05
"""Most that log-probabilities of a token differ: ten times what 11,000 tokens showed."""

STEM = (5, 80, 3, 44, 12, 61, 7, 7, 90, 33, 2, 18, 71)
prompts = st.tuples(st.integers(0, 13), st.integers(1, 20), st.integers(0, 4)).map(
    lambda drawn: STEM[: drawn[0]] + tuple((drawn[2] * 31 + 7 * i) % 97 for i in range(drawn[1]))
)
requests = st.builds(
    Request,
    prompt=prompts,
    max_tokens=st.integers(1, 20),
    sampling=st.sampled_from(
        [GREEDY, GREEDY, Sampling(seed=3), Sampling(seed=4, repetition_penalty=1.3, presence_penalty=0.5)]
    ),
    num_answers=st.sampled_from([1, 1, 2]),
    priority=st.sampled_from([0, 0, 1]),
    client=st.sampled_from(["x", "y"]),
    stop_ids=st.sampled_from([frozenset(), frozenset(range(0, 97, 9))]),
)
arrivals = st.lists(
    st.tuples(st.integers(0, 12), requests, st.none() | st.none() | st.integers(0, 20)),
    min_size=1,
    max_size=8,
)
engines = st.builds(
    dict,
    max_sequences=st.integers(1, 6),
    tokens_per_step=st.integers(6, 40),
    block_size=st.sampled_from([1, 4, 5]),
    prefix_caching=st.booleans(),
    drafts=st.sampled_from(["off", "off", "ngram", "known"]),  # known: all guesses stand
)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def kind(request):
    """Name of a model, and what its cache has."""
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    torch.manual_seed(0)
    model = Decoder(MODELS[kind[0]])
    for parameter in model.parameters():  # answers that are no loop
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    path = tmp_path_factory.mktemp("model") / kind[0]
    save_pretrained(model.state_dict(), model.config, path)
    return path


@pytest.fixture(scope="module")
def alone(folder, kind):
    """Return a function from a request to the tokens of its answers when nothing else is asked."""
    engine = build_engine(folder, EngineConfig(device="cpu", cache=kind[1], prefix_caching=False))
    known = {}

    def answers(request):
        if repr(request) not in known:
            engine.add(request)
            known[repr(request)] = told(run(engine), request)
        return known[repr(request)]

    yield answers
    engine.close()


def run(engine):
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    return pieces


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: str | None


def told(pieces, request):
    """Return the answers of a request, given its pieces."""
    by_answer = [[piece for piece in pieces if piece.answer == n] for n in range(request.num_answers)]
    return [
        Answer(
            [t for piece in own for t in piece.token_ids],
            [p for piece in own for p in piece.logprobs],
            own[-1].finish,
        )
        for own in by_answer
    ]


class Knowing:
    """Guesses every token right, because it is given the answers.

    Args:
        tokens_of: (request id, number of the answer) -> all its tokens.
    """

    def __init__(self, tokens_of):
        self._tokens_of = tokens_of

    def propose(self, done, wanted):
        return [
            self._following(share.sequence)[:number]
            for share, number in zip(done.plan.shares, wanted, strict=True)
        ]

    def forget(self, sequence):
        pass

    def _following(self, sequence):
        return tuple(self._tokens_of(sequence.request_id, sequence.answer)[sequence.num_sampled :])


def answers_beside_others(folder, kind, asked, config, spare, alone, *, overlaps=False):
    """Ask an engine with little room; return the request and each of its answers, of all requests.

    Args:
        overlaps: launch each step before the last one is read, as on a GPU.
    """
    name, cache = kind
    windows, block_size = MODELS[name].windows, config["block_size"]
    groups = cache_groups(windows, context=CONTEXT)
    num_blocks = spare + blocks_of(  # one context fits, and little more
        CONTEXT,
        [group.window for group in groups],
        block_size=block_size,
        share_tokens=config["tokens_per_step"],
    )
    is_known = config["drafts"] == "known"
    config = {**config, "drafts": "ngram" if is_known else config["drafts"], "adapt_drafts": False}
    position_bytes = 2 * rows_of(groups) * 2 * ROW_BYTES[cache]  # keys and values, layers, heads
    room_gib = num_blocks * block_size * position_bytes / 2**30
    engine = build_engine(folder, EngineConfig(device="cpu", cache=cache, cache_gib=room_gib, **config))
    assert engine.capacity.num_blocks <= num_blocks
    if overlaps:
        engine.runner.sample(engine.capacity.max_sequences)
    pieces, ids, step = [], {}, 0
    requests = {}  # id -> request
    if is_known:
        engine._drafting._drafter = Knowing(lambda ident, answer: alone(requests[ident])[answer].tokens)
    while engine.has_work or step <= 12:
        for number, (arrives, request, leaves) in enumerate(asked):
            if arrives == step:
                ids[number] = engine.add(request)
                requests[ids[number]] = request
            if leaves is not None and arrives + leaves == step:
                engine.cancel(ids[number])
        pieces += engine.step()
        engine.scheduler.check()
        step += 1
    assert engine.stats().used_blocks == 0
    assert not is_known or not engine._drafting._failed, "drafts that fail would be none"
    assert engine._token_sampler._sampler.num_known == 0
    engine.close()
    found = []
    for number, (_, request, leaves) in enumerate(asked):
        answers = told([piece for piece in pieces if piece.request_id == ids[number]], request)
        assert leaves is not None or all(answer.finish != "cancelled" for answer in answers)
        found.append((request, answers))
    return found


@given(arrivals, engines, st.integers(0, 20), st.booleans())
@examples(40)
def test_tokens_do_not_depend_on_neighbours_or_on_how_steps_are_cut(
    folder, kind, alone, asked, config, spare, overlaps
):
    for request, answers in answers_beside_others(
        folder, kind, asked, config, spare, alone, overlaps=overlaps
    ):
        for answer, expected in zip(answers, alone(request), strict=True):
            check_tokens(answer, expected)


def check_tokens(answer, expected):
    if answer.finish == "cancelled":
        assert answer.tokens == expected.tokens[: len(answer.tokens)]
    else:
        assert (answer.tokens, answer.finish) == (expected.tokens, expected.finish)


@pytest.mark.parametrize("kind", [("windows", "int8")], indirect=True, ids=" ".join)
@given(arrivals, engines, st.integers(0, 20))
@examples(40)
def test_few_query_heads_and_8_bits_change_a_token_only_where_another_was_as_likely(
    folder, kind, alone, asked, config, spare
):
    asked = [
        (arrives, replace(request, sampling=replace(request.sampling, num_logprobs=5)), leaves)
        for arrives, request, leaves in asked
    ]
    for request, answers in answers_beside_others(folder, kind, asked, config, spare, alone):
        for answer, expected in zip(answers, alone(request), strict=True):
            num_equal = next(
                (n for n, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b),
                None,
            )
            for found, wanted in zip(answer.logprobs[:num_equal], expected.logprobs, strict=False):
                assert found.logprob == pytest.approx(wanted.logprob, abs=CLOSE)
            if num_equal is None:
                check_tokens(answer, expected)
            elif request.sampling.temperature == 0:
                found = answer.logprobs[num_equal]
                assert found.logprob - found.top.get(expected.tokens[num_equal], -math.inf) <= 2 * CLOSE
