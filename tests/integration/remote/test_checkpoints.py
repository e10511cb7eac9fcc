"""Checkpoints in an object store: written by two processes, listed, damaged, passed over, exported."""

import json
from pathlib import Path

import pytest
from tests.integration.remote.setting import lead_to, upload
from tests.warm import penstock

from penstock.checkpoint.remote_storage import RemotePlace
from penstock.checkpoint.storage import open_place
from penstock.core.errors import CheckpointError, ConfigError
from penstock.testing.corpora import write_corpus

RECIPE = """
compute = "float32"
[run]
dir = "{run}"
steps = 4
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
sequence_length = 16
global_batch_size = 4
[data.corpora.c]
path = "{corpus}"
[checkpoint]
every = 2
dir = "{address}"
keep = 9
"""


@pytest.fixture
def address(s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of a bucket, of the test's own; the environment leads to its server."""
    lead_to(s3_process, monkeypatch)
    (tmp_path / "empty").mkdir()
    return upload(tmp_path / "empty", s3_url=s3_process, bucket="checkpoints", prefix=f"runs/{tmp_path.name}")


def test_a_run_saves_to_an_object_store_and_resumes_past_a_damaged_checkpoint(
    address: str, tmp_path: Path
) -> None:
    documents = [[1 + i % 30 for i in range(5 + n % 20)] for n in range(200)]
    corpus = write_corpus(tmp_path / "corpus", documents, vocab_size=32)
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(run=run, corpus=corpus, address=address))
    done = penstock("train", recipe, "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert f"{address}/step-00000004" in done.stderr
    assert not (run / "checkpoints").exists()
    listed = json.loads(penstock("checkpoint", "list", run, "--json").stdout)
    assert [(row["step"], row["ranks"], row["files"]) for row in listed] == [(2, 2, 2), (4, 2, 2)]

    place = open_place(address)
    size = place.size("step-00000004", "rank-00001.safetensors")
    content = bytearray(place.read("step-00000004", "rank-00001.safetensors", 0, size))
    content[-9] ^= 1
    import obstore
    from obstore.store import from_url

    store = from_url(address, client_options={"allow_http": True})
    obstore.put(store, "step-00000004/rank-00001.safetensors", bytes(content))
    verified = penstock("checkpoint", "verify", address)
    assert verified.returncode == 1
    assert f"{address}/step-00000002 is sound." in verified.stdout
    assert f"Checkpoint {address}/step-00000004 is damaged: bytes" in verified.stdout

    again = penstock("train", recipe, "--set", "run.steps=5")
    assert again.returncode == 0, again.stderr
    assert f"Resuming from {address}/step-00000002 instead; set aside: step-00000004" in again.stderr
    assert sorted(place.names()) == ["step-00000002", "step-00000004", "step-00000005"], "written again"
    assert penstock("checkpoint", "verify", run).returncode == 0
    exported = penstock("export", run, "--step", 2, "--out", tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_an_object_store_keeps_the_law_of_a_place(address: str) -> None:
    place = RemotePlace(address)
    name, index = "step-00000001", b'{"files": {"a": {}}}'
    assert place.names() == place.leftovers() == []
    place.write(name, "a", [memoryview(b"abc"), memoryview(b"defg")])
    place.write(name, "stale", [memoryview(b"of a killed run")])
    assert (place.names(), place.leftovers()) == ([], [name])
    place.commit(name, index)
    assert (place.names(), place.leftovers()) == ([name], [])
    assert bytes(place.read(name, "a", 2, 5)) == b"cde"
    assert bytes(place.read(name, "a", 5, 99)) == b"fg"
    assert bytes(place.read(name, "a", 9, 99)) == b""
    with pytest.raises(FileNotFoundError, match=f"{address}/{name}/stale"):
        place.size(name, "stale")
    place.set_aside(name)
    assert place.names() == place.leftovers() == []
    place.write(name, "a", [memoryview(b"new")])
    place.commit(name, index)
    assert bytes(place.read(name, "a", 0, 3)) == b"new"
    place.remove(name)
    assert place.names() == place.leftovers() == []
    with pytest.raises(FileNotFoundError):
        place.size(name, "a")


def test_what_cannot_hold_checkpoints_is_named(address: str) -> None:
    assert address
    with pytest.raises(ConfigError, match="Checkpoints cannot be written to a web server"):
        open_place("https://example.org/checkpoints")
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/x"):
        RemotePlace("s3://no-such-bucket/x").names()
