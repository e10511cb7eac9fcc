"""Refuse files and functions that have grown too large, and files with names that say nothing.

Limits are those of CONTRIBUTING.md: a file 500 lines (300 is reported), a function 100 (50 is
reported), 7 arguments. What is exempt stands here by name, with the reason. Of tests, and of C++ and
JavaScript, files are measured, not functions.
"""

import ast
import sys
from pathlib import Path

MAX_FILE, TALK_FILE = 500, 300
MAX_FUNCTION, TALK_FUNCTION = 100, 50
MAX_ARGUMENTS = 7
VAGUE = {"utils", "util", "helpers", "common", "misc"}
MEASURED = {".py", ".cpp", ".h", ".js"}

EXEMPT = {
    "src/penstock/nn/kernels/documents.py:_attend_backward": "operators take no records",
    "src/penstock/nn/kernels/paged_triton.py:_attend": "a program for GPUs, which takes no records",
    "src/penstock/nn/kernels/paged_triton.py:_add_up": "a program for GPUs, which takes no records",
    "src/penstock/nn/low_bit_triton.py:_multiply_int8": "a program for GPUs, which takes no records",
    "src/penstock/nn/low_bit_triton.py:_multiply_int4": "a program for GPUs, which takes no records",
    "src/penstock/data/loader.py:Loader.__init__": "the public signature, each option by name",
    "src/penstock/data/run.py:Run.__init__": "what Loader is made with, handed on by name",
    "src/penstock/checkpoint/hf.py:save_pretrained": "public: each keyword is one independent choice",
}


def of_file(path: Path, *, root: Path) -> tuple[list[str], list[str]]:
    """Return what is refused and what is worth discussing of a file's name and length."""
    name, num_lines = path.relative_to(root), len(path.read_text().splitlines())
    refused = [f"{name}: a file is named for what it does"] if path.stem in VAGUE else []
    if num_lines > MAX_FILE:
        return [*refused, f"{name}: {num_lines} lines, at most {MAX_FILE}"], []
    return refused, [f"{name}: {num_lines} lines"] if num_lines > TALK_FILE else []


def of_functions(path: Path, *, root: Path) -> tuple[list[str], list[str]]:
    """Return what is refused and what is worth discussing of the functions in a file of Python."""
    name = path.relative_to(root)
    refused, discuss = [], []
    for qualified, node in functions(ast.parse(path.read_text())):
        where = f"{name}:{qualified}"
        size = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        arguments = len(node.args.args) + len(node.args.kwonlyargs) - ("." in qualified)
        if where in EXEMPT:
            continue
        if size > MAX_FUNCTION:
            refused.append(f"{where}: {size} lines, at most {MAX_FUNCTION}")
        elif size > TALK_FUNCTION:
            discuss.append(f"{where}: {size} lines")
        if arguments > MAX_ARGUMENTS:
            refused.append(f"{where}: {arguments} arguments, at most {MAX_ARGUMENTS}")
    return refused, discuss


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return functions and methods with their names, one level of classes deep."""
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += [
                (f"{node.name}.{inner.name}", inner)
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
    return found


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's docstring, which do not count against it."""
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def main() -> int:
    """Check the package and its tests; print what is refused and what to discuss."""
    root = Path(__file__).parent.parent
    package = sorted(path for path in (root / "src").rglob("*") if path.suffix in MEASURED)
    found = [of_file(path, root=root) for path in package]
    found += [of_functions(path, root=root) for path in package if path.suffix == ".py"]
    refused, discuss = ([line for each in found for line in each[kind]] for kind in (0, 1))
    refused += [
        line for path in sorted((root / "tests").rglob("*.py")) for line in of_file(path, root=root)[0]
    ]
    for line in discuss:
        print(f"discuss  {line}")
    for line in refused:
        print(f"REFUSED  {line}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
