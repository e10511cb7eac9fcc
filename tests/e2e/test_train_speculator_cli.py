"""`penstock train-speculator` as a user runs it: stopped, gone on with, used."""

import json
import shutil
import signal
import subprocess
from dataclasses import replace

import pytest

from penstock.cli.main import main
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request
from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import train_tokenizer
from tests.tiny_models import save_tiny_model
from tests.warm import Command, penstock


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads") / "model"
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = [[(start + 7 * step) % 211 for step in range(90)] for start in range(40)]
    return write_corpus(tmp_path_factory.mktemp("heads") / "corpus", documents, vocab_size=211)


@pytest.fixture
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_heads_are_trained_in_two_sittings_and_used(model, corpus, tmp_path):
    out = tmp_path / "heads"
    words = ["train-speculator", model, "--data", corpus, "--out", out, "--steps", 40]
    command = [*words, "--sequence-length", 64, "--json"]
    with Command(
        *command, interpreter="Ctrl-C", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stderr is not None
        assert "Train on text" in first.stderr.readline()  # after its first step
        first.send_signal(signal.SIGINT)
        assert first.stdout.read() == ""
        assert first.wait(timeout=120) == 75
    assert not out.exists()
    second = penstock(*command)
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout)
    assert told["out"] == str(out)
    assert len(told["on_text"]) == len(told["decoding"]) == 3
    assert 1 <= told["tokens_per_step"] <= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads"]
    assert answers(model, str(out)) == answers(model, "off")


def answers(model, drafts):
    """Greedy tokens."""
    config = EngineConfig(device="cpu", cache_gib=0.001, max_sequences=2, drafts=drafts)
    engine = build_engine(model, config)
    engine.add(Request(prompt=(3, 10, 17, 24), max_tokens=30))
    tokens = []
    while engine.has_work:
        tokens += [token for piece in engine.step() for token in piece.token_ids]
    engine.close()
    return tokens


@pytest.mark.usefixtures("signals_as_before")
def test_text_of_another_tokenizer_is_named(model, corpus, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "model")
    train_tokenizer(["some text"] * 9, vocab_size=280).save(tmp_path / "model" / "tokenizer.json")
    shutil.copytree(corpus, tmp_path / "corpus")
    save_manifest(tmp_path / "corpus", replace(load_manifest(tmp_path / "corpus"), tokenizer="0" * 64))
    words = ["--data", tmp_path / "corpus", "--out", tmp_path / "x", "--steps", 0]
    assert main(["train-speculator", str(tmp_path / "model"), *map(str, words)]) == 2
    assert "made with another tokenizer file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--steps": "0"}, "steps must be at least 1"),
        ({"--sequence-length": "0"}, "sequence_length must hold a prompt and more tokens"),
        ({"--sequence-length": "200"}, "longer than the model's context of 128 tokens"),
        ({"--data": "absent"}, "absent"),
    ],
)
@pytest.mark.usefixtures("signals_as_before")
def test_what_cannot_be_trained_is_said_before_anything_is_written(
    model, corpus, tmp_path, capsys, changed, words
):
    options = {"--data": str(corpus), "--out": str(tmp_path / "x"), "--steps": "2"}
    options = {**options, **changed}
    given = [word for name, value in options.items() if value is not None for word in (name, value) if word]
    assert main(["train-speculator", str(model), *given]) in (1, 2)
    assert words in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
