"""The dispatcher: one paragraph an error, exit codes for scripts, nothing heavy for a help text."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from penstock import __version__
from penstock.cli import main as cli
from penstock.core.errors import ConfigError, CorpusError

HEAVY = ("torch", "numpy", "pyarrow", "tokenizers", "rich", "transformers", "safetensors")


def python(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter whose output is buffered, as a user's is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, *words], text=True, stderr=subprocess.PIPE, env=environment, check=False, **options
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """A function that makes `penstock train` do something else."""

    def replace(work: Callable[[], int]) -> None:
        module = ModuleType("penstock.cli.train", "Train, or so it says.")
        module.add_arguments = lambda parser: parser.add_argument("--steps", type=int)  # type: ignore[attr-defined]
        module.run = lambda arguments: work()  # type: ignore[attr-defined]  # noqa: ARG005
        monkeypatch.setitem(sys.modules, "penstock.cli.train", module)

    return replace


def failing(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    "program",
    ["import penstock", "from penstock.cli.main import main; main(['--help'])"],
    ids=["import", "help"],
)
def test_the_package_and_its_help_load_nothing_heavy(program: str) -> None:
    code = f"""
import sys
try:
    {program}
except SystemExit:
    pass
sys.exit(", ".join(set(sys.modules) & set({HEAVY!r})) or None)
"""
    done = python("-c", code, stdout=subprocess.PIPE)
    assert done.returncode == 0, f"loaded {done.stderr}"


def test_the_help_of_no_command_waits_for_torch() -> None:
    """One interpreter prints them all: the first after which torch is there has loaded it."""
    code = f"""
import sys
from penstock.cli.main import main
for name in {[*cli.VERBS]!r}:
    try:
        main([name, "--help"])
    except SystemExit:
        pass
    if "torch" in sys.modules:
        sys.exit(f"{{name}} loads torch")
"""
    done = python("-c", code, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: penstock {name}" in done.stdout for name in cli.VERBS)


def test_importing_the_package_loads_nothing_beyond_itself() -> None:
    listed = [
        set(python("-c", f"{code}; import sys; print(*sys.modules)", stdout=subprocess.PIPE).stdout.split())
        for code in ("pass", "import penstock")
    ]
    assert listed[1] - listed[0] == {"penstock"}


def test_the_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name, purpose in cli.VERBS.items():
        assert f"  {name:<18}{purpose}\n" in shown
    assert "exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped" in shown


@pytest.mark.parametrize("name", ["export", "generate", "chat", "serve", "train", "plan"])
def test_the_help_of_a_command_has_its_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert "\nexit codes: 0 " in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_command_listed_exists_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: penstock {name}" in capsys.readouterr().out


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


def test_no_command_is_wrong_usage_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: penstock COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "unknown command 'trian'. Did you mean 'train'?"),
        ("xyzzy", "Known: chat, checkpoint, console, control, data"),
    ],
)
def test_an_unknown_command_is_wrong_usage_and_names_the_nearest(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([word])
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-such-option"], "usage: penstock"),
        (["train", "--no-such-option"], "usage: penstock"),
        (["train", "--steps", "many"], "usage: penstock"),
        (["train", "extra"], "usage: penstock"),
        (["train", "--stesp", "3"], "usage: penstock train [-h]"),
        (["train", "--stesp", "3"], "unrecognized arguments: --stesp 3. Did you mean '--steps'?"),
        (["data", "describe", "x", "--jsn"], "usage: penstock data describe [-h]"),
        (["data", "describe", "x", "--jsn"], "unrecognized arguments: --jsn. Did you mean '--json'?"),
    ],
)
def test_a_wrong_option_is_wrong_usage_and_the_nearest_is_named(
    words: list[str],
    said: str,
    verb: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb(lambda: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_later_rank_that_no_first_one_has_ended_says_what_is_wrong_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("penstock.core.clock.sleep", waits.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    assert ended.value.code == 2
    assert waits == [cli._FIRST_SPEAKS_S]
    assert "required: RECIPE" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_exit_code_is_the_commands(code: int, verb: Callable[[Callable[[], int]], None]) -> None:
    verb(lambda: code)
    assert cli.main(["train"]) == code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("It is wrong", got=3, fix="Right it."), 2, "penstock: It is wrong (got 3). Right it."),
        (CorpusError("It is damaged"), 1, "penstock: It is damaged."),
        (KeyboardInterrupt(), 130, "penstock: Interrupted."),
        (OSError(errno.ENOSPC, "No space left on device"), 1,
         "penstock: No space left on device. Free some space (`df -h` shows where) and run the same command "
         "again."),
        (OSError("odd"), 1, "penstock: odd."),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_an_error_is_one_paragraph_and_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    verb: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb(failing(error))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == f"{said}\n"


def test_a_long_message_is_folded_into_one_paragraph_and_long_paths_stay_whole(
    verb: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/very" * 30
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    verb(failing(CorpusError(f"The shard\n\nin {path} " + "is damaged " * 20)))
    cli.main(["train"])
    shown = capsys.readouterr().err
    assert "\n\n" not in shown
    assert path in shown
    assert all(len(line) <= 100 or line == path for line in shown.splitlines())
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    cli.main(["train"])
    assert len(capsys.readouterr().err.splitlines()) == 1, "one line where there is no terminal"


@pytest.mark.parametrize("words", [["--debug", "train"], ["train", "--debug"]], ids=" ".join)
def test_debug_anywhere_shows_the_error_itself(
    words: list[str], verb: Callable[[Callable[[], int]], None]
) -> None:
    verb(failing(CorpusError("It is damaged")))
    with pytest.raises(CorpusError):
        cli.main(words)


def test_a_bug_of_ours_is_a_traceback_and_not_a_paragraph(verb: Callable[[Callable[[], int]], None]) -> None:
    verb(failing(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


def test_the_module_and_the_command_are_the_same() -> None:
    done = python("-m", "penstock", "--version", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"penstock {__version__}\n", "")


def test_both_outputs_are_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    code = """
import sys, types
module = types.ModuleType("penstock.cli.train")
module.add_arguments = lambda parser: None
def run(arguments):
    print("gr\\u00f6\\u00dfer \\udcff")
    print("\\u65e5 \\udcff", file=sys.stderr)
    return 0
module.run = run
sys.modules["penstock.cli.train"] = module
from penstock.cli.main import main
sys.exit(main(["train"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "größer ?\n", "日 \\udcff\n")


def to_a_reader_that_left(*words: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return python(*words, stdout=writer)
    finally:
        os.close(writer)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], []], ids=str)
def test_a_short_answer_to_a_reader_that_left_ends_in_silence(words: list[str]) -> None:
    done = to_a_reader_that_left("-m", "penstock", *words)
    assert "BrokenPipe" not in done.stderr
    assert done.returncode in (0, 2)


def test_a_long_answer_to_a_reader_that_left_ends_in_silence() -> None:
    code = """
import sys, types
module = types.ModuleType("penstock.cli.train")
module.add_arguments = lambda parser: None
module.run = lambda arguments: print("x" * 10**6) or 0
sys.modules["penstock.cli.train"] = module
from penstock.cli.main import main
sys.exit(main(["train"]))
"""
    done = to_a_reader_that_left("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", [["--log-format", "json", "train"], ["train", "--log-format=json"]], ids=" ".join
)
def test_a_log_format_anywhere_makes_an_event_of_an_error(
    words: list[str],
    verb: Callable[[Callable[[], int]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "")
    verb(failing(CorpusError("It is damaged")))
    assert cli.main(words) == 1
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["message"]) == ("error", "It is damaged.")
    assert cli.main(["train", "--log-format"]) == 2
    assert "--log-format is text, logfmt or json" in capsys.readouterr().err


def test_an_unknown_log_format_of_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "JSON")
    assert cli.main(["version"]) == 2
    assert "PENSTOCK_LOG_FORMAT is text, logfmt or json" in capsys.readouterr().err
