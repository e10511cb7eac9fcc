"""The server's own handling of signals."""

import logging
import signal
from types import SimpleNamespace

import uvicorn

from penstock.serve.server import _Server


def test_a_signal_without_a_name_drains_as_any_other(caplog):
    service = SimpleNamespace(draining=False)
    server = _Server(uvicorn.Config(lambda: None), service, drain_s=1.0, idle_s=None, on_started=lambda: None)
    with caplog.at_level(logging.INFO):
        server.handle_exit(signal.SIGRTMIN + 6, None)
    assert (service.draining, server.should_exit, server.force_exit) == (True, True, False)
    assert f"received signal {signal.SIGRTMIN + 6}" in caplog.text
