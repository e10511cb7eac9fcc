"""Commands as the tests start them: what is theirs, and what is left of them."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest
import torch

from penstock import __version__
from penstock.cli.main import VERBS
from tests import warm
from tests.in_process import run_cli
from tests.warm import Command, penstock

RUNNERS = pytest.mark.parametrize("run", [run_cli, penstock], ids=["in this process", "forked"])


def as_interpreter(*words, **options):
    return penstock(*words, interpreter="the others are held against it", **options)


@pytest.mark.parametrize(
    "words",
    [["--version"], [], ["--help"], ["train"], ["data", "describe", "absent"], ["paint"]],
    ids=lambda words: " ".join(words) or "no words",
)
def test_a_command_answers_as_that_of_an_interpreter(words, tmp_path):
    expected, *found = (run(*words, cwd=tmp_path) for run in (as_interpreter, run_cli, penstock))
    for done in found:
        assert (done.returncode, done.stdout, done.stderr) == (
            expected.returncode,
            expected.stdout,
            expected.stderr,
        )


@RUNNERS
def test_folder_and_environment_are_the_commands_own(run, tmp_path):
    before = dict(os.environ), Path.cwd()
    (tmp_path / "recipe.toml").write_text("[nonsense]\n")
    narrow, wide = (run("--help", env={**os.environ, "COLUMNS": str(n)}).stdout for n in (50, 150))
    assert narrow != wide
    assert "recipe.toml does not exist" in " ".join(run("train", "recipe.toml", cwd="/").stderr.split())
    assert "nonsense" in run("train", "recipe.toml", cwd=tmp_path).stderr
    assert before == (dict(os.environ), Path.cwd())


@pytest.mark.parametrize("interpreter", ["", "the other is held against it"], ids=["forked", "interpreter"])
def test_a_command_is_a_process_that_signals_end(interpreter):
    words = ("console", ".", "--port", 0)
    options = {"interpreter": interpreter, "stdout": subprocess.PIPE, "text": True}
    with Command(*words, **options) as first:
        assert "http://" in first.stdout.readline()
        assert os.getpgid(first.pid) == os.getpgid(0)
        first.kill()
        assert first.wait(60) == -signal.SIGKILL
    with Command(*words, start_new_session=True, **options) as second:
        assert "http://" in second.stdout.readline()
        assert os.getsid(second.pid) == os.getpgid(second.pid) == second.pid
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_starts_in_an_interpreter(verb):
    done = penstock(verb, "--help", interpreter="users start each one so")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: penstock {verb} ")


def test_what_an_interpreter_reads_as_it_starts_is_refused_to_a_forked_command():
    with pytest.raises(AssertionError, match="PYTHONUTF8: read as an interpreter starts"):
        Command("--version", env={**os.environ, "PYTHONUTF8": "0"})


@pytest.fixture
def verb(monkeypatch):
    """Make `penstock train` do something else in this process."""

    def replace(work):
        module = types.ModuleType("penstock.cli.train", "Train, or so it says.")
        module.add_arguments, module.run = lambda _parser: None, lambda _arguments: work()
        monkeypatch.setitem(sys.modules, "penstock.cli.train", module)

    return replace


def test_a_command_in_this_process_leaves_it_as_it_was(verb, tmp_path):
    def changes_everything():
        os.environ["A_NEW_VARIABLE"] = "1"
        os.chdir(tmp_path)
        sys.argv.append("more")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        logging.getLogger("penstock").handlers[:] = [logging.NullHandler()]
        logging.getLogger().setLevel(1)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        random.seed(7)
        warnings.simplefilter("error")
        return 0

    def state():
        return (
            dict(os.environ),
            Path.cwd(),
            sys.argv[:],
            [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
            logging.getLogger("penstock").handlers[:],
            logging.getLogger().level,
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            torch.are_deterministic_algorithms_enabled(),
            random.getstate(),
            warnings.filters[:],
            (sys.stdin, sys.stdout, sys.stderr),
            [os.fstat(number) for number in range(3)],
        )

    verb(changes_everything)
    before = state()
    assert run_cli("train").returncode == 0
    assert state() == before


def test_all_that_a_command_in_this_process_prints_is_its_output(verb):
    def prints():
        print("größer")
        sys.stdout.flush()
        os.write(1, b"by C\n")
        subprocess.run(["echo", "by a child"], check=True)
        print(sys.stdin.read(), file=sys.stderr)
        warnings.warn("look", UserWarning, stacklevel=1)
        raise RuntimeError("a bug")

    verb(prints)
    done = run_cli("train", stdin="given")
    assert (done.returncode, done.stdout) == (1, "größer\nby C\nby a child\n")
    assert done.stderr.startswith("given\n")
    assert "UserWarning: look" in done.stderr
    assert done.stderr.endswith("RuntimeError: a bug\n")


def test_the_version_is_printed_by_all():
    assert {run("--version").stdout for run in (run_cli, penstock)} == {f"penstock {__version__}\n"}


def test_orphans_that_come_to_the_tests_while_a_command_is_forked_are_no_children_of_a_test(monkeypatch):
    penstock("--version")
    socket = warm._parent()._socket

    class SlowSocket:
        def __getattr__(self, name):
            return getattr(socket, name)

        def recv(self, size):
            time.sleep(0.5)
            return socket.recv(size)

    monkeypatch.setattr(warm._parent(), "_socket", SlowSocket())
    before = warm.children()
    with subprocess.Popen(["sh", "-c", "for _ in $(seq 30); do (sleep 0.1 &); sleep 0.1; done"]):
        assert penstock("--version").returncode == 0
    assert warm.children() == before
