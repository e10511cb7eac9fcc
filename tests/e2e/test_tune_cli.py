"""`penstock tune` as a user types it: which recipes it takes, refusals, and a run that is killed."""

import json
import subprocess
import time
from contextlib import contextmanager

import pytest
import tokenizers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from penstock.checkpoint.find import find
from penstock.cli.main import main
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Params, Sampling
from penstock.engine.text_processor import TextProcessor
from penstock.obs.sinks.jsonl import read_records
from penstock.testing.corpora import write_corpus
from tests.in_process import run_cli
from tests.serving import serving
from tests.tiny_models import save_talker
from tests.warm import Command, penstock

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


@pytest.mark.parametrize("tune", ["", '[tune]\nmethod = "full"', '[tune]\nmethod = "lora"'])
def test_a_model_without_an_output_matrix_is_refused_alike_with_and_without_dry_run(tune, tmp_path, capsys):
    base = save_talker(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    corpus = write_corpus(tmp_path / "corpus", [[1, 2, 3]] * 40)
    text = RECIPE.format(dir=tmp_path / "run", start=f'start_from = "{base}"', tune=tune)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text.replace("synthetic:words", str(corpus)))
    capsys.readouterr()
    said = []
    for words in ((), ("--dry-run",)):
        assert main(["tune" if tune else "train", str(recipe), *words]) == 1
        said.append(" ".join(capsys.readouterr().err.split()))
    assert said[0] == said[1]
    assert f"{base} has no output matrix" in said[0]
    assert not (tmp_path / "run").exists()


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def talker(folder, *, vocab_size):
    """Write a small Llama, and a tokenizer and a chat template with two tokens more than it was made with."""
    save_talker(folder, context=256, vocab_size=vocab_size)
    parsed = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in ("<|im_start|>", "<|im_end|>"):
        parsed.add_tokens([tokenizers.AddedToken(name, special=True, normalized=False)])
    parsed.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder, parsed.get_vocab_size()


def chats_for(base):
    lines = [
        {"messages": [{"role": "user", "content": f"{n} + 3?"}, {"role": "assistant", "content": f"{n + 3}"}]}
        for n in range(200)
    ]
    text, out = base.with_name("chats.jsonl"), base.with_name("chats")
    text.write_text("\n".join(map(json.dumps, lines)))
    assert main(["data", "prepare", str(text), "--chat", "--tokenizer", str(base), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small Llama whose vocabulary lacks the tokens of its chat template."""
    folder, size = talker(tmp_path_factory.mktemp("start") / "base", vocab_size=320)
    assert size > 320
    return folder


@pytest.fixture(scope="module")
def chats(base):
    return chats_for(base)


def losses_of(run):
    records = read_records(run / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@contextmanager
def alive(words, run, *, processes, after):
    """Tune without end; yield once some steps are logged, then send SIGKILL to the command."""
    command = [*words, "--processes", processes, "--set", "run.steps=1000000"]
    log = run.with_name("log.txt")
    with (
        log.open("w") as errors,
        Command(*command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while max(losses_of(run), default=0) < after:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.communicate(timeout=120)  # ends when the last rank does


def recipe_of(folder, base, chats):
    """Write a recipe that tunes an adapter; return the folder of its run, and its path."""
    run, recipe = folder / "run", folder / "recipe.toml"
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
    return run, recipe


def test_an_adapter_killed_and_rescaled_learns_the_same_from_the_same_samples(base, chats, tmp_path):
    """New rows included; on 2 ranks, then on 1, then on 3, each start after a SIGKILL."""
    run, recipe = recipe_of(tmp_path, base, chats)
    with alive(["tune", str(recipe)], run, processes=2, after=7):
        pass
    first = max(losses_of(run))
    with alive(["tune", str(recipe)], run, processes=1, after=first + 4):
        pass
    steps = str(max(losses_of(run)) + 2)
    done = penstock("tune", recipe, "--set", f"run.steps={steps}", "--processes", 3)
    assert done.returncode == 0, done.stderr

    audit = run_cli("data", "audit", run, "--json")
    result = json.loads(audit.stdout)
    assert audit.returncode == 0, audit.stderr
    assert (result["faults"], set(result["ranks"])) == ([], {1, 2, 3})
    assert find(run).index().meta.adapter.new_rows > 0

    whole = tmp_path / "whole"
    done = penstock("tune", recipe, "--set", f"run.dir={whole}", "--set", f"run.steps={steps}")
    assert done.returncode == 0, done.stderr
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)
    assert losses_of(whole)[int(steps)] < 0.9 * losses_of(whole)[1], "something was learned"


@pytest.mark.parametrize(
    ("method", "vocab_size"),
    [("lora", 448), ("dora", 448), ("lora", 320)],
    ids=["lora", "dora", "new-tokens"],
)
def test_an_adapter_is_served_as_it_was_just_written_while_its_run_goes_on(
    tmp_path, method, vocab_size, capsys
):
    base, size = talker(tmp_path / "base", vocab_size=vocab_size)
    adds_tokens = size > vocab_size
    run, recipe = recipe_of(tmp_path, base, chats_for(base))
    settings = ["--set", "checkpoint.keep_every=3", "--set", "optim.learning_rate=0.03"]
    settings += ["--set", f"tune.method={method}"]
    asked = {"role": "user", "content": "4 + 3?"}
    with alive(["tune", str(recipe), *settings], run, processes=1, after=10):
        newest = str(find(run))
        assert main(["export", newest, "--out", str(tmp_path / "adapter")]) == 0
        assert f"serve it with its base: penstock serve {base} --adapter" in capsys.readouterr().out
        if adds_tokens:  # the base was never told of them
            save_talker(base, context=256, vocab_size=vocab_size)
            (base / "chat_template.jinja").unlink()
        with (
            serving(base, "--adapter", f"live={tmp_path / 'adapter'}", "--cache-gib", "0.05") as server,
            server.openai() as client,
        ):
            served = {
                name: client.chat.completions.create(
                    model=name, messages=[asked], max_tokens=8, temperature=0
                )
                for name in ("base", "live")
            }
            told = client.chat.completions.create(
                model="live",
                messages=[asked],
                max_tokens=48,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": [[17, "yes"]]}},
                },
            )
            assert json.loads(told.choices[0].message.content) == [17, "yes"]
    assert find(run).index().meta.step > find(tmp_path / newest).index().meta.step
    merged = tmp_path / "merged"
    assert main(["export", newest, "--out", str(merged), "--merge", "--dtype", "fp32"]) == 0
    with LLM(merged, EngineConfig(cache_gib=0.05)) as llm:
        expected = llm.chat([asked], Params(sampling=Sampling(temperature=0), max_tokens=8))
    answers = {name: reply.choices[0].message.content for name, reply in served.items()}
    assert answers["live"] == expected.text != answers["base"]


def test_a_tuned_model_stops_at_the_token_that_ends_the_turns_it_learned(tmp_path):
    """Of a base with another end token; so does what is exported of it, and the base with its adapter."""
    base, _ = talker(tmp_path / "base", vocab_size=448)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 20}))
    run, recipe = recipe_of(tmp_path, base, chats_for(base))
    assert main(["tune", str(recipe), "--set", "run.steps=1"]) == 0
    end = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json")).token_to_id("<|im_end|>")
    assert json.loads((run / "generation_config.json").read_text()) == {"eos_token_id": [7, end], "top_k": 20}
    for words in ((), ("--merge",)):
        assert main(["export", str(run), "--out", str(tmp_path / f"out{len(words)}"), *words]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out1").eos_token_id == [7, end]
    known = TextProcessor.load(base / "tokenizer.json")
    assert end not in known.stop_ids
    with_adapter = EngineConfig(device="cpu", cache_gib=0.05, adapters={"a": tmp_path / "out0"})
    with LLM(base, with_adapter) as llm:
        assert llm.text_processor.of("a").stop_ids == known.stop_ids | {end}
        assert llm.text_processor.stop_ids == known.stop_ids


def test_conversations_are_written_with_the_template_that_the_adapter_was_tuned_with(tmp_path):
    base, _ = talker(tmp_path / "base", vocab_size=448)
    run, recipe = recipe_of(tmp_path, base, chats_for(base))
    assert main(["tune", str(recipe), "--set", "run.steps=1"]) == 0
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    parsed = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    words = {"base": "4 + 3?", "a": "<|im_start|>user\n4 + 3?<|im_end|>\n<|im_start|>assistant\n"}
    wanted = {name: parsed.encode(text, add_special_tokens=False).ids for name, text in words.items()}
    asked = [{"role": "user", "content": "4 + 3?"}]
    config = EngineConfig(device="cpu", cache_gib=0.05, adapters={"a": tmp_path / "adapter"})
    with LLM(base, config) as llm:
        assert list(llm.chat_request(asked).prompt) == wanted["base"]
        assert list(llm.chat_request(asked, Params(adapter="a")).prompt) == wanted["a"]
    with (
        serving(base, "--adapter", f"a={tmp_path / 'adapter'}", "--cache-gib", "0.05") as server,
        server.http() as client,
    ):
        for model, ids in wanted.items():
            found = client.post("/tokenize", json={"model": model, "messages": asked}).json()
            assert found["tokens"] == ids


def test_conversations_are_packed_whole_unless_the_run_began_otherwise(tmp_path, capsys):
    base, _ = talker(tmp_path / "base", vocab_size=448)
    run, recipe = recipe_of(tmp_path, base, chats_for(base))
    text = recipe.read_text().replace('packing = "whole"\noverlong = "drop"\n', "")
    recipe.write_text(text)
    cuts = text.replace("[data]", '[data]\npacking = "best_fit"')
    (tmp_path / "cuts.toml").write_text(cuts)
    told = ["tune", str(tmp_path / "cuts.toml"), "--set", "run.steps=1"]
    assert main(told) == 2
    assert "'best_fit' cuts conversations of chats" in capsys.readouterr().err
    assert main(["tune", str(recipe), "--dry-run", "--set", "run.steps=1"]) == 0
    assert 'data.packing = "whole"' in capsys.readouterr().out
    run.mkdir()
    (run / "config.json").write_text('{"data": {"packing": "best_fit"}}')  # as an earlier Penstock began it
    assert main(told) == 0
    assert "data.packing 'best_fit' may cut a conversation" in capsys.readouterr().err
    assert main(["tune", str(recipe), "--set", "run.steps=2"]) == 0, "without the key it goes on as it was"
    assert main(["tune", str(recipe), "--set", "run.steps=3", "--set", "data.packing=concat"]) == 2


def test_an_adapter_of_a_runs_step_names_that_step_as_its_base(tmp_path, capsys):
    base, _ = talker(tmp_path / "base", vocab_size=448)
    chats = chats_for(base)
    first = tmp_path / "first"
    first.mkdir()
    full, recipe = recipe_of(first, base, chats)
    settings = ["--set", "tune.method='full'", "--set", "run.steps=6"]
    assert main(["tune", str(recipe), *settings]) == 0
    run, recipe = recipe_of(tmp_path, full, chats)
    assert main(["tune", str(recipe), "--set", "run.start_step=3", "--set", "run.steps=1"]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    named = full / "checkpoints" / "step-00000003"
    assert f"penstock serve {named} --adapter" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "adapter"), "--merge", "--out", str(tmp_path / "merged")]) == 0
    with LLM(named, EngineConfig(device="cpu", cache_gib=0.05, adapters={"a": tmp_path / "adapter"})) as llm:
        assert llm.generate("4 + 3?", Params(max_tokens=2, adapter="a"))[0].token_ids
