"""Continued pre-training as a user does it: a folder of transformers, text, a kill, an export."""

import json
import shutil
import signal
import time

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.main import main
from penstock.core.config import load_json
from tests.tiny_models import save_talker
from tests.warm import Command, penstock

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama with a tokenizer, a template whose tokens it lacks, and two end tokens."""
    folder = save_talker(tmp_path_factory.mktemp("start") / "base", context=256)
    raw = load_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**raw, "eos_token_id": [0, 7]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"text": f"the penstock {n} feeds the turbine, {n * n} times"}) for n in range(600))
    path.write_text("\n".join(lines))
    return path


def prepared(text, tokenizer, out):
    assert main(["data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(out)]) == 0
    return out


def recipe_for(folder, corpus, start, **run):
    path = folder / "recipe.toml"
    keys = "\n".join(f"{name} = {json.dumps(value)}" for name, value in run.items())
    path.write_text(
        f'compute = "float32"\n[run]\ndir = "{folder / "run"}"\nstart_from = "{start}"\n{keys}\n'
        f'[data]\nsequence_length = 32\nglobal_batch_size = 4\n[data.corpora.docs]\npath = "{corpus}"\n'
    )
    return path


def test_a_model_is_trained_on_killed_resumed_and_exported(model, text, tmp_path, capsys):
    corpus = prepared(text, model, tmp_path / "corpus")
    recipe = recipe_for(tmp_path, corpus, model, steps=40)
    capsys.readouterr()
    assert main(["train", str(recipe), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["model"]["vocab_size"] == 400
    assert main(["recipes", "check", str(recipe)]) == 0
    every = ("--set", "checkpoint.every=8")
    process = Command("train", recipe, *every)
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()

    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    refused = penstock("train", recipe, *every, "--set", f"run.start_from={other}")
    assert refused.returncode == 1
    told = " ".join(refused.stderr.split())  # lines are wrapped where paths end
    assert f"started from {model}" in told
    assert f"is now {other}" in told
    assert "Traceback" not in refused.stderr

    done = penstock("train", recipe, *every, "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert "Resumed after step " in done.stderr
    run = tmp_path / "run"
    assert (run / "chat_template.jinja").read_text() == TEMPLATE
    assert load_json(run / "config.json")["run"]["start_from"] == str(model)

    out = tmp_path / "exported"
    assert main(["export", str(run), "--out", str(out), "--dtype", "fp32"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    base = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "turbine?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == base.apply_chat_template(
        messages, tokenize=False
    )
    assert tokenizer("the penstock").input_ids == base("the penstock").input_ids
    assert load_json(out / "config.json")["eos_token_id"] == [0, 7]
    assert load_json(out / "generation_config.json")["eos_token_id"] == [0, 7]
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.generation_config.eos_token_id == [0, 7]
    with torch.no_grad():
        ids = torch.tensor([tokenizer("the penstock 3 feeds the turbine, 9 times").input_ids])
        assert (
            exported(ids, labels=ids).loss
            < 0.9 * AutoModelForCausalLM.from_pretrained(model)(ids, labels=ids).loss
        )

    second = recipe_for(tmp_path, corpus, run, steps=2).rename(tmp_path / "second.toml")
    done = penstock("train", second, "--set", f"run.dir={tmp_path / 'second'}")
    assert done.returncode == 0, done.stderr
    assert "step-00000040" in done.stderr
    assert (tmp_path / "second" / "chat_template.jinja").read_text() == TEMPLATE
    (run / "checkpoints" / "step-00000040").rename(tmp_path / "removed")  # as a run does that goes on
    done = penstock("train", second, "--set", f"run.dir={tmp_path / 'second'}", "--set", "run.steps=3")
    assert done.returncode == 0, done.stderr
    assert "Resumed after step 2" in done.stderr


def test_added_tokens_grow_the_vocabulary_and_are_told(model, text, tmp_path):
    grown = tmp_path / "grown"
    shutil.copytree(model, grown)
    parsed = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    parsed.add_special_tokens([f"<|extra_{n}|>" for n in range(500)] + ["<|im_start|>", "<|im_end|>"])
    parsed.save(str(grown / "tokenizer.json"))
    corpus = prepared(text, grown, tmp_path / "corpus")
    done = penstock("train", recipe_for(tmp_path, corpus, model, steps=2))
    assert done.returncode == 0, done.stderr
    size = -(-parsed.get_vocab_size() // 64) * 64
    assert f"its vocabulary grows from 400 to {size:,} rows" in done.stderr
    assert load_json(tmp_path / "run" / "config.json")["model"]["vocab_size"] == size
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("<|im_start|>").input_ids == [parsed.token_to_id("<|im_start|>")]
    assert AutoModelForCausalLM.from_pretrained(out).get_input_embeddings().num_embeddings == size


def test_a_corpus_of_another_tokenizer_is_refused_with_the_remedy(model, text, tmp_path):
    out = tmp_path / "corpus"
    assert main(["data", "prepare", str(text), "--train-tokenizer", "300", "--out", str(out)]) == 0
    recipe = recipe_for(tmp_path, tmp_path / "corpus", model, steps=2)
    for words in ((), ("--dry-run",)):
        refused = penstock("train", recipe, *words)
        assert refused.returncode == 2
        assert "have different tokenizers" in refused.stderr
        assert f"--tokenizer {model}" in refused.stderr
        assert "Traceback" not in refused.stderr
