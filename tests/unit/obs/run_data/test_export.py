"""Files of columns: every step in its row, other records in the row of theirs, no formula, bounded memory."""

import csv
import io
import json
import tracemalloc

import numpy as np
import pyarrow.parquet as parquet
import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.run_data import export
from penstock.obs.run_data.columns import RunColumns
from penstock.obs.run_data.export import exported, rows_by_step
from penstock.obs.run_data.run_files import LocalFiles


@pytest.fixture
def columns_of(tmp_path):
    def of(*records, name="run"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / METRICS_FILE).open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        columns = RunColumns(LocalFiles(tmp_path / name))
        columns.update()
        return columns.data

    return of


def steps(number, **more):
    return [{"step": n, "loss": 5.0 - n / 10, **more} for n in range(1, number + 1)]


def rows_of(pieces):
    return [*csv.reader(io.StringIO(b"".join(pieces).decode()))]


def test_every_step_is_a_row_and_a_validation_stands_in_the_row_of_its_step(columns_of):
    run = columns_of(*steps(3), {"step": 2, "validation_loss": 9.5, "corpus_validation_loss": {"a, b": 1e-7}})
    found = rows_of(exported({"r": run}, (), form="csv"))
    assert found == [
        ["step", "loss", "validation_loss", "corpus_validation_loss/a, b"],
        ["1", "4.9", "", ""],
        ["2", "4.8", "9.5", "1e-7"],
        ["3", "4.7", "", ""],
    ]


def test_several_runs_have_a_column_of_their_names_and_the_metrics_of_all(columns_of):
    runs = {"a": columns_of(*steps(2), name="a"), "b": columns_of(*steps(1, mfu=0.5), name="b")}
    found = rows_of(exported(runs, ["mfu", "loss"], form="csv"))
    assert found == [
        ["run", "step", "mfu", "loss"],
        ["a", "1", "", "4.9"],
        ["a", "2", "", "4.8"],
        ["b", "1", "0.5", "4.9"],
    ]


def test_a_spreadsheet_finds_no_formula_in_csv_and_a_program_the_name_itself_in_parquet(columns_of):
    evil = "=HYPERLINK(0)"
    runs = {
        evil: columns_of(*steps(1, **{evil: 2.0, "+1": 3.0}), name="a"),
        "@b": columns_of(*steps(1), name="b"),
    }
    found = rows_of(exported(runs, (), form="csv"))
    assert found[0] == ["run", "step", "loss", f"'{evil}", "'+1"]
    assert [row[0] for row in found[1:]] == [f"'{evil}", "'@b"]
    table = parquet.read_table(io.BytesIO(b"".join(exported(runs, (), form="parquet"))))
    assert table.column_names == ["run", "step", "loss", evil, "+1"]
    assert table["run"].to_pylist() == [evil, "@b"]


def test_pieces_of_tables_with_other_steps_meet_at_the_same_rows(columns_of, monkeypatch):
    monkeypatch.setattr(export, "_ROWS", 4)
    checks = [{"step": n, "validation_loss": float(n)} for n in (1, 2, 3, 9, 10)]
    run = columns_of(*steps(5), *checks)
    pieces = [*rows_by_step(run, ["loss", "validation_loss"])]
    assert len(pieces) > 1
    assert np.concatenate([piece["step"] for piece in pieces]).tolist() == [1, 2, 3, 4, 5, 9, 10]
    known = np.concatenate([piece["validation_loss"] for piece in pieces])
    np.testing.assert_equal(known, [1, 2, 3, np.nan, np.nan, 9, 10])
    loss = np.concatenate([piece["loss"] for piece in pieces])
    np.testing.assert_equal(loss, [4.9, 4.8, 4.7, 4.6, 4.5, np.nan, np.nan])


def test_validations_in_no_order_are_written_once_and_to_an_end(columns_of):
    run = columns_of(*steps(12), *({"step": n, "validation_loss": float(n)} for n in (10, 5, 7, 3)))
    rows = [row for piece in rows_by_step(run, ["loss", "validation_loss"]) for row in piece["step"]]
    values = [
        each for piece in rows_by_step(run, ["loss", "validation_loss"]) for each in piece["validation_loss"]
    ]
    assert set(rows) == set(range(1, 13))
    assert sorted(value for value in values if value == value) == [3.0, 5.0, 7.0, 10.0]


def test_an_unknown_metric_and_a_run_without_steps_are_refused_before_a_file_begins(columns_of):
    with pytest.raises(UsageError, match="Did you mean 'loss'"):
        exported({"r": columns_of(*steps(1))}, ["lss"], form="csv")
    with pytest.raises(PenstockError, match="has not recorded a step yet"):
        exported({"r": columns_of(name="empty")}, (), form="csv")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_memory_does_not_grow_with_the_run(columns_of, monkeypatch, form):
    monkeypatch.setattr(export, "_ROWS", 1 << 10)
    peaks = []
    for number in (4_000, 40_000):
        run = columns_of(*steps(number), name=str(number))
        tracemalloc.start()
        size = sum(map(len, exported({"r": run}, (), form=form)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size > 8 * number or form == "parquet"
    assert peaks[1] < 2 * peaks[0], "ten times the steps"
