"""Curves: thinned where there are many points, raw where there are few, and by money."""

import json

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState


def asked(folder, *, price=0.0, of="curves", **query):
    state = ConsoleState([folder], ConsoleAccess(), price=price)
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        (run,) = client.get("/api/runs").json()["runs"]
        found = client.get(f"/api/runs/{run['id']}/{of}", params=query)
    state.close()
    return found


def write(folder, records):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


NUM_STEPS = 20_000
SHARES = [f"share_{number}" for number in range(20)]
SPIKES = (7_000, 7_100)


@pytest.fixture
def long(tmp_path):
    """A run whose loss has two spikes near one another, with 20 noisy metrics beside it."""
    noise = np.random.default_rng(0).normal(0, 0.1, (NUM_STEPS, len(SHARES) + 1)).round(3).tolist()
    records = [
        {"step": step, "loss": 3 + (4 if step in SPIKES else row[-1]), **dict(zip(SHARES, row, strict=False))}
        for step, row in enumerate(noise, start=1)
    ]
    write(tmp_path / "runs" / "one", records)
    return tmp_path / "runs", records


def test_two_spikes_near_one_another_are_kept_however_many_metrics_are_asked_for(long):
    folder, records = long
    found = asked(folder, metrics=",".join(["step", "loss", *SHARES]), points=1000).json()
    assert found["means"].keys() == found["series"].keys()
    assert len(found["x"]) <= 500 + 21 * 32
    assert set(SPIKES) <= set(found["x"])
    kept = [records[int(step) - 1] for step in found["x"]]
    for name in ("loss", *SHARES):
        assert found["series"][name] == [record[name] for record in kept], (
            "each point is one that was recorded"
        )


def test_a_zoom_shows_every_record_of_its_range(long):
    folder, records = long
    query = {"metrics": f"loss,{SHARES[0]}", "points": 1000}
    assert len(asked(folder, **query).json()["x"]) < NUM_STEPS / 8
    zoomed = asked(folder, **query, **{"from": 6_600.5, "to": 7_400}).json()
    inside = records[6_600:7_400]
    assert zoomed["means"] == {}, "no record is left out"
    assert zoomed["x"] == [record["step"] for record in inside]
    for name in ("loss", SHARES[0]):
        assert zoomed["series"][name] == [record[name] for record in inside]


def test_values_at_a_place_are_of_the_last_record_up_to_it(tmp_path):
    records = [{"step": n, "loss": 10.0 - n, "tokens": 8 * n} for n in range(1, 7)]
    records.insert(2, {"step": 2, "validation_loss": 0.5})
    records[-1]["loss"] = None
    write(tmp_path / "runs" / "one", records)

    def values(**query):
        found = asked(tmp_path / "runs", of="values", metrics="loss,validation_loss,mfu", **query)
        return [found.json()["values"][name] for name in ("loss", "validation_loss", "mfu")]

    assert values(at=4) == [6, 0.5, None]
    assert values(at=33, x="tokens") == [6, 0.5, None]
    assert values(at=1.5) == [9, None, None]
    assert values(at=9) == [5, 0.5, None], "the last step has no loss"
    assert asked(tmp_path / "runs", of="values", metrics="loss", at=1, x="money").status_code == 400


def test_more_metrics_than_are_read_at_once_are_refused_and_none_is_left_out(tmp_path):
    write(tmp_path / "runs" / "one", [{"step": 1, **dict.fromkeys(map(str, range(200)), 2.0)}])
    names = [*map(str, range(200))]
    assert len(asked(tmp_path / "runs", metrics=",".join(names)).json()["series"]) == 200
    refused = asked(tmp_path / "runs", metrics=",".join([*names, "loss"]))
    assert (refused.status_code, "at most 200" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("of", "query"), [("curves", {"points": 1}), ("curves", {"x": "miles"}), ("values", {"at": "here"})]
)
def test_a_malformed_request_reads_no_columns(of, query, tmp_path, monkeypatch):
    write(tmp_path / "runs" / "one", [{"step": 1, "loss": 2.5}])
    read = []
    monkeypatch.setattr(ConsoleState, "columns", lambda _, run: read.append(run))
    assert asked(tmp_path / "runs", of=of, metrics="loss", **query).status_code == 422
    assert read == []


def test_a_corpus_whose_name_has_a_comma_has_curves_too(tmp_path):
    write(tmp_path / "runs" / "one", [{"step": 1, "loss": 2.5, "corpus_tokens": {"a,b": 2.0, "c": 3.0}}])
    found = asked(tmp_path / "runs", metrics='loss,"corpus_tokens/a,b"').json()
    assert found["series"] == {"loss": [2.5], "corpus_tokens/a,b": [2.0]}
    refused = asked(tmp_path / "runs", metrics='"loss')
    assert (refused.status_code, "not valid TOML" in refused.text) == (400, True)


def test_curves_by_money_need_a_price(tmp_path):
    folder = tmp_path / "runs"
    write(folder / "one", [{"step": n, "loss": 1.0, "device_hours": n / 2} for n in (1, 2, 3)])
    query = {"metrics": "loss", "x": "money"}
    assert asked(folder, price=3.0, **query).json()["x"] == [1.5, 3.0, 4.5]
    refused = asked(folder, **query)
    assert (refused.status_code, "--price" in refused.text) == (400, True)
