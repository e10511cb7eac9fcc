"""How the operator's watches log in to a cluster."""

import json

import pytest

pytest.importorskip("kopf")
KubeConfig = pytest.importorskip("lightkube").KubeConfig

from penstock.launch.controller.operator_loop import _Connection, login_of  # noqa: E402  # needs both packages

PRINTED = {
    "apiVersion": "client.authentication.k8s.io/v1beta1",
    "kind": "ExecCredential",
    "status": {"token": "printed"},
}
PLUGIN = {"apiVersion": PRINTED["apiVersion"], "command": "echo", "args": [json.dumps(PRINTED)]}


@pytest.fixture
def login(tmp_path):
    def login(**user):
        (tmp_path / "token").write_text("filed\n")
        config = {
            "current-context": "c",
            "clusters": [
                {"name": "c", "cluster": {"server": "https://c", "certificate-authority": "ca.crt"}}
            ],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": user}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        return login_of(KubeConfig.from_file(tmp_path / "kubeconfig").get())

    return login


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "given"}, "Bearer given"),
        ({"exec": PLUGIN}, "Bearer printed"),
        ({"username": "a", "password": "b"}, "Basic YTpi"),
    ],
)
def test_a_token_is_that_of_the_kubeconfig_or_what_its_plugin_prints(login, user, header):
    assert login(**user).as_http_headers() == {"Authorization": header}


def test_a_token_file_is_read(login, tmp_path):
    headers = login(tokenFile=str(tmp_path / "token")).as_http_headers()
    assert headers == {"Authorization": "Bearer filed"}


def test_files_of_certificates_are_beside_the_kubeconfig(login, tmp_path):
    found = login(**{"client-certificate": "me.crt", "client-key": "me.key"})
    assert found.ca_path == str(tmp_path / "ca.crt")
    assert (found.certificate_path, found.private_key_path) == (
        str(tmp_path / "me.crt"),
        str(tmp_path / "me.key"),
    )


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
    sockets = used.client._client._client
    assert connection.renewed() is not used
    assert not sockets.is_closed, "a request may be on its way"
    del used
    assert sockets.is_closed
