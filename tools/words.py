"""Find words that make English read like a translation: `python -m tools.words`.

It reads the manual, the pages in the root folder, and the package's messages: texts that are no docstrings.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = re.compile(
    r"\b(?:anew|asked|beside|for want of|go on|goes on|going on|in the making|nobody|stands|told|went on)\b"
    r"|\bwhoever\b|(?:^|(?<=[.:;!?] ))(?-i:Of|Those|What|Who)\b[^?]*[.;:]$",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|\w+=%s", re.DOTALL)
ALLOWED = ("training stands still, the first save", "request asked, asked_by")  # names of a row and of keys


def found_in(text: str) -> Iterator[str]:
    """Yield the sentences of a text that have such a word.

    >>> list(found_in("Those wait. They wait `beside` it. What is it? Nobody was told."))
    ['Those wait.', 'Nobody was told.']
    """
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])|\n\n|\n(?=[-|#>])|\|", CODE.sub("", text)):
        words = " ".join(sentence.split()).lstrip("-#> *")
        if WORDS.search(words) and not any(allowed in words for allowed in ALLOWED):
            yield words


def messages(text: str) -> Iterator[str]:
    """Yield the texts of a program that are no docstrings and have more than one word.

    >>> list(messages('"Doc string."\\nraise ValueError("two words", "one")'))
    ['two words']
    """
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(value)) if id(node) not in docstrings and " " in value.strip():
                yield value


def main() -> int:
    """Print the sentences; 1 if there are any."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    sources = sorted(path for path in (ROOT / "src").rglob("*.py") if "testing" not in path.parts)
    texts = [(page, page.read_text()) for page in pages]
    texts += [(path, text) for path in sources for text in messages(path.read_text())]
    said = [f"{path.relative_to(ROOT)}: {sentence}" for path, text in texts for sentence in found_in(text)]
    print("\n".join(said), end="\n" if said else "")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
