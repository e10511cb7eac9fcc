"""Curves by money: device-hours at a price, or a refusal."""

import json

from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState


def asked(folder, **options):
    state = ConsoleState([folder], ConsoleAccess(), **options)
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        (run,) = client.get("/api/runs").json()["runs"]
        found = client.get(f"/api/runs/{run['id']}/curves", params={"metrics": "loss", "x": "money"})
    state.close()
    return found


def test_curves_by_money_need_a_price(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": n, "loss": 1.0, "device_hours": n / 2}) for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert asked(folder.parent, price=3.0).json()["x"] == [1.5, 3.0, 4.5]
    refused = asked(folder.parent)
    assert (refused.status_code, "--price" in refused.text) == (400, True)
