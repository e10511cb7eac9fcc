"""Requests of `penstock control`: in whose name they are sent."""

import os

from penstock.cli.control import user_name


def test_a_user_has_a_name_or_the_number_of_one_without_a_name(monkeypatch):
    monkeypatch.setenv("LOGNAME", "anna")
    assert user_name() == "anna"
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)  # as in a container with an arbitrary user id
    assert user_name() == "user 987654321"
