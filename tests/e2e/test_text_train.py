"""`penstock train` on raw text: begins before it is prepared, is killed, resumes, and leaves no process."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penstock.data.corpus.manifest import load_manifest
from tests.e2e.test_train_cli import losses_of
from tests.in_process import run_cli
from tests.warm import Command, penstock

SIZES = "first_part_tokens=2000,part_tokens=1M"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A JSON lines file that takes minutes to prepare, written in a second."""
    path = tmp_path_factory.mktemp("text") / "web.jsonl"
    words = [f"def function_{i}(self, value): return value * {i * 7919 % 1013}\n" for i in range(1000)]
    lines = [json.dumps({"text": "".join(words[i : i + 1 + i % 13])}) for i in range(980)]
    path.write_text("\n".join(lines * 300) + "\n")
    return path


@pytest.fixture
def words(recipe, corpus, text, tmp_path):
    """The words of a command that trains on the text, in `run`; its paths are relative."""
    tokenizer = os.path.relpath(corpus / "tokenizer.json", tmp_path)
    place = f"text:{os.path.relpath(text, tmp_path)},tokenizer={tokenizer},cache=cache,{SIZES}"
    return ["train", str(recipe), "--set", f"data.corpora.python.path={place}", "--processes", "2"]


def cache_of(folder):
    (found,) = (folder / "cache").iterdir()
    return found


def preparers(folder):
    """The processes that prepare a corpus in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "prepare.background" in command and str(folder) in command:
            found.append(command)
    return found


def until(condition, process=None):
    deadline = time.monotonic() + 120
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_on_text_begins_at_once_and_a_killed_one_resumes_exactly(words, tmp_path):
    run = tmp_path / "run"
    with Command(*words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: (run / "metrics.jsonl").is_file() and 14 in losses_of(run), process)
        until((run / "checkpoints" / "step-00000010").is_dir, process)  # it is written while training goes on
        assert load_manifest(cache_of(tmp_path)).streamed_parts == 0, "it is still being prepared"
        assert len(preparers(tmp_path)) == 1, "one for both ranks"
        process.send_signal(signal.SIGKILL)
    until(lambda: not preparers(tmp_path))
    done = penstock(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Or from a later one, where the kill came late.
    assert re.search(r"Resumed after step [123]0, ", done.stderr), done.stderr
    until(lambda: not preparers(tmp_path))
    assert load_manifest(cache_of(tmp_path)).streamed_parts == 0, "its preparer ended with it"

    audit = run_cli("data", "audit", run, "--json", cwd="/")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["samples"] == 480
    assert not preparers(tmp_path)

    words = [*words, "--set", f"run.dir={tmp_path / 'whole'}"]
    assert penstock(*words, cwd=tmp_path).returncode == 0
    assert losses_of(run) == losses_of(tmp_path / "whole"), "every digit of every step"


def test_bad_text_ends_the_run_with_the_cause(words, text, corpus, tmp_path):
    bad = tmp_path / "bad.jsonl"
    with text.open() as source:
        good = [next(source) for _ in range(5)]
    bad.write_text("".join(good) + "{broken\n")
    place = f"text:{bad},tokenizer={corpus / 'tokenizer.json'},cache=cache,{SIZES}"
    words = [word if "text:" not in word else f"data.corpora.python.path={place}" for word in words]
    done = penstock(*words, cwd=tmp_path)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "could not be prepared: Rejected inputs: 1 (broken json: 1), but --max-errors is 0" in said
    assert "written after the path here: ,max_errors=2." in said
    assert "Traceback" not in said
    assert not preparers(tmp_path)
