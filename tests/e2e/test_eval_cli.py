"""`penstock eval` as a user runs it: the figures that training logged, and those of an exported folder."""

import json
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.cli.main import main
from penstock.cli.streams import explain
from penstock.core.signals import StopFlag
from penstock.evaluation.options import TextEvalOptions
from penstock.launch.local import run as run_processes
from penstock.obs.sinks.jsonl import read_records
from penstock.testing.corpora import write_corpus
from penstock.train.inspect.offline_eval import rows_of
from penstock.train.resolve.load import load_recipe
from penstock.train.run import run as train
from tests.tiny_models import save_talker


@pytest.fixture
def run(recipe, tmp_path):
    """A finished run, trained in a forked process, which has torch already; a new one would load it again."""
    settings = load_recipe(recipe, ["run.steps=10"])
    outcome = run_processes(lambda: int(not train(settings, StopFlag())), explain, processes=1)
    assert outcome.code == 0, outcome
    return tmp_path / "run"


def scored(capsys, *words):
    code = main(["eval", *map(str, words), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out), said.err


def test_a_run_is_scored_as_training_logged_it_and_its_export_alike(run, corpus, tmp_path, capsys):
    """1e-5: one process scores eight rows at once, training did so by its own micro-batch."""
    logged = next(
        record for record in reversed(read_records(run / "metrics.jsonl")) if "validation_loss" in record
    )
    found, _ = scored(capsys, run)
    assert found["rows"] == 8
    assert logged["step"] == 10
    assert found["all"]["loss"] == pytest.approx(logged["validation_loss"], abs=1e-5)
    assert found["all"]["perplexity"] == pytest.approx(logged["validation_perplexity"], rel=1e-5)
    assert found["all"]["bits_per_byte"] == pytest.approx(logged["validation_bits_per_byte"], abs=1e-5)
    assert found["corpora"]["python"]["loss"] == pytest.approx(
        logged["corpus_validation_loss"]["python"], abs=1e-5
    )

    assert main(["export", str(run), "--out", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    held = ("--corpus", f"python={corpus}", "--holdout", 0.1, "--sequence-length", 32)
    ours, _ = scored(capsys, run, *held)
    theirs, warned = scored(capsys, tmp_path / "hf", *held)
    assert theirs["all"] == pytest.approx(ours["all"], rel=1e-6)
    assert theirs["rows"] > 8
    assert "another tokenizer" not in warned

    (tmp_path / "hf" / "tokenizer.json").write_text((tmp_path / "hf" / "tokenizer.json").read_text() + "\n")
    _, warned = scored(capsys, tmp_path / "hf", "--corpus", corpus, "--rows", 2)
    assert "another tokenizer" in warned

    assert main(["eval", str(run), "--corpus", str(corpus), "--rows", "3"]) == 0
    assert "python " in capsys.readouterr().out
    for option, value in (("--sequence-length", "16"), ("--holdout", "0")):
        assert main(["eval", str(run), option, value]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "need --corpus: without it they are those of the run" in said
    assert main(["eval", str(run), "--corpus", str(corpus), "--sequence-length", "0"]) == 2
    assert "sequence_length must be at least 1 (got 0)" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "hf")]) == 2
    assert "has no held-out rows of its own. Give --corpus DIR." in " ".join(capsys.readouterr().err.split())


def test_a_corpus_of_token_ids_has_the_loss_of_transformers_in_float64(tmp_path, capsys):
    """lm-eval takes texts only. Each piece of a document in a row is read without what is before it."""
    folder, ids = save_talker(tmp_path / "model", context=32), [*range(400)]
    Random(0).shuffle(ids)
    documents = [
        ids[first:past] for first, past in pairwise([0, 1, 20, 50, 59, 98, 160, 177, 240, 241, 300, 400])
    ]
    after = dict(pair for document in documents for pair in pairwise(document))  # each id occurs once
    corpus = write_corpus(tmp_path / "corpus", documents, vocab_size=400)
    found, _ = scored(capsys, folder, "--corpus", f"ids={corpus}", "--sequence-length", 16)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    opened = rows_of("ids", str(corpus), TextEvalOptions(sequence_length=16), context=32)
    batch = opened.loader.gather(np.arange(opened.rows))
    rows, nats, tokens = batch["input_ids"].flatten().tolist(), 0.0, 0
    for first, past in pairwise(batch["cu_seqlens"].tolist()):
        piece = rows[first:past]
        following = [after[token] for token in piece if token in after]
        with torch.no_grad():
            logits = model(torch.tensor([piece])).logits[0].log_softmax(-1)
        nats -= float(logits[range(len(following)), following].sum())
        tokens += len(following)
    assert (found["rows"], found["all"]["tokens"]) == (opened.rows, tokens)
    assert found["all"]["loss"] == pytest.approx(nats / tokens, abs=1e-6)
