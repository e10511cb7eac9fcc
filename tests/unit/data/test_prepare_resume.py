"""A preparation that is stopped and continued: a crash at every durable step, damaged leftovers."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import CorpusError, InputError
from penstock.data.corpus.manifest import load_manifest
from penstock.data.prepare import Summary

Run = Callable[..., Summary]
Content = Callable[[Path], dict[str, bytes]]


class Killed(BaseException):
    """Stands for a kill: not an Exception, so nothing may catch it."""


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Raise Killed instead of the `step`-th durable operation."""
    steps = count(1)

    def counted(operation: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*args: object) -> None:
            if next(steps) == step:
                raise Killed
            operation(*args)

        return wrapper

    patch.setattr(os, "fsync", counted(os.fsync))
    patch.setattr(Path, "rename", counted(Path.rename))


STREAMED = {"stream": True, "first_part_tokens": 6, "part_tokens": 50}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_kill_at_any_durable_step_and_a_resume_give_the_same_bytes(
    run: Run,
    content: Content,
    inputs: Path,
    tmp_path: Path,
    tokenizer: Path,
    trained: bool,
    streamed: bool,
) -> None:
    options: dict[str, Any] = {"shard_tokens": 20, **({"train_tokenizer": 300} if trained else {})}
    options |= STREAMED if streamed else {}
    given = None if trained else tokenizer
    run(inputs, tmp_path / "whole", given, **options)
    expected = content(tmp_path / "whole")
    for step in range(1, 1000):
        out = tmp_path / f"out{step}"
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            try:
                run(inputs, out, given, **options)
            except Killed:
                pass
            else:
                break
        if streamed and (out / "manifest.json").is_file():  # what may have been read already stays
            early = load_manifest(out)
            assert load_manifest(tmp_path / "whole").first_parts(len(early.parts)).shards == early.shards
        run(inputs, out, given, **options)
        assert content(out) == expected, f"killed at step {step}"
    assert step > 25


def test_a_torn_journal_line_is_done_again(
    run: Run, content: Content, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError):
        run(inputs, out, tokenizer, max_errors=0)
    journal = out / "journal.jsonl"
    lines = journal.read_bytes()[:-20].splitlines(keepends=True)
    journal.write_bytes(b"".join(line.replace(b"{", b'{"whole_texts": true, ', 1) for line in lines))
    resumed = run(inputs, out, tokenizer)
    run(inputs, tmp_path / "whole", tokenizer)
    assert content(out) == content(tmp_path / "whole")
    assert resumed.manifest == load_manifest(tmp_path / "whole")


def half_done(run: Run, inputs: Path, out: Path, tokenizer: Path) -> None:
    with pytest.raises(InputError):
        run(inputs, out, tokenizer, max_errors=0)


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_finished_shard_that_went_since_the_kill_is_an_error(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path, damage: str
) -> None:
    half_done(run, inputs, tmp_path / "out", tokenizer)
    shard = tmp_path / "out" / "shard-00001.arrow"
    shard.unlink() if damage == "remove" else os.truncate(shard, 10)
    with pytest.raises(CorpusError, match=r"shard-00001\.arrow is missing or has another size.*--restart"):
        run(inputs, tmp_path / "out", tokenizer)


def test_a_damaged_journal_is_an_error(run: Run, inputs: Path, tmp_path: Path, tokenizer: Path) -> None:
    half_done(run, inputs, tmp_path / "out", tokenizer)
    (tmp_path / "out" / "journal.jsonl").write_text('{"nonsense": 1}\n')
    with pytest.raises(CorpusError, match=r"journal\.jsonl is damaged .*nonsense.*--restart"):
        run(inputs, tmp_path / "out", tokenizer)


def test_another_tokenizer_json_in_a_half_done_folder_is_an_error(
    run: Run, inputs: Path, tmp_path: Path, tokenizer: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError):
        run(inputs, out, None, train_tokenizer=300, max_errors=0)
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    with pytest.raises(CorpusError, match=r"not the one its shards were made with"):
        run(inputs, out, None, train_tokenizer=300)


def test_a_full_disk_leaves_a_folder_that_can_be_continued(
    run: Run, content: Content, inputs: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.data.prepare.shards.write_shard", full)
        with pytest.raises(OSError, match="No space left"):
            run(inputs, tmp_path / "out", tokenizer)
    assert not list((tmp_path / "out").glob(".*.tmp"))
    run(inputs, tmp_path / "out", tokenizer)
    run(inputs, tmp_path / "whole", tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
