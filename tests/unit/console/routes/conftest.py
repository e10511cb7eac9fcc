"""What tests of routes share: a client that asks for something of their one run."""

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState


@pytest.fixture
def asked(run):
    """Ask for something of the run."""
    state = ConsoleState([run.parent], ConsoleAccess())
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        (row,) = client.get("/api/runs").json()["runs"]
        yield lambda of: client.get(f"/api/runs/{row['id']}/{of}")
    state.close()
