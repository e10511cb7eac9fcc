"""Device-hours of a run go on through its jobs, and count lost steps."""

import json

from penstock.core import clock
from penstock.obs.sinks.jsonl import rewind
from penstock.train.device_hours import DeviceHours, last_recorded


def test_a_job_goes_on_from_the_newest_figure_and_counts_all_its_devices(tmp_path, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now_s[0])
    path = tmp_path / "metrics.jsonl"
    first = DeviceHours(path, num_devices=2)
    for step in (1, 2, 3):
        now_s[0] += 3600
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **first.record()}) + "\n")
    assert last_recorded(path) == 6.0
    now_s[0] += 7200  # nothing runs
    second = DeviceHours(path, num_devices=3)
    rewind(path, step=1)  # steps 2 and 3 are lost, and were paid for
    now_s[0] += 3600
    assert second.record() == {"device_hours": 9.0}


def test_a_file_without_the_figure_begins_at_nothing(tmp_path):
    assert last_recorded(tmp_path / "absent") == 0.0
    (tmp_path / "old").write_text('{"step": 1, "loss": 2.0}\n{"device_hours": .e.\n')
    assert last_recorded(tmp_path / "old") == 0.0
