"""The clusters that come with Penstock, and those of files."""

import tomllib
from importlib.resources import files
from pathlib import Path

from penstock.core.errors import UsageError, nearest
from penstock.plan.hardware import Cluster, load_cluster

_SUFFIX = ".toml"


def cluster_names() -> list[str]:
    """Return the names, in alphabetical order."""
    found = (entry.name for entry in files("penstock").joinpath("recipes", "clusters").iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))


def cluster_of(name: str) -> Cluster:
    """Return the cluster of a file, or one that comes with Penstock by its name.

    Raises:
        UsageError: there is none.
        ConfigError: the file describes no cluster.
    """
    if name.endswith(_SUFFIX):
        return load_cluster(Path(name))
    known = cluster_names()
    if name not in known:
        raise UsageError(
            "No cluster of this name comes with Penstock",
            got=name,
            fix=f"{nearest(name, known)} Or give the path of a .toml file.",
        )
    text = files("penstock").joinpath("recipes", "clusters", f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return Cluster.read(tomllib.loads(text))
