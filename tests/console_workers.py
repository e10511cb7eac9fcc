"""A console in the process of the tests, and its workers: forked from the warm parent, not interpreters."""

import json
import socket
import subprocess
from contextlib import contextmanager
from threading import Thread

import uvicorn

from penstock.cli.data.inspect import _reply
from penstock.console.workers import data_process
from penstock.console.workers.data_process import DataProcess, QuestionRefused
from penstock.console.workers.model_process import ModelProcess
from penstock.core import env
from penstock.train.inspect.run_questions import RunQuestions
from tests.warm import Command


@contextmanager
def served(state, app):
    """Yield the address of a console's app, which answers in a thread."""
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, interface="asgi3", lifespan="off", log_config=None))
    thread = Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/"
    finally:
        state.end()
        server.should_exit = True
        thread.join()
        state.close()


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
