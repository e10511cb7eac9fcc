"""`penstock tune` as a user types it: which recipes it takes, refusals, and a run that is killed."""

import json
import subprocess
import sys
import time

import pytest
import tokenizers

from penstock.checkpoint.find import find
from penstock.cli.main import main
from tests.e2e.conftest import penstock
from tests.tiny_models import save_talker

RECIPE = """
[run]
dir = "{dir}"
steps = 1
{start}
[data]
sequence_length = 16
global_batch_size = 1
[data.corpora.text]
path = "synthetic:words"
{tune}
"""


@pytest.mark.parametrize(
    ("verb", "start", "tune", "words"),
    [
        ("train", 'start_from = "base"', "[tune]", "Type `penstock tune` with the same recipe"),
        ("tune", 'start_from = "base"', "", 'Write [tune] and, below it, method = "full" or "lora"'),
        ("tune", "", "[tune]", "Set run.start_from to a Hugging Face folder or a run"),
    ],
)
def test_a_recipe_of_the_other_command_is_refused_with_the_remedy(verb, start, tune, words, tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(dir=tmp_path / "run", start=start, tune=tune))
    assert main([verb, str(recipe)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_the_old_form_of_the_command_names_the_new_one(capsys):
    assert main(["tune", "runs/first", "--speculator", "--data", "c", "--out", "o", "--steps", "1"]) == 2
    assert "Type `penstock train-speculator PATH" in " ".join(capsys.readouterr().err.split())


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small Llama whose vocabulary lacks the tokens of its chat template."""
    folder = save_talker(tmp_path_factory.mktemp("start") / "base", context=256, vocab_size=320)
    parsed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert parsed.get_vocab_size() > 320 - 2
    for name in ("<|im_start|>", "<|im_end|>"):
        parsed.add_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    parsed.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def chats(base):
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + 3?"}, {"role": "assistant", "content": f"{n + 3}"}]}
        for n in range(200)
    ]
    text, out = base.with_name("chats.jsonl"), base.with_name("chats")
    text.write_text("\n".join(map(json.dumps, lines)))
    assert main(["data", "prepare", str(text), "--chat", "--tokenizer", str(base), "--out", str(out)]) == 0
    return out


def losses_of(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def killed(words, run, *, processes, after):
    """Tune without end until some steps are logged, then send SIGKILL to the command."""
    command = [*words, "--processes", str(processes), "--set", "run.steps=1000000"]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *command], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").is_file() or max(losses_of(run), default=0) < after:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=120)


def test_an_adapter_killed_and_rescaled_learns_the_same_from_the_same_samples(base, chats, tmp_path):
    """New rows included; on 2 ranks, then on 1, then on 3, each start after a SIGKILL."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(f"""
compute = "float32"
[run]
dir = "{run}"
start_from = "{base}"
log_samples = true
[tune]
method = "lora"
rank = 4
[data]
sequence_length = 64
global_batch_size = 6
packing = "whole"
overlong = "drop"
[data.corpora.chats]
path = "{chats}"
[optim]
learning_rate = 1e-3
[schedule]
rule = "constant"
[checkpoint]
every = 3
""")
    killed(["tune", str(recipe)], run, processes=2, after=7)
    first = max(losses_of(run))
    killed(["tune", str(recipe)], run, processes=1, after=first + 4)
    steps = str(max(losses_of(run)) + 2)
    done = penstock("tune", recipe, "--set", f"run.steps={steps}", "--processes", 3)
    assert done.returncode == 0, done.stderr

    audit = penstock("data", "audit", run, "--json")
    result = json.loads(audit.stdout)
    assert audit.returncode == 0, audit.stderr
    assert (result["faults"], set(result["ranks"])) == ([], {1, 2, 3})
    assert find(run).index().meta.adapter.new_rows > 0

    whole = tmp_path / "whole"
    done = penstock("tune", recipe, "--set", f"run.dir={whole}", "--set", f"run.steps={steps}")
    assert done.returncode == 0, done.stderr
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)
    assert losses_of(whole)[int(steps)] < 0.9 * losses_of(whole)[1], "something was learned"
