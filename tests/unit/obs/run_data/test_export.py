"""Files of columns: every step in its row, other records in the row of theirs, no formula."""

import csv
import json

import pyarrow.parquet as parquet
import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.run_data.columns import RunColumns
from penstock.obs.run_data.export import write_steps
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


@pytest.fixture
def rows_of(tmp_path):
    def of(runs, metrics=()):
        write_steps(tmp_path / "steps.csv", runs, metrics, form="csv")
        return [*csv.reader((tmp_path / "steps.csv").read_text().splitlines())]

    return of


def test_every_step_is_a_row_and_a_validation_stands_in_the_row_of_its_step(columns_of, rows_of):
    run = columns_of(*steps(3), {"step": 2, "validation_loss": 9.5, "corpus_validation_loss": {"a, b": 1e-7}})
    found = rows_of({"r": run})
    assert found == [
        ["step", "loss", "validation_loss", "corpus_validation_loss/a, b"],
        ["1", "4.9", "", ""],
        ["2", "4.8", "9.5", "1e-7"],
        ["3", "4.7", "", ""],
    ]


def test_several_runs_have_a_column_of_their_names_and_the_metrics_of_all(columns_of, rows_of):
    runs = {"a": columns_of(*steps(2), name="a"), "b": columns_of(*steps(1, mfu=0.5), name="b")}
    found = rows_of(runs, ["mfu", "loss"])
    assert found == [
        ["run", "step", "mfu", "loss"],
        ["a", "1", "", "4.9"],
        ["a", "2", "", "4.8"],
        ["b", "1", "0.5", "4.9"],
    ]


def test_a_spreadsheet_finds_no_formula_in_csv_and_a_program_the_name_itself_in_parquet(
    columns_of, rows_of, tmp_path
):
    evil = "=HYPERLINK(0)"
    runs = {
        evil: columns_of(*steps(1, **{evil: 2.0, "+1": 3.0}), name="a"),
        "@b": columns_of(*steps(1), name="b"),
    }
    found = rows_of(runs)
    assert found[0] == ["run", "step", "loss", f"'{evil}", "'+1"]
    assert [row[0] for row in found[1:]] == [f"'{evil}", "'@b"]
    write_steps(tmp_path / "steps.parquet", runs, (), form="parquet")
    table = parquet.read_table(tmp_path / "steps.parquet")
    assert table.column_names == ["run", "step", "loss", evil, "+1"]
    assert table["run"].to_pylist() == [evil, "@b"]


def test_tables_with_other_steps_meet_at_the_same_rows(columns_of, rows_of):
    checks = [{"step": n, "validation_loss": float(n)} for n in (10, 1, 3, 9)]
    found = rows_of({"r": columns_of(*steps(4), *checks)}, ["loss", "validation_loss"])
    assert found[1:] == [
        *(["1", "4.9", "1"], ["2", "4.8", ""], ["3", "4.7", "3"], ["4", "4.6", ""]),
        *(["9", "", "9"], ["10", "", "10"]),
    ]


def test_an_unknown_metric_and_a_run_without_steps_are_refused_before_a_file_begins(columns_of, tmp_path):
    path = tmp_path / "steps.csv"
    with pytest.raises(UsageError, match="Did you mean 'loss'"):
        write_steps(path, {"r": columns_of(*steps(1))}, ["lss"], form="csv")
    with pytest.raises(PenstockError, match="has not recorded a step yet"):
        write_steps(path, {"r": columns_of(name="empty")}, (), form="csv")
    assert not path.exists()
