"""Commands of Penstock in the process of the tests, for those that need no signal, kill, rank or terminal.

Whatever a command changes in its process is as it was afterwards. Its output is all that is written to the
descriptors 1 and 2: by its threads, C code and children, too.
"""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from penstock.cli.main import main


def run_cli(
    *words: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it returns what `subprocess.run` returns of a process.

    Args:
        words: of the command line.
        cwd: folder; None: the present one.
        env: environment; None: the present one.
        stdin: what the command reads.
    """
    given = [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]
    with ExitStack() as stack:
        for part in (_environment(env), _folder(cwd), _warnings(), _log(), _signals(), _numbers()):
            stack.enter_context(part)
        files = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(3)]
        files[0].write(stdin.encode())
        files[0].seek(0)
        with _streams(files):
            code = _code_of(given)
        out, errors = (_text_of(file) for file in files[1:])
    return subprocess.CompletedProcess(["penstock", *given], code, out, errors)


def _code_of(words: list[str]) -> int:
    """Run the command; return the exit code that an interpreter would end with."""
    try:
        return main(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 1


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def _streams(files: Sequence[IO[bytes]]) -> Iterator[None]:
    """The files as descriptors 0, 1 and 2, and as Python's streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    python = sys.stdin, sys.stdout, sys.stderr
    kept = [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    try:
        yield
    finally:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()  # flushes
        sys.stdin, sys.stdout, sys.stderr = python
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _environment(env: Mapping[str, str] | None) -> Iterator[None]:
    before, argv = dict(os.environ), sys.argv[:]
    _set_environment(before if env is None else env)
    try:
        yield
    finally:
        _set_environment(before)
        sys.argv[:] = argv


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def _folder(cwd: Path | str | None) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(before if cwd is None else cwd)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _warnings() -> Iterator[None]:
    """Warnings are printed as an interpreter prints them; the tests make errors of them."""
    with warnings.catch_warnings():
        warnings.showwarning = _show
        warnings.resetwarnings()
        for unseen in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", unseen)
        yield


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: IO[str] | None = None,
    line: str | None = None,
) -> None:
    (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


@contextmanager
def _log() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("penstock")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    try:
        yield
    finally:
        for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
            each.handlers[:], each.propagate = handlers, propagate
            each.setLevel(level)


@contextmanager
def _signals() -> Iterator[None]:
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _numbers() -> Iterator[None]:
    """Random states, torch's settings, and the garbage collector's."""
    states: tuple[Any, ...] = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, kind, collected = torch.get_num_threads(), torch.get_default_dtype(), gc.get_threshold()
    is_exact = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
        torch.set_default_dtype(kind)
        torch.use_deterministic_algorithms(is_exact)
        gc.set_threshold(*collected)
