"""Write the files of tests/golden/previous; run it with the sources of the version before."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from penstock.data import Loader

WORDS = ["water", "gate", "turbine", "pipe", "flow", "valve", "head", "river", "dam", "power"]
RECIPE = """compute = "float32"
[run]
dir = "run"
steps = 6
log_samples = true
[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
tie_word_embeddings = true
[data]
sequence_length = 32
global_batch_size = 4
holdout = 0.1
[data.corpora.river]
path = "river"
weight = 0.7
[data.corpora.dam]
path = "dam"
weight = 0.3
[[data.schedule]]
at_step = 4
weights = { river = 0.25, dam = 0.75 }
[optim]
learning_rate = 3e-3
[schedule]
rule = "constant"
[checkpoint]
every = 3
"""
BOTH = ["river", "dam"]
CASES = {  # name -> corpora at first, options, method called after three steps
    "one corpus, best_fit": (["river"], {}, None),
    "two corpora, concat": (BOTH, {"packing": "concat", "weights": {"river": 0.7, "dam": 0.3}}, None),
    "uneven weights": (BOTH, {"weights": {"river": 0.123456, "dam": 0.654321}}, None),
    "whole documents": (["river"], {"packing": "whole", "overlong": "truncate"}, None),
    "weights changed": (BOTH, {}, lambda loader: loader.set_weights({"river": 0.2, "dam": 0.8})),
    "length changed": (BOTH, {}, lambda loader: loader.set_sequence_length(32)),
    "batch changed": (BOTH, {}, lambda loader: loader.set_global_batch_size(8)),
    "corpus added": (
        ["river"],
        {},
        lambda loader: loader.add_corpus("dam", "dam", weights={"river": 0.5, "dam": 0.5}),
    ),
}


def penstock(*arguments: str) -> None:
    """Run a command of the version."""
    subprocess.run([sys.executable, "-m", "penstock", *arguments], check=True)


def write_text(name: str, first: int) -> None:
    """Write 60 documents of 5 to 64 words."""
    with Path(name).open("w") as file:
        for seed in range(first, first + 60):
            words = [WORDS[(seed * 7 + i * i + i * seed) % 10] for i in range(5 + (seed - first) * 13 % 60)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


def rows_of(batch: dict) -> dict:
    """Return the sample ids of one step and a hash of its tokens, whatever the order of its rows."""
    rows = sorted(zip(batch["sample_ids"].tolist(), batch["input_ids"].tolist(), strict=True))
    text = json.dumps([row for _, row in rows]).encode()
    return {"samples": [sample for sample, _ in rows], "tokens": hashlib.sha256(text).hexdigest()[:16]}


def main() -> None:
    """Write the files into the folder that the command line names."""
    out = Path(sys.argv[1]).resolve()
    work = out / "work"
    work.mkdir(parents=True)
    os.chdir(work)
    write_text("river.jsonl", 0)
    write_text("dam.jsonl", 100)
    write_text("more.jsonl", 200)
    penstock("data", "prepare", "river.jsonl", "--train-tokenizer", "300", "--out", "river")
    penstock("data", "prepare", "dam.jsonl", "--tokenizer", "river/tokenizer.json", "--out", "dam")
    penstock("data", "append", "river", "more.jsonl")
    Path("recipe.toml").write_text(RECIPE)
    penstock("train", "recipe.toml", "--processes", "2", "--set", "run.steps=3")
    shutil.copytree("run", out / "run")
    penstock("train", "recipe.toml")
    shutil.copy("run/metrics.jsonl", out / "metrics_to_6.jsonl")
    states = {}
    for name, (corpora, options, change) in CASES.items():
        options = {"packing": "best_fit", "sequence_length": 16, "global_batch_size": 6, **options}
        loader = Loader({corpus: corpus for corpus in corpora}, num_workers=0, deliver="numpy", **options)
        batches = iter(loader)
        for step in range(5):
            if change and step == 3:
                change(loader)
            next(batches)
        state = loader.state_dict()
        following = [rows_of(next(batches)) for _ in range(40)]
        corpora = BOTH if name == "corpus added" else corpora
        states[name] = {"corpora": corpora, "options": options, "state": state, "next": following}
    (out / "loader_states.json").write_text(json.dumps(states, indent=1))
    for name in ("river", "dam", "recipe.toml"):
        Path(name).rename(out / name)
    os.chdir(out)
    shutil.rmtree(work)
    for lock in out.rglob(".lock"):
        lock.unlink()


if __name__ == "__main__":
    main()
