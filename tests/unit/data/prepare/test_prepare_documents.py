"""Reading one input file: documents in order, everything else rejected in its place."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.core.errors import InputError
from penstock.data.prepare import byte_streams
from penstock.data.prepare.byte_streams import zstd
from penstock.data.prepare.documents import Document, ReadOptions, Rejection, read_records
from penstock.data.prepare.inputs import Selection, find_inputs
from penstock.data.prepare.plan import InputFile

OPTIONS = ReadOptions(text_column="text", max_document_bytes=1000)


def described(path: Path) -> InputFile:
    (file,), _ = find_inputs([str(path)], Selection())
    return file


def read(path: Path, *, start: int = 0) -> list[tuple[int, str]]:
    """Return (index, text or kind of rejection) of every record."""
    records = read_records(described(path), OPTIONS, start=start)
    return [(r.index, r.content.text if isinstance(r.content, Document) else r.content.kind) for r in records]


def reasons(path: Path) -> list[str]:
    contents = [record.content for record in read_records(described(path), OPTIONS)]
    return [content.reason for content in contents if isinstance(content, Rejection)]


def reason(path: Path) -> str:
    (only,) = reasons(path)
    return only


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_file_is_one_document_and_its_byte_order_mark_is_honoured(
    tmp_path: Path, encoding: str
) -> None:
    (tmp_path / "a.txt").write_bytes("naïve\r\n日本\n".encode(encoding))
    assert read(tmp_path / "a.txt") == [(0, "naïve\r\n日本\n")]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "empty"), (b"\xef\xbb\xbf", "empty"), (b"ok \xff", "undecodable"), (b"x" * 1001, "too_large")],
)
def test_a_text_file_that_is_no_document_is_rejected(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == [(0, kind)]


def test_a_text_file_at_the_limit_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    assert read(tmp_path / "a.txt") == [(0, "x" * 1000)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_json_lines_are_read_in_the_encoding_of_their_mark(
    tmp_path: Path, encoding: str, suffix: str
) -> None:
    texts = ["naïve", "日本 \U0001f600 \u2028 one line", "x" * 900]
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    content = (mark + "".join(f'{{"text": {json.dumps(t, ensure_ascii=False)}}}\n' for t in texts)).encode(
        encoding
    )
    pack = {"gz": gzip.compress, "zst": zstd.compress}.get(suffix.rpartition(".")[2], bytes)
    (tmp_path / f"a.{suffix}").write_bytes(pack(content))
    assert read(tmp_path / f"a.{suffix}") == list(enumerate(texts))
    assert read(tmp_path / f"a.{suffix}", start=2) == [(2, texts[2])]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 2**20])
@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ude00\ud83d", r"\ud83d\ud83d"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_half_a_surrogate_pair_costs_its_line_alone(
    tmp_path: Path, encoding: str, half: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_streams, "CHUNK_BYTES", chunk_bytes)
    half = half.encode().decode("unicode_escape")
    lines = ['{"text": "größer"}', f'{{"text": "ok {half}"}}', half, '{"text": "日本"}']
    for end in ("", "\n"):
        content = "\ufeff" + "\n".join(lines) + end
        (tmp_path / "a.jsonl").write_bytes(content.encode(encoding, "surrogatepass"))
        found = [(0, "größer"), (1, "undecodable"), (2, "undecodable"), (3, "日本")]
        assert read(tmp_path / "a.jsonl") == found
        assert read(tmp_path / "a.jsonl", start=2) == found[2:]
    assert "at character 13" in reasons(tmp_path / "a.jsonl")[0]


@pytest.mark.parametrize(
    ("encoding", "damage"),
    [
        ("utf-16-le", b"\x00"),
        ("utf-32-le", b"\xff\xff\xff\xff"),
        ("utf-32-be", b"\x00\x00"),
        ("utf-8", b"\xff"),
    ],
)
def test_bytes_outside_of_an_encoding_cost_their_line_alone(
    tmp_path: Path, encoding: str, damage: bytes
) -> None:
    """Also a code beyond Unicode, and an end in the middle of a character."""
    first = '\ufeff{"text": "ok"}\n'.encode(encoding)
    (tmp_path / "a.jsonl").write_bytes(first + damage)
    assert read(tmp_path / "a.jsonl") == [(0, "ok"), (1, "undecodable")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-be"])
def test_half_a_surrogate_pair_costs_its_conversation_of_a_list_alone(tmp_path: Path, encoding: str) -> None:
    turns = ['{"messages": "größer"}', '{"messages": "\ud83d"}', '{"messages": "\\ude00"}', '{"messages": 1}']
    content = f"\ufeff[{', '.join(turns)}]".encode(encoding, "surrogatepass")
    (tmp_path / "a.json").write_bytes(content)
    records = read_records(described(tmp_path / "a.json"), replace(OPTIONS, chat=True))
    kinds = [getattr(record.content, "kind", "chat") for record in records]
    assert kinds == ["chat", "undecodable", "undecodable", "chat"]


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_a_window_of_zstd_is_read_up_to_the_one_that_was_allowed(tmp_path: Path, window_log: int) -> None:
    options = {
        zstd.CompressionParameter.window_log: window_log,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    packer = zstd.ZstdCompressor(options=options)  # in pieces: else the window is as large as the content
    packed = packer.compress(b'{"text": "a"}\n') + packer.compress(b'{"text": "b"}\n') + packer.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    file = described(tmp_path / "a.jsonl.zst")
    allowed = ReadOptions(text_column="text", max_document_bytes=1000, zstd_long=window_log)
    found = [record.content for record in read_records(file, allowed)]
    assert [one.text for one in found if isinstance(one, Document)] == ["a", "b"]
    if window_log == 31:
        (refused,) = read_records(
            file, ReadOptions(text_column="text", max_document_bytes=1000, zstd_long=30)
        )
        assert isinstance(refused.content, Rejection)
        assert "larger than 2^30 bytes" in refused.content.reason
    if window_log > 27:
        assert "larger than 2^27 bytes (it was made with zstd --long): give --zstd-long 31" in reason(
            tmp_path / "a.jsonl.zst"
        )


LINES = (
    b'\xef\xbb\xbf{"text": "first"}\n',
    b"\n",
    b'{"text": "sec\\u006fnd", "id": 2}\r\n',
    b'{"text": 3}\n',
    b'{"body": "x"}\n',
    b'["text"]\n',
    b'{"text": "x"\n',
    b'{"text": "\xff"}\n',
    b'{"text": "\\ud800"}\n',
    b'{"text": ""}\n',
    b"[" * 900 + b"\n",
    b'{"text": "' + b"y" * 2000 + b'"}\n',
    b'{"text": "last"}',
)
OUTCOMES = [
    (0, "first"),
    (2, "second"),
    (3, "not_text"),
    (4, "missing_field"),
    (5, "missing_field"),
    (6, "broken_json"),
    (7, "undecodable"),
    (8, "undecodable"),
    (9, "empty"),
    (10, "broken_json"),
    (11, "too_large"),
    (12, "last"),
]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_each_line_becomes_a_document_or_a_rejection_in_its_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": lambda b: pa.compress(b, "zstd", asbytes=True)}[suffix]
    path.write_bytes(pack(b"".join(LINES)))
    assert read(path) == OUTCOMES
    assert read(path, start=5) == OUTCOMES[4:], "reading from a position gives the same records"


def test_files_of_several_compressed_members_are_read_to_the_end(tmp_path: Path) -> None:
    line = b'{"text": "x"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line) * 3)
    (tmp_path / "b.jsonl.zst").write_bytes(pa.compress(line, "zstd", asbytes=True) * 3)
    assert len(read(tmp_path / "a.jsonl.gz")) == len(read(tmp_path / "b.jsonl.zst")) == 3


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_rejected_where_it_breaks_off(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(json.dumps({"text": os.urandom(8).hex()}).encode() + b"\n" for _ in range(90_000))
    packed = gzip.compress(lines, 1) if suffix == ".gz" else pa.compress(lines, "zstd", asbytes=True)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed[: len(packed) // 2])
    records = read(tmp_path / f"a.jsonl{suffix}")
    assert len(records) > 1000
    assert [index for index, _ in records] == list(range(len(records)))
    assert records[-1][1] == "unreadable"


def test_a_line_of_any_length_is_read_in_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(
        pa.compress(b'{"text": "' + b"z" * 2**26 + b'"}\n{"text": "after"}\n', "zstd", asbytes=True)
    )
    assert read(tmp_path / "a.jsonl.zst") == [(0, "too_large"), (1, "after")]


def test_rows_of_every_row_group_are_read_in_order_from_any_position(tmp_path: Path) -> None:
    texts = [f"row {i}" for i in range(10)]
    texts[3] = ""
    pq.write_table(pa.table({"id": range(10), "text": texts}), tmp_path / "a.parquet", row_group_size=4)
    expected = [(i, text or "empty") for i, text in enumerate(texts)]
    for start in range(11):
        assert read(tmp_path / "a.parquet", start=start) == expected[start:]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_every_kind_of_string_column_is_read_and_nulls_are_empty(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"]).cast(kind)}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(0, "a"), (1, "empty"), (2, "b")]


def test_a_parquet_value_that_is_not_utf8_or_too_large_is_rejected(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xff", b"x" * 1001], pa.binary())
    pq.write_table(pa.table({"text": raw.view(pa.string())}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(0, "ok"), (1, "undecodable"), (2, "too_large")]


def test_a_parquet_file_without_the_column_says_what_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    assert reason(tmp_path / "a.parquet") == "no column 'text'; the file has: id, body"


def test_a_parquet_column_of_numbers_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert reason(tmp_path / "a.parquet") == "column 'text' holds int64, not strings"


def test_a_file_that_is_no_parquet_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"hello")
    assert read(tmp_path / "a.parquet") == [(0, "unreadable")]


def test_a_link_to_nowhere_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "absent")
    (file,), _ = find_inputs([str(tmp_path)], Selection())
    (record,) = read_records(file, OPTIONS)
    assert record.content == Rejection("unreadable", "No such file or directory", whole_file=True)


def test_a_file_that_changed_or_went_since_the_plan_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    file = described(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("three")
    with pytest.raises(InputError, match=r"a\.txt changed while"):
        list(read_records(file, OPTIONS))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a\.txt changed while"):
        list(read_records(file, OPTIONS))
