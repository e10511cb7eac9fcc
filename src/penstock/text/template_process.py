"""Chat templates rendered in a separate process with limits, for servers.

A template is a program that came with a model, and its input comes from the client. The sandbox of
`text/chat_template.py` keeps it from files and objects, but not from endless loops or from filling the
memory. So it runs in a process limited to `CPU_S` seconds and `MEMORY_BYTES`; the kernel ends a process
beyond them, the request is rejected, and the next one gets a new process. No torch is loaded there. Both
sides exchange JSON, one object per line.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import IO, Any, TypedDict

from penstock.core.errors import ModelError, PenstockError, UsageError
from penstock.text.chat_template import ChatTemplate, render
from penstock.text.learned_tokens import Answer, RenderedChat, Renderer, find_answers

CPU_S = 2.0
"""CPU seconds for one conversation; a long one takes a few milliseconds."""
MEMORY_BYTES = 1 << 30
"""Address space of the process; about 100 MB are Python's own."""


class _Answer(TypedDict, total=False):
    text: str
    answers: list[tuple[int, list[tuple[int, int]]]]
    dropped: int
    refused: str
    failed: str


class TemplateProcess:
    """Process that renders one template; thread-safe, one request at a time.

    Args:
        template: chat template of the model.
        control: names of the tokenizer's control tokens; `answers` needs them.
    """

    def __init__(self, template: ChatTemplate, *, control: Sequence[str] = ()) -> None:
        self._template, self._control = template, list(control)
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] = (),
        variables: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text; arguments and errors as of `text.chat_template.render`.

        Raises:
            ModelError: also if the template exceeded its limits.
        """
        request = json.dumps(
            {
                "messages": messages,
                "tools": tools,
                "variables": variables or {},
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return self._answer(request)["text"]

    def answers(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] = (),
        date: str | None = None,
    ) -> RenderedChat:
        """Return the text and the assistant's turns in it; errors as of `text.learned_tokens.find_answers`.

        Args:
            date: day that the template is told, YYYY-MM-DD; None: today.

        Raises:
            UsageError: also if the messages are not JSON values.
            ModelError: also if the template exceeded its limits.
        """
        wanted = {"messages": messages, "tools": tools, "find": True, "date": date}
        try:
            request = json.dumps(wanted)
        except TypeError as error:  # of a column of dates or bytes in Parquet
            raise UsageError(
                f"A message or tool has a value that is not JSON: {error}", fix="Write it as text."
            ) from None
        found = self._answer(request)
        answers = [Answer(index, tuple((a, b) for a, b in spans)) for index, spans in found["answers"]]
        return RenderedChat(found["text"], tuple(answers), found["dropped"])

    def _answer(self, request: str) -> _Answer:
        with self._turn:
            answer = self._ask(request)
        if "refused" in answer:
            raise UsageError(answer["refused"])
        if "failed" in answer:
            raise ModelError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process; the next request starts it again."""
        with self._turn:
            self._end()

    def _ask(self, request: str) -> _Answer:
        process = self._process or self._start()
        stdin, stdout = _pipes(process)
        try:
            stdin.write(request + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            self._end()
            raise ModelError(
                f"The model's chat template took more than {CPU_S:g} seconds or {MEMORY_BYTES >> 20} MiB "
                "on these messages",
                fix="Send fewer messages, or correct the template.",
            )
        found: _Answer = json.loads(line)
        return found

    def _start(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C at the server's terminal is handled by the server
        )
        stdin, _ = _pipes(process)
        stdin.write(json.dumps([asdict(self._template), self._control]) + "\n")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in _pipes(process):
            try:
                pipe.close()
            except BrokenPipeError:  # unsent data is not needed any more
                continue
        process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None, process
    assert process.stdout is not None, process
    return process.stdin, process.stdout


def _limit_memory() -> None:
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Limit this process's CPU time from now on; waiting does not count."""
    import signal

    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def _answer(request: str, renderer: Renderer) -> _Answer:
    wanted = json.loads(request)
    try:
        if not wanted.pop("find", False):
            return {"text": renderer.render(**wanted)}
        date = wanted["date"]
        dated = replace(renderer, render=partial(renderer.render, date=date))
        found = find_answers(wanted["messages"], wanted["tools"], dated)
        answers = [(answer.message, list(answer.spans)) for answer in found.answers]
        return {"text": found.text, "answers": answers, "dropped": found.dropped}
    except UsageError as error:
        return {"refused": str(error)}
    except PenstockError as error:
        return {"failed": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"failed": f"The model's chat template fails ({type(error).__name__})"}


def _serve(requests: IO[str], answers: IO[str]) -> None:
    values, control = json.loads(requests.readline())
    template = ChatTemplate(**values)

    def timed(messages: Sequence[Mapping[str, object]], **options: Any) -> str:  # Any: of `render`
        _limit_time()
        return render(messages, template, **options)

    sources = (template.source or "", template.tool_source or "")
    renderer = Renderer(
        render=timed,
        control=re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"),
        has_tags=any("endgeneration" in source for source in sources),
    )
    for line in requests:
        answers.write(json.dumps(_answer(line, renderer)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _limit_memory()
    # JSON may contain escaped halves of surrogate pairs: ASCII transmits them
    _serve(sys.stdin, sys.stdout)
