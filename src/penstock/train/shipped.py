"""The recipes that come with Penstock: their names, texts and what each says of itself; imports no torch.

They lie inside the package, so an installed Penstock has them; `recipes/` at the root of the repository is a
link to them.
"""

from importlib.resources import files

from penstock.core.errors import UsageError, nearest

_SUFFIX = ".toml"


def recipe_names() -> list[str]:
    """Return the names, in alphabetical order."""
    found = (entry.name for entry in files("penstock").joinpath("recipes").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def recipe_text(name: str) -> str:
    """Return a recipe as its author wrote it, comments included.

    Raises:
        UsageError: there is none of that name.
    """
    known = recipe_names()
    if name not in known:
        raise UsageError("No recipe of this name comes with Penstock", got=name, fix=nearest(name, known))
    return files("penstock").joinpath("recipes", f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def about(text: str) -> str:
    """Return what a recipe says of itself: the first sentence of its first comment.

    >>> about("# A small Llama. Prepare a corpus first:\\n[run]")
    'A small Llama'
    """
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip().partition(". ")[0].rstrip(".")
