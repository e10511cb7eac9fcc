"""`penstock data append` and `data prepare --stream` as a user types them."""

import json
import shutil

import pytest

from penstock.data.corpus.manifest import load_manifest
from tests.in_process import run_cli
from tests.warm import penstock


@pytest.fixture
def news(tmp_path):
    path = tmp_path / "news.jsonl"
    lines = [json.dumps({"text": f"def number_{i}(): return {i}"}) for i in range(50)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_corpus_is_appended_to_described_and_verified(corpus, news, tmp_path):
    copy = shutil.copytree(corpus, tmp_path / "copy")
    before = load_manifest(copy)
    done = run_cli("data", "append", copy, news)
    assert done.returncode == 0, done.stderr
    assert f"{copy} has a new part:" in done.stdout
    assert "documents    50" in done.stdout
    with news.open("a") as file:
        file.write("{broken\n")
    refused = run_cli("data", "append", copy, news)
    assert refused.returncode == 1
    assert "Rejected inputs: 1" in refused.stderr
    again = run_cli("data", "append", copy, news, "--max-errors", 1, "--json")
    added = json.loads(again.stdout)
    assert (added["part"], added["parts"], added["documents"], added["rejected"]) == (2, 3, 50, 1)
    assert added["same_as"] == 1
    assert "Part 1 has the same tokens" in again.stderr
    assert load_manifest(copy).first_parts(1).fingerprint == before.fingerprint
    assert ", 3 parts" in run_cli("data", "describe", copy).stdout
    described = json.loads(run_cli("data", "describe", copy, "--json").stdout)
    assert [part["tokens"] for part in described["parts"]] == [before.num_tokens, *[added["tokens"]] * 2]
    verified = run_cli("data", "verify", copy)
    assert verified.returncode == 0
    assert ", 3 parts" in verified.stdout


def test_a_corpus_prepared_to_be_streamed_has_parts_that_double(corpus, news, tmp_path):
    sizes = ("--first-part-tokens", 100, "--part-tokens", 300)
    words = ("data", "prepare", news, "--tokenizer", corpus / "tokenizer.json", "--out", tmp_path / "out")
    done = penstock(*words, "--stream", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(tmp_path / "out")
    assert json.loads(done.stdout)["parts"] == manifest.streamed_parts == len(manifest.parts) > 3
    tokens = [shard.tokens for shard in manifest.shards]
    assert 50 < tokens[0] <= 100 < tokens[1] <= 200 < tokens[2] <= 300
    other = penstock(*words)
    assert other.returncode == 1
    assert "--stream was set, now unset" in " ".join(other.stderr.split())


def test_a_run_on_a_streamed_corpus_takes_up_what_was_appended_when_it_resumes(
    recipe, corpus, news, tmp_path
):
    sizes = ("--first-part-tokens", 200, "--part-tokens", 800)
    words = ("data", "prepare", news, "--tokenizer", corpus / "tokenizer.json", "--out", tmp_path / "out")
    assert penstock(*words, "--stream", *sizes).returncode == 0
    parts = len(load_manifest(tmp_path / "out").parts)
    settings = ("--set", f"data.corpora.python.path={tmp_path / 'out'}", "--set", "validate.every=0")
    settings += ("--set", "data.holdout=0.0", "--set", "data.global_batch_size=4")
    assert penstock("train", recipe, *settings, "--set", "run.steps=10").returncode == 0
    assert run_cli("data", "append", tmp_path / "out", news).returncode == 0
    more = penstock("train", recipe, *settings, "--set", "run.steps=30", "--processes", 2)
    assert more.returncode == 0, more.stderr
    assert f"Corpus python has grown: {parts + 1} parts from step 11 on." in more.stderr
    audit = json.loads(run_cli("data", "audit", tmp_path / "run", "--json").stdout)
    assert (audit["samples"], audit["faults"]) == (120, [])
