"""HTML pages: recognised, extracted, refused without the extractor, and never in silence."""

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PackageMissing
from penstock.data.prepare import html
from penstock.data.prepare.documents import Document, ReadOptions, read_records
from penstock.data.prepare.html import text_of_html
from penstock.data.prepare.inputs import Selection, find_inputs
from tests.examples import examples

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p {color: red}</style></head><body>
<nav><a href="/">Home</a> <a href="/about">About us</a></nav>
<article><h1>Penstocks</h1><p>The penstock feeds the turbine &amp; the wheel.</p>
<p>A second paragraph, with <b>bold</b> words in it.</p><table><tr><td>head</td><td>12 m</td></tr></table>
</article><script>track("you")</script></body></html>"""


def read(path: Path, **options: str) -> list[str]:
    files, _ = find_inputs([str(path)], Selection())
    chosen = ReadOptions(text_column="text", max_document_bytes=10**8, **options)  # type: ignore[arg-type]
    return [
        r.content.text if isinstance(r.content, Document) else f"{r.content.kind}: {r.content.reason}"
        for file in files
        for r in read_records(file, chosen)
    ]


def write(path: Path, page: str = PAGE) -> Path:
    path.write_text(json.dumps({"text": page}) if path.suffix == ".jsonl" else page)
    return path


@pytest.mark.parametrize("name", ["a.html", "a.txt", "a.jsonl", "a.xhtml"])
def test_the_main_text_of_a_page_is_read_wherever_it_stands(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    (text,) = read(path)
    assert "The penstock feeds the turbine & the wheel.\nA second paragraph, with bold words in it." in text
    assert "12 m" in text
    assert not any(mark in text for mark in ("<", "track", "About us", "color"))
    assert read(path, html="keep") == [PAGE]


def test_a_page_without_its_optional_tags_is_a_page(tmp_path: Path) -> None:
    page = '<title>T</title><meta charset="utf-8"><p>The penstock feeds the turbine.'
    assert read(write(tmp_path / "a.jsonl", page)) == ["The penstock feeds the turbine."]


@pytest.mark.parametrize("name", ["a.php", "a.py", "a.vue.gz"])
def test_programs_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    if name.endswith(".gz"):
        import gzip

        (tmp_path / name).write_bytes(gzip.compress(PAGE.encode()))
    else:
        write(tmp_path / name)
    assert read(tmp_path / name) == [PAGE]


def test_text_that_only_speaks_of_tags_is_no_page(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "the <html> tag comes first")) == ["the <html> tag comes first"]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!doctype html><html></html>", "empty: an HTML page without text"),
        ("<html>" + "<br>" * 100_000, "too_large: an HTML page of 0.4 MiB and 100,001 tags"),
    ],
)
def test_a_page_without_text_or_of_too_many_tags_is_rejected(tmp_path: Path, page: str, said: str) -> None:
    (found,) = read(write(tmp_path / "a.html", page))
    assert found.replace("390.6 KiB", "0.4 MiB").replace("390.6KiB", "0.4 MiB") == said


@pytest.mark.parametrize("page", ["<html>\0\1<body>hi", "<html>" + "<div>" * 9000, "<html><p \ud7ff='\x1b'>"])
def test_a_page_made_to_break_a_parser_is_text_or_a_rejection(tmp_path: Path, page: str) -> None:
    assert len(read(write(tmp_path / "a.html", page))) == 1


def test_without_the_extractor_pages_are_refused_with_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    monkeypatch.setattr(html, "trafilatura", html.Package("trafilatura", "HTML pages"))
    for name in ("a.html", "a.jsonl"):
        with pytest.raises(
            PackageMissing, match=r"a\.\w+ is an HTML page.*pip install 'penstock\[html\]'.*keep"
        ):
            read(write(tmp_path / name))
        assert read(tmp_path / name, html="keep") == [PAGE]


def test_many_comments_before_a_page_or_a_text_take_no_time() -> None:
    comments = "<!----> <!-- a -- b -->" * 40
    assert html.is_html(f"{comments}<html>", "a.txt")
    assert not html.is_html(f"{comments} text", "a.txt")
    assert not html.is_html("<!-- <html> never ends", "a.txt")


SPACES = st.text(" \t\n\r", min_size=1, max_size=6)


@given(
    words=st.lists(st.tuples(SPACES, st.sampled_from(["", "b", "span", "p", "div", "li", "td"])), min_size=2)
)
@examples(60)
def test_white_space_of_a_page_is_what_a_browser_shows(words: list[tuple[str, str]]) -> None:
    inner = "".join(
        f"{space}word{number}{space}" if not tag else f"{space}<{tag}>{space}word{number}{space}</{tag}>"
        for number, (space, tag) in enumerate(words)
    )
    text = text_of_html(f"<html><body><div>{inner}</div></body></html>")
    assert re.search(r"[ \t\r]{2}|\t|\r|\n\s|[ \t]\n", text) is None, text


PROGRAM = "if x:\n\t\treturn  1"


@pytest.mark.parametrize("marked", [f"<pre>{PROGRAM}</pre>", f"<p>Type <code>{PROGRAM}</code>\t\n now.</p>"])
def test_white_space_of_programs_is_kept(marked: str) -> None:
    text = text_of_html(f"<html><body><p>A \t\n line.</p>{marked}</body></html>")
    assert "A line." in text
    assert PROGRAM in text


def test_style_sheets_are_no_text_unless_they_are_asked_for(tmp_path: Path) -> None:
    for name in ("a.css", "b.scss", "c.css.gz", "d.txt"):
        (tmp_path / name).write_text("p { color: red }")
    files, _ = find_inputs([str(tmp_path)], Selection())
    assert [Path(file.path).name for file in files] == ["d.txt"]
    files, _ = find_inputs([str(tmp_path)], Selection(suffixes=(".css",)))
    assert [Path(file.path).name for file in files] == ["a.css"]
