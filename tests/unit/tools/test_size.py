import doctest
from pathlib import Path

import pytest
from tools import size


def test_what_a_line_of_code_is():
    assert doctest.testmod(size).failed == 0


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""Two\nlines."""\n\nx = (\n    1\n)\n', 3),
        ("a.h", "/* a */ int x;\n", 1),
        ("page/a.js", "/* a\n b */\nlet x; // c\n\n}\n", 2),
        ("page/a.css", "a {\n  b: c;\n}\n\n/* d */\n", 3),
        ("page/a.html", "<p>\n\n<!-- a -->\n", 1),
        ("page/vendor/a.js", "let x;\n", 0),
        ("a.png", "no text", 0),
    ],
)
def test_each_language_is_counted_without_blanks_and_comments(name, text, lines):
    assert size.code_lines(Path(name), text) == lines


def test_a_package_above_its_ceiling_fails_with_what_to_do(capsys, monkeypatch, tmp_path):
    limits = tmp_path / "size.toml"
    limits.write_text('since = "HEAD"\n[ceilings]\ndata = 1\n')
    monkeypatch.setattr(size, "LIMITS", limits)
    monkeypatch.setitem(
        size.COUNTERS, ".py", lambda text: text.count("\n")
    )  # it takes seconds to count all code
    monkeypatch.setattr("sys.argv", ["size.py", "--check"])
    assert size.main() == 1
    said = capsys.readouterr().err
    assert ", ceiling 1\n" in said
    assert ", ceiling 0\n" in said
    assert said.endswith(size.HOW_TO_RAISE + "\n")
