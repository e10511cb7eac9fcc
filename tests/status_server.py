"""An HTTPS server of Kubeflow Trainer's status contract (KEP-2779): path, token, body of known fields."""

import json
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.core.env import StatusServer

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/first/status"
FIELDS = {
    "progressPercentage": lambda value: type(value) is int and 0 <= value <= 100,
    "estimatedRemainingSeconds": lambda value: type(value) is int and 0 <= value < 2**31,
    "metrics": lambda value: all(
        set(metric) == {"name", "value"} and all(isinstance(v, str) and v for v in metric.values())
        for metric in value
    ),
    "lastUpdatedTime": lambda value: datetime.fromisoformat(value).tzinfo is not None,
}


class Controller:
    """What the server took and answers: `answers` lists statuses to give first, with headers."""

    def __init__(self, token):
        self.token = token
        self.reports, self.seen, self.answers = [], [], []
        self.hangs = threading.Event()
        self.asked = threading.Event()
        self.released = threading.Event()

    def judge(self, path, headers, body):
        """Return the status of the answer, as pkg/statusserver of kubeflow/trainer decides it."""
        if self.answers:
            return self.answers.pop(0)
        if path != PATH:
            return 404, {}
        if headers["Authorization"] != f"Bearer {self.token}":
            return 403, {}
        try:
            status = json.loads(body)["trainerStatus"]
            sound = all(FIELDS[name](value) for name, value in status.items())
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound or len(body) > 2**16 or headers["Content-Type"] != "application/json":
            return 422, {}
        self.reports.append(status)
        return 200, {}


@contextmanager
def status_server(folder, *, token="first-token"):
    """Run the server; yields its state and what a pod is told about it."""
    folder.mkdir(exist_ok=True)
    certificate, key = _certificate(folder)
    told = folder / "token"
    told.write_text(f"{token}\n")
    controller = Controller(token)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            controller.asked.set()
            if controller.hangs.is_set():
                controller.released.wait(60)
                return
            status, headers = controller.judge(self.path, self.headers, body)
            controller.seen.append(status)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    url = f"https://127.0.0.1:{server.server_port}{PATH}"
    try:
        yield controller, StatusServer(url=url, ca_file=certificate, token_file=told)
    finally:
        controller.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _certificate(folder):
    """Write a certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "status server")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "ca.crt", folder / "server.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
