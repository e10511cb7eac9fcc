"""Streams of a checkpoint's answers."""

import asyncio
import json

from penstock.console.routes.models import _written
from penstock.core.errors import PenstockError


def test_a_model_that_goes_away_ends_its_stream_in_words():
    async def events():
        yield "text", {"text": "A pen"}
        raise PenstockError("not enough memory: 9 GiB")

    async def pieces():
        return [piece async for piece in _written(events())]

    *_, text, said, end = asyncio.run(pieces())
    assert text.startswith("event: text")
    assert json.loads(said.partition("data: ")[2]) == {"said": "not enough memory: 9 GiB."}
    assert end.startswith("event: end")
