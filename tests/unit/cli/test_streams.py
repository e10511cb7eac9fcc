"""The standard streams of a command that was started without them, or loses the reader of its log."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

COMMAND = """
import os, sys, types
module = types.ModuleType("penstock.cli.train")
module.add_arguments = lambda parser: None
def run(arguments):
    {work}
    return 75
module.run = run
sys.modules["penstock.cli.train"] = module
from penstock.cli.main import main
sys.argv = ["penstock", "train"]
sys.exit(main())
"""


def command(work: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a `penstock train` that does something else."""
    words = [sys.executable, "-c", COMMAND.format(work=work)]
    return subprocess.run(words, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def closing(*numbers: int) -> Sequence[str]:
    """The words of a shell that runs the words after them without some of its streams."""
    return ["sh", "-c", 'exec "$0" "$@" ' + " ".join(f"{number}>&-" for number in numbers)]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_command_started_without_a_stream_works_and_its_files_get_other_numbers(number: int) -> None:
    work = "print(sys.stdin.read()), print('said', file=sys.stderr); sys.exit(min(os.pipe()) > 2 and 75)"
    words = [*closing(number), sys.executable, "-c", COMMAND.format(work=work)]
    done = subprocess.run(words, input=None if number else "", capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert done.stderr == ("" if number == 2 else "said\n")


def test_whom_a_command_starts_without_its_streams_has_them() -> None:
    child = "import os; [os.fstat(number) for number in range(3)]"
    work = f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    words = [*closing(0, 1, 2), sys.executable, "-c", COMMAND.format(work=work)]
    assert subprocess.run(words, check=False).returncode == 75


def test_work_goes_on_when_the_reader_of_its_log_has_left() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    work = "print('step 1', file=sys.stderr), print('step 2', file=sys.stderr), print('done')"
    done = command(work, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert (done.returncode, done.stdout) == (75, "done\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_work_goes_on_when_the_disk_of_its_log_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = command("print('step 1', file=sys.stderr), print('done')", stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (75, "done\n")


def test_each_line_of_the_log_is_written_at_once() -> None:
    work = "print('step 1', file=sys.stderr); os._exit(3)"
    done = command(work, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (3, "step 1\n")
