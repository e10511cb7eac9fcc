"""The worker processes of a console in a test: forked from the warm parent, not started as interpreters."""

import json
import subprocess

from penstock.cli.data.inspect import _reply
from penstock.console.workers import data_process
from penstock.console.workers.data_process import DataProcess, QuestionRefused
from penstock.console.workers.model_process import ModelProcess
from penstock.core import env
from penstock.train.inspect.run_questions import RunQuestions
from tests.warm import Command


def fork_workers(monkeypatch):
    """Let consoles of this process fork their workers."""

    def inspect():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return Command("data", "inspect", encoding="utf-8", start_new_session=True, **pipes)

    def serve(self, words, errors):
        environment = {**env.variables(""), "PENSTOCK_API_KEY": self._key}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        return Command("serve", *words, env=environment, start_new_session=True, **streams)

    monkeypatch.setattr(data_process, "start", inspect)
    monkeypatch.setattr(ModelProcess, "_start", serve)


def answer_here(monkeypatch):
    """Let consoles answer questions about runs in this process, in which a test may change what is asked."""
    questions = RunQuestions()

    def ask(self, question, run, **words):  # noqa: ARG001
        found = _reply(questions, json.dumps({"id": 1, "ask": question, "run": str(run), **words}))
        if "error" in found:
            raise QuestionRefused(found["error"], found["status"])
        return found["answer"]

    monkeypatch.setattr(DataProcess, "ask", ask)
