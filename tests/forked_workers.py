"""Ranks of an engine that begin with everything imported: a fixture forks each from the tests' process.

A rank that starts an interpreter imports for more than a CPU-second, which is most of what an engine over a
tiny model takes. A forked rank is a process of its own with the same pipe, and runs the worker's `main`.
Ranks that start an interpreter give the same tokens in test_ranked_steps.py and test_adapters.py, and
test_ranked_engine.py shows how they end.
"""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

from penstock.engine.workers import worker

_MOST_DESCRIPTORS = 1 << 16


class _Worker(subprocess.Popen[bytes]):
    """`subprocess.Popen` that forks what is a rank of an engine."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        if worker.__name__ not in given["args"]:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        self.pid = os.fork()
        if not self.pid:
            _run(given["args"], given["pass_fds"], [given[name] for name in ("p2cread", "c2pwrite")])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


def _run(words: list[str], kept: Iterable[int], streams: Iterable[int]) -> NoReturn:
    """Run a rank with its streams and descriptors alone: its end of the pipe shows that the other closed."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        first = 3
        for descriptor in [*sorted(kept), _MOST_DESCRIPTORS]:
            os.closerange(first, descriptor)
            first = descriptor + 1
        sys.argv = words[-2:]
        code = worker.main()
    finally:
        os._exit(code)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built in this test fork their ranks."""
    monkeypatch.setattr(subprocess, "Popen", _Worker)
