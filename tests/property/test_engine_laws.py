"""Whatever else is asked, and however steps are cut: a request's tokens are those it gets alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.hf import save_pretrained
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY, Sampling
from penstock.models.llama.model import Llama
from tests.examples import examples
from tests.families import small_llama

CONTEXT = 64
SMALL = {"vocab_size": 97, "max_position_embeddings": CONTEXT}
MODELS = {
    "llama": small_llama(**SMALL),
    "windows": small_llama(**SMALL, model_type="qwen2", sliding_window=9, max_window_layers=1),
    "windows only": small_llama(**SMALL, model_type="mistral", sliding_window=9),
}
ROW_BYTES = {"auto": 8 * 4, "int8": 8 + 4}  # of a head: float32 numbers, or codes and a scale
KINDS = [*((name, "auto") for name in MODELS), ("windows", "int8")]

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
    drafts=st.sampled_from(["off", "ngram", "itself"]),  # the model as its own draft model: all guesses stand
)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def kind(request):
    """Name of a model, and what its cache has."""
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    torch.manual_seed(0)
    model = Llama(MODELS[kind[0]])
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
            known[repr(request)] = [tokens for tokens, _ in told(run(engine), request)]
        return known[repr(request)]

    yield answers
    engine.close()


def run(engine):
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    return pieces


def told(pieces, request):
    """Return tokens and end of each answer of a request, given its pieces."""
    by_answer = [[piece for piece in pieces if piece.answer == n] for n in range(request.num_answers)]
    return [([t for piece in own for t in piece.token_ids], own[-1].finish) for own in by_answer]


@given(arrivals, engines, st.integers(0, 20))
@examples(40)
def test_tokens_do_not_depend_on_neighbours_or_on_how_steps_are_cut(
    folder, kind, alone, asked, config, spare
):
    num_blocks = -(-CONTEXT // config["block_size"]) + spare  # one context fits, and little more
    drafted = config["drafts"] == "itself"
    config = {**config, "drafts": str(folder) if drafted else config["drafts"], "adapt_drafts": False}
    position_bytes = 2 * 2 * 2 * ROW_BYTES[kind[1]]  # keys and values, layers, heads
    room_gib = (1 + drafted) * num_blocks * config["block_size"] * position_bytes / 2**30
    engine = build_engine(folder, EngineConfig(device="cpu", cache=kind[1], cache_gib=room_gib, **config))
    assert engine.capacity.num_blocks <= num_blocks
    pieces, ids, step = [], {}, 0
    while engine.has_work or step <= 12:
        for number, (arrives, request, leaves) in enumerate(asked):
            if arrives == step:
                ids[number] = engine.add(request)
            if leaves is not None and arrives + leaves == step:
                engine.cancel(ids[number])
        pieces += engine.step()
        engine.scheduler.check()
        step += 1
    assert engine.stats().used_blocks == 0
    for number, (_, request, leaves) in enumerate(asked):
        own = [piece for piece in pieces if piece.request_id == ids[number]]
        for (tokens, finish), expected in zip(told(own, request), alone(request), strict=True):
            if finish == "cancelled":
                assert leaves is not None
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
    engine.close()
