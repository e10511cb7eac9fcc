"""The table of a device's kernels: which candidate computes each operation, and by how much it won; no torch.

    {"device": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.11.0", ...}, "rows": {
      "attention.rows 2x4096, 32 heads of 8, 128 wide, bfloat16": {
        "kernel": "cudnn", "us": {"sdpa": 1810.0, "cudnn": 1802.0, "flash": 3200.0}, "out": {}}}}

The tables that were measured lie in the user's cache, one file for each device and set of versions. A file of
this form pins a choice (`kernels = "FILE"`), and the record of a run has the same form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.core import config, env
from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.core.files import write_json

AUTO, REFERENCE = "auto", "reference"
"""Settings besides a file. AUTO measures on accelerators; REFERENCE always uses the first candidate."""

_WRITE_ONE = 'Write one by `penstock kernels --out FILE`, or set kernels to "auto" or "reference".'
_TIE = 1.02  # a candidate that is faster by less than this does not displace one before it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenKernel:
    """Chosen kernel of an operation on a device, and the times of its candidates."""

    kernel: str
    """Name of the chosen candidate."""
    us: dict[str, float] = field(default_factory=dict)
    """Candidate -> microseconds, in the static order; empty: not measured."""
    out: dict[str, str] = field(default_factory=dict)
    """Candidate -> why it was left out: its error, or its wrong result."""

    @property
    def lead(self) -> float | None:
        """Time of the best other candidate over that of the chosen one; None: no other was measured.

        >>> ChosenKernel(kernel="cudnn", us={"sdpa": 30.0, "cudnn": 20.0, "flash": 40.0}).lead
        1.5
        """
        others = [us for name, us in self.us.items() if name != self.kernel]
        return min(others) / self.us[self.kernel] if others and self.kernel in self.us else None

    def __str__(self) -> str:
        """Return the choice in words."""
        if self.lead is None:
            return f"{self.kernel} (the only one)" if self.us else f"{self.kernel} (not measured)"
        return f"{self.kernel} ({self.us[self.kernel]:.4g} us, {self.lead:.2f} times as fast as the next)"


def fastest(us: Mapping[str, float]) -> str:
    """Return the fastest candidate; among those that are as good as equal, the first.

    >>> fastest({"sdpa": 100.0, "cudnn": 99.0, "flash": 130.0}), fastest({"sdpa": 100.0, "cudnn": 90.0})
    ('sdpa', 'cudnn')
    """
    best = min(us.values())
    return next(name for name, time in us.items() if time <= _TIE * best)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """Kernels of a device. The key of a row is an operation's name, a space, and its shape."""

    setting: str = AUTO
    """Setting by which it was chosen."""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, ChosenKernel] = field(default_factory=dict)

    def row_for(self, key: str) -> ChosenKernel | None:
        """Return the row of a key, or else of its operation with another shape; None: there is neither."""
        same = (row for other, row in self.rows.items() if other.split()[0] == key.split()[0])
        return self.rows.get(key) or next(same, None)

    def chosen_by(self, setting: str) -> Self:
        """Return this table if it was chosen by such a setting, or else an empty one."""
        return self if self.setting == setting else type(self)()

    @property
    def chosen(self) -> dict[str, str]:
        """Operation -> name of its kernel."""
        return {key.split()[0]: row.kernel for key, row in self.rows.items()}

    def is_of(self, device: str, versions: Mapping[str, str]) -> bool:
        """True if the rows were measured on such a device, with these versions."""
        return self.device == device and self.versions == versions

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a table.

        Raises:
            UsageError: there is no such file.
            ConfigError: it holds no table.
        """
        if not path.is_file():
            raise UsageError(f"There is no table of kernels in {path}", fix=_WRITE_ONE)
        try:
            return config.build(cls, config.load_json(path))
        except ConfigError as error:
            raise ConfigError(f"{path} holds no table of kernels: {error}", fix=_WRITE_ONE) from None

    def write(self, path: Path) -> None:
        """Write the table as `read` reads it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, config.dump(self))


def kept_path(device: str, versions: Mapping[str, str]) -> Path:
    """Return the file in the user's cache that keeps a device's table."""
    name = "".join(sign if sign.isalnum() else "-" for sign in device)
    return env.cache_folder() / "kernels" / f"{name}-{config.fingerprint(dict(versions))}.json"


def kept(device: str, versions: Mapping[str, str]) -> KernelTable:
    """Return a device's table in the cache; an empty one if it is missing or cannot be read."""
    try:
        found = KernelTable.read(kept_path(device, versions))
    except (PenstockError, OSError):
        found = KernelTable()
    return found if found.is_of(device, versions) else KernelTable(device=device, versions=dict(versions))
