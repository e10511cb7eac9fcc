"""Requests of `penstock control`: in whose name they are sent."""

import os

from penstock.cli.control import ask
from penstock.train.control.requests import ControlRequest, read_request


def test_a_request_has_the_name_of_its_user_or_the_number_of_one_without_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "anna")
    assert ask(tmp_path, ControlRequest(weights={"web": 0.5}), timeout_s=0, as_json=False) == 0
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)  # as in a container with an arbitrary user id
    assert ask(tmp_path, ControlRequest(islands=2), timeout_s=0, as_json=False) == 0
    assert [read_request(tmp_path, number).asked_by for number in (1, 2)] == ["anna", "user 987654321"]
