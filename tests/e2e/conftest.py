"""The command line as a user types it: real processes, a real corpus, tiny models."""

import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.browser import ARGUMENTS, CHROMIUM
from tests.in_process import run_cli
from tests.serving import end, make_model, serving
from tests.warm import Command, penstock


def audit_of_pods(folder):
    """Return the audit of an ended run whose pods saw this folder's parent as /runs."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"/runs/', f'"{folder.parent}/'))
    return json.loads(run_cli("data", "audit", folder, "--json").stdout)


def torchrun(*words):
    """Run a command on two processes that torchrun starts."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock"]
    return subprocess.run(
        [sys.executable, *command, *map(str, words)], capture_output=True, text=True, timeout=240
    )


@contextmanager
def console(*words, port=0):
    """Yield the address of `penstock console`."""
    with Command("console", *words, "--port", port, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+?/", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


@pytest.fixture(scope="module")
def browser():
    """Chromium; of a module, because Playwright's event loop is one that other tests cannot use."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A corpus made by `penstock data prepare` from Python sources that every machine has."""
    out = tmp_path_factory.mktemp("corpus") / "python"
    source = Path(__import__("json").__file__).parent
    done = penstock("data", "prepare", source, "--train-tokenizer", 400, "--max-errors", 9, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model called "tiny"."""
    return make_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_folder):
    """`penstock serve` on it, for all tests that only ask; at the end it must have kept nothing."""
    options = ("--cache-gib", "0.05", "--max-sequences", "16")
    with serving(tiny_folder, *options, interpreter="most tests of the server ask it") as running:
        yield running
        assert running.metric("penstock_cache_blocks_used") == 0
        assert running.metric("penstock_answers_running") == 0
        assert end(running) == 0
        assert "Traceback" not in running.errors.read_text()


@pytest.fixture
def client(tiny_server):
    """The client of OpenAI."""
    with tiny_server.openai() as found:
        yield found


@pytest.fixture
def http(tiny_server):
    """A client that knows no API."""
    with tiny_server.http() as found:
        yield found


@pytest.fixture
def recipe(corpus, tmp_path):
    """A recipe file for a model that takes milliseconds a step."""
    path = tmp_path / "recipe.toml"
    path.write_text(f"""
compute = "float32"
[run]
dir = "{tmp_path / "run"}"
steps = 40
log_samples = true
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
sequence_length = 32
global_batch_size = 12
holdout = 0.1
[data.corpora.python]
path = "{corpus}"
[optim]
learning_rate = 0.01
[schedule]
warmup_steps = 2
[validate]
every = 20
samples = 8
[checkpoint]
every = 10
""")
    return path
