"""For every test: what is kept of runs (golden files, seconds), and a failure where one leaves a thread,
a process or a file open."""

import gc
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.examples  # noqa: F401 - loads the profile of hypothesis
from penstock.core.garbage import freeze_gc, tune_gc
from tests.seconds import Seconds
from tests.warm import children

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts this in the background ignores Ctrl-C for it and for all that it starts; the
    # tests press Ctrl-C. A handler, unlike "ignore", is not inherited by a program that is started.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests fork ranks from processes that have computed already. A pool of OpenMP threads does not survive a
# fork: a child that used one would wait for ever for threads that are not there.
os.environ["OMP_NUM_THREADS"] = "1"

# Tests of the operators wait for their build; a test with plain PyTorch in their place would prove nothing.
os.environ["PENSTOCK_NATIVE"] = "wait"

tune_gc()  # collecting the tests takes 7 s so, and 12 s else

GOLDEN = Path(__file__).parent / "golden"
_STATE = tempfile.TemporaryDirectory(prefix="penstock-state-")
_PATIENCE_S = 5.0  # for what is ending already
_MANY_DESCRIPTORS = 24  # of no file of the test: what libraries open once and keep

# Threads and processes that libraries keep for the rest of this process.
_LIBRARY_THREADS = ("TMonitor",)  # the class of tqdm's one thread, behind others' progress bars
_LIBRARY_PROCESSES = (
    "multiprocessing.resource_tracker",  # one for ever once shared memory or a semaphore was used
    "multiprocessing.forkserver",  # likewise
    "torch/_inductor/compile_worker",  # torch.compile's pool
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden; review the change as code"
    )
    parser.addoption("--update-seconds", action="store_true", help="rewrite tests/seconds.json")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["XDG_STATE_HOME"] = _STATE.name  # else `penstock launch list` of who tests has their runs
    config.pluginmanager.register(Seconds(config.getoption("--update-seconds")), "seconds")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that workers end together; inside a file, order is random."""
    items.sort(key=config.pluginmanager.get_plugin("seconds").expected, reverse=True)


def pytest_collection_finish() -> None:
    """Let looks for garbage, of which tests ask for some, pass over all that was imported for them."""
    freeze_gc()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Give the next test the log that this one had: a command run in this process sets it up for good."""
    logger = logging.getLogger("penstock")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """A function that compares a value with the JSON file of that name in tests/golden."""

    def compare(name: str, value: Any) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(json.dumps(value, indent=1) + "\n")
        assert json.loads(path.read_text()) == value

    return compare


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in before and type(thread).__name__ not in _LIBRARY_THREADS
    ]
    if left:
        gc.collect()  # an iterator that was dropped ends its threads
    deadline = time.monotonic() + _PATIENCE_S
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread.name for thread in left if thread.is_alive()], "the test left threads running"


@pytest.fixture(autouse=True)
def leaves_no_process() -> Iterator[None]:
    before = children()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (left := [_command(pid) for pid in children() - before]) and time.monotonic() < deadline:
        if all(_is_of_a_library(command) for command in left):
            return
        gc.collect()
        time.sleep(0.01)
    assert not left, "the test left processes running"


@pytest.fixture(autouse=True)
def leaves_no_descriptor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No open file of the test's own, and no other in numbers that would add up over a suite."""
    own_folder, before = str(tmp_path_factory.getbasetemp()), _descriptors()
    yield
    if left := _leaked(before, own_folder):
        gc.collect()
        left = _leaked(before, own_folder)
    assert not left, "the test left descriptors open"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() or f"ended, pid {pid}"
    except OSError:
        return f"ended, pid {pid}"


def _is_of_a_library(command: str) -> bool:
    return any(name in command for name in _LIBRARY_PROCESSES)


def _descriptors() -> dict[int, str]:
    """Return what each open descriptor is; nothing on systems without /proc."""
    found: dict[int, str] = {}
    folder = "/proc/self/fd"  # a text: a Path of each takes longer than its link
    for name in os.listdir(folder) if os.path.isdir(folder) else []:  # noqa: PTH112, PTH208
        try:
            found[int(name)] = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - it need not be a path
        except OSError:  # the listing's own
            continue
    return found


def _leaked(before: dict[int, str], own_folder: str) -> list[str]:
    new = [what for number, what in _descriptors().items() if before.get(number) != what]
    own = [what for what in new if what.startswith(own_folder)]
    return own or (new if len(new) > _MANY_DESCRIPTORS else [])
