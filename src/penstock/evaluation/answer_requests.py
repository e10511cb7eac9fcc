"""Answer many requests with one engine; common prefixes of their prompts are computed once.

Requests enter the engine as earlier ones finish, so many at a time that their keys and values fit into half
of the cache: what a prefix left there is still there when those who share it arrive, a step later. Everything
runs in the engine's thread, between two steps; the caller waits.
"""

import queue
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.errors import AnswerFailed, EngineClosed, PenstockError, UsageError
from penstock.engine.outputs import Collected, RequestOutput
from penstock.engine.request import OutputDelta, Request
from penstock.evaluation.prefix_tree import Node, tree_of

if TYPE_CHECKING:
    from penstock.engine.llm import LLM

OnProgress = Callable[[int, int], None]
"""Called with (finished, all) requests."""


def answers_of(llm: "LLM", requests: Sequence[Request], *, on_progress: OnProgress) -> list[RequestOutput]:
    """Return the outputs of requests, in their order.

    Raises:
        UsageError: a request can never be computed.
        AnswerFailed: the engine failed; the other requests are cancelled.
    """
    if not requests:
        return []
    return _Run(llm, requests).result(on_progress)


class _Run:
    """The requests of one call; but for `result`, its methods run in the engine's thread."""

    def __init__(self, llm: "LLM", requests: Sequence[Request]) -> None:
        self._llm = llm
        self._requests = requests
        self._collected = [Collected(request) for request in requests]
        prompts = [np.array(request.prompt, np.uint32) for request in requests]
        roots = tree_of(prompts, [_shareable(one) for one in requests], block_size=llm.capacity.block_size)
        self._ready = roots[::-1]  # a stack: a prefix's own requests come before other prefixes
        self._under_way: dict[int, int] = {}  # request id -> tokens
        self._most_tokens = llm.capacity.num_blocks * llm.capacity.block_size // 2
        self._events: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._is_stopped = False

    def result(self, on_progress: OnProgress) -> list[RequestOutput]:
        """Wait for all requests."""
        done, total = 0, len(self._requests)
        try:
            self._llm.thread.call(lambda _: self._fill())
            while done < total:
                event = self._events.get()
                if isinstance(event, Exception):
                    raise event
                done += event
                on_progress(done, total)
        finally:
            if done < total:
                with suppress(EngineClosed):
                    self._llm.thread.call(lambda _: self._stop())
        return [collected.answers() for collected in self._collected]

    def _fill(self) -> None:
        while self._ready and not self._is_stopped and self._has_room(self._ready[-1]):
            item = self._ready.pop()
            try:
                self._submit(item)
            except PenstockError as error:
                self._events.put(error)
                self._is_stopped = True

    def _has_room(self, item: "Node | int") -> bool:
        if not self._under_way:
            return True
        tokens = sum(self._under_way.values()) + _num_tokens(item, self._requests)
        return tokens <= self._most_tokens and len(self._under_way) < self._llm.capacity.max_sequences

    def _submit(self, item: "Node | int") -> None:
        request = self._requests[item] if isinstance(item, int) else self._prefix(item)
        request_id = self._llm.thread.submit(request, lambda delta: self._take(item, delta))
        self._under_way[request_id] = _num_tokens(item, self._requests)

    def _prefix(self, node: Node) -> Request:
        """Return a request that computes a prefix's keys and values and nothing else."""
        one = self._requests[node.prompt]
        return Request(
            prompt=one.prompt[: node.num_tokens],
            max_tokens=0,
            task="score",
            adapter=one.adapter,
            salt=one.salt,
        )

    def _take(self, item: "Node | int", delta: OutputDelta) -> None:
        if delta.finish in ("error", "refused", "cancelled"):
            kind = UsageError if delta.finish == "refused" else AnswerFailed
            self._events.put(kind(delta.error or "The engine was closed"))
        if isinstance(item, int):
            self._collected[item].take(delta)
        if delta.finish is None:
            return
        self._under_way.pop(delta.request_id, None)
        if isinstance(item, Node):
            self._ready += item.children[::-1]
        else:
            self._events.put(1)
        self._fill()

    def _stop(self) -> None:
        self._is_stopped = True
        for request_id in tuple(self._under_way):
            self._llm.thread.cancel(request_id)


def _num_tokens(item: "Node | int", requests: Sequence[Request]) -> int:
    if isinstance(item, Node):
        return item.num_tokens
    return len(requests[item].prompt) + requests[item].max_tokens


def _shareable(request: Request) -> int:
    """Return how many tokens of a prompt may come from the prefix cache."""
    longest = max(map(len, request.continuations), default=0)
    return len(request.prompt) - max(1, longest)
