"""fms-fsdp's Arrow files: a batch a document, many of them, empty ones, damaged ones."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.formats import TokenShard, ipc
from penstock.data.formats.arrow_folders import find_fms
from penstock.data.formats.ipc_tokens import open_batches
from penstock.storage.base import LocalStorage
from tests.format_examples import DATA, DOCUMENTS

DOCS = [[1, 2, 3], [], [4], [5, 6]]


def written(
    path: Path, docs: list[list[int | None]], *, dtype: str = "uint32", new: Any = pa.ipc.new_file
) -> Path:
    schema = pa.schema([("id", pa.string()), ("tokens", pa.type_for_alias(dtype))])
    with pa.OSFile(str(path), "wb") as sink, new(sink, schema) as writer:
        for doc in docs:
            writer.write(pa.record_batch([["x"] * len(doc), pa.array(doc, schema.field(1).type)], schema))
    return path


def opened(path: Path, **options: str) -> TokenShard:
    return open_batches(LocalStorage(path.parent), path.name, options)


def documents_of(shard: TokenShard) -> list[list[int]]:
    ends = shard.document_ends(-1, shard.num_tokens)
    assert len(ends) == shard.num_documents
    return [part.tolist() for part in np.split(shard.tokens[0 : shard.num_tokens], ends)[:-1]]


def test_empty_batches_are_empty_documents(tmp_path: Path) -> None:
    shutil.copytree(DATA / "fms" / "empties", tmp_path / "c")
    corpus = open_corpus(tmp_path / "c")
    assert corpus.num_documents == len(DOCUMENTS) + 12
    assert corpus.tokens(0, corpus.num_tokens).tolist() == [token for doc in DOCUMENTS for token in doc]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_each_batch_is_a_document(tmp_path: Path, dtype: str, new: Any) -> None:
    shard = opened(written(tmp_path / "a.arrow", DOCS, dtype=dtype, new=new))
    assert documents_of(shard) == DOCS
    assert shard.document_ends(0, 6).tolist() == [3, 3, 4, 6]
    assert str(shard.tokens[0:0].dtype) == ("uint16" if dtype == "uint16" else "uint32")


def test_a_document_is_read_in_place_among_many(tmp_path: Path) -> None:
    docs: list[list[int | None]] = [[n] * (n % 5) for n in range(3000)]
    shard = opened(written(tmp_path / "a.arrow", docs))
    assert documents_of(shard) == docs
    place = sum(n % 5 for n in range(2004))
    assert shard.tokens[place : place + 4].tolist() == [2004] * 4
    assert not shard.tokens[place : place + 4].flags.owndata


@pytest.mark.parametrize("damage", ["none", "truncated", "altered", "elsewhere"])
def test_the_places_of_many_batches_are_kept_and_made_again_where_they_are_damaged(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs: list[list[int | None]] = [[n] * (n % 3) for n in range(ipc._MANY + 7)]
    path = written(tmp_path / "a.arrow", docs)
    assert documents_of(opened(path)) == docs
    (kept,) = (tmp_path / ".penstock").iterdir()
    content = kept.read_bytes()
    if damage == "truncated":
        kept.write_bytes(content[:-56])
    elif damage == "altered":
        kept.write_bytes(content[:-16] + b"\x7f" * 16)
    elif damage == "elsewhere":
        written(path, docs[::-1])
    else:
        read = pa.ipc.read_message
        calls: list[object] = []
        monkeypatch.setattr(ipc.pa.ipc, "read_message", lambda *given: calls.append(0) or read(*given))
    assert documents_of(opened(path)) == (docs[::-1] if damage == "elsewhere" else docs)
    assert kept.read_bytes() == content
    if damage == "none":
        assert len(calls) == 1 + ipc._MANY


def test_few_batches_leave_nothing_in_the_index_folder(tmp_path: Path) -> None:
    opened(written(tmp_path / "a.arrow", DOCS))
    assert [path.name for path in tmp_path.iterdir()] == ["a.arrow"]


def test_a_file_without_batches_has_no_tokens(tmp_path: Path) -> None:
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        assert documents_of(opened(written(tmp_path / "a.arrow", [], new=new))) == []


def test_a_null_token_is_an_error_with_its_document(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"a\.arrow has a null among the tokens of document 1"):
        opened(written(tmp_path / "a.arrow", [[1], [2, None], [3]]))


def test_a_negative_token_is_an_error_with_its_document(tmp_path: Path) -> None:
    shard = opened(written(tmp_path / "a.arrow", [[1], [], [2, -7]], dtype="int32"))
    with pytest.raises(CorpusError, match=r"a\.arrow has token -7 in document 2"):
        shard.tokens[0:3]


def test_a_column_of_another_name_is_named(tmp_path: Path) -> None:
    batch = pa.record_batch({"ids": [1, 2], "types": [3, 4]})
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write(batch)
    assert documents_of(opened(path, column="types")) == [[3, 4]]
    with pytest.raises(UsageError, match="several columns of integers: ids, types"):
        opened(path)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.arrow", DOCS)
    content = path.read_bytes()
    for size in range(0, len(content), 11):
        path.write_bytes(content[:size])
        with pytest.raises(CorpusError, match=r"a\.arrow cannot be read"):
            opened(path)


def test_a_batch_that_looks_like_the_end_of_an_arrow_file_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "a.arrow", DOCS)
    content = bytearray(path.read_bytes())
    schema, *batches, _ = (match.start() for match in re.finditer(b"\xff{4}", content))
    assert (schema, len(batches)) == (8, len(DOCS))
    content[batches[2] + 4 : batches[2] + 8] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=rf"its batches end at byte {batches[2]}, its footer begins"):
        opened(path)


def test_what_is_no_arrow_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"\xff" * 4096)
    with pytest.raises(CorpusError, match="there is no Arrow message at byte 0"):
        opened(tmp_path / "a.arrow")


def test_files_are_found_unless_hugging_face_wrote_them() -> None:
    assert find_fms({"b/x.arrow": 1, "a/x.arrow": 1, "meta.csv": 1}) == ["a/x.arrow", "b/x.arrow"]
    assert find_fms({"data-00000-of-00001.arrow": 1, "state.json": 1}) == []
