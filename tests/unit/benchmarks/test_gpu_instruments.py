"""One failure of the GPU kit's figures costs one row, and settings take turns."""

import sys
from itertools import count
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.instruments import attempt, in_turns, memory_bytes_s, seconds_of
from gpu_parts.part import Part

CPU = torch.device("cpu")


@pytest.fixture
def part(tmp_path):
    return Part("kernels", CPU, True, 100.0, tmp_path / "kernels.json")


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "options", "status", "why"),
    [
        (
            raising(torch.OutOfMemoryError("tried 9 GiB\nof 8")),
            {},
            "skipped",
            "not enough memory: tried 9 GiB",
        ),
        (raising(ValueError("no such kernel")), {}, "failed", "ValueError: no such kernel (at"),
        (raising(ValueError("not built")), {"is_optional": True}, "skipped", "ValueError: not built (at"),
        (lambda: 1, {"needs_s": 1000.0}, "skipped", "s of the part were left, and it takes 1000"),
    ],
)
def test_what_cannot_be_measured_is_a_row_with_its_reason(part, work, options, status, why):
    assert attempt(part, "a figure", work, **options) is None
    (row,) = part.rows
    assert (row.name, row.status) == ("a figure", status)
    assert why in row.why
    assert "\n" not in row.why


def test_what_is_measured_files_nothing_by_itself(part):
    assert attempt(part, "a figure", lambda: 7, needs_s=1.0) == 7
    assert part.rows == []


def test_settings_take_turns_and_each_has_one_where_time_is_over():
    called = []
    settings = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    assert in_turns(settings, rounds=2, left_s=lambda: 1.0) == {"a": [1, 4], "b": [2, 5], "c": [3, 6]}
    assert called == list("abcabc")
    assert in_turns(settings, rounds=5, left_s=lambda: 0.0) == {"a": [7], "b": [8], "c": [9]}


def test_a_time_is_that_of_one_call_of_several():
    numbers = count()
    calls = [lambda: next(numbers) for _ in range(4)]
    seconds = seconds_of(CPU, calls, for_s=0.0)
    assert next(numbers) % 4 == 0
    assert 0 < seconds < 1


def test_a_copy_counts_both_directions():
    found = memory_bytes_s(CPU, is_tiny=True)
    assert set(found) == {"read", "copy"}
    assert all(speed > 0 for speed in found.values())
