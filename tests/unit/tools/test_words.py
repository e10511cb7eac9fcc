import doctest
from pathlib import Path

from tools import words, wrapped


def test_a_sentence_that_reads_like_a_translation_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "# What it is\n\nNodes wait.\nNobody tells why.\n\n```\nbeside\n```\n"
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text('"""Goes on."""\n\nraise ValueError("it goes on")\n')
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert words.main() == 1
    page, source = Path("docs", "a.md"), Path("src", "a.py")
    assert capsys.readouterr().out == f"{page}: Nobody tells why.\n{source}: it goes on\n"


def test_a_table_that_was_wrapped_again_is_found_with_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "src").mkdir()
    text = '"""Table.\n\n    one   a long row whose\n    rest\n    two   a row\n"""\n'
    (tmp_path / "src" / "a.py").write_text(text)
    monkeypatch.setattr(wrapped, "ROOT", tmp_path)
    assert wrapped.main() == 1
    assert capsys.readouterr().out == "src/a.py:4: broken by a re-wrap: rest\n"


def test_the_examples_hold():
    assert [doctest.testmod(module).failed for module in (words, wrapped)] == [0, 0]
