"""Tables of alternatives: name -> "module:object", imported on first access."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.core.errors import UsageError, nearest


class Table(Mapping[str, Any]):  # Any: each table holds one kind of thing, which its owner names
    """Alternatives by name; an unknown name is a UsageError that names the nearest one.

    Args:
        kind: what the rows are, for messages ("packing rule").
        rows: name -> "package.module:object".
    """

    def __init__(self, kind: str, rows: Mapping[str, str]) -> None:
        self._kind = kind
        self._rows = dict(rows)
        self._modules: dict[str, tuple[ModuleType, str]] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows:
            raise UsageError(f"Unknown {self._kind}", got=name, fix=nearest(name, list(self._rows)))
        if name not in self._modules:  # a planner asks a million times
            module, _, attribute = self._rows[name].partition(":")
            self._modules[name] = import_module(module), attribute
        return getattr(*self._modules[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows
