"""Ctrl-C at any moment of a command: one line and exit code 130, never a traceback."""

import signal
import subprocess
import sys

import pytest

DURING_IMPORT = """
import os, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), 2)

sys.meta_path.insert(0, Sender())
sys.argv = ["penstock", "recipes", "list"]
from penstock.__main__ import main
sys.exit(main())
"""

AT_THE_END = """
import atexit, os, sys
atexit.register(os.kill, os.getpid(), 2)
sys.argv = ["penstock", "recipes", "show", "tiny"]
from penstock.__main__ import main
sys.exit(main())
"""

AT_WORK = """
import os, sys
import penstock.cli.recipes as verb

def run(arguments):
    try:
        os.kill(os.getpid(), 2)
    finally:
        print("cleaned up")

verb.run = run
sys.argv = ["penstock", "recipes", "list"]
from penstock.__main__ import main
sys.exit(main())
"""


def run(code: str, *, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )


@pytest.mark.parametrize(
    "name", ["penstock.cli.main", "argparse", "penstock.core.table", "penstock.cli.recipes.list"]
)
def test_an_interrupt_while_modules_load_is_one_line(name: str) -> None:
    done = run(DURING_IMPORT.format(name=name))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "penstock: Interrupted.\n")


def test_an_interrupt_while_the_interpreter_ends_is_one_line() -> None:
    done = run(AT_THE_END)
    assert (done.returncode, done.stderr) == (130, "penstock: Interrupted.\n")
    assert "[model]" in done.stdout


def test_a_command_at_work_is_interrupted_by_an_exception_and_may_clean_up() -> None:
    done = run(AT_WORK)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "penstock: Interrupted.\n")


@pytest.mark.parametrize("code", [DURING_IMPORT.format(name="argparse"), AT_THE_END])
def test_an_interrupt_that_the_starter_ignores_is_ignored(code: str) -> None:
    done = run(code, ignored=True)
    assert (done.returncode, done.stderr) == (0, "")
