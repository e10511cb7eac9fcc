"""Optional packages: imported on first use."""

from importlib import import_module
from typing import Any

from penstock.core.errors import PackageMissing


class Package:
    """Optional package, imported when its first attribute is read; a stand-in for the module.

    For type checkers, import the module itself under `TYPE_CHECKING`. Reading an attribute raises
    PackageMissing if the package is not installed.

    Args:
        name: dotted name of the module.
        feature: what needs it, for messages ("Arrow and Parquet files").


    >>> Package("math", "Roots").sqrt(4.0)
    2.0
    """

    def __init__(self, name: str, feature: str) -> None:
        self._name, self._feature = name, feature

    def __getattr__(self, attribute: str) -> Any:  # Any: whatever the module offers
        if attribute.startswith("__"):  # read by tools that inspect every object, such as doctest
            raise AttributeError(attribute)
        try:
            found = getattr(import_module(self._name), attribute)
        except ModuleNotFoundError as error:
            if error.name != self._name.partition(".")[0]:  # installed but broken
                raise
            raise missing(self._name, self._feature) from None
        setattr(self, attribute, found)  # later reads need no call
        return found


def missing(module: str, feature: str) -> PackageMissing:
    """Return the error for a module that is not installed.

    >>> print(missing("pyarrow.parquet", "Arrow and Parquet files"))
    Arrow and Parquet files need the package pyarrow, which is not installed. pip install pyarrow
    """
    package = module.partition(".")[0]
    return PackageMissing(
        f"{feature} need the package {package}, which is not installed", fix=f"pip install {package}"
    )
