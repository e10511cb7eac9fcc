"""Columns equal the history in the file, however it was written, cut, rewritten and read on the way."""

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.run_data.columns import RunColumns
from penstock.obs.run_data.run_files import LocalFiles
from penstock.obs.run_data.tail import Tail
from penstock.obs.thin import largest_triangles
from tests.examples import examples

STEPS = st.tuples(st.just("steps"), st.integers(1, 6))
ACTIONS = st.lists(
    st.one_of(
        STEPS,
        st.tuples(st.just("many"), st.just(0)),
        st.tuples(st.just("half"), st.integers(1, 30)),
        st.tuples(st.just("back"), st.integers(0, 12)),
        st.tuples(st.just("rewind"), st.integers(0, 12)),
        st.tuples(st.just("cut"), st.integers(0, 200)),
        st.tuples(st.just("damage"), st.binary(max_size=20)),
        st.tuples(st.just("validate"), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0)),
        st.tuples(st.just("read"), st.just(0)),
    ),
    max_size=25,
)


def history(content):
    """Return step -> loss as the file tells it now: of a repeated step the later record, none beyond it."""
    found = {}
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and "loss" in record:
            found = {step: loss for step, loss in found.items() if step < record["step"]}
            found[record["step"]] = record["loss"]
    return found


def origin(content):
    """Return the step of the last start that is whole: all there is where the records after it were torn."""
    found = 0
    for line in content.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("event") == "start":
            found = record["step"]
    return found


class Writer:
    """A run's file, and the steps that were written."""

    def __init__(self, file):
        self.file, self.step, self.written = file, 0, 0

    def line(self, record):
        self.add(json.dumps(record).encode() + b"\n")

    def add(self, content):
        with self.file.open("ab") as file:
            file.write(content)

    def apply(self, action, value):  # noqa: C901 - one branch an action
        if action == "steps":
            for _ in range(value):
                self.step, self.written = self.step + 1, self.written + 1
                self.line({"step": self.step, "loss": self.written / 7, "step_s": 1.0})
        elif action == "many":
            for _ in range(40):  # long enough to be parsed together
                self.step, self.written = self.step + 1, self.written + 1
                self.line({"step": self.step, "loss": self.written / 7, "step_s": 1.0, "note": "x" * 600})
        elif action == "half":
            self.add(b'{"step": 9, "loss": 1.5, "grad_norm": 1}'[:value])
        elif action == "back":
            self.step = min(value, self.step)
            self.line({"event": "start", "step": self.step, "ranks": 2, "time": "2020-01-01"})
        elif action == "rewind":
            content, self.step = self.file.read_bytes(), min(value, self.step)
            kept = [(step, loss) for step, loss in history(content).items() if step <= self.step]
            self.file.unlink()
            self.file.write_bytes(b"")
            for step, loss in kept:
                self.line({"step": step, "loss": loss, "step_s": 1.0})
        elif action == "cut":
            content = self.file.read_bytes()
            self.file.write_bytes(content[: max(0, len(content) - value)])
        elif action == "damage":
            self.add(value + b"\n")
        elif action == "validate":
            self.line({"step": self.step, "validation_loss": 2.0, "corpus_validation_loss": {"web": 2.5}})


@examples(60)
@given(ACTIONS)
@example([("many", 0), ("back", 1), ("half", 1), ("steps", 1)])
@example([("many", 0), ("back", 1), ("half", 1), ("back", 0)])
def test_columns_are_the_history_that_the_file_tells(actions):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        writer = Writer(run / METRICS_FILE)
        writer.file.touch()
        columns = RunColumns(LocalFiles(run))
        before, generation = {}, 0
        for action, value in [*actions, ("read", 0)]:
            writer.apply(action, value)
            if action == "reopen":
                columns = RunColumns(LocalFiles(run))
            elif action == "read":
                columns.update()
                data = columns.data
                steps, losses = data.column("step"), data.column("loss")
                told = dict(zip(steps.astype(int).tolist(), losses.tolist(), strict=True))
                # a start at an earlier step ends the history there, before a step is repeated
                content = writer.file.read_bytes()
                truth = history(content)
                assert {step: truth.get(step) for step in told} == told
                assert not truth or max(told, default=0) in (max(truth), writer.step, origin(content), 0)
                assert (np.diff(steps) > 0).all()
                if data.generation == generation:
                    assert {step: told.get(step) for step in before} == before, (
                        "nothing was taken back in silence"
                    )
                before, generation = told, data.generation


@given(
    st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=20), st.integers(8, 64)
)
def test_lines_are_whole_whatever_the_chunk(lines, chunk):
    content = b"".join(line + b"\n" for line in lines) + b"half"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_bytes(content)
        read = [*Tail(LocalFiles(Path(folder)), "file", block_bytes=chunk).blocks()]
    found = [line for block in read for line in block.content.split(b"\n")[:-1]]
    dropped = sum(block.num_dropped for block in read)
    assert found == [line for line in lines if line in found or len(line) < chunk // 2] or dropped
    assert dropped + len(found) == len(lines) + (dropped > 0 and len(b"half") >= chunk)
    for block in read:
        assert content[block.offset :].startswith(block.content)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(3, 50))
def test_thinned_points_keep_both_ends_their_order_and_their_number(values, points):
    y = np.array(values)
    kept = largest_triangles(np.arange(float(len(y))), y, points)
    assert len(kept) == min(points, len(y))
    assert (kept[0], kept[-1]) == (0, len(y) - 1)
    assert (np.diff(kept) > 0).all()
