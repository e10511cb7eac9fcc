"""The JSON lines sink: one history in the file, whatever was killed."""

import json

import pytest

from penstock.obs.sinks.jsonl import JsonLines, read_records, rewind

RECORDS = [
    {"event": "start", "step": 0, "ranks": 1},
    {"step": 1, "loss": 2.5},
    {"step": 1, "validation_loss": 2.4},
    {"step": 2, "loss": 2.0},
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLines(file)
    for record in RECORDS:
        sink(record)
    sink.close()
    return file


def test_records_come_back_as_they_were_written(path):
    assert read_records(path) == RECORDS


def test_a_missing_file_has_no_records(tmp_path):
    assert read_records(tmp_path / "absent.jsonl") == []


def test_a_record_is_in_the_file_before_the_sink_is_closed(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink(RECORDS[1])
    assert read_records(tmp_path / "metrics.jsonl") == [RECORDS[1]]
    sink.close()


def test_no_file_appears_before_the_first_record(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl").close()
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_harmless_and_a_later_record_is_appended(path):
    sink = JsonLines(path)
    sink({"step": 3, "loss": 1.5})
    sink.close()
    sink.close()
    sink({"step": 4, "loss": 1.0})
    sink.close()
    assert [record["step"] for record in read_records(path)] == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("cut", range(1, len(json.dumps(RECORDS[-1]))))
def test_a_last_line_cut_at_any_byte_is_not_a_record(path, cut):
    path.write_text(path.read_text()[: -cut - 1])
    assert read_records(path) == RECORDS[:-1]


@pytest.mark.parametrize(("step", "kept"), [(0, 1), (1, 3), (2, 4), (9, 4)])
def test_rewinding_keeps_the_records_up_to_a_step(path, step, kept):
    rewind(path, step=step)
    assert read_records(path) == RECORDS[:kept]


def test_after_a_cut_line_is_rewound_the_next_record_has_a_line_of_its_own(path):
    path.write_text(path.read_text()[:-4])
    rewind(path, step=2)
    sink = JsonLines(path)
    sink({"step": 2, "loss": 1.75})
    sink.close()
    assert read_records(path) == [*RECORDS[:-1], {"step": 2, "loss": 1.75}]


def test_rewinding_a_missing_file_makes_none(tmp_path):
    rewind(tmp_path / "absent.jsonl", step=3)
    assert list(tmp_path.iterdir()) == []
