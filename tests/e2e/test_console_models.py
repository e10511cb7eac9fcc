"""The console over a real run: rows of its steps, the loss of each token, its checkpoints as models."""

import json
import shutil
from contextlib import contextmanager
from threading import Thread

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from penstock.console.workers.model_slot import ModelKey
from penstock.core.errors import PenstockError
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Params, Sampling
from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import train_tokenizer
from tests.console_workers import fork_workers
from tests.in_process import run_cli
from tests.launched import records_of
from tests.warm import penstock

HOST = "127.0.0.1:8400"
OWN = {"origin": f"http://{HOST}"}
ASKED, ANSWERED = "user: which one?", " bot: the größer 日本 penstock"
RECIPE = """
compute = "float32"
[run]
dir = "@/runs/first"
steps = 8
[model]
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
vocab_size = 384
[data]
sequence_length = 48
global_batch_size = 6
num_workers = 0
packing = "best_fit"
[data.corpora.web]
path = "@/web"
weight = 0.5
[data.corpora.chats]
path = "@/chats"
weight = 0.5
[checkpoint]
every = 3
keep = 9
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 8 steps on plain text and on conversations, of which only the answers are learned."""
    folder = tmp_path_factory.mktemp("console")
    tokenizer = train_tokenizer([ASKED + ANSWERED] * 3, vocab_size=300)
    asked, answered = tokenizer.encode(ASKED), tokenizer.encode(ANSWERED)
    texts = [
        [*tokenizer.encode(f"the web feeds the turbine {n}") * (1 + n % 3), tokenizer.eos_id]
        for n in range(60)
    ]
    write_corpus(folder / "web", texts, vocab_size=384)
    bits = [[False] * len(asked) + [True] * len(answered)] * 60
    write_corpus(folder / "chats", [[*asked, *answered]] * 60, vocab_size=384, columns={"learned": bits})
    (folder / "recipe.toml").write_text(RECIPE.replace("@", str(folder)))
    done = penstock("train", folder / "recipe.toml")
    assert done.returncode == 0, done.stderr
    tokenizer.save(folder / "runs" / "first" / "tokenizer.json")
    return folder


@contextmanager
def console(root, **rules):
    """Yield a client of a console, and the console."""
    state = ConsoleState([root], ConsoleAccess(**rules))
    with TestClient(build_app(state), base_url=f"http://{HOST}") as client:
        client.headers.update(OWN)
        yield client, state
    state.close()


@pytest.fixture
def asked(folder, monkeypatch):
    """A client of a console over the run, with the address of the run."""
    fork_workers(monkeypatch)
    with console(folder / "runs") as (client, state):
        client.run = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        client.state = state
        yield client


def events(response):
    """Return (kind, data) of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [part.split("\n") for part in response.text.split("\n\n") if part.startswith("event:")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in lines]


class Held:
    """A model that does nothing."""

    is_alive = True

    def close(self):
        pass


def hold(state, monkeypatch, run):
    """Lend a model of another run."""
    monkeypatch.setattr(state.models, "_open_model", lambda _, **__: Held())
    return state.models.lent(ModelKey(run, 1, "other"))


def text_of(document):
    return "".join(text for text, _, _ in document["pieces"])


def test_losses_are_those_of_the_next_checkpoint_if_the_job_deletes_the_nearest(
    folder, tmp_path, monkeypatch
):
    shutil.copytree(folder / "runs" / "first", tmp_path / "runs" / "pruned")
    saved = tmp_path / "runs" / "pruned" / "checkpoints"
    fork_workers(monkeypatch)
    with console(tmp_path / "runs") as (client, state):
        ask, at = state.data.ask, f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"

        def ask_late(question, run, **words):
            if question == "model" and words["step"] == 6:  # after the list was read
                shutil.rmtree(saved / "step-00000006", ignore_errors=True)
            return ask(question, run, **words)

        opened = []

        def without_memory(key, **_):
            opened.append(key.step)
            raise PenstockError("no memory is free")

        with monkeypatch.context() as patched:
            patched.setattr(state.models, "_open_model", without_memory)
            assert "no memory is free" in client.post(f"{at}/rows/7/losses", json={}).text
        assert opened == [6]  # it is there, so no other one is tried
        monkeypatch.setattr(state.data, "ask", ask_late)
        scored = client.post(f"{at}/rows/7/losses", json={})
        assert scored.status_code == 200, scored.text
        assert scored.json()["rows"][0]["checkpoint"] == 3


def test_the_rows_of_a_step_are_those_of_data_where_in_pages(asked, folder):
    first = asked.get(f"{asked.run}/rows/5", params={"limit": 4}).json()
    then = asked.get(f"{asked.run}/rows/5", params={"offset": 4, "limit": 4}).json()
    assert (first["num_rows"], first["checkpoint"], first["note"]) == (6, 3, "")
    rows = first["rows"] + then["rows"]
    assert [row["row"] for row in rows] == [*range(6)]
    done = run_cli("data", "where", folder / "runs" / "first", "--step", 5, "--row", 4, "--json")
    told, row = json.loads(done.stdout), rows[4]
    assert row["sample"] == told["sample"]
    fields = ("corpus", "document", "offset", "tokens")
    shown = [[part[name] for name in fields] for part in row["documents"] if part["pieces"]]
    assert shown == [[part[name] for name in fields] for part in told["pieces"] if part["corpus"]]
    texts = [text_of(part).removesuffix("<|endoftext|>") for part in row["documents"] if part["pieces"]]
    assert texts == [part["text"] for part in told["pieces"] if part["corpus"]]
    assert asked.get(f"{asked.run}/rows/5", params={"offset": 6}).json()["rows"] == []


def test_tokens_that_are_not_learned_are_told_apart_and_characters_stay_whole(asked):
    rows = asked.get(f"{asked.run}/rows/1", params={"limit": 6}).json()["rows"]
    parts = [part for row in rows for part in row["documents"] if part["pieces"]]
    chats = [part for part in parts if text_of(part) == ASKED + ANSWERED]
    assert chats
    for part in chats:
        assert part["pieces"] == [[ASKED, False, None], [ANSWERED, True, None]]
    assert {learned for part in parts if part["corpus"] == "web" for _, learned, _ in part["pieces"]} == {
        True
    }


def test_losses_of_tokens_are_the_step_s_loss_as_training_computed_it(asked, folder):
    """Step 4 begins with the weights of the checkpoint of step 3: the same sums, in float32."""
    found = asked.post(f"{asked.run}/rows/4/losses", json={"limit": 6}).json()
    assert found["checkpoint"] == 3
    nats, labels = 0.0, 0
    for row in found["rows"]:
        for document in row["documents"]:
            losses = [loss for _, _, loss in document["pieces"]]
            nats += sum(loss for loss in losses if loss is not None)
            labels += sum(loss is not None for loss in losses)
            assert losses[:1] in ([None], []), "nothing comes before the first token"
            assert all((loss is not None) == learned for _, learned, loss in document["pieces"][1:])
    assert labels > 60
    step = next(r for r in records_of(folder / "runs" / "first") if r.get("step") == 4 and "loss" in r)
    # shown losses have 4 digits, and those of tokens beyond a row's end are not shown
    assert nats / labels == pytest.approx(step["loss"], abs=0.02)


def test_rows_are_not_scored_while_another_model_is_in_use(asked, monkeypatch, tmp_path):
    with hold(asked.state, monkeypatch, tmp_path):
        refused = asked.post(f"{asked.run}/rows/4/losses", json={})
        assert (refused.status_code, "Try again" in refused.json()["error"]) == (409, True)
        assert asked.get(f"{asked.run}/rows/4").status_code == 200, "others are not held up"


@pytest.mark.parametrize(("step", "said"), [(0, "steps 1 to 8"), (9, "steps 1 to 8"), (-5, "steps 1 to 8")])
def test_a_step_that_the_run_never_has_is_one_sentence(asked, step, said):
    for found in (
        asked.get(f"{asked.run}/rows/{step}"),
        asked.post(f"{asked.run}/rows/{step}/losses", json={}),
    ):
        assert (found.status_code, said in found.json()["error"]) == (400, True)


@pytest.fixture
def damaged(folder, tmp_path, monkeypatch):
    """Copies of the run and its corpora, to be damaged, and a console over them."""
    fork_workers(monkeypatch)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = copy / "runs" / "first" / "config.json"
    config.write_text(config.read_text().replace(str(folder), str(copy)))
    return copy


def test_steps_to_come_skipped_steps_and_runs_without_checkpoints_say_so(damaged):
    run = damaged / "runs" / "first"
    shutil.rmtree(run / "checkpoints")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step", 0) <= 5]
    kept.append(json.dumps({"event": "skipped", "step": 5, "why": "loss is NaN"}))
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    with console(damaged / "runs") as (client, _):
        at = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        later = client.get(f"{at}/rows/7").json()
        assert "yet to come" in later["note"]
        assert "no checkpoint" in later["why_no_losses"]
        assert "skipped (loss is NaN)" in client.get(f"{at}/rows/5").json()["note"]
        scored = client.post(f"{at}/rows/5/losses", json={})
        assert (scored.status_code, "no checkpoint" in scored.json()["error"]) == (400, True)
        assert client.get(f"{at}/checkpoints").json()["why_not"] == "The run has no checkpoint yet."


@pytest.mark.parametrize("how", ["gone", "cut", "recipe gone", "recipe damaged", "tokenizer damaged"])
def test_corpora_that_moved_and_damaged_files_are_one_sentence(damaged, how):
    run = damaged / "runs" / "first"
    match how:
        case "gone":
            shutil.rmtree(damaged / "web")
        case "cut":
            shard = next((damaged / "web").glob("*.arrow"))
            shard.write_bytes(shard.read_bytes()[:100])
        case "recipe gone":
            (run / "config.json").unlink()
        case "recipe damaged":
            (run / "config.json").write_text("{")
        case "tokenizer damaged":
            (run / "tokenizer.json").write_text("{")
    with console(damaged / "runs") as (client, _):
        at = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        found = client.get(f"{at}/rows/2")
        assert found.status_code == 400
        assert len(found.json()["error"]) > 20


def chunks_of(response):
    """Return the chunks of a stream of OpenAI's API."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


CHAT = {"messages": [{"role": "user", "content": "the web"}], "max_tokens": 5, "temperature": 0}


def test_a_checkpoint_answers_a_chat_and_continues_a_text_in_a_stream(asked):
    assert asked.get(f"{asked.run}/checkpoints").json() == {"steps": [3, 6, 8], "why_not": "", "open": None}
    text = {"prompt": "the web", "max_tokens": 5, "temperature": 0}
    for path, body in (("chat/completions", CHAT), ("completions", text)):
        found = chunks_of(asked.post(f"{asked.run}/checkpoints/3/{path}", json=body))
        choices = [choice for chunk in found for choice in chunk["choices"]]
        assert choices[-1]["finish_reason"] in ("length", "stop")
        assert len(choices) >= 2, "it comes in parts"
        assert found[-1]["usage"]["completion_tokens"] <= 5
    assert "step 3 of first" in asked.get(f"{asked.run}/checkpoints").json()["open"]


def test_checkpoints_answer_the_same_prompts_side_by_side_as_they_do_alone(asked, folder):
    body = {"steps": [3, 8, 5], "prompts": ["the web", "größer"], "mode": "text", "max_tokens": 6}
    *told, end = events(asked.post(f"{asked.run}/answers", json=body))
    assert end == ("end", {})
    found = {data["step"]: data for _, data in told}
    assert [*found] == [3, 8, 5]
    assert "no complete checkpoint of step 5" in found[5]["error"]
    assert [one["prompt"] for one in found[8]["answers"]] == body["prompts"]
    params = Params(sampling=Sampling(temperature=0), max_tokens=6)
    checkpoint = folder / "runs" / "first" / "checkpoints" / "step-00000003"
    with LLM(checkpoint, EngineConfig(cache_gib=0.05)) as llm:
        alone = [out.text for out in llm.generate(body["prompts"], params)]
    assert [one["answer"] for one in found[3]["answers"]] == alone


def test_two_who_chat_with_one_checkpoint_share_its_engine_and_others_wait(asked, monkeypatch, tmp_path):
    with monkeypatch.context() as held, hold(asked.state, held, tmp_path):
        (told,) = chunks_of(asked.post(f"{asked.run}/checkpoints/3/chat/completions", json=CHAT))
        assert "in use: the checkpoint of step 1 of other" in told["error"]["message"]
    found = []

    def chat():
        found.append(chunks_of(asked.post(f"{asked.run}/checkpoints/8/chat/completions", json=CHAT)))

    chat()  # opens it
    threads = [Thread(target=chat) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all("usage" in told[-1] for told in found)


@pytest.mark.parametrize(
    ("step", "body", "status"),
    [
        (3, {}, 422),
        (3, {"messages": []}, 422),
        ("x", CHAT, 422),
        (3, {"messages": [{"role": "tool", "content": "a"}]}, 422),
        (3, {"messages": [{"role": "user", "content": "\ud800"}]}, 422),
        (3, CHAT | {"temperature": float("nan")}, 422),
        (3, CHAT | {"max_tokens": 0}, 422),
        (3, CHAT | {"stream": False}, 422),
        (3, CHAT | {"\ud800": 1}, 422),
        (10**30, CHAT, 200),
        (3, {"messages": [{"role": "user", "content": "a b " * 500}]}, 200),
    ],
)
def test_a_bad_body_is_one_sentence(asked, step, body, status):
    headers, path = {"content-type": "application/json"}, f"{asked.run}/checkpoints/{step}/chat/completions"
    found = asked.post(path, content=json.dumps(body), headers=headers)
    assert found.status_code == status
    said = found.json()["error"] if status != 200 else chunks_of(found)[0]["error"]["message"]
    assert len(said) > 20
    assert "Traceback" not in said


def test_other_machines_may_load_a_model_only_where_control_is_given(folder, monkeypatch):
    fork_workers(monkeypatch)
    for control, status in ((False, 403), (True, 200)):
        with console(folder / "runs", host="0.0.0.0", control=control) as (client, _):
            at = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
            assert client.post(f"{at}/checkpoints/3/chat/completions", json=CHAT).status_code == status
            prompts = {"steps": [3], "prompts": ["the"], "max_tokens": 2}
            assert client.post(f"{at}/answers", json=prompts).status_code == status
            assert client.post(f"{at}/rows/4/losses", json={}).status_code == status
            assert ("--control" in client.get(f"{at}/checkpoints").json()["why_not"]) is not control
            assert client.get(f"{at}/rows/4").status_code == 200


def test_a_model_that_does_not_fit_is_refused_with_its_size(asked, monkeypatch):
    from penstock.core import env

    monkeypatch.setattr(env, "available_bytes", lambda: 1000)
    (told,) = chunks_of(asked.post(f"{asked.run}/checkpoints/6/chat/completions", json=CHAT))
    assert "1000 B are free" in told["error"]["message"]
    scored = asked.post(f"{asked.run}/rows/7/losses", json={})
    assert (scored.status_code, "are free" in scored.json()["error"]) == (400, True)


def test_tokens_without_a_tokenizer_are_numbers(damaged):
    (damaged / "runs" / "first" / "tokenizer.json").unlink()
    with console(damaged / "runs") as (client, _):
        at = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}"
        found = client.get(f"{at}/rows/2", params={"limit": 1}).json()
    numbers = text_of(found["rows"][0]["documents"][0]).split()
    assert all(number.isdecimal() for number in numbers)
