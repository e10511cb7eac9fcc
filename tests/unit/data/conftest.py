"""A small input folder, a tokenizer, a preparation in this process, and a loader of a small corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.data import Loader
from penstock.data.prepare import PrepareConfig, Selection, Summary, prepare
from penstock.testing.corpora import numbered_corpus
from penstock.text.tokenizer import train_tokenizer

WORDS = "the cat sat on the mat and looked at the dog "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([WORDS] * 4, vocab_size=300).save(path)
    return path


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Twelve documents and two rejected inputs in three files."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text(WORDS)
    (folder / "b.txt").write_text("")
    lines = [json.dumps({"text": WORDS[: 5 + i]}) for i in range(10)]
    (folder / "c.jsonl").write_text("\n".join([*lines[:4], "{broken", *lines[4:]]))
    (folder / "d.txt").write_text("last")
    return folder


@pytest.fixture
def run() -> Callable[..., Summary]:
    """A function that prepares `folder` into `out`, in small shards, with two rejections allowed."""

    def prepared(
        folder: Path,
        out: Path,
        tokenizer: Path | None,
        *,
        restart: bool = False,
        suffixes: tuple[str, ...] = (".txt", ".jsonl"),
        **options: Any,
    ) -> Summary:
        selection = Selection(suffixes=suffixes)
        config = PrepareConfig(tokenizer=tokenizer, **{"shard_tokens": 40, "max_errors": 2, **options})
        return prepare([str(folder)], out, config=config, selection=selection, restart=restart)

    return prepared


@pytest.fixture
def content() -> Callable[[Path], dict[str, bytes]]:
    """A function that returns every file of a corpus folder but the lock."""
    return lambda out: {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return numbered_corpus(tmp_path / "web", [1 + (7 * i) % 43 for i in range(60)], documents_per_shard=20)


@pytest.fixture
def make(corpus: Path) -> Callable[..., Loader]:
    """A function that makes a loader of that corpus; options over plain ones."""

    def made(**options: Any) -> Loader:
        plain = {"sequence_length": 16, "global_batch_size": 4, "num_workers": 0, "deliver": "numpy"}
        return Loader(options.pop("corpora", {"web": corpus}), **{**plain, **options})

    return made


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Path]:
    lengths = {"web": [30] * 20, "code": [20] * 20, "math": [10] * 20}
    return {name: numbered_corpus(tmp_path / name, each) for name, each in lengths.items()}


@pytest.fixture
def mix(corpora: dict[str, Path]) -> Callable[..., Loader]:
    """A function that makes a loader of some of those corpora; options over plain ones."""

    def made(*names: str, **options: Any) -> Loader:
        plain = {"sequence_length": 8, "global_batch_size": 4, "num_workers": 0, "deliver": "numpy"}
        chosen = {name: corpora[name] for name in names or ("web", "code")}
        return Loader(chosen, **{**plain, **options})

    return made
