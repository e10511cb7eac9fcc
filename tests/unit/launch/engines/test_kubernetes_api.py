"""The client of a cluster's API server, asked of a server over HTTP: logs of pods, and its sockets."""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("lightkube")

from penstock.core.errors import PenstockError  # needs the package
from penstock.launch.engines.kubernetes_api import LogBrokeOff, connect

STAMP = "2026-01-01T00:00:00.000001999Z"
PRINTED_AT = datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)


LOGS = {
    "cut": f"{STAMP} loss\u2028=\x0b1\x85 10%\r20%\n{STAMP} \u65e5".encode(),
    "odd": b"failed to watch file\n" + f"{STAMP} a".encode() + b"\xffb\n",
    "empty": b"",
}
BROKEN = f"{STAMP} a\n{STAMP} the beginning of".encode()
REFUSED = {"waiting": 400, "gone": 404, "hidden": 403}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        path, _, query = self.path.partition("?")
        pod = path.split("/")[-2]
        assert path == f"/api/v1/namespaces/jobs/pods/{pod}/log"
        assert "timestamps=true" in query
        code = REFUSED.get(pod, 200)
        content = json.dumps({"kind": "Status", "code": code, "message": f"pod {pod}: no"}).encode()
        content = LOGS.get(pod, content)
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if code == 200 else "application/json")
        if pod == "broken":  # off, before all of it has come
            content = BROKEN
            self.send_header("Content-Length", str(len(content) + 1))
        self.end_headers()
        for start in range(len(content)):  # characters come in pieces
            self.wfile.write(content[start : start + 1])


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield connect("jobs")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("follow", [True, False])
def test_a_line_of_a_log_ends_where_its_rank_ended_it(cluster, follow):
    assert list(cluster.log("cut", follow=follow)) == [
        (PRINTED_AT, "loss\u2028=\x0b1\x85 10%\r20%\n"),
        (PRINTED_AT, "\u65e5\n"),
    ]
    assert list(cluster.log("empty", follow=follow)) == []


@pytest.mark.parametrize("follow", [True, False])
def test_a_log_that_breaks_off_in_a_line_has_the_lines_before_it(cluster, follow):
    lines = cluster.log("broken", follow=follow)
    assert next(lines) == (PRINTED_AT, "a\n")
    with pytest.raises(LogBrokeOff, match=r"The log of pod broken broke off: .*Ask for it again"):
        next(lines)


def test_words_of_the_kubelet_and_bytes_that_are_no_text_are_lines_too(cluster):
    never = datetime.min.replace(tzinfo=UTC)
    words = [(never, "failed to watch file\n"), (PRINTED_AT, "a\N{REPLACEMENT CHARACTER}b\n")]
    assert list(cluster.log("odd", follow=False)) == words


@pytest.mark.parametrize("follow", [True, False])
def test_a_pod_that_waits_or_is_gone_has_no_log_and_one_that_is_hidden_is_told(cluster, follow):
    assert list(cluster.log("waiting", follow=follow)) == list(cluster.log("gone", follow=follow)) == []
    with pytest.raises(
        PenstockError, match="refused the log of pod hidden in namespace jobs: pod hidden: no"
    ):
        list(cluster.log("hidden", follow=follow))
