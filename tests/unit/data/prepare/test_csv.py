"""CSV files as documents: rows, what is damaged, and how a row is found again."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UsageError
from penstock.data.prepare.columnar import columns_of
from penstock.data.prepare.csv_rows import csv_rows
from penstock.data.prepare.documents import Document, ReadOptions, Rejection, check_text_column, read_records
from penstock.data.prepare.inputs import Selection, find_inputs
from tests.examples import examples

OPTIONS = ReadOptions(text_column="text", max_document_bytes=2**20)
VALUES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\r"), max_size=9)


def contents(path: Path, text: str, *, start: int = 0, limit: int = 2**20) -> list[Document | Rejection]:
    path.write_text(text)
    (file,), _ = find_inputs([str(path)], Selection())
    options = ReadOptions(text_column="text", max_document_bytes=limit)
    found = [record.content for record in read_records(file, options, start=start)]
    assert all(isinstance(each, Document | Rejection) for each in found)
    return found  # type: ignore[return-value]  # none is a conversation


@examples(40)
@given(st.lists(st.lists(VALUES, min_size=2, max_size=2), max_size=4), st.integers(1, 9))
def test_what_python_writes_is_read_in_pieces_of_any_size(rows: Sequence[list[str]], size: int) -> None:
    file = io.StringIO()
    csv.writer(file).writerows([["a", "b"], *rows])
    stored = file.getvalue().encode()
    pieces = [stored[at : at + size] for at in range(0, len(stored), size)]
    assert list(csv_rows(pieces, tabs=False, limit=999)) == [["a", "b"], *rows]


def test_each_row_is_a_document_and_reading_goes_on_from_any(tmp_path: Path) -> None:
    text = 'id,text\n1,"one\ntwo"\n\n2,\n3,three\n'
    found = contents(tmp_path / "a.csv", text)
    assert [each.text if isinstance(each, Document) else each.kind for each in found] == [
        "one\ntwo",
        "empty",
        "three",
    ]
    assert contents(tmp_path / "a.csv", text, start=2) == found[1:]


@pytest.mark.parametrize(
    ("text", "kinds", "said"),
    [
        ("id,text\n1\n2,b\n", ["broken_csv", None], "1 value, and 2 columns"),
        ('text,id\na,1\n"b,2\n', [None, "broken_csv"], "nothing can be read after row 1: unexpected end of"),
        ("text,text\na,b\n", ["broken_csv"], "the first row names the column 'text' twice"),
        (",body\n0,a\n", ["missing_field"], "no column 'text'; the file has: , body"),
        ("text\n" + "x" * 300_000 + "\nb\n", ["too_large", None], "a row of 293.0 KiB; the limit is 100 B"),
        ("text\n" + "\u00e9" * 51 + "\nb\n", ["too_large", None], "a row of 102 B; the limit is 100 B"),
        ("text\ra\rb", ["broken_csv"], "lines end in a carriage return alone: convert them to newlines"),
    ],
)
def test_damage_is_a_rejection_with_its_reason(
    tmp_path: Path, text: str, kinds: list[str | None], said: str
) -> None:
    found = contents(tmp_path / "a.csv", text, limit=100)
    assert [each.kind if isinstance(each, Rejection) else None for each in found] == kinds
    assert said in next(each.reason for each in found if isinstance(each, Rejection))


@pytest.mark.parametrize(
    "text",
    [
        "\na;b\n1;2",
        "\r\n\r\na;b\r\n1;2",
        "sep=;\r\na;b\r\n1;2",
        "sep=|\na|b\n1|2",
        '"a";"b"\n1;2',
        "a,b\n1,2",
    ],
)
def test_the_separator_is_that_of_the_names(text: str) -> None:
    assert list(csv_rows([text.encode()], tabs=False, limit=99)) == [["a", "b"], ["1", "2"]]


def test_commas_in_a_quoted_name_separate_nothing() -> None:
    assert list(csv_rows([b'"a,b,c";d\n1;2'], tabs=False, limit=99)) == [["a,b,c", "d"], ["1", "2"]]


def test_a_file_without_the_column_of_texts_is_refused_with_its_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    assert columns_of(str(tmp_path / "a.csv"), "csv").texts == ["title", "body"]
    files, _ = find_inputs([str(tmp_path / "a.csv")], Selection())
    with pytest.raises(UsageError, match=r"No CSV input has a text column 'text'.*--text-column body"):
        check_text_column(files, "text")
