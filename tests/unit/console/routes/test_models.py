"""Streams of a checkpoint's answers."""

import asyncio
import json

import pytest

from penstock.console.routes.models import _written


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("not enough memory: 9 GiB"), "not enough memory: 9 GiB"),
        (MemoryError(), "no memory is left"),
    ],
)
def test_a_model_that_runs_out_of_memory_ends_its_stream_in_words(error, words):
    async def events():
        yield "text", {"text": "A pen"}
        raise error

    async def pieces():
        return [piece async for piece in _written(events())]

    *_, text, said, end = asyncio.run(pieces())
    assert text.startswith("event: text")
    assert json.loads(said.partition("data: ")[2]) == {"said": words}
    assert end.startswith("event: end")
