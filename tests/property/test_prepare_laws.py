"""Laws of `data prepare`: the corpus is the documents, in order, at any shard size, after any kill."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.prepare import PrepareConfig, prepare
from penstock.data.prepare import tokenize as tokenize_module
from penstock.data.prepare.documents import split_lines
from penstock.data.prepare.train_tokenizer import portions
from penstock.text.tokenizer import Tokenizer, train_tokenizer
from tests.examples import examples

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=3),
        st.text(max_size=200),
        st.sampled_from(["", "a", "\n", "<|endoftext|>", "\x00", "\r\n"]),
        st.builds(lambda text, n: text * n, st.text(min_size=1, max_size=5), st.integers(1, 400)),
    ),
    min_size=1,
    max_size=30,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the cat sat on the mat " * 9], vocab_size=290).save(folder / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        # Small, so that these documents are cut and batched as gigabytes are.
        patch.setattr(tokenize_module, "PIECE_CHARS", 64)
        patch.setattr(tokenize_module, "_BATCH_BYTES", 256)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        tokenizer.path = folder / "tokenizer.json"  # type: ignore[attr-defined]
        yield tokenizer


def stored(out: Path) -> list[list[list[int]]]:
    """Return the token lists of each shard, read with pyarrow alone."""
    shards = []
    for path in sorted(out.glob("shard-*.arrow")):
        with pa.memory_map(str(path)) as source:
            shards.append(pa.ipc.open_file(source).read_all()["tokens"].to_pylist())
    return shards


def write_lines(folder: Path, texts: list[str]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@examples(60)
@given(texts=TEXTS, shard_tokens=st.integers(1, 300))
def test_the_corpus_holds_exactly_the_documents_in_order(
    tokenizer: Tokenizer, texts: list[str], shard_tokens: int
) -> None:
    kept = [text for text in texts if text]
    config = PrepareConfig(
        tokenizer=tokenizer.path,  # type: ignore[attr-defined]
        shard_tokens=shard_tokens,
        max_errors=len(texts),
    )
    with TemporaryDirectory() as name:
        path = write_lines(Path(name), [*texts, "sentinel"])
        summary = prepare([str(path)], Path(name) / "out", config=config)
        shards = stored(Path(name) / "out")
    documents = [document for shard in shards for document in shard]
    assert [tokenizer.decode(document[:-1], special=True) for document in documents] == [*kept, "sentinel"]
    assert all(document[-1] == 0 and 0 not in document[:-1] for document in documents)
    assert all(sum(map(len, shard)) <= shard_tokens or len(shard) == 1 for shard in shards)
    assert summary.rejected == ({"empty": len(texts) - len(kept)} if len(kept) < len(texts) else {})


class Killed(BaseException):
    """Stands for a kill."""


@examples(40)
@given(texts=TEXTS, shard_tokens=st.integers(1, 120), kills=st.lists(st.integers(1, 12), max_size=4))
def test_any_number_of_kills_leave_the_same_bytes(
    tokenizer: Tokenizer, texts: list[str], shard_tokens: int, kills: list[int]
) -> None:
    config = PrepareConfig(
        tokenizer=tokenizer.path,  # type: ignore[attr-defined]
        shard_tokens=shard_tokens,
        max_errors=len(texts),
    )
    with TemporaryDirectory() as name:
        path = write_lines(Path(name), [*texts, "sentinel"])
        prepare([str(path)], Path(name) / "whole", config=config)
        for kill in kills:
            with pytest.MonkeyPatch.context() as patch:
                steps = count(1)

                def dying(number: int, kill: int = kill, steps: "count[int]" = steps) -> None:  # noqa: ARG001
                    if next(steps) == kill:
                        raise Killed

                patch.setattr("os.fsync", dying)
                with suppress(Killed):
                    prepare([str(path)], Path(name) / "killed", config=config)
        prepare([str(path)], Path(name) / "killed", config=config)
        whole, killed = (
            {p.name: p.read_bytes() for p in (Path(name) / folder).iterdir() if p.name != ".lock"}
            for folder in ("whole", "killed")
        )
    assert killed == whole


@given(content=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60)), limit=st.integers(1, 20))
def test_lines_do_not_depend_on_how_the_stream_is_cut(content: bytes, cuts: list[int], limit: int) -> None:
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    pieces = [content[start:stop] for start, stop in pairwise(edges)]
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert list(split_lines(pieces, limit=limit)) == [x if len(x) <= limit else len(x) for x in expected]


@given(sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=50), budget=st.integers(1, 10**7))
def test_the_tokenizers_sample_fills_its_budget_and_no_more(sizes: list[int], budget: int) -> None:
    given_bytes = portions(sizes, budget=budget)
    if sum(sizes) <= budget:
        assert given_bytes == sizes
    else:
        assert budget / 2 <= sum(given_bytes) <= budget
    assert all(wanted == 0 for wanted, size in zip(given_bytes, sizes, strict=True) if size == 0)
