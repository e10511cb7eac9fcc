"""Control requests to a running job: rank 0 notices them, all ranks apply them after the same step.

Rank 0 checks the folder once a step, at the cost of one `stat`. The sum that every step begins with tells all
ranks whether there are requests; only then is anything broadcast. Every rank applies the same requests in the
same way (apply_request.py), so the ranks agree on everything, except whether each of them can read the new
parts of a corpus.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.core import clock, config, env
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.log import EventLog
from penstock.data import Loader, open_corpus
from penstock.parallel.mesh import World, broadcast
from penstock.train.control import requests
from penstock.train.control.apply_request import follow, known_parts, refused, take_up
from penstock.train.control.requests import ControlReply, ControlRequest
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import num_data_ranks

log = EventLog(__name__)

_MAX_AT_ONCE = 64
_SETTLED_S = 2.0
"""Age in seconds below which a changed folder is listed again: its time stamp may hide a further change."""


def _sizes(recipe: TrainConfig) -> list[int]:
    """Return the numbers of data-parallel ranks on each number of nodes that a launched run may have."""
    found = []
    if text := env.variable(env.NODES):
        from penstock.launch.spec import node_range

        nodes, processes = node_range(text), env.local_world_size()
        for number in range(nodes.least, nodes.most + 1):
            with suppress(ConfigError):  # of a layout that is planned anew there
                ranks = number * processes
                found.append(num_data_ranks(recipe, world_size=ranks, ranks_per_machine=processes))
    return found


class Control:
    """One rank's endpoint for control requests.

    Args:
        loader: this rank's loader, at the step from which the job starts.
    """

    def __init__(self, recipe: TrainConfig, loader: Loader, world: World) -> None:
        self._run = Path(recipe.run.dir)
        self._recipe = recipe
        self._loader = loader
        self._world = world
        self._seen = -1
        self._answers: list[ControlReply] = []
        self.islands: int | None = None
        """Number of islands to restart with, if a request changed it."""
        self.stops = False
        """True if a request ends the job."""

    def start(self) -> None:
        """Apply decisions made after the checkpoint again, then new corpus parts, then waiting requests."""
        first = self._world.is_first
        if first:
            (self._run / requests.CONTROL_FOLDER).mkdir(parents=True, exist_ok=True)
        told = broadcast(
            self._world, [asdict(found) for found in requests.answers(self._run)] if first else None
        )
        self._answers = [config.build(ControlReply, found) for found in told]
        for found in follow(self._loader, self._answers):
            log.info(
                "request_again",
                "Request {request} is applied again: {reply}",
                request=found.number,
                reply=found.said,
            )
        self._extend()
        self.take_up(is_start=True)

    def has_news(self) -> bool:
        """True if there is an unanswered request; always False on ranks other than 0."""
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

    def take_up(self, *, is_start: bool = False) -> list[ControlReply]:
        """Apply all waiting requests; every rank must call it after the same step.

        Args:
            is_start: the job begins: requests to stop or save were meant for the one before it.
        """
        told = broadcast(self._world, self._read() if self._world.is_first else None)
        asked = self._seen_by_all([config.build(ControlRequest, request) for request in told])
        found = []
        for request in asked:
            if is_start and request.needs_job:
                why = "the job that it was meant for has ended"
                found.append(refused(request, why, step=self._loader.step))
            else:
                found.append(self._take_up(request))
            self._answers.append(found[-1])
            self.islands = found[-1].islands or self.islands
            self.stops = self.stops or found[-1].stop
            if found[-1].stop and self._world.is_first:
                self._tell_supervisors()
        for each in found if self._world.is_first else ():
            log.info("request", "Request {request}: {reply}", request=each.number, reply=each.said)
            self._answer(each)
        return found

    def _take_up(self, request: ControlRequest) -> ControlReply:
        """Apply a request on all ranks; on none, if one of them cannot."""
        before = self._loader.snapshot()
        found = take_up(self._loader, self._recipe, request, sizes=_sizes(self._recipe))
        (number,) = self._world.sum(int(found.taken_up))
        if not found.taken_up or number == self._world.ranks.world_size:
            return found
        self._loader.restore(before)
        return refused(request, "a rank cannot apply it; its log says why", step=self._loader.step)

    def _tell_supervisors(self) -> None:
        """Mark a launched run as one to stop for good: supervisors start ranks again that stop unasked."""
        from penstock.launch.job_folder import JobFolder

        job = JobFolder(self._run)
        if job.path.is_dir():
            try:
                job.ask_to_stop(env.variable(env.JOB))
            except OSError as error:
                log.warning(
                    "stop_unnoted",
                    "The stop cannot be noted, so the run may be started again: {error}",
                    error=error,
                )

    def _waiting(self) -> list[int]:
        try:
            return requests.open_requests(self._run)[:_MAX_AT_ONCE]
        except OSError as error:
            log.warning("requests_unread", "Requests cannot be read: {error}", error=error)
            return []

    def _answer(self, found: ControlReply) -> None:
        """Write a reply; a full disk must not end the job."""
        try:
            requests.answer(self._run, found)
        except OSError as error:
            log.warning(
                "reply_unwritten",
                "The answer to request {request} cannot be written: {error}",
                request=found.number,
                error=error,
            )

    def _read(self) -> list[dict[str, Any]]:  # Any: JSON values
        """Return the waiting requests; unreadable ones are answered and moved aside."""
        good = []
        for number in self._waiting():
            try:
                request = requests.read_request(self._run, number)
                if request.extend is not None:
                    request = replace(request, parts=self._parts_on_disk(request.extend))
                good.append(asdict(request))
            except PenstockError as error:
                said = f"refused: {error}"
                log.warning("request", "Request {request}: {reply}", request=number, reply=said)
                with suppress(OSError):
                    requests.set_aside(self._run, number)
                self._answer(ControlReply(number=number, taken_up=False, said=said, step=self._loader.step))
        return good

    def _parts_on_disk(self, name: str) -> int:
        path, corpus = self._recipe.data.paths.get(name), self._loader.corpora.get(name)
        return 0 if path is None or corpus is None else open_corpus(path).manifest.adoptable_parts

    def _parts_seen(self, name: str) -> int:
        try:
            return self._parts_on_disk(name)
        except (PenstockError, OSError) as error:
            log.warning(
                "parts_unread",
                "The parts of corpus {corpus} cannot be read here: {error}",
                corpus=name,
                error=error,
            )
            return 0

    def _seen_by_all(self, asked: Sequence[ControlRequest]) -> list[ControlRequest]:
        """Replace extensions by parts that some rank cannot read by empty ones, which are refused."""
        growing = [request for request in asked if request.extend is not None]
        if not growing:
            return list(asked)
        blind = [self._parts_seen(str(each.extend)) < (each.parts or 0) for each in growing]
        unseen = dict(zip((each.number for each in growing), self._world.sum(*blind), strict=True))
        return [replace(each, parts=0) if unseen.get(each.number) else each for each in asked]

    def _extend(self) -> None:
        """Apply parts that were appended to corpora since the checkpoint."""
        loader, again = self._loader, {found.extend for found in self._answers if found.extend}
        names = [name for name in loader.corpora if name in self._recipe.data.corpora and name not in again]
        ours = [loader.corpora[name].manifest.adoptable_parts for name in names]
        agreed: list[int] = broadcast(self._world, ours if self._world.is_first else None)
        blind = self._world.sum(*(mine < parts for mine, parts in zip(ours, agreed, strict=True)))
        for name, parts, unseen in zip(names, agreed, blind, strict=True):
            if unseen or parts <= known_parts(loader, name):
                continue
            loader.extend_corpus(name, parts=parts)
            log.info(
                "corpus_grew",
                "Corpus {corpus} has grown: {parts} parts from step {step:,} on",
                corpus=name,
                parts=parts,
                step=loader.step + 1,
            )
