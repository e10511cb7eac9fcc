"""Requests to a running job: noticed by rank 0, taken up by all ranks after the same step.

Rank 0 looks at the folder once a step, which costs one `stat`. That there is news is agreed on by the sum
that every step begins with; only then is anything broadcast. Every rank does the same with the same
words (see take_up.py), so nothing else has to be agreed on, save whether each of them sees the new parts of
a corpus.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.core import clock, config
from penstock.core.errors import PenstockError
from penstock.data import Loader, open_corpus
from penstock.parallel.mesh import World
from penstock.train import requests
from penstock.train.config import TrainConfig
from penstock.train.requests import Answer, Request
from penstock.train.take_up import follow, known_parts, take_up

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 64
_SETTLED_S = 2.0
"""A folder that changed so lately is listed again: its time stamp may not tell a further change."""


class Control:
    """One rank's end of the channel.

    Args:
        loader: the rank's; at the step the job starts from.
    """

    def __init__(self, recipe: TrainConfig, loader: Loader, world: World) -> None:
        self._run = Path(recipe.run.dir)
        self._recipe = recipe
        self._loader = loader
        self._world = world
        self._seen = -1
        self._answers: list[Answer] = []
        self.islands: int | None = None
        """With which the job is to go on, if it was asked for another number."""

    def start(self) -> None:
        """Take up again what was decided after the checkpoint, then new parts, then what is waiting."""
        first = self._world.is_first
        if first:
            (self._run / requests.CONTROL_FOLDER).mkdir(parents=True, exist_ok=True)
        told = share(self._world, [asdict(found) for found in requests.answers(self._run)] if first else None)
        self._answers = [config.build(Answer, found) for found in told]
        for found in follow(self._loader, self._answers):
            log.info("taken up again request=%d: %s", found.number, found.said)
        self._extend()
        self.take_up()

    def has_news(self) -> bool:
        """Whether there is a request without an answer; always false on ranks other than 0."""
        if not self._world.is_first:
            return False
        try:
            changed = (self._run / requests.CONTROL_FOLDER).stat().st_mtime_ns
        except OSError:
            return False
        if changed == self._seen and clock.unix_seconds() - changed / 1e9 > _SETTLED_S:
            return False
        self._seen = changed
        return bool(self._waiting())

    def take_up(self) -> list[Answer]:
        """Do what is asked and say what came of it; every rank must call it after the same step."""
        told = share(self._world, self._read() if self._world.is_first else None)
        asked = self._seen_by_all([config.build(Request, request) for request in told])
        found = []
        for request in asked:
            undo = partial(self._back_to, self._loader.state_dict())
            found.append(take_up(self._loader, self._recipe, request, undo=undo))
            self._answers.append(found[-1])
            self.islands = found[-1].islands or self.islands
        for each in found if self._world.is_first else ():
            log.info("request=%d: %s", each.number, each.said)
            self._answer(each)
        return found

    def _waiting(self) -> list[int]:
        try:
            return requests.open_requests(self._run)[:_MOST_AT_ONCE]
        except OSError as error:
            log.warning("requests cannot be read: %s", error)
            return []

    def _answer(self, found: Answer) -> None:
        """Write an answer; a full disk must not end the job."""
        try:
            requests.answer(self._run, found)
        except OSError as error:
            log.warning("request=%d: its answer cannot be written: %s", found.number, error)

    def _read(self) -> list[dict[str, Any]]:  # Any: JSON values
        """Return what waits; what cannot be read is answered and moved aside."""
        good = []
        for number in self._waiting():
            try:
                request = requests.read_request(self._run, number)
                if request.extend is not None:
                    request = replace(request, parts=self._parts_on_disk(request.extend))
                good.append(asdict(request))
            except PenstockError as error:
                said = f"refused: {error}"
                log.warning("request=%d: %s", number, said)
                with suppress(OSError):
                    requests.set_aside(self._run, number)
                self._answer(Answer(number=number, taken_up=False, said=said, step=self._loader.step))
        return good

    def _parts_on_disk(self, name: str) -> int:
        path, corpus = self._recipe.data.paths.get(name), self._loader.corpora.get(name)
        return 0 if path is None or corpus is None else open_corpus(path).manifest.adoptable_parts

    def _seen_by_all(self, asked: Sequence[Request]) -> list[Request]:
        """Make extensions by parts that some rank does not see ones by none, which are refused."""
        growing = [request for request in asked if request.extend is not None]
        if not growing:
            return list(asked)
        blind = [self._parts_on_disk(str(each.extend)) < (each.parts or 0) for each in growing]
        unseen = dict(zip((each.number for each in growing), self._world.sum(*blind), strict=True))
        return [replace(each, parts=0) if unseen.get(each.number) else each for each in asked]

    def _extend(self) -> None:
        """Take up the parts that were appended to corpora since the checkpoint."""
        loader, again = self._loader, {found.extend for found in self._answers if found.extend}
        names = [name for name in loader.corpora if name in self._recipe.data.corpora and name not in again]
        ours = [loader.corpora[name].manifest.adoptable_parts for name in names]
        agreed: list[int] = share(self._world, ours if self._world.is_first else None)
        blind = self._world.sum(*(mine < parts for mine, parts in zip(ours, agreed, strict=True)))
        for name, parts, unseen in zip(names, agreed, blind, strict=True):
            if unseen or parts <= known_parts(loader, name):
                continue
            loader.extend_corpus(name, parts=parts)
            log.info("corpus=%s grew: %d parts from step=%d on", name, parts, loader.step)

    def _back_to(self, state: dict[str, Any]) -> None:  # Any: JSON values
        self._loader.load_state_dict(state)
        follow(self._loader, self._answers)


def share(world: World, value: Any) -> Any:  # Any: JSON values
    """Return rank 0's value on every rank; every rank must call it.

    Args:
        value: read on rank 0 only.
    """
    content = json.dumps(value).encode() if world.is_first else b""
    (size,) = world.sum(len(content))
    if not world.is_first:
        content = bytes(int(size))
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(world.device)
    dist.broadcast(sent, src=0)
    return json.loads(sent.cpu().numpy().tobytes())
