"""Print code lines by package, and the change since the last tag. It informs and refuses nothing.

A line of code has something besides blanks, comments and docstrings. Python and C++ of `src/penstock` count;
`python tools/size.py --since REV` compares with any commit.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = "src/penstock"
C_SUFFIXES = {".c", ".cpp", ".h"}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip


def python_lines(text: str) -> int:
    """Return the lines of `text` that hold Python code; docstrings are not code.

    >>> python_lines('"Docstring."\\n\\nx = 1  # comment\\n# comment\\n')
    1
    """
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if first and isinstance(value, ast.Constant) and isinstance(value.value, str):
                code -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def c_lines(text: str) -> int:
    """Return the lines of `text` that hold C or C++ code.

    >>> c_lines("int x;  // comment\\n/* two\\nlines */\\n\\n")
    1
    """
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.partition("//")[0].strip()) for line in text.splitlines())


def code_lines(path: Path, text: str) -> int:
    """Return the lines of code of one file; 0 for files that are neither Python nor C++."""
    if path.suffix == ".py":
        return python_lines(text)
    return c_lines(text) if path.suffix in C_SUFFIXES else 0


def count(files: dict[Path, str]) -> tuple[Counter[str], Counter[str]]:
    """Return lines and files of code by package: the first folder below `src/penstock`."""
    lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    for path, text in files.items():
        parts = path.relative_to(SOURCES).parts
        package = parts[0] if len(parts) > 1 else "penstock"
        if path.suffix == ".py" or path.suffix in C_SUFFIXES:
            lines[package] += code_lines(path, text)
            num_files[package] += 1
    return lines, num_files


def git(*arguments: str) -> str:
    """Return what a git command prints; empty if it fails."""
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()  # fmt: skip


def files_now() -> dict[Path, str]:
    """Return the sources of the working tree, by path below the repository."""
    paths = sorted(path for path in (ROOT / SOURCES).rglob("*") if path.suffix in {".py", *C_SUFFIXES})
    return {path.relative_to(ROOT): path.read_text() for path in paths}


def files_at(revision: str) -> dict[Path, str]:
    """Return the sources of a commit, by path below the repository."""
    names = git("ls-tree", "-r", "--name-only", revision, SOURCES).splitlines()
    paths = [Path(name) for name in names if Path(name).suffix in {".py", *C_SUFFIXES}]
    return {path: git("show", f"{revision}:{path}") for path in paths}


def main() -> int:
    """Print a table of packages: files, lines of code, and the change since a commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default=git("describe", "--tags", "--abbrev=0"), metavar="REV",
                        help="commit to compare with (default: the last tag, if there is one)")  # fmt: skip
    since = parser.parse_args().since
    lines, num_files = count(files_now())
    before = count(files_at(since))[0] if since else lines
    print(f"{'package':<12} {'files':>6} {'code lines':>11}" + (f"  since {since}" if since else ""))
    for package in sorted(lines, key=lambda name: -lines[name]):
        change = f"  {lines[package] - before[package]:+,}" if since else ""
        print(f"{package:<12} {num_files[package]:>6} {lines[package]:>11,}{change}")
    change = f"  {lines.total() - before.total():+,}" if since else ""
    print(f"{'sum':<12} {num_files.total():>6} {lines.total():>11,}{change}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
