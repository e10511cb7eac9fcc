"""A tiny model in a folder, and `penstock serve` on it in a process of its own, as a user types it."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from openai import OpenAI
from pydantic import BaseModel

from tests.tiny_models import save_talker
from tests.warm import Command

T = TypeVar("T", bound=BaseModel)

PATIENCE_S = 120.0
CONTEXT = 4096
TEMPLATE = """\
{%- if tools %}{{ '<|tools|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if loud %}{{ 'LOUD' }}{% endif %}
{%- if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the penstock"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "big": {"type": "boolean"}},
            "required": ["a", "big"],
            "additionalProperties": False,
        },
    },
}
"""A tool."""


def make_model(folder: Path, *, template: str | None = TEMPLATE, context: int = CONTEXT) -> Path:
    """Write a model that talks, with a chat template."""
    save_talker(folder, context=context)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that takes requests."""

    process: subprocess.Popen[str]
    started: dict[str, object]
    """Its line of JSON."""
    errors: Path
    """What it wrote to standard error."""

    @property
    def url(self) -> str:
        return str(self.started["url"])

    def openai(self, key: str = "unused") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels."""
        from prometheus_client.parser import text_string_to_metric_families

        with self.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
            found = [sample.value for one in families for sample in one.samples if sample.name == name]
        assert found, name
        return sum(found)


@contextmanager
def serving(folder: Path, *words: object, interpreter: str = "", **variables: str) -> Iterator[Running]:
    """Run `penstock serve` on a free port; ended by force if the test has not ended it.

    Args:
        interpreter: why it starts one; empty: it is forked.
        variables: of its environment.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".err", delete=False) as errors:
        process = Command(
            *("serve", folder, "--port", 0, "--json", *words),
            interpreter=interpreter,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **variables},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, Path(errors.name).read_text()
        yield Running(process=process, started=json.loads(line), errors=Path(errors.name))
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
        Path(errors.name).unlink()


def end(running: Running) -> int:
    """Ask a server to end, as Kubernetes does; return its exit code."""
    running.process.send_signal(signal.SIGTERM)
    return running.process.wait(PATIENCE_S)


def strict(kind: type[T], reply: BaseModel) -> T:
    """Hold an answer against the published type: every key known, every value of its type."""
    return kind.model_validate_json(reply.model_dump_json(exclude_unset=True, by_alias=True), strict=True)
