"""Vectors that are cut, and texts that are compared beside the event loop."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from penstock.serve.errors import ApiError
from penstock.serve.limits import ServerLimits
from penstock.serve.routes import embeddings
from penstock.serve.routes.embeddings import RerankRequest, ScoreRequest, rerank, score, shortened

VECTOR = (0.6, 0.0, 0.8)


@pytest.mark.parametrize("lengths", [(1, 2), None], ids=["these", "any"])
def test_a_cut_vector_has_length_one_again(lengths):
    assert shortened(VECTOR, 2, lengths=lengths) == [1.0, 0.0]
    assert shortened((0.0, 0.0, 1.0), 2, lengths=lengths) == [0.0, 0.0]  # nothing is left to stretch


@pytest.mark.parametrize("length", [None, 3])
def test_a_whole_vector_is_as_it_was(length):
    assert shortened(VECTOR, length, lengths=()) == list(VECTOR)


@pytest.mark.parametrize(
    ("length", "lengths", "said"),
    [(4, None, "have 3 dim"), (2, (), "has no is_matryoshka"), (2, (8, 1), "embeddings of 1, 8 dimensions")],
)
def test_a_cut_that_means_nothing_is_refused(length, lengths, said):
    with pytest.raises(ApiError, match=said) as refused:
        shortened(VECTOR, length, lengths=lengths)
    assert (refused.value.status, refused.value.param) == (400, "dimensions")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (score, ScoreRequest(text_1="a", text_2=["b", "c"])),
        (rerank, RerankRequest(query="a", documents=["b", "c"])),
    ],
)
def test_texts_are_encoded_and_compared_in_other_threads_than_the_event_loops(monkeypatch, route, body):
    threads = []

    def encode(_key, given, *_args, **_more):
        threads.append(threading.get_ident())
        return [given] if isinstance(given, str) else given

    async def computed(_tally, num_texts):
        return [(1.0, 0.0)] * num_texts

    def compare(ones, others, cosines=embeddings._cosines):
        threads.append(threading.get_ident())
        return cosines(ones, others)

    usage = SimpleNamespace(usage=lambda: SimpleNamespace(prompt_tokens=1))
    service = SimpleNamespace(
        check_open=lambda: None,
        limits=ServerLimits(),
        bridge=SimpleNamespace(submit=lambda some: some),
        served=SimpleNamespace(of=lambda _model: SimpleNamespace(name="m")),
    )
    for name, fake in {
        "service_of": lambda _: service,
        "visit_of": lambda _: SimpleNamespace(client="", opened=lambda stream: stream),
        "UsageCounter": lambda _: usage,
        "_requests": encode,
        "_computed": computed,
        "_cosines": compare,
    }.items():
        monkeypatch.setattr(embeddings, name, fake)
    assert asyncio.run(route(body, None)).status_code == 200
    assert len(threads) == 3
    assert threading.get_ident() not in threads
