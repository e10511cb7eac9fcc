"""Print every module with the first line of its docstring; `--check` only checks that each has one."""

import ast
import sys
from pathlib import Path


def code_map(root: Path) -> str:
    """Return the map of the package below `root`."""
    package = root / "src" / "penstock"
    lines = ["# Code map\n"]
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        title = "penstock" if folder == package else f"penstock/{folder.relative_to(package)}"
        lines.append(f"\n## {title}\n\n{summary(folder / '__init__.py')}\n")
        rows = [
            f"- `{path.name}`: {summary(path)}"
            for path in sorted(folder.glob("*.py"))
            if path.name != "__init__.py"
        ]
        if rows:
            lines.append("\n".join(["", *rows, ""]))
    return "".join(lines)


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else None
    if not docstring:
        raise SystemExit(f"{path} has no docstring: its first line says what the module is responsible for")
    return docstring.splitlines()[0]


def main() -> int:
    """Print the map."""
    text = code_map(Path(__file__).parent.parent)
    if "--check" not in sys.argv:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
