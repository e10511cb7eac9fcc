"""Find docstrings whose tables or paragraphs an automatic re-wrap has broken: `python -m tools.wrapped`.

A row of a table is a label, two spaces or more, and a text, which continues in the column of the text.
A re-wrap puts the rest of a long row into the column of the label, or leaves a few words of a sentence on a
line of their own.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"(\s{4,})[\w`.-]+(?: [\w`.-]+){0,2}\s{2,}(?=\S)")
NO_PROSE = re.compile(r">>>|->|[={}|]|\bpenstock ")
ENDS = (".", ":", ";", ",", "+", ")", "]")
GOES_ON = re.compile(r"\s*[a-z(]")
WIDTH = 90
"""Characters that a line of prose has at least before it is wrapped."""


def broken(text: str) -> Iterator[int]:
    r"""Yield the indices of the lines of a docstring that a re-wrap has put in the wrong place.

    >>> list(broken("T.\n\n    a   one\n    b   two, long\n    rest\n        of it\n    c   three\n"))
    [4]
    >>> list(broken("T.\n\n    a   one\n        goes on\n    b   two\n"))
    []
    >>> list(broken("T.\n\n" + "word " * 20 + "\nends\nhere, in a line that could have been longer.\n"))
    [3]
    """
    lines = text.splitlines()
    block: list[int] = []
    for index, line in enumerate([*lines, ""]):
        if line.strip():
            block.append(index)
            continue
        yield from _of_block(lines, block)
        block = []


def _of_block(lines: list[str], block: list[int]) -> Iterator[int]:
    if any(lines[index].lstrip().startswith(">>>") for index in block):
        return
    rows = Counter((len(row[1]), row.end()) for index in block if (row := ROW.match(lines[index])))
    indent, column = max(rows, key=rows.__getitem__) if rows else (0, 0)
    is_table = rows[indent, column] > 1
    for position, index in enumerate(block):
        line = lines[index]
        if NO_PROSE.search(line):
            continue
        if is_table:
            row = ROW.match(line)
            is_row = line[column - 1 : column] == " " or (row is not None and row.end() == column + 1)
            if position and _indent(line) == indent and not is_row:
                yield index
        elif 0 < position < len(block) - 1 and len(lines[index - 1]) > WIDTH and len(line.split()) < 5:
            after = lines[index + 1]
            goes_on = GOES_ON.match(line) and GOES_ON.match(after) and _indent(after) <= _indent(line)
            if goes_on and not line.endswith(ENDS):
                yield index


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each docstring of a file, those under fields included."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def main() -> int:
    """Print each line that was put in the wrong place; 1 if there is one."""
    found = [
        f"{path.relative_to(ROOT)}:{first + index}: broken by a re-wrap: {text.splitlines()[index].strip()}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for first, text in docstrings(path)
        for index in broken(text)
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
