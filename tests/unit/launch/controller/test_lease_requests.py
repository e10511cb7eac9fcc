"""The lease of the leading replica, asked of a server over HTTP that leaves a request without an answer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("lightkube")

from penstock.launch.controller.lease import NAME, LeaderLease, answer_s  # needs the package
from penstock.launch.engines.kubernetes_api import connect

LEASE_S = 10.0
PATIENCE_S = 60.0


class LeaseServer(ThreadingHTTPServer):
    """Keeps one lease; the writing of a version can be left without an answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept, self.version, self.hangs_at = None, 0, 0
        self.has_hung, self.written, self.is_over = (
            threading.Event(),
            threading.Condition(),
            threading.Event(),
        )

    def wait_for(self, version):
        with self.written:
            assert self.written.wait_for(lambda: self.version >= version, PATIENCE_S)


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _answer(self, code, found):
        content = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        if self.server.kept is None:
            status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 404}
            self._answer(404, status | {"message": f"leases {NAME!r} not found", "reason": "NotFound"})
        else:
            self._answer(200, self.server.kept)

    def do_POST(self):
        server = self.server
        found = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.version + 1 == server.hangs_at and not server.has_hung.is_set():
            server.has_hung.set()
            server.is_over.wait(PATIENCE_S)
            self.close_connection = True
            return
        with server.written:
            server.version += 1
            found["metadata"]["resourceVersion"] = str(server.version)
            server.kept = found
            server.written.notify_all()
        self._answer(200, found)

    def do_PUT(self):
        self.do_POST()


@pytest.fixture
def server(tmp_path, monkeypatch):
    found = LeaseServer()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{found.server_port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield found
    found.is_over.set()
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_renewal_without_an_answer_is_sent_again_while_the_replica_leads(server):
    cluster = connect("default", answer_s=answer_s(LEASE_S))
    lease, lost = LeaderLease("one", LEASE_S, lambda: cluster), threading.Event()
    try:
        assert lease.acquire(threading.Event())
        server.hangs_at = server.version + 1
        lease.keep(lambda _: lost.set())
        server.wait_for(server.hangs_at + 1)
        assert server.has_hung.is_set()
        assert not lost.is_set()
    finally:
        lease.stop()
