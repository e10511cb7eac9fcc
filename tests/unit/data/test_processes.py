"""Worker processes: order, independence of their number, errors, deaths, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from penstock.core.errors import CorpusExhausted, TransformError
from penstock.data.processes import Fields, Processes
from penstock.data.transform import Sample, apply

Report = Callable[[int], None]


def noise(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, input_ids=rng.integers(0, 1000, len(sample.input_ids)))


def transformed(step: int, on_sample: Report) -> Fields:
    """A batch of two rows of step `step`, transformed."""
    batch = {
        "sample_ids": np.array([2 * step, 2 * step + 1]),
        "input_ids": np.zeros((2, 4096), dtype=np.int64),
        "labels": np.zeros((2, 4096), dtype=np.int64),
        "cu_seqlens": np.array([0, 4096, 8192], dtype=np.int32),
    }
    return apply(batch, noise, seed=3, fields=("input_ids", "cu_seqlens"), on_sample=on_sample)


def troubled(step: int, on_sample: Report, *, at: int, trouble: str) -> Fields:
    on_sample(100 + step)
    if step == at:
        if trouble == "raise":
            raise TransformError(f"Transform 'f' of sample {100 + step} failed with KeyError: 'x'")
        if trouble == "exhausted":
            raise CorpusExhausted("Corpus 'web' has given all", fix="Train for fewer steps.")
        if trouble == "bug":
            raise ZeroDivisionError("by zero")
        if trouble == "exit":
            os._exit(9)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"step": np.array([step])}


def take(compute: Callable[[int, Report], Fields], *, processes: int, steps: int) -> list[Fields]:
    with Processes(compute, processes=processes, name="noise") as workers:
        return list(workers.ordered(iter(range(steps)), depth=5))


def test_results_come_in_order_and_do_not_depend_on_the_number_of_processes() -> None:
    alone = [transformed(step, lambda _: None) for step in range(7)]
    for processes in (1, 3):
        found = take(transformed, processes=processes, steps=7)
        assert len(found) == 7
        for ours, theirs in zip(alone, found, strict=True):
            assert list(ours) == list(theirs)
            for name in ours:
                np.testing.assert_array_equal(ours[name], theirs[name])
                assert ours[name].dtype == theirs[name].dtype


def test_what_an_abandoned_stream_left_under_way_is_not_taken_for_the_next_ones() -> None:
    compute = partial(troubled, at=3, trouble="raise")
    with Processes(compute, processes=2, name="f") as workers:
        first = workers.ordered(count(0), depth=6)
        assert [int(fields["step"][0]) for fields in islice(first, 2)] == [0, 1]
        first.close()  # step 3 has failed by now or will, and nobody asks for it any more
        second = workers.ordered(count(10), depth=2)
        assert [int(fields["step"][0]) for fields in islice(second, 3)] == [10, 11, 12]
        second.close()


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("raise", TransformError, "Transform 'f' of sample 102 failed with KeyError: 'x'."),
        ("exhausted", CorpusExhausted, "Corpus 'web' has given all. Train for fewer steps."),
        ("bug", TransformError, "A worker process failed with ZeroDivisionError: by zero."),
        ("exit", TransformError, "A worker process of transform 'f' ended with exit code 9 at sample 102."),
        ("kill", TransformError, "A worker process of transform 'f' was killed by SIGKILL at sample 102."),
    ],
)
def test_trouble_in_a_worker_is_an_error_at_its_step_after_the_steps_before(
    trouble: str, kind: type[Exception], message: str
) -> None:
    with Processes(partial(troubled, at=2, trouble=trouble), processes=1, name="f") as workers:
        found = workers.ordered(count(0), depth=3)
        assert [int(fields["step"][0]) for fields in islice(found, 2)] == [0, 1]
        with pytest.raises(kind) as caught:
            next(found)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)
    if trouble not in ("exit", "kill"):
        assert "in troubled\n" in caught.value.__notes__[0], "the traceback of the worker"


def test_a_transform_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    with (
        pytest.raises(TransformError, match=r"'f' cannot be sent to worker processes: .*top of a module"),
        Processes(lambda step, _: {"step": step}, processes=1, name="f"),
    ):
        pass


SCRIPT = """
import sys, time
sys.path[:0] = [{here!r}]
from itertools import count
from penstock.data.processes import Processes
from test_processes import transformed

def work():
    with Processes(transformed, processes=2, name="noise") as workers:
        for number, _ in enumerate(workers.ordered(count(), depth=4)):
            if number == 3:
                print("running", *(worker.process.pid for worker in workers._workers), flush=True)

{start}
"""


@contextlib.contextmanager
def running(start: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that works with two worker processes, in a process group of its own."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent), start=start))
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


GUARDED = "if __name__ == '__main__': work()"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_program_without_a_word(number: signal.Signals, tmp_path: Path) -> None:
    with running(GUARDED, tmp_path) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()[1:]]
        assert len(pids) == 2
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does: to all of them
        else:
            program.kill()
        _, said = program.communicate()
        assert said.count("Traceback") == (number == signal.SIGINT), said
        deadline = time.monotonic() + 5
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(psutil.pid_exists, pids))


def test_a_main_module_without_a_guard_is_told_so(tmp_path: Path) -> None:
    with running("work()", tmp_path) as program:
        _, said = program.communicate()
    assert "ended with exit code 1 before its first sample" in said
    assert "if __name__ == '__main__':" in said
