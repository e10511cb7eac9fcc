"""A run that is steered from outside, as a user does it: changed while it runs, killed, looked into."""

import getpass
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from penstock.checkpoint.layout import name_of
from penstock.cli.main import main
from penstock.core import config
from penstock.core.files import write_json
from penstock.data.corpus.open import open_corpus
from penstock.obs.sinks.jsonl import read_records
from penstock.train.resolve.load import build_recipe
from tests.e2e.conftest import torchrun
from tests.in_process import run_cli
from tests.warm import Command, penstock


@pytest.fixture(scope="module")
def second(corpus, tmp_path_factory):
    """A second corpus with the tokenizer of the first."""
    out = tmp_path_factory.mktemp("second") / "code"
    source = Path(__import__("email").__file__).parent
    done = penstock(
        "data", "prepare", source, "--tokenizer", corpus / "tokenizer.json", "--max-errors", 9, "--out", out
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def mixed(recipe, corpus, second):
    """The recipe with two corpora, a batch warm-up, a ramp and a phase of longer rows."""
    text = recipe.read_text().replace("[data.corpora.python]", "[data.corpora.web]")
    recipe.write_text(
        text.replace(
            f'path = "{corpus}"\n',
            f"""path = "{corpus}"
weight = 1
[data.corpora.code]
path = "{second}"
weight = 1
[[data.schedule]]
at_tokens = 3000
global_batch_size = 24
[[data.schedule]]
at_step = 30
weights = {{ web = 0.2, code = 0.8 }}
ramp_steps = 4
[[data.schedule]]
at_step = 36
sequence_length = 64
global_batch_size = 12
""",
        )
    )
    return recipe


def records_of(run):
    return read_records(run / "metrics.jsonl")


def steps_of(run):
    return {record["step"]: record for record in records_of(run) if "loss" in record}


def wait_until(run, process, holds):
    """Wait until something holds of the record of a step."""
    deadline = time.monotonic() + 120
    while not any(map(holds, steps_of(run).values())):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(run, process, step):
    wait_until(run, process, lambda record: record["step"] == step)


def control(run, *words):
    done = run_cli("control", run, *words, "--json")
    return done.returncode, json.loads(done.stdout)


def test_a_running_job_takes_up_requests_and_a_killed_one_takes_them_up_again(mixed, tmp_path):
    run, words = (
        tmp_path / "run",
        ["--set", "run.steps=3000", "--set", "data.schedule=[]", "--processes", "2"],
    )
    command = ["train", mixed, *words]
    with Command(*command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(run, process, 3)
        first = max(steps_of(run))
        code, changed = control(run, "--weights", "web=0.9", "--reason", "more web")
        assert (code, changed["status"]) == (0, "taken up")
        bad = run / "control" / "request-000050.json"
        bad.write_text("nonsense")
        code, refused = control(run, "--extend", "web")
        assert (code, refused["status"], refused["request"]) == (1, "refused", 51)
        last = max(steps_of(run))
        at = last + 50 + 5 * (last - first)  # two commands are answered before, as two were since the first
        code, _ = control(run, "--skip", f"{at}:{at + 3}", "--reason", "spike")
        assert code == 0
        code, later = control(run, "--weights", "code=0.7", "--at-step", str(at + 5))
        assert (code, later["answer"]["holds_from"]) == (0, at + 5)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
    assert "refused" in (run / "control" / "answer-000050.json").read_text()
    assert (run / "control" / "request-000050.json.bad").is_file()
    killed = steps_of(run)

    words[1] = f"run.steps={at + 9}"
    done = penstock("train", mixed, *words)
    assert done.returncode == 0, done.stderr
    audit = run_cli("data", "audit", run)
    assert audit.returncode == 0, audit.stdout
    again = steps_of(run)
    for step in set(killed) & set(again):
        for name in ("corpus_tokens", "corpus_weights", "corpus_shares"):
            assert again[step][name] == killed[step][name], "as if it had not been killed"
    assert max(killed) >= max(r["step"] for r in records_of(run) if r.get("event") == "start")
    assert again[at + 6]["corpus_weights"]["code"] == pytest.approx(0.7, abs=1e-4), (
        "planned for later, and kept"
    )
    code, waiting = control(run, "--weights", "code=0.5")
    assert (code, waiting["status"]) == (0, "waiting"), "for a job"

    code, view = control(run)
    assert code == 0
    reasons = [mixture["reason"] for mixture in view["mixtures"]]
    assert "request 1: more web" in reasons
    assert [skip["reason"] for skip in view["skips"]] == ["request 52: spike"]
    assert view["skips"][0]["stop"] - view["skips"][0]["start"] == 3 * 12


def test_a_running_job_saves_at_once_and_trains_with_another_batch_size(recipe, tmp_path):
    run, words = tmp_path / "run", ["--set", "run.steps=3000", "--set", "checkpoint.every=3000"]
    command = ["train", recipe, *words]
    with Command(*command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(run, process, 3)
        code, saved = control(run, "--save")
        assert (code, saved["status"], saved["answer"]["checkpoint"]) == (0, "taken up", True)
        code, changed = control(run, "--batch-size", 24, "--reason", "loss is noisy")
        assert (code, changed["answer"]["batch_size"]) == (0, 24)
        wait_for(run, process, changed["answer"]["holds_from"] + 2)
        code, skipped = control(run, "--skip", "2990:2991")
        assert (code, skipped["status"]) == (0, "taken up")
        code, stopped = control(run, "--stop")
        assert (code, stopped["answer"]["stop"]) == (0, True)
        process.communicate(timeout=120)
    assert process.returncode == 75
    for found in (saved, stopped):
        assert (run / "checkpoints" / name_of(found["answer"]["step"])).is_dir()
    tokens = {step: record["tokens"] for step, record in steps_of(run).items()}
    first = changed["answer"]["holds_from"] + 1
    assert tokens[first - 1] - tokens[first - 2] == 12 * 32
    assert tokens[first] - tokens[first - 1] == 24 * 32
    events = [record for record in records_of(run) if record.get("event") == "request"]
    assert [event["asked_by"] for event in events] == [getpass.getuser()] * 4
    assert (events[1]["batch_size"], events[1]["reason"]) == (24, "loss is noisy")


TURNS = """{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture
def with_chats(recipe, corpus, tmp_path):
    """The recipe with text and conversations, each in one row."""
    (tmp_path / "turns.jinja").write_text(TURNS)
    words = ["import", "return", "self", "value", "class", "def"]
    talks = [
        [
            {"role": "user", "content": f"What follows {words[n % 6]} {n}?"},
            {"role": "assistant", "content": f"{words[(n + 1) % 6]} {n + 1}"},
        ]
        for n in range(120)
    ]
    (tmp_path / "talks.json").write_text(json.dumps([{"messages": turns} for turns in talks]))
    done = penstock(
        *("data", "prepare", tmp_path / "talks.json", "--chat", "--tokenizer", corpus / "tokenizer.json"),
        *("--chat-template", tmp_path / "turns.jinja", "--out", tmp_path / "chats"),
    )
    assert done.returncode == 0, done.stderr
    text = recipe.read_text().replace("[data.corpora.python]", "[data.corpora.web]\nweight = 0.8")
    chats = f'[data.corpora.chats]\npath = "{tmp_path / "chats"}"\nweight = 0.2\n'
    recipe.write_text(text.replace("[data.corpora.web]", f"{chats}[data.corpora.web]"))
    return recipe, open_corpus(tmp_path / "chats").manifest


def test_chats_among_text_are_reweighted_live_read_again_and_audited(with_chats, tmp_path):
    (recipe, chats), run = with_chats, tmp_path / "run"
    words = ["--set", "run.steps=3000", "--set", "data.packing=whole", "--set", "data.overlong=truncate"]
    words += ["--set", "schedule.rule=constant"]  # a cosine would change with the number of steps
    command = ["train", recipe, *words]
    with Command(*command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(run, process, 3)
        code, changed = control(run, "--weights", "chats=0.7", "--reason", "talk more")
        assert (code, changed["status"]) == (0, "taken up")
        changed_at = changed["answer"]["holds_from"]
        wait_until(
            run,
            process,
            lambda r: r["step"] >= changed_at + 20 and r["corpus_tokens"]["chats"] > 2 * chats.num_tokens,
        )
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
    killed = steps_of(run)
    words[1] = f"run.steps={max(killed) + 5}"
    done = penstock("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    audit = run_cli("data", "audit", run)
    assert audit.returncode == 0, audit.stdout
    again = steps_of(run)
    for name in ("loss", "labels", "corpus_tokens", "corpus_weights"):
        assert [again[step][name] for step in killed] == [record[name] for record in killed.values()]
    last = again[max(again)]
    assert last["corpus_weights"]["chats"] == pytest.approx(0.7, abs=1e-3)
    assert last["corpus_tokens"]["chats"] > 2 * chats.num_tokens, "it was read more than once"
    before, after = (
        mean(record["labels"] for step, record in again.items() if (step > changed_at) == is_after)
        for is_after in (False, True)
    )
    assert after < 0.8 * before, "of conversations the answers alone are learned"
    once = run_cli("train", recipe, *words, "--set", "data.corpora.chats.epochs=1", "--dry-run")
    assert once.returncode == 2
    assert "corpus 'chats' reaches the end of its one epoch" in " ".join(once.stderr.split())


def test_a_planned_run_stopped_and_resumed_is_that_of_one_go_and_can_be_looked_into(mixed, tmp_path):
    plan = json.loads(run_cli("train", mixed, "--dry-run", "--json").stdout)
    assert [change.split(":")[0] for change in plan["changes"]] == [
        "after step 8 and 3,072 tokens (3.07k)",
        "after step 30 and 19,968 tokens (20k)",
        "after step 36 and 24,576 tokens (24.6k)",
    ]
    assert plan["derived"]["tokens in the run"] == 24_576 + 4 * 12 * 64
    run, whole = tmp_path / "run", tmp_path / "whole"
    done = penstock("train", mixed, "--set", f"run.dir={whole}", "--processes", 2)
    assert done.returncode == 0, done.stderr
    with Command("train", mixed, "--processes", 2, stderr=subprocess.PIPE, text=True) as process:
        wait_for(run, process, 13)
        process.kill()
        process.communicate(timeout=120)
    assert penstock("train", mixed, "--processes", 2).returncode == 0
    one, other = (
        {s: (r["loss"], r["tokens"], r["corpus_shares"]) for s, r in steps_of(r).items()}
        for r in (run, whole)
    )
    assert one == other, "every digit of every step"
    audit = json.loads(run_cli("data", "audit", run, "--json").stdout)
    assert (audit["samples"], audit["tokens"], audit["faults"]) == (8 * 12 + 28 * 24 + 4 * 12, 27_648, [])
    looked_into(run, tmp_path / "replayed")


def test_a_run_whose_mixture_follows_the_losses_is_audited_too(mixed, tmp_path):
    policy = ("data.schedule=[]", "data.adaptive.policy=online_data_mixing", "data.adaptive.every=4")
    settings = [word for setting in (*policy, "run.steps=14") for word in ("--set", setting)]
    done = penstock("train", mixed, *settings, "--processes", 2)
    assert done.returncode == 0, done.stderr
    audit = run_cli("data", "audit", tmp_path / "run")
    assert audit.returncode == 0, audit.stdout
    events = [record for record in records_of(tmp_path / "run") if record.get("event") == "mixture"]
    assert {event["reason"] for event in events} == {"online_data_mixing"}
    shares = [1000 * share for event in events for share in event["weights"].values()]
    assert shares == pytest.approx([round(share) for share in shares], abs=0.02), (
        "thousandths, in 65,536 slots"
    )


def looked_into(run, out):
    where = json.loads(run_cli("data", "where", run, "--step", 38, "--row", 5, "--json").stdout)
    assert sum(piece["tokens"] for piece in where["pieces"]) == 64
    piece = where["pieces"][0]
    assert piece["text"]
    assert (
        f"{piece['corpus']}:{piece['document']}"
        in run_cli("data", "where", run, "--step", 38, "--row", 5).stdout
    )
    document = f"{piece['corpus']}:{piece['document']}"
    found = json.loads(run_cli("data", "find", run, "--document", document, "--json").stdout)
    assert [
        (use["offset"], use["taken"]) for use in found["uses"] if (use["step"], use["row"]) == (38, 5)
    ].count((piece["offset"], True)) == 1
    done = run_cli("data", "replay", run, "--steps", "35:39", "--out", out, "--json")
    assert [step["rows"] for step in json.loads(done.stdout)["steps"]] == [24, 24, 12, 12]
    batch = np.load(out / "step-00000038.npz", allow_pickle=False)
    assert batch["sample_ids"][5] == where["sample"]
    assert batch["input_ids"].shape == (12, 64)
    logged = sorted(
        sample
        for path in (run / "samples").glob("*.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        if record["step"] == 38
        for sample in record["sample_ids"]
    )
    assert sorted(batch["sample_ids"].tolist()) == logged


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["control", "RUN", "--weights", "wbe=0.5"], 2, "no such corpus (got 'wbe'). Did you mean 'web'"),
        (["control", "RUN", "--weights", '"a,b"=0.2,web=0.3'], 2, "no such corpus (got 'a,b')"),
        (
            ["control", "RUN", "--weights", "a,b=0.2"],
            2,
            "(got 'a'). Example: --weights web=0.6,code=0.4. A name",
        ),
        (["control", "RUN", "--weights", "web"], 2, "--weights takes CORPUS=SHARE (got 'web')"),
        (["control", "RUN", "--weights", "web=2"], 2, "must be between 0 and 1 (got 2.0)"),
        (["control", "RUN", "--weights", "web=0.5,web=0.6"], 2, "gives corpus 'web' two shares"),
        (
            ["control", "RUN", "--weights", "web=0.5", "--weights", "web=1"],
            2,
            "gives corpus 'web' two shares",
        ),
        (["control", "RUN", "--weights", "web=0.5,"], 2, "--weights takes CORPUS=SHARE (got '')"),
        (["control", "RUN", "--weights", "=0.5"], 2, "--weights takes CORPUS=SHARE (got '=0.5'). Name the"),
        (["control", "RUN", "--weights", "web=0,code=0"], 2, "no other corpus has a share to take the rest"),
        (["control", "RUN", "--at-step", "3"], 2, "--at-step and --reason need a request"),
        (["control", "RUN", "--save", "--at-step", "3"], 2, "at_step needs weights"),
        (["control", "RUN", "--skip", "9:3"], 2, "--skip takes FIRST:PAST"),
        (["control", "RUN", "--skip", ""], 2, "--skip takes FIRST:PAST"),
        (["control", "RUN", "--extend", "wbe"], 2, "no such corpus (got 'wbe'). Did you mean 'web'"),
        (["control", "RUN", "--islands", "0"], 2, "at least one island (got 0)"),
        (["control", "RUN", "--islands", "2"], 2, "Start it with --processes for as many islands"),
        (["control", "RUN", "--save"], 2, "No job runs on "),
        (["control", "nowhere"], 2, "nowhere is not a folder. Give the folder of a run"),
        (["data", "where", "RUN", "--step", "41"], 2, "The run has steps 1 to 40 (got 41)"),
        (["data", "where", "RUN", "--step", "3", "--row", "12"], 2, "Step 3 has rows 0 to 11 (got 12)"),
        (["data", "find", "RUN", "--document", "web"], 2, "--document takes CORPUS:NUMBER (got 'web')"),
        (["data", "find", "RUN", "--document", "web:99999999"], 2, "has documents 0 to"),
        (["data", "find", "RUN", "--document", "web:0", "--steps", ""], 2, "--steps takes FIRST:PAST"),
        (
            ["data", "replay", "RUN", "--steps", "39:43", "--out", "x"],
            2,
            "The run has steps 1 to 40 (got 42)",
        ),
        (["data", "where", "nowhere", "--step", "3"], 2, "nowhere is not a folder. Give the folder of a run"),
    ],
)
def test_wrong_usage_is_one_paragraph(prepared, capsys, words, code, message):
    assert main([*[str(prepared) if word == "RUN" else word for word in words]]) == code
    said = capsys.readouterr()
    assert not said.out
    assert message in " ".join(said.err.split())


@pytest.fixture(scope="module")
def prepared(corpus, second, tmp_path_factory):
    """A run folder without a step: what is written before the first one."""
    run = tmp_path_factory.mktemp("runs") / "run"
    run.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    corpora = {"web": {"path": str(corpus), "weight": 1}, "code": {"path": str(second), "weight": 1}}
    raw = {
        "run": {"dir": str(run), "steps": 40},
        "model": sizes,
        "data": {"corpora": corpora, "sequence_length": 32, "global_batch_size": 12},
    }
    write_json(run / "config.json", config.dump(build_recipe(raw)))
    return run


def test_torchrun_says_what_is_wrong_with_a_recipe_once(mixed):
    done = torchrun("train", mixed, "--set", "run.steps=0")
    assert done.returncode == 1
    assert done.stderr.count("run.steps must be at least 1") == 1
