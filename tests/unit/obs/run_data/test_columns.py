"""Columns of a run: what a damaged, deleted or very long file does to them."""

import io
import json
import math
import os
import resource
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.run_data import columns as run_columns
from penstock.obs.run_data.columns import RunColumns
from penstock.obs.run_data.events import first_compared, spikes
from penstock.obs.run_data.run_files import LocalFiles


@pytest.fixture(autouse=True)
def generations_from_0(monkeypatch):
    monkeypatch.setattr("penstock.obs.run_data.columns.getrandbits", lambda _: 0)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(run, *records):
    with (run / METRICS_FILE).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def opened(run):
    columns = RunColumns(LocalFiles(run))
    columns.update()
    return columns


def start(step, ranks):
    return {"event": "start", "step": step, "ranks": ranks, "time": f"2026-01-0{ranks}T00:00:00+00:00"}


def test_tables_by_corpus_are_columns_and_a_metric_may_come_late(run):
    write(run, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5, "corpus_tokens": {"web": 8}, "mfu": 0.5})
    write(run, {"step": 2, "validation_loss": 2.0, "corpus_validation_loss": {"web": 2.5}})
    write(run, {"event": "evaluation", "step": 2, "task_scores": {"hellaswag/acc": 0.3}})
    columns = opened(run)
    assert columns.data.metrics()[:2] == ["step", "loss"]
    np.testing.assert_equal(columns.data.column("mfu"), [np.nan, 0.5])
    np.testing.assert_equal(columns.data.column("corpus_tokens/web"), [np.nan, 8])
    assert columns.data.column("corpus_validation_loss/web", table="validations").tolist() == [2.5]
    assert columns.data.table_of("task_scores/hellaswag/acc") == "tasks"


def test_a_resume_on_other_ranks_takes_back_what_came_after_its_checkpoint(run):
    write(run, start(0, 2), *({"step": n, "loss": 1.0, "step_s": 2.0} for n in range(1, 6)))
    columns = opened(run)
    before = columns.data.column("loss")
    write(run, start(3, 3), {"step": 4, "loss": 0.5, "step_s": 1.0})
    columns.update()
    assert columns.data.column("step").tolist() == [1, 2, 3, 4]
    assert columns.data.column("elapsed_s")[-1] == 7.0
    assert [(event["kind"], event["step"]) for event in columns.data.events] == [("start", 0), ("rescale", 3)]
    assert columns.data.generation == 1
    assert before.tolist() == [1.0] * 5, "a reader that still holds the old curve may finish"


def compared(step, rank, own_s, median_s=1.0):
    return {"event": "ranks", "step": step, "slowest_rank": rank, "slowest_s": own_s, "median_s": median_s}


def test_comparisons_in_which_a_rank_was_slow_are_kept_and_go_back_with_the_run(run):
    write(run, start(0, 3), {"step": 1, "loss": 1.0}, compared(1, 2, 1.1), compared(1, 0, 2.0))
    write(run, compared(1, "2", 9.0), compared(1, 2, math.nan), {"event": "ranks", "step": 1})
    write(run, {"step": 2, "loss": 1.0}, compared(2, 1, 3.0))
    columns = opened(run)
    assert columns.data.slow_ranks == [(1, 0, 2.0, 1.0), (2, 1, 3.0, 1.0)]
    assert columns.data.num_damaged == 0
    write(run, start(1, 3))
    columns.update()
    assert columns.data.slow_ranks == [(1, 0, 2.0, 1.0)]


def test_a_deleted_run_keeps_what_was_read_and_a_new_one_of_its_name_starts_again(run):
    write(run, *({"step": n, "loss": 1.0} for n in range(1, 6)))
    columns = opened(run)
    shutil.rmtree(run)
    columns.update()
    assert columns.data.num_rows() == 5
    run.mkdir()
    write(run, {"step": 1, "loss": 9.0})
    columns.update()
    assert (columns.data.column("loss").tolist(), columns.data.generation) == ([9.0], 1)


def test_lines_that_are_no_records_are_counted_and_left_out(run):
    write(run, {"step": 1, "loss": 3.0}, {"step": True, "loss": 1.0}, [1], {"loss": 2.0})
    with (run / METRICS_FILE).open("ab") as file:
        file.write(
            b"\xff\xfe\x00\n" + b"[" * 100_000 + b"\n" + b'{"step": 2, "loss": 1' + b"0" * 400 + b"}\n{"
        )
    write(run, {"step": 3, "loss": "high", "mfu": None, "corpus_tokens": [1]})
    columns = opened(run)
    assert columns.data.column("step").tolist() == [1, 2]
    assert columns.data.num_damaged == 6, "half a line that another writer continued is one of them"


class PausedFiles(LocalFiles):
    """Files that are read no further than some bytes until `goes_on` is set."""

    def __init__(self, folder, *, past):
        super().__init__(folder)
        self.past, self.is_paused, self.goes_on = past, Event(), Event()

    def open(self, name):
        owner = self

        class Paused(io.FileIO):
            def read(self, size=-1):
                if size > 1 << 20 and self.tell() > owner.past:
                    owner.is_paused.set()
                    assert owner.goes_on.wait(60)
                return super().read(size)

        return Paused(self.folder / name)


def test_a_run_is_looked_at_while_another_request_parses_it(run):
    note = "x" * 1_000_000
    write(run, *({"step": n, "loss": float(n), "note": note} for n in range(1, 30)))
    files = PausedFiles(run, past=1 << 20)
    columns = RunColumns(files)
    with ThreadPoolExecutor(2) as pool:
        parsing = pool.submit(columns.update)
        try:
            assert files.is_paused.wait(60)
            shown = columns.data.column("loss")
            assert 0 < len(shown) < 29
        finally:
            files.goes_on.set()
        assert parsing.result(timeout=60)
    assert columns.data.column("loss").tolist() == [float(n) for n in range(1, 30)]


def test_requests_that_parse_one_run_at_a_time_add_each_record_once(run):
    write(run, *({"step": n, "loss": float(n), "note": "x" * 2000} for n in range(1, 3001)))
    columns = RunColumns(LocalFiles(run))
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(columns.update) for _ in range(4)]:
            assert done.result(timeout=60)
    assert columns.data.column("step").tolist() == list(range(1, 3001))


def test_memory_does_not_grow_with_the_file(run):
    line = json.dumps({"step": 1, "loss": 1.0, "note": "x" * 100_000}).encode()
    write(run, {"step": 0, "loss": 1.0})
    columns = opened(run)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (run / METRICS_FILE).open("ab") as file:
        for step in range(2, 3000):
            file.write(line.replace(b'"step": 1', b'"step": %d' % step) + b"\n")
        file.write(b"x" * (20 << 20) + b'\n{"step": 3000, "loss": 2.0}\n')
    columns.update()
    assert columns.data.column("step")[-1] == 3000
    assert columns.data.num_damaged == 1, "the line of 20 MiB"
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 100, "of a file of 320 MiB"


def test_a_spike_is_a_loss_far_above_those_before_it():
    loss = 3 + np.random.default_rng(0).normal(0, 0.02, 500)
    loss[[300, 301, 450]] = 5.0
    found = spikes(np.arange(1.0, 501), loss)
    assert [event["step"] for event in found] == [301, 451]
    assert not spikes(np.arange(1.0, 501), np.full(500, np.nan))
    assert not spikes(np.arange(1.0, 11), loss[:10])


def test_new_spikes_are_those_of_the_whole_curve_though_only_its_end_is_read():
    loss = 3 + np.random.default_rng(0).normal(0, 0.02, 500)
    loss[[70, 300, 301, 450]] = 5.0
    steps = np.arange(500.0)
    for row in (1, 64, 65, 128, 300, 301, 302, 450, 451, 499):
        first = first_compared(row)
        assert first >= row - 128
        found = [event["step"] for event in spikes(steps[first:], loss[first:]) if event["step"] >= row]
        assert found == [step for step in (70, 300, 450) if step >= row], row


@pytest.mark.parametrize(
    "record",
    [
        {"event": "start", "step": 0, "ranks": 1, "changes": 5},
        {"event": "mixture", "step": 1, "weights": {"web": 10**400}},
        {"event": "start", "step": 0, "ranks": 10**5000},
    ],
    ids=["changes", "weight", "ranks"],
)
def test_an_event_of_odd_values_is_a_damaged_line_and_is_read_once(run, record):
    sys.set_int_max_str_digits(0)
    try:
        write(run, {"step": 1, "loss": 3.0}, record, {"step": 2, "loss": 2.0})
    finally:
        sys.set_int_max_str_digits(4300)
    columns = opened(run)
    columns.update()
    assert columns.data.column("loss").tolist() == [3, 2]
    assert (columns.data.num_damaged, columns.data.events, columns.data.starts) == (1, [], [])


def test_a_step_that_took_longer_than_any_number_is_one_of_no_time(run):
    write(run, {"step": 1, "loss": 3.0, "step_s": 10**400}, {"step": 2, "loss": 2.0, "step_s": 1})
    columns = opened(run)
    assert columns.data.column("elapsed_s").tolist() == [0, 1]


def test_of_very_many_events_the_newest_are_kept_and_a_reader_is_told_of_each(run, monkeypatch):
    monkeypatch.setattr(run_columns, "_MAX_EVENTS", 3)
    write(run, *({"event": "skipped", "step": n, "why": "loss is NaN"} for n in range(1, 6)))
    columns = opened(run)
    before = columns.data.cursor
    assert [event["step"] for event in columns.data.events] == [3, 4, 5]
    write(run, {"event": "skipped", "step": 6, "why": "loss is NaN"})
    columns.update()
    assert [event["step"] for event in columns.data.events] == [4, 5, 6]
    assert columns.data.cursor.events == before.events + 1


def test_what_each_start_changed_is_kept(run):
    write(run, {**start(0, 2), "changes": {"optim.clip": [1, 2]}}, {"step": 1, "loss": 3.0})
    columns = opened(run)
    assert columns.data.starts[0]["changes"] == {"optim.clip": [1, 2]}


def test_a_table_has_a_bounded_number_of_columns(run):
    write(run, {"step": 1, "loss": 3.0, **{f"m{n}": n for n in range(5000)}}, {"step": 2, "loss": 2.0})
    columns = opened(run)
    assert len(columns.data.metrics()) == 4096 - 1, "and the time"
    assert columns.data.column("loss").tolist() == [3, 2]


def test_a_pipe_in_place_of_the_records_is_no_file(run):
    os.mkfifo(run / METRICS_FILE)
    columns = opened(run)
    assert columns.data.num_rows() == 0


def together(run, *records):
    """Return the columns of records that are long enough to be parsed together."""
    write(run, *({**record, "note": "x" * 3000} for record in records))
    return opened(run).data


@pytest.mark.parametrize(
    "odd", [{}, {"mfu": "high"}, {"mfu": [1]}, {"corpus_tokens": {"web": "many"}}, {"loss": None}]
)
def test_records_that_are_alike_and_those_that_are_not_are_the_same_columns(run, odd):
    records = [{"step": n, "loss": 1 / n, "tokens": 3 * n, "mfu": 0.5, "corpus_tokens": {"web": n}}
               for n in range(1, 40)]  # fmt: skip
    records[3]["ok"] = True
    records[20] |= odd
    records.insert(9, {"event": "skipped", "step": 9, "why": "loss is NaN"})
    records.insert(30, {"step": 29, "validation_loss": 2.0})
    found = together(run, *records)
    assert found.num_damaged == 0
    assert found.metrics() == ["step", "loss", "tokens", "mfu", "corpus_tokens/web", "validation_loss"]
    steps = [record for record in records if "loss" in record]
    for name in ("step", "loss", "tokens", "mfu"):
        wanted = [value if isinstance(value := record[name], int | float) else math.nan for record in steps]
        np.testing.assert_array_equal(found.column(name), wanted)
    assert found.column("validation_loss", table="validations").tolist() == [2.0]
    assert [event["step"] for event in found.events] == [9]


def test_steps_that_go_back_among_lines_that_are_parsed_together_drop_what_was_beyond(run):
    before = [start(0, 2), *({"step": n, "loss": 1.0, "step_s": 1.0} for n in range(1, 20))]
    scored = {"step": 19, "validation_loss": 2.0}
    after = [start(9, 3), *({"step": n, "loss": 2.0, "step_s": 1.0} for n in range(10, 15))]
    repeated = [{"step": n, "loss": 3.0, "step_s": 1.0} for n in range(12, 40)]
    found = together(run, *before, scored, *after, *repeated)
    assert found.column("loss").tolist() == [1.0] * 9 + [2.0] * 2 + [3.0] * 28
    assert found.column("elapsed_s").tolist() == list(range(1, 40))
    assert found.num_rows("validations") == 0
    assert found.generation == 2


def test_the_time_of_steps_counts_what_is_a_duration(run):
    took = [1.0, -1.0, math.inf, 2.0]
    found = together(
        run, *({"step": n, "loss": 1.0, "step_s": took[n % 4], "checkpoint_s": 1} for n in range(1, 30))
    )
    assert found.column("elapsed_s")[3] == 1 + 1 + 3 + 2
