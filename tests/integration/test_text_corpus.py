"""Text that is prepared while it is read: real preparers, killed, failing, taken over, never left behind."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError
from penstock.data import Loader, open_corpus
from penstock.data.corpus.manifest import load_manifest
from penstock.data.corpus.spec import parse_spec
from penstock.data.prepare import PrepareConfig, prepare
from penstock.data.prepare.background import LOCK_FILE, Preparation, PreparationJob
from penstock.data.prepare.text_corpus import folder_of
from penstock.text.tokenizer import train_tokenizer

SIZES = {"first_part_tokens": 2_000, "part_tokens": 60_000}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and looked at the dog "] * 4, vocab_size=300).save(path)
    return path


def write_lines(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "sat", "on", "mat", "and", "looked", "at", "dog"])
    with path.open("w") as file:
        for index in range(count):
            text = " ".join(rng.choice(words, 1 + index % 40).tolist())
            file.write(json.dumps({"text": f"{index} {text}"}) + "\n")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "small.jsonl", 3_000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text that takes seconds to prepare."""
    return write_lines(tmp_path_factory.mktemp("large") / "large.jsonl", 25_000)


def named(path: Path, tokenizer: Path, cache: Path, **options: object) -> str:
    given = {"tokenizer": tokenizer, "cache": cache, **SIZES, **options}
    return ",".join([f"text:{path}", *(f"{name}={value}" for name, value in given.items())])


def folder(text: str) -> Path:
    return folder_of(parse_spec(text))


def wait_for(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_prepared(path: Path) -> bool:
    """Whether somebody holds the lock of preparers."""
    with (path / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


def prepared_at_once(path: Path, tokenizer: Path, out: Path) -> Path:
    """The same corpus, prepared in the foreground and never stopped."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        prepare([path.name], out, config=PrepareConfig(tokenizer=tokenizer, stream=True, **SIZES))  # type: ignore[arg-type]
    finally:
        os.chdir(before)
    return out


def finish(text: str) -> Path:
    """Wait until a text is prepared to its end."""
    corpus = open_corpus(text)
    wait_for(lambda: load_manifest(folder(text)).streamed_parts, "never finished")
    wait_for(lambda: not is_prepared(folder(text)), "the preparer did not end")
    del corpus
    return folder(text)


def preparer_of(corpus: object) -> subprocess.Popen[str]:
    (child,) = corpus.preparation._children  # type: ignore[attr-defined]
    return child  # type: ignore[no-any-return]


def test_reading_begins_with_the_first_part_and_the_result_is_that_of_data_prepare(
    large: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    corpus = open_corpus(text)
    early = load_manifest(folder(text))
    assert corpus.num_tokens >= 1_000
    assert early.streamed_parts == 0, "it opened before it was finished"
    path = finish(text)
    del corpus
    assert content(path) == content(prepared_at_once(large, tokenizer, tmp_path / "whole"))
    assert open_corpus(text).preparation is None, "nothing is left to do"


def test_a_loader_reads_to_the_end_of_what_was_not_there_when_it_began(
    small: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(small, tokenizer, tmp_path / "cache", part_tokens=5_000)
    loader = Loader({"web": text}, sequence_length=16, global_batch_size=8, deliver="numpy", packing="concat")
    total = open_corpus(finish(text)).num_tokens
    seen = [loader.batch_at(step)["input_ids"] for step in range(total // 16 // 8)]
    again = Loader({"web": text}, sequence_length=16, global_batch_size=8, deliver="numpy", packing="concat")
    for step, batch in enumerate(seen):
        assert np.array_equal(again.batch_at(step)["input_ids"], batch)


def test_a_preparer_killed_again_and_again_gives_the_same_bytes(
    large: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    for parts in (1, 3, 5):
        corpus = open_corpus(text)
        wait_for(lambda parts=parts: len(load_manifest(folder(text)).parts) >= parts, "no part")
        if corpus.preparation and corpus.preparation._children:  # type: ignore[attr-defined]
            preparer_of(corpus).kill()
        del corpus
    assert content(finish(text)) == content(prepared_at_once(large, tokenizer, tmp_path / "whole"))


def test_a_killed_preparer_is_an_error_and_a_further_start_goes_on(
    large: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    corpus = open_corpus(text)
    preparer_of(corpus).kill()
    preparer_of(corpus).wait()
    with pytest.raises(CorpusError, match=r"could not be prepared: its process was killed by SIGKILL"):
        open_corpus(text)
    finish(text)


def test_a_disk_that_takes_no_more_is_an_error_with_the_systems_words(
    large: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    loader = Loader({"web": text}, sequence_length=16, global_batch_size=8, deliver="numpy")
    limit = (50_000, 50_000)  # bytes of a file, which is the nearest to a full disk that a test may have
    resource.prlimit(preparer_of(loader.corpora["web"]).pid, resource.RLIMIT_FSIZE, limit)
    with pytest.raises(CorpusError, match=r"could not be prepared: .*File too large"):
        loader.batch_at(2_000)
    del loader
    finish(text)


def test_bad_input_is_an_error_in_the_users_words_and_can_be_tolerated(
    small: Path, tokenizer: Path, tmp_path: Path
) -> None:
    with small.open("a") as file:
        file.write("{broken\n")
    text = named(small, tokenizer, tmp_path / "cache")
    message = r"small\.jsonl could not be prepared: Rejected inputs: 1 .broken json: 1.*max_errors=2"
    with pytest.raises(CorpusError, match=message):  # at once, where the preparer was faster than we are
        Loader({"web": text}, sequence_length=16, global_batch_size=8, deliver="numpy").batch_at(1_000)
    path = finish(named(small, tokenizer, tmp_path / "cache", max_errors=1))
    assert load_manifest(path).rejected == 1


def test_an_input_without_any_document_is_an_error_at_once(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(CorpusError, match="could not be prepared: No document was accepted"):
        open_corpus(named(tmp_path / "a.jsonl", tokenizer, tmp_path / "cache"))


def test_dropping_the_corpus_ends_its_preparer(large: Path, tokenizer: Path, tmp_path: Path) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    corpus = open_corpus(text)
    child = preparer_of(corpus)
    second = open_corpus(text)
    assert second.preparation is corpus.preparation, "one for the whole process"
    del corpus
    assert child.poll() is None
    del second
    assert child.poll() is not None
    assert not is_prepared(folder(text))


def preparation(text: str, path: Path, tokenizer: Path) -> Preparation:
    options: dict[str, str | int | None] = {"tokenizer": str(tokenizer), **SIZES}
    job = PreparationJob(
        parent=os.getpid(),
        folder=str(folder(text)),
        directory=str(path.parent),
        name=path.name,
        options=options,
    )
    return Preparation("web", folder(text), job)


def test_one_of_many_readers_prepares_and_another_takes_over(
    large: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    readers = [preparation(text, large, tokenizer) for _ in range(3)]
    for reader in readers:
        reader.keep_going()
    assert [len(reader._children) for reader in readers] == [1, 0, 0]
    wait_for(lambda: (folder(text) / "manifest.json").is_file(), "no part")
    del readers[0]
    for reader in readers:
        reader.keep_going()
    assert [len(reader._children) for reader in readers] == [1, 0]
    wait_for(lambda: load_manifest(folder(text)).streamed_parts, "never finished")
    whole = prepared_at_once(large, tokenizer, tmp_path / "whole")
    assert content(folder(text)).items() >= content(whole).items()


def test_readers_that_only_waited_learn_the_cause_too(small: Path, tokenizer: Path, tmp_path: Path) -> None:
    small.write_text("{broken\n")
    text = named(small, tokenizer, tmp_path / "cache")
    readers = [preparation(text, small, tokenizer) for _ in range(2)]
    for reader in readers:
        reader.keep_going()
    for reader in readers:
        with pytest.raises(CorpusError, match="No document was accepted; rejected: 1"):
            wait_for(reader.keep_going, "the preparer did not end")


@contextmanager
def reading(text: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that opened a text and reads no further."""
    program = (
        "import sys, time\n"
        "from penstock.data import open_corpus\n"
        "corpus = open_corpus(sys.argv[1])\n"
        "print(corpus.num_tokens, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, text], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_preparer_ends_with_the_process_that_started_it(
    large: Path, tokenizer: Path, tmp_path: Path, number: int
) -> None:
    text = named(large, tokenizer, tmp_path / "cache")
    with reading(text) as process:
        assert is_prepared(folder(text))
        process.send_signal(number)
        process.wait()
        wait_for(lambda: not is_prepared(folder(text)), "the preparer outlived its parent")
    assert load_manifest(folder(text)).streamed_parts == 0


def test_a_preparer_of_another_machine_is_respected_while_its_claim_is_fresh(
    small: Path, tokenizer: Path, tmp_path: Path
) -> None:
    text = named(small, tokenizer, tmp_path / "cache")
    status = folder(text) / "status.json"
    status.write_text(json.dumps({"owner": "far:1:2", "host": "far"}))
    reader = preparation(text, small, tokenizer)
    reader.keep_going()
    time.sleep(1.5)
    assert "far" in status.read_text()
    assert not (folder(text) / "manifest.json").exists()
    os.utime(status, (1, 1))  # the other machine died
    wait_for(lambda: (folder(text) / "manifest.json").is_file(), "not taken over")
    wait_for(lambda: not is_prepared(folder(text)), "the preparer did not end")
    assert not status.exists()


def test_a_preparer_whose_claim_was_overwritten_yields(large: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "larger.jsonl").write_bytes(
        large.read_bytes() * 20
    )  # or it would be finished before it looks
    text = named(tmp_path / "larger.jsonl", tokenizer, tmp_path / "cache")
    corpus = open_corpus(text)
    child = preparer_of(corpus)
    status = folder(text) / "status.json"
    claim = json.dumps({"owner": "far:1:2", "host": "far"})

    def overwritten() -> bool:
        if "far" not in status.read_text():
            status.write_text(claim)
        return child.poll() is not None

    wait_for(overwritten, "both prepare")
    assert child.returncode == 3
