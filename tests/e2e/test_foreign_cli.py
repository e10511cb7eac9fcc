"""Corpora of other tools on the command line: indexed, verified, described, converted there and back."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_data_cli import one_line, penstock
from tests.format_examples import DATA

NANOGPT = "nanogpt:files,eos_id=0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "nanogpt" / "raw", tmp_path / "files")
    return tmp_path


def test_a_corpus_of_another_tool_is_indexed_verified_and_described(folder: Path) -> None:
    indexed = penstock("index", NANOGPT, folder=folder)
    assert indexed.stdout == f"{NANOGPT}: 967 tokens in 36 documents, 1.9 KiB, shards: 2.\n"
    assert penstock("verify", NANOGPT, folder=folder).stdout.startswith(f"{NANOGPT} is sound: 967 tokens")
    assert json.loads(penstock("describe", NANOGPT, "--json", folder=folder).stdout)["documents"] == 36


def test_to_megatron_and_back(folder: Path) -> None:
    row = json.loads(
        penstock("convert", NANOGPT, "--to", "arrow", "--out", "own", "--json", folder=folder).stdout
    )
    assert (row["tokens"], row["documents"], row["shards"]) == (967, 36, 2)
    assert penstock("convert", "own", "--to", "megatron", "--out", "mega", folder=folder).returncode == 0
    assert penstock("convert", "mega", "--to", "arrow", "--out", "back", folder=folder).returncode == 0
    for path in (folder / "own").iterdir():
        assert (folder / "back" / path.name).read_bytes() == path.read_bytes()
    assert "own is sound" in penstock("verify", "own", folder=folder).stdout


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("convert", "files", "--to", "arrow", "--out", "out"),
            2,
            "stores no document boundaries. Add",
        ),
        (("convert", NANOGPT, "--to", "arrow", "--out", "files"), 2, "--out files exists"),
        (("convert", NANOGPT, "--to", "mds", "--out", "out"), 2, "invalid choice: 'mds'"),
        (("index", "nanogpt:absent,eos_id=0"), 1, "Corpus absent does not exist"),
        (("index", "synthetic:tokens=5"), 2, "A synthetic corpus has no files"),
        (("verify", "nanogtp:files"), 2, "Did you mean 'nanogpt'?"),
    ],
)
def test_what_is_wrong_is_said_in_one_paragraph(
    folder: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    done = penstock(*words, folder=folder)
    assert done.returncode == code
    assert message in one_line(done.stderr)
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()


def test_a_refused_file_of_text_is_a_corpus_after_the_command_of_its_refusal(tmp_path: Path) -> None:
    table = pa.table({"n": [1], "story": pa.array(["the end"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "two words.parquet")
    refused = penstock("describe", "two words.parquet", folder=tmp_path)
    assert refused.returncode == 1
    said = one_line(refused.stderr)
    assert "two words.parquet holds text (story), not token ids" in said
    command = re.search(r"`penstock data (prepare .*)`", said)
    assert command is not None
    assert penstock(*shlex.split(command[1]), folder=tmp_path).returncode == 0
    assert json.loads(penstock("describe", "corpus", "--json", folder=tmp_path).stdout)["documents"] == 1
