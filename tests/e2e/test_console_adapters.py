"""A run that trained an adapter, in the console: its chat, its answers side by side, and its curves."""

import json

import pytest
import tokenizers

from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Params, Sampling
from tests.console_workers import fork_workers
from tests.e2e.test_console_models import chunks_of, console, events
from tests.e2e.test_tune_cli import TEMPLATE
from tests.tiny_models import save_talker
from tests.warm import penstock

RECIPE = """
compute = "float32"
[run]
dir = "@/runs/tuned"
start_from = "@/base"
steps = 2
[tune]
method = "lora"
rank = 2
[data]
sequence_length = 64
global_batch_size = 2
packing = "whole"
overlong = "drop"
num_workers = 0
[data.corpora.chats]
path = "@/chats"
[optim]
learning_rate = 1e-2
[schedule]
rule = "constant"
[checkpoint]
every = 1
keep = 9
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base model with a chat template, conversations, and a run that trained LoRA adapters on them."""
    folder = tmp_path_factory.mktemp("adapters")
    save_talker(folder / "base", context=256, vocab_size=320)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    for name in ("<|im_start|>", "<|im_end|>"):  # beyond the vocabulary of the base: new rows are trained too
        tokenizer.add_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    tokenizer.save(str(folder / "base" / "tokenizer.json"))
    (folder / "base" / "chat_template.jinja").write_text(TEMPLATE)
    turns = [
        {"messages": [{"role": "user", "content": f"{n} + 3?"}, {"role": "assistant", "content": f"{n + 3}"}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, turns)))
    (folder / "recipe.toml").write_text(RECIPE.replace("@", str(folder)))
    prepare = ("data", "prepare", folder / "chats.jsonl", "--chat", "--tokenizer", folder / "base")
    for words in ((*prepare, "--out", folder / "chats"), ("tune", folder / "recipe.toml")):
        done = penstock(*words)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_run_that_trained_an_adapter_answers_as_its_merged_model_does(folder, monkeypatch):
    fork_workers(monkeypatch)
    asked = {"role": "user", "content": "4 + 3?"}
    with console(folder / "runs") as (client, _):
        (row,) = client.get("/api/runs").json()["runs"]
        run = f"/api/runs/{row['id']}"
        assert client.get(f"{run}/checkpoints").json() == {"steps": [1, 2], "why_not": "", "open": None}
        assert len(client.get(f"{run}/curves?metrics=loss").json()["series"]["loss"]) == 2
        body = {"messages": [asked], "max_tokens": 6, "temperature": 0}
        told = chunks_of(client.post(f"{run}/checkpoints/2/chat/completions", json=body))
        parts = [choice["delta"].get("content") for chunk in told for choice in chunk["choices"]]
        chatted = "".join(filter(None, parts))
        prompts = {"steps": [1, 2], "prompts": ["4 + 3?"], "max_tokens": 6}
        *told, _ = events(client.post(f"{run}/answers", json=prompts))
        answered = {data["step"]: data["answers"][0]["answer"] for _, data in told}
    params = Params(sampling=Sampling(temperature=0), max_tokens=6)
    checkpoint = folder / "runs" / "tuned" / "checkpoints" / "step-00000002"
    with LLM(checkpoint, EngineConfig(cache_gib=0.05)) as llm:
        alone = llm.chat([asked], params)
    assert chatted == answered[2] == alone.text
    assert set(answered) == {1, 2}
