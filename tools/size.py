"""Print code lines by package and the change since a commit; `--check` fails above a package's ceiling.

A line of code has something besides blanks, comments and docstrings. Python, C++, JavaScript, CSS and HTML of
`src/penstock` count; vendored files (`vendor/`) do not. `tools/size.toml` names the commit and the ceilings.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = "src/penstock"
HOW_TO_RAISE = (
    "Remove code, or raise the ceiling in tools/size.toml in a commit that says what was removed elsewhere."
)
LIMITS = ROOT / "tools/size.toml"
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
    """Return the lines of `text` that hold code; comments are C's, which JavaScript and CSS share.

    >>> c_lines("int x;  // comment\\n/* two\\nlines */\\n\\n")
    1
    """
    text = re.sub(r"/\*.*?\*/", _newlines, text, flags=re.DOTALL)
    return sum(bool(line.partition("//")[0].strip()) for line in text.splitlines())


def html_lines(text: str) -> int:
    """Return the lines of `text` that hold HTML.

    >>> html_lines("<p>\\n<!-- two\\nlines -->\\n</p>\\n")
    2
    """
    text = re.sub(r"<!--.*?-->", _newlines, text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.splitlines())


def _newlines(comment: re.Match[str]) -> str:
    return "\n" * comment[0].count("\n")


COUNTERS = {".py": python_lines, ".html": html_lines} | dict.fromkeys(
    (".c", ".cpp", ".h", ".js", ".css"), c_lines
)


def is_code(path: Path) -> bool:
    """Return whether the lines of a file count."""
    return path.suffix in COUNTERS and "vendor" not in path.parts


def code_lines(path: Path, text: str) -> int:
    """Return the lines of code of one file; 0 for a file that holds none."""
    return COUNTERS[path.suffix](text) if is_code(path) else 0


def count(files: dict[Path, str]) -> tuple[Counter[str], Counter[str]]:
    """Return lines and files of code by package: the first folder below `src/penstock`."""
    lines: Counter[str] = Counter()
    num_files: Counter[str] = Counter()
    for path, text in files.items():
        parts = path.relative_to(SOURCES).parts
        package = parts[0] if len(parts) > 1 else "penstock"
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
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCES).rglob("*"))
    return {path: (ROOT / path).read_text() for path in paths if is_code(path)}


def files_at(revision: str) -> dict[Path, str]:
    """Return the sources of a commit, by path below the repository."""
    paths = map(Path, git("ls-tree", "-r", "--name-only", revision, SOURCES).splitlines())
    return {path: git("show", f"{revision}:{path}") for path in paths if is_code(path)}


def above_ceilings(lines: Counter[str], ceilings: dict[str, int]) -> list[str]:
    """Return a sentence for each package that has more lines than its ceiling.

    >>> above_ceilings(Counter(data=11, text=5, new=1), {"data": 10, "text": 5})
    ['data: 11 lines, ceiling 10', 'new: 1 lines, ceiling 0']
    """
    return [
        f"{package}: {count:,} lines, ceiling {ceilings.get(package, 0):,}"
        for package, count in lines.items()
        if count > ceilings.get(package, 0)
    ]


def main() -> int:
    """Print a table of packages: files, lines of code, the change since a commit and the ceiling."""
    limits = tomllib.loads(LIMITS.read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", default=limits["since"], metavar="REV",
                        help="commit to compare with (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="print nothing but the packages above their ceilings"
    )
    arguments = parser.parse_args()
    lines, num_files = count(files_now())
    if arguments.check:
        above = above_ceilings(lines, limits["ceilings"])
        print(
            "\n".join([*above, *([HOW_TO_RAISE] if above else [])]), file=sys.stderr, end="\n" * bool(above)
        )
        return bool(above)
    before = count(files_at(arguments.since))[0]
    print(f"{'package':<12} {'files':>6} {'code lines':>11} {'ceiling':>8}  since {arguments.since}")
    for name in sorted(lines | before, key=lambda name: -lines[name]):
        ceiling = limits["ceilings"].get(name, 0)
        change = lines[name] - before[name]
        print(f"{name:<12} {num_files[name]:>6} {lines[name]:>11,} {ceiling:>8,}  {change:+,}")
    change = lines.total() - before.total()
    print(f"{'sum':<12} {num_files.total():>6} {lines.total():>11,} {'':>8}  {change:+,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
