"""Second half of the demo: a base that reads, tuned to answer; served with its adapter, asked, evaluated."""

import json
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.cli.demo_commands import command, penstock, say, show
from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.testing.questions import TOOLS, ExamQuestion, Language, write

_READY_S, _ANSWER_S = 900.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedModel:
    """Scores of the base and of the tuned model."""

    run: Path
    before: float
    """Share of the questions that the base answers."""
    after: float
    """Share that it answers with the adapter."""
    asked: int
    """Number of questions; none was tuned on."""


def tune(folder: Path, *, first_step: int) -> TunedModel:
    """Make a base, tune it, serve it with its adapter, ask it and evaluate it.

    Args:
        first_step: number of the first title.
    """
    titles = iter(range(first_step, first_step + 99))
    language = Language()
    write(folder, language)
    _, questions = language.questions(share=0.7)
    say(f"{next(titles)}. A base: a small model reads facts and sums, as plain text")
    _make_base(folder)
    say(f"{next(titles)}. Conversations to tokens: only the answers are learned")
    penstock(
        "data",
        "prepare",
        folder / "chats.jsonl",
        "--chat",
        "--tokenizer",
        folder / "base",
        "--out",
        folder / "chats",
    )
    penstock("data", "describe", folder / "chats", "--rows", 2)
    say(f"{next(titles)}. Tune: the weights stay, an adapter learns to answer")
    penstock("tune", _recipe(folder, "demo_tune.toml"))
    run = folder / "tuned-run"
    penstock("export", run, "--out", folder / "adapter")
    say(f"{next(titles)}. Serve the base and the adapter, and ask both what they were not tuned on")
    with _server(folder / "base", adapter=folder / "adapter") as address:
        before = _share_right(address, "base", questions)
        after = _share_right(address, "tuned", questions)
        _call_a_tool(address)
    if find_spec("lm_eval") is not None:
        say(f"{next(titles)}. Evaluate: the same questions as a task of lm-eval")
        penstock("eval", run, "--tasks", folder / "questions.yaml", "--chat-template")
    else:
        print("\nNot evaluated: lm-eval is not installed (pip install 'penstock[eval]')", flush=True)
    penstock("report", run)
    return TunedModel(run=run, before=before, after=after, asked=len(questions))


def _make_base(folder: Path) -> None:
    penstock("data", "prepare", folder / "text", "--train-tokenizer", 500, "--out", folder / "corpus")
    penstock("train", _recipe(folder, "demo_tuning.toml"))
    penstock("export", folder / "base-run", "--out", folder / "base")
    shutil.copy(folder / "chat_template.jinja", folder / "base")  # which a model of the hub brings


def _recipe(folder: Path, name: str) -> Path:
    text = files("penstock.cli").joinpath(name).read_text(encoding="utf-8")
    path = folder / name
    path.write_text(text.replace("@DIR@", str(folder)), encoding="utf-8")
    return path


@contextmanager
def _server(base: Path, *, adapter: Path) -> Iterator[str]:
    """Serve a model with an adapter, named "tuned"; yield the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", base, "--adapter", f"tuned={adapter}", "--port", port)
    show(words)
    with subprocess.Popen(command(words), stdout=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, process)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    end = clock.monotonic() + _READY_S
    while clock.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/ready", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            clock.sleep(0.1)
    raise PenstockError("The server did not start", fix="Its message is above.")


def _share_right(address: str, model: str, questions: list[ExamQuestion]) -> float:
    right = 0
    for question in questions:
        messages = question.messages()[:1]
        message = _asked(address, {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0})
        right += message["content"].strip() == question.answer
    print(f"{model}: {right} of {len(questions)} right", flush=True)
    return right / len(questions)


def _call_a_tool(address: str) -> None:
    """Print the call that the tuned model makes."""
    text = "How is the weather in Lomar?"
    messages = [{"role": "user", "content": text}]
    body = {"model": "tuned", "messages": messages, "tools": list(TOOLS), "temperature": 0}
    message = _asked(address, body)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if not calls:
        raise PenstockError("The tuned model did not call the tool", got=message.get("content"))
    print(f"{text} -> {calls[0]['name']}({calls[0]['arguments']})", flush=True)


def _asked(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message that answers a chat request."""
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as reply:
        message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
    return message
