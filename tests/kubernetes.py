"""A real kube-apiserver with etcd on the loopback, from KUBEBUILDER_ASSETS as with Go's envtest."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ADMIN = "admin-token"
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
}


def binary(name):
    """Return the path of a binary; skips the test, loudly, where it is missing."""
    assets = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which(name, path=f"{assets}:{os.environ['PATH']}")
    if not assets or found is None:
        pytest.skip(
            f"NO KUBERNETES: set KUBEBUILDER_ASSETS to a folder with {name}; nothing was asked of a real one"
        )
    return found


@dataclass(frozen=True)
class Cluster:
    """A running API server."""

    url: str
    ca_file: Path

    def ask(self, method, path, body=None, *, token=ADMIN, kind="application/json"):
        """Return the status and the JSON of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        trust = ssl.create_default_context(cafile=str(self.ca_file))
        try:
            with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def create(self, found, *, dry_run=False):
        """Create an object; returns the status and the answer."""
        path = _PATHS[found["kind"]].format(found["metadata"].get("namespace"))
        return self.ask("POST", f"{path}{'?dryRun=All' if dry_run else ''}", found)

    def token_of(self, namespace, account):
        """Return a token of a service account, as Kubernetes mounts it into a pod."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        status, answer = self.ask("POST", path, {"spec": {"expirationSeconds": 3600}})
        assert status == 201, answer
        return answer["status"]["token"]


@contextmanager
def cluster(folder):
    """Run etcd and kube-apiserver until the block ends."""
    etcd, apiserver = binary("etcd"), binary("kube-apiserver")
    client, peer, port = (_free_port() for _ in range(3))
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n')
    commands = [
        [
            etcd, "--data-dir", folder / "etcd", "--unsafe-no-fsync",
            "--listen-client-urls", f"http://127.0.0.1:{client}",
            "--advertise-client-urls", f"http://127.0.0.1:{client}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        ],
        [
            apiserver, f"--etcd-servers=http://127.0.0.1:{client}", f"--cert-dir={folder / 'certificates'}",
            "--bind-address=127.0.0.1", f"--secure-port={port}", "--insecure-port=0",
            "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC",
            f"--token-auth-file={tokens}",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}", "--disable-admission-plugins=ServiceAccount",
        ],
    ]  # fmt: skip
    with ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{Path(command[0]).name}.log").open("w"))
            process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        found = Cluster(f"https://127.0.0.1:{port}", folder / "certificates" / "apiserver.crt")
        deadline = time.monotonic() + 180
        while not _is_ready(found):
            assert process.poll() is None, (folder / "kube-apiserver.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "kube-apiserver.log").read_text()[-3000:]
            time.sleep(0.2)
        yield found


def _is_ready(found):
    try:
        return found.ask("GET", "/api/v1/namespaces/default")[0] == 200
    except (OSError, ValueError):
        return False


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]
