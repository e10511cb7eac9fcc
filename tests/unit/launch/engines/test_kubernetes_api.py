"""The client of a cluster's API server, asked of a server over HTTP: logs of pods, and its sockets."""

import json
import subprocess
import sys
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

pytest.importorskip("lightkube")

from penstock.core.errors import PenstockError  # needs the package
from penstock.launch.engines import kubernetes_api
from penstock.launch.engines.kubernetes_api import LogBrokeOff, connect

STAMP = "2026-01-01T00:00:00.000001999Z"
PRINTED_AT = datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)


LOGS = {
    "cut": f"{STAMP} loss\u2028=\x0b1\x85 10%\r20%\n{STAMP} \u65e5".encode(),
    "odd": b"failed to watch file\n" + f"{STAMP} a".encode() + b"\xffb\n",
    "empty": b"",
}
BROKEN = f"{STAMP} a\n{STAMP} the beginning of".encode()
ANSWERS = {
    "/secrets/": (403, json.dumps({"kind": "Status", "message": "no: forbidden"})),
    "/services/": (404, json.dumps({"kind": "Status", "message": "none"})),
    "/jobsets/": (404, "404 page not found"),
    "/leases/": (502, "<html>"),
}
REFUSED = {"waiting": 400, "gone": 404, "hidden": 403}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if not path.endswith("/log"):
            self._answer(path, parse_qs(query))
            return
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

    def _answer(self, path, asked):
        meta = {}
        if path.endswith("/pods"):
            items = [{"metadata": {"name": "p"}, "spec": {}, "status": {}}]
        else:
            assert asked.get("labelSelector", ["a=b,c=d"]) == ["a=b,c=d"]
            begin, size = int(asked.get("continue", ["0"])[0]), int(asked.get("limit", ["9"])[0])
            items = [{"metadata": {"name": str(i)}} for i in range(begin, min(5, begin + size))]
            meta = {"continue": str(begin + size)} if begin + size < 5 else {}
        code, content = 200, json.dumps({"items": items, "metadata": meta})
        for part, answer in ANSWERS.items():
            if part in path:
                code, content = answer
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content.encode())


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


@pytest.mark.usefixtures("cluster")
def test_threads_share_a_connection_in_a_fresh_process():
    """lightkube's own objects crash here: 8 threads decode one type at once, before any has."""
    lines = """
import threading
from penstock.launch.engines.kubernetes_api import connect
cluster = connect("jobs")
go, found = threading.Barrier(8), []
def ask():
    go.wait()
    found.append(cluster.all("v1", "Pod")[0]["metadata"]["name"])
threads = [threading.Thread(target=ask) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
assert found == ["p"] * 8, found
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_long_list_is_read_page_by_page(cluster, monkeypatch):
    monkeypatch.setattr(kubernetes_api, "_PAGE", 2)
    names = [found["metadata"]["name"] for found in cluster.all("v1", "ConfigMap", {"a": "b", "c": "d"})]
    assert names == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Secret", "refused Secret any in namespace jobs: no: forbidden"),
        ("JobSet", "does not know jobset.x-k8s.io/v1alpha2 of JobSet any"),
        ("Lease", "cannot be reached"),
    ],
)
def test_a_refusal_an_absent_kind_and_an_answer_of_another_server_are_told_apart(cluster, kind, said):
    api = "jobset.x-k8s.io/v1alpha2" if kind == "JobSet" else "v1"
    with pytest.raises(PenstockError, match=said):
        cluster.get(api, kind, "any")
    assert cluster.get("v1", "Service", "any") is None
