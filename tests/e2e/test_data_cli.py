"""`penstock data` as a user runs it: real processes, real kills, every message and exit code."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from penstock.testing.corpora import write_corpus
from penstock.text.tokenizer import train_tokenizer
from tests import warm
from tests.in_process import run_cli
from tests.published_templates import CHATML, without_tags
from tests.warm import Command

ENVIRONMENT = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


def penstock(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    run = warm.penstock if words[0] == "prepare" else run_cli  # tokenizers leaves threads
    return run("data", *words, cwd=folder, env=ENVIRONMENT)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the dog "] * 9, vocab_size=300).save(path)
    return path


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


def test_a_text_too_small_for_the_vocabulary_asked_for_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 9)
    words = ("prepare", "a.txt", "--train-tokenizer", "100000", "--out", "corpus")
    done = penstock(*words, folder=tmp_path)
    record = json.loads(penstock(*words, "--json", folder=tmp_path).stdout)
    assert (record["vocab_size"] < 300, record["vocab_size_asked"]) == (True, 100_000)
    assert f"requested 100,000, the text yields {record['vocab_size']}\n" in done.stdout


@pytest.mark.parametrize("words", [["data", "--help"], ["data", "verify", "--help"]], ids=" ".join)
def test_the_help_has_a_worked_example(words: list[str], tmp_path: Path) -> None:
    done = penstock(*words[1:], folder=tmp_path)
    assert "example:\n  penstock data " in done.stdout


def test_a_mixed_input_is_prepared_described_and_verified(tmp_path: Path) -> None:
    (tmp_path / "code" / "tests").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("print('hello')\n" * 20)
    (tmp_path / "code" / "tests" / "b.py").write_text("left out")
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50))
    (tmp_path / "web.jsonl.zst").write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
    pq.write_table(pa.table({"text": ["row one", "row two"]}), tmp_path / "rows.parquet")
    inputs = ("code", "web.jsonl.zst", "rows.parquet")
    done = penstock(
        "prepare",
        *inputs,
        "--exclude",
        "tests",
        "--train-tokenizer",
        300,
        "--out",
        "corpus",
        "--json",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["documents"], summary["rejected"], summary["dtype"]) == (53, 0, "uint16")
    assert summary["passed_over"] == {"excluded": 1}
    described = json.loads(penstock("describe", "corpus", "--json", folder=tmp_path).stdout)
    assert described["tokens"] == summary["tokens"]
    assert described["samples"][0]["text"].startswith("print('hello')")
    shown = penstock("describe", "corpus", folder=tmp_path)
    assert "tokens per document: min" in shown.stdout
    assert "█" in shown.stdout
    sound = penstock("verify", "corpus", folder=tmp_path)
    assert (sound.returncode, "corpus is sound" in sound.stdout) == (0, True)
    again = penstock(
        "prepare", *inputs, "--exclude", "tests", "--train-tokenizer", 300, "--out", "corpus", folder=tmp_path
    )
    assert (again.returncode, "already complete" in again.stdout) == (0, True)


def write_many(folder: Path) -> None:
    """Two inputs of about a megabyte together, with a broken line now and then."""
    rows = [json.dumps({"text": f"the cat number {i} sat on the mat {i * i}. " * 4}) for i in range(8000)]
    rows[100::1000] = ["{broken"] * len(rows[100::1000])
    (folder / "a.jsonl").write_text("\n".join(rows[:4000]))
    (folder / "b.jsonl").write_text("\n".join(rows[4000:]))


ARGUMENTS = ("prepare", "a.jsonl", "b.jsonl", "--shard-tokens", "20k", "--max-errors", 8, "--out")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> tuple[Path, dict[str, bytes]]:
    """A folder of inputs and the content of their corpus, made without interruption."""
    folder = tmp_path_factory.mktemp("many")
    write_many(folder)
    done = penstock(*ARGUMENTS, "whole", "--tokenizer", tokenizer, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, content(folder / "whole")


def started(folder: Path, out: str, tokenizer: Path, *, shards: int) -> subprocess.Popen[str]:
    """Start a preparation and return when it has finished so many more shards, or ended."""
    had = len(list((folder / out).glob("shard-*.arrow")))
    process = Command(
        *("data", *ARGUMENTS, out, "--tokenizer", tokenizer),
        cwd=folder,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        if len(list((folder / out).glob("shard-*.arrow"))) >= had + shards:
            break
        time.sleep(0.001)
    return process


def test_killed_again_and_again_it_ends_with_the_same_bytes(
    many: tuple[Path, dict[str, bytes]], tokenizer: Path
) -> None:
    folder, expected = many
    num_kills = 0
    for shards in (1, 2, 1, 5, 3, 1):
        process = started(folder, "killed", tokenizer, shards=shards)
        num_kills += process.poll() is None
        process.kill()
        process.communicate()
    assert num_kills >= 4
    done = penstock(*ARGUMENTS, "killed", "--tokenizer", tokenizer, folder=folder)
    assert done.returncode == 0, done.stderr
    assert content(folder / "killed") == expected


def test_conversations_killed_in_the_middle_end_with_the_same_bytes(tmp_path: Path, tokenizer: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(without_tags(CHATML))
    turns = [("user", "the cat number {i}?"), ("assistant", "sat on the mat {i}.")] * 2
    (tmp_path / "chats.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [{"role": role, "content": text.format(i=i)} for role, text in turns]})
            for i in range(1500)
        )
    )
    words = ("prepare", "chats.jsonl", "--chat", "--tokenizer", model, "--shard-tokens", "5k", "--out")
    whole = penstock(*words, "whole", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = tmp_path / "killed"
    with Command(
        *("data", *words, "killed"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 120
        while len(list(killed.glob("shard-*.arrow"))) < 3 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert process.poll() is None, "killed in the middle"
        process.kill()
    assert not (killed / "manifest.json").exists()
    again = penstock(*words, "killed", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert content(killed) == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 75, "Terminated"), (signal.SIGINT, 130, "Interrupted")]
)
def test_a_polite_stop_says_that_the_same_command_continues(
    many: tuple[Path, dict[str, bytes]], tokenizer: Path, number: int, code: int, word: str
) -> None:
    folder, expected = many
    process = started(folder, word, tokenizer, shards=2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert f"{word}. Finished shards in {word}: " in errors
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    assert penstock(*ARGUMENTS, word, "--tokenizer", tokenizer, folder=folder).returncode == 0
    assert content(folder / word) == expected


def test_a_second_preparation_of_the_same_folder_refuses(
    many: tuple[Path, dict[str, bytes]], tokenizer: Path
) -> None:
    folder, _ = many
    process = started(folder, "both", tokenizer, shards=1)
    process.send_signal(signal.SIGSTOP)
    try:
        second = penstock(*ARGUMENTS, "both", "--tokenizer", tokenizer, folder=folder)
    finally:
        process.kill()
        process.communicate()
    assert second.returncode == 1
    assert "being written by another process (data prepare, pid" in one_line(second.stderr)


BAD_LINES = {
    "broken json": '{"text": ',
    "missing field": '{"body": "x"}',
    "not text": '{"text": 7}',
    "too large": '{"text": "' + "x" * 500 + '"}',
    "undecodable": '{"text": "\\udfff"}',
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_fails_by_default_and_is_left_out_on_request(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"text": "good"}}\n{BAD_LINES[kind]}\n')
    words = ("prepare", "in.jsonl", "--tokenizer", tokenizer, "--max-document-bytes", 100, "--out", "out")
    failed = penstock(*words, folder=tmp_path)
    assert failed.returncode == 1
    row = json.loads((tmp_path / "out" / "rejected.jsonl").read_text())
    assert one_line(failed.stderr).endswith(
        f"penstock: Rejected inputs: 1 ({kind}: 1), but --max-errors is 0; out/rejected.jsonl lists them; "
        f"the first is in.jsonl, line 2: {row['reason']}. Correct them and use --restart, or run the same "
        "command with --max-errors 1 to leave them out; it finishes at once from the work already done."
    )
    assert (row["source"], row["line"], row["kind"]) == ("in.jsonl", 2, kind.replace(" ", "_"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    accepted = penstock(*words, "--max-errors", 1, folder=tmp_path)
    assert accepted.returncode == 0
    assert f"rejected     1 ({kind}: 1)" in accepted.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prepare", "absent", "--train-tokenizer", "300"), "Input absent does not exist"),
        (("prepare", "empty", "--train-tokenizer", "300"), "No input file in empty (empty)"),
        (("prepare", "pictures", "--train-tokenizer", "300"), "suffix .png: 1"),
        (("prepare", "a.txt"), "Exactly one of --tokenizer and --train-tokenizer"),
        (("prepare", "a.txt", "--train-tokenizer", "300", "--tokenizer", "t"), "Exactly one of"),
        (("prepare", "a.txt", "--tokenizer", "absent.json"), "Tokenizer absent.json does not exist"),
        (
            ("prepare", "a.txt", "--tokenizer", "."),
            "Tokenizer . has no tokenizer.json. Give the path of a tokenizer.json",
        ),
        (("prepare", "a.txt", "--train-tokenizer", "256"), "--train-tokenizer is too small (got 256)"),
        (("prepare", "a.txt", "--train-tokenizer", "many"), "Not a count or size (got 'many')"),
        (
            ("prepare", "a.txt", "--train-tokenizer", "300", "--shard-tokens", "0"),
            "--shard-tokens must be at least 1",
        ),
        (("prepare", "--train-tokenizer", "300"), "arguments are required: INPUT"),
    ],
)
def test_wrong_usage_exits_with_2_and_leaves_no_folder(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_bytes(b"\x89PNG")
    done = penstock(*words, "--out", "out", folder=tmp_path)
    assert done.returncode == 2
    assert message in one_line(done.stderr)
    assert not (tmp_path / "out").exists()


def damage_flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-300] ^= 4
    shard.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_flip, "shard-00003.arrow: altered"),
        (lambda shard: os.truncate(shard, 500), "shard-00003.arrow: has 500 bytes"),
        (Path.unlink, "shard-00003.arrow: missing"),
        (
            lambda shard: shard.with_name("shard-00004.arrow").replace(shard),
            "holds the content of shard-00004",
        ),
    ],
)
def test_verify_lists_every_damage_and_exits_with_1(
    many: tuple[Path, dict[str, bytes]], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    for name, data in many[1].items():
        (tmp_path / name).write_bytes(data)
    damage(tmp_path / "shard-00003.arrow")
    done = penstock("verify", tmp_path, folder=tmp_path)
    assert done.returncode == 1
    assert message in done.stdout
    report = json.loads(penstock("verify", tmp_path, "--json", folder=tmp_path).stdout)
    assert (report["sound"], "shard-00003.arrow" in {row["file"] for row in report["faults"]}) == (
        False,
        True,
    )


def test_verify_writes_block_checksums_of_a_sound_corpus_only(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[1, 2, 3], [4]])
    assert penstock("verify", "corpus", "--block-checksums", folder=tmp_path).returncode == 0
    written = tmp_path / "corpus" / "blocks.checksums"
    assert written.is_file()
    written.unlink()
    shard = tmp_path / "corpus" / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert penstock("verify", "corpus", "--block-checksums", folder=tmp_path).returncode == 1
    assert not written.exists()
    far = penstock("verify", "s3://bucket/corpus", "--block-checksums", folder=tmp_path)
    assert far.returncode == 2
    assert "needs a folder of this machine (got 's3://bucket/corpus')" in " ".join(far.stderr.split())


@pytest.mark.parametrize("command", ["describe", "verify"])
def test_a_folder_that_is_no_corpus_exits_with_1(tmp_path: Path, command: str) -> None:
    done = penstock(command, "absent", folder=tmp_path)
    assert done.returncode == 1
    assert "Corpus absent does not exist. Make it with" in one_line(done.stderr)


@pytest.mark.parametrize("command", ["prepare", "append", "describe", "verify"])
def test_help_has_an_example_and_the_exit_codes(tmp_path: Path, command: str) -> None:
    shown = penstock(command, "--help", folder=tmp_path).stdout
    assert f"penstock data {command} " in shown.split("example:")[1]
    assert "exit codes: 0 " in shown
