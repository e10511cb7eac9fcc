"""Sinks of a run's records; a sink is a callable that takes one record."""

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]  # Any: JSON values
Sink = Callable[[Record], None]
