"""Each page of docs/tutorials, typed into a terminal as a reader types it.

What a page may hold, and how it is run:

- A block ```console is typed into one bash per page, in a fresh folder: the lines that begin with `$ `. What
  stands below a command must be printed, line by line in that order; the page may leave lines out. A number
  stands for any number, `...` for any text, and a line `...` says that something was left out. The command
  ends with exit code 0.
- `^C` and `^D` are keys, pressed when the lines above them were printed; `> text` is typed at a program's
  prompt. After `^C` the exit code may be another; `$ echo $?` shows it, and there numbers must be equal.
- A block ```python, ```toml or ```jinja is a file, named by the comment in its first line.
- Port 8000 is another one here, for there may be a server.
- Pages after the first begin with commands of the first; they run in a copy of the first's folder instead.

Blocks ```text are for what differs each time and is not checked.
"""

import os
import re
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pexpect
import pytest

from penstock.netlab.hosts import why_not
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.md"))
LONG = {"02-loader", "03-steer-a-run", "04-plan-a-cluster", "06-tune"}
"""Pages that check_tutorials.py follows."""
NEEDS = {"04-plan-a-cluster": why_not()}
"""Why a page cannot be run here, if so."""

PATIENCE_S = 600
PROMPT = r"<exit (\d+)>"
START = r"(?m)(?:^|\x1b\[K)[ \t\r]*"  # of a line, or where a command has cleared one
END = r"[ \t]*(?:\r?\n|(?=<exit ))"
NUMBER = r"-?\d(?:[\d,.:]*\d)?(?:e[-+]\d+)?[kKMGT]?"


@dataclass(frozen=True, slots=True)
class File:
    """A block that is a file."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line that is typed, and what the page shows below it."""

    text: str
    shown: list[str] = field(default_factory=list)


def blocks(page):
    """Return the blocks of a page in order, each a list of what is done for it."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert {kind for kind, _ in found} <= {"console", "python", "toml", "jinja", "text"}, page
    return [commands(text) if kind == "console" else [file(text)] for kind, text in found if kind != "text"]


def file(text):
    first = re.match(r"(?:#|{#-) (\S+\.\w+)( -#})?\n", text)
    assert first, f"a file must be named in its first line:\n{text}"
    return File(first[1], text)


def commands(text):
    found = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif found and found[-1].text.endswith("\\"):
            found[-1] = Command(f"{found[-1].text}\n{line}")
        else:
            assert found, f"nothing was typed before {line!r}"
            found[-1].shown.append(line.strip())
    return found


def pattern(line, *, exact):
    """Return the regular expression of a line that the page shows."""
    meaning = {"...": r"[^\r\n]*"}
    parts = re.split(rf"(\.\.\.|[ \t]+|{NUMBER})", line)
    for part in parts:
        if part.isspace():
            meaning[part] = r"[ \t]+"
        elif re.fullmatch(NUMBER, part) and not exact:
            meaning[part] = NUMBER
    return START + "".join(meaning.get(part, re.escape(part)) for part in parts) + END


class Terminal:
    """A bash that types commands and holds what is printed against what a page shows."""

    def __init__(self, folder):
        self._port = str(free_port())
        bin_folder = str(Path(sys.executable).parent)
        self._shell = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "PS1": "<exit $?>",
                "PS2": "",
                "TERM": "dumb",
            },
            echo=False,
            encoding="utf-8",
            timeout=PATIENCE_S,
            dimensions=(50, 250),
        )
        self._shell.expect(PROMPT)

    def with_port(self, text):
        return text.replace("8000", self._port)

    def run(self, command, *, code_is_asked_for):
        self._shell.sendline(self.with_port(command.text))
        in_background = command.text.endswith("&")
        if in_background:
            self._shell.expect(PROMPT)
        for line in command.shown:
            self._follow(line, command)
        if not in_background:
            self._shell.expect(PROMPT)
            assert self._shell.match[1] == "0" or code_is_asked_for or "^C" in command.shown, (
                f"$ {command.text}\nended with {self._shell.match[1]}:\n{self._shell.before}"
            )

    def _follow(self, line, command):
        if line == "^C":
            self._shell.sendintr()
        elif line == "^D":
            self._shell.sendeof()
        elif line.startswith("> "):
            self._shell.expect_exact("> ")
            self._shell.sendline(line[2:])
        elif line != "...":
            wanted = pattern(line, exact=command.text == "echo $?")
            found = self._shell.expect([wanted, PROMPT, pexpect.TIMEOUT, pexpect.EOF])
            assert found == 0, f"$ {command.text}\nshould print\n{line}\nbut printed\n{self._shell.before}"

    def close(self):
        self._shell.close(force=True)  # bash hangs up on what still runs


@contextmanager
def terminal(folder):
    opened = Terminal(folder)
    try:
        yield opened
    finally:
        opened.close()


def follow(page, folder, *, done=()):
    """Do what a page says, but for what was done already."""
    steps = [step for block in blocks(page) if not all(step in done for step in block) for step in block]
    with terminal(folder) as shell:
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if isinstance(step, File):
                (folder / step.name).write_text(shell.with_port(step.text))
            else:
                asked = isinstance(after, Command) and after.text == "echo $?"
                shell.run(step, code_is_asked_for=asked)


@pytest.fixture(scope="module")
def first_folder(tmp_path_factory):
    """The folder of a reader of the first page."""
    folder = tmp_path_factory.mktemp("tutorial")
    follow(PAGES[0], folder)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in LONG], ids=lambda page: page.stem
)
def test_a_page_does_what_it_says(page, first_folder, tmp_path):
    if page != PAGES[0]:
        follow_after_the_first(page, first_folder, tmp_path)


def follow_after_the_first(page, first_folder, tmp_path):
    """Do what a page says in a copy of the folder of the first page's reader."""
    if NEEDS.get(page.stem):
        pytest.skip(NEEDS[page.stem])
    folder = shutil.copytree(first_folder, tmp_path / "reader")
    follow(page, folder, done=[step for block in blocks(PAGES[0]) for step in block])


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step 1/200  loss 6.93  2k tokens/s", "step 1/200   loss 6.9\n"),
        ("corpus is complete: ...", "corpora is complete: 3 s\n"),
        ("corpus is complete", "corpus is complete: 3 s\n"),
        ("PASS", "FAIL\n"),
    ],
)
def test_what_is_not_printed_is_not_taken_for_it(shown, printed):
    assert re.search(pattern(shown, exact=False), printed) is None


def test_numbers_and_spaces_may_differ_but_not_where_the_exit_code_is_asked_for():
    assert re.search(pattern("a  1.5k b", exact=False), "x\na 22 b\r\n")
    assert re.search(pattern("75", exact=True), "75\r\n")
    assert not re.search(pattern("75", exact=True), "1\r\n")


WAIT = """\
```python
# wait.py
import time

print("begun", flush=True)
time.sleep(60)
```
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```console\n$ echo a\nb\n```\n", "$ echo a should print b but printed a"),
        ("```console\n$ false\n```\n", "$ false ended with 1"),
        (
            f"{WAIT}```console\n$ python wait.py\nbegun\n^C\n$ echo $?\n0\n```\n",
            "$ echo $? should print 0 but printed 130",
        ),
        ("```python\nprint(1)\n```\n", "a file must be named in its first line"),
    ],
    ids=["another output", "a failure", "another exit code", "a file without a name"],
)
def test_a_page_that_is_not_true_fails(tmp_path, text, said):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError) as raised:
        follow(page, tmp_path)
    assert said in " ".join(str(raised.value).split())


def test_keys_are_pressed_and_text_is_typed_where_a_page_shows_them(tmp_path):
    page = tmp_path / "page.md"
    asks = "```python\n# ask.py\nprint('hello', input('> '))\n```\n"
    typed = "$ python ask.py\n> you\nhello you\n$ python wait.py\nbegun\n^C\n$ echo $?\n130\n"
    page.write_text(f"{asks}{WAIT}```console\n{typed}$ python wait.py &\nbegun\n$ kill %1\n```\n")
    follow(page, tmp_path)
    assert (tmp_path / "ask.py").is_file()
