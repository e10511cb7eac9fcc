"""The operator's connection: made again now and then, and closed once nobody uses it."""

import json

import pytest

pytest.importorskip("lightkube")

from penstock.launch.controller import operator_loop  # needs the package
from penstock.launch.controller.operator_loop import _Connection


def test_a_connection_that_was_made_again_is_closed_once_nobody_uses_the_old_one(tmp_path, monkeypatch):
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    connection = _Connection("default")
    used = connection.get()
    sockets = used.http
    assert connection.get() is used
    monkeypatch.setattr(operator_loop, "_RECONNECT_S", -1.0)
    assert connection.get() is not used
    assert not sockets.is_closed, "a request may be on its way"
    del used
    assert sockets.is_closed
