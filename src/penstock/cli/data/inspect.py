"""`penstock data inspect`: answer questions about runs, one JSON object a line."""

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from penstock.core.errors import PenstockError
from penstock.train.control.send import NoJob
from penstock.train.inspect.run_questions import RunQuestions

_AT_ONCE = 8
_STATUSES = ((NoJob, 409), (PenstockError, 400), (OSError, 500))

EPILOG = """\
`penstock console` starts this process for what needs a run's recipe, corpora, checkpoints or job. A question
is a line of standard input: `ask` names it, `run` is the run's folder, `id` comes back with the answer. The
command ends at the end of its input. Questions:

  rows         step, offset, limit: rows of a step, their documents, and the text of each token
  mixture      step, weights: mixture, epochs of each corpus by the run's end; other weights: a preview
  checkpoints  steps of the complete checkpoints
  model        step: bytes of a checkpoint's weights and of a token in the KV cache
  requests     requests to the run's job and the replies
  request      asked, asked_by: send one

example:
  echo '{"id": 1, "ask": "checkpoints", "run": "runs/first"}' | penstock data inspect

exit codes: 0 end of input, 2 wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no option."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001
    """Answer until the end of the input."""
    questions, lock = RunQuestions(), Lock()

    def reply(line: str) -> None:
        said = json.dumps(_reply(questions, line))
        with lock:
            print(said, flush=True)

    with ThreadPoolExecutor(_AT_ONCE, "question") as pool:
        for line in sys.stdin:
            pool.submit(reply, line)
    questions.close()
    return 0


def _reply(questions: RunQuestions, line: str) -> dict[str, Any]:  # Any: JSON values
    number = None
    try:
        question = json.loads(line)
        number = question.pop("id")
        return {"id": number, "answer": questions.answer(question)}
    except Exception as error:  # the process answers other questions too
        return {"id": number, **_refusal(error)}


def _refusal(error: Exception) -> Mapping[str, Any]:
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 0)
    if isinstance(error, OSError):
        return {"error": f"A file cannot be read or written: {error}.", "status": status}
    said = str(error) if status else f"The question cannot be answered: {type(error).__name__} {error}"
    return {"error": said, "status": status or 500}
