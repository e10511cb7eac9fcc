"""Where hosts cannot be emulated, it is said why, and what to install or run."""

import shutil
from typing import Any

import pytest

from penstock.core.errors import UsageError
from penstock.netlab import namespaces
from penstock.netlab.hosts import _program, lab, why_not


def test_a_machine_without_iproute2_is_told_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"'ip'.* is not installed\. Install the package iproute2"):
        _program("ip")


def test_a_process_that_may_not_is_told_how_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> None:
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(namespaces, "_call", refuse)
    with pytest.raises(UsageError, match=r"Run it as root .*`unshare --map-root-user --net"), lab(hosts=1):
        pass
    why_not.cache_clear()
    assert "may not create network namespaces" in why_not()
    why_not.cache_clear()
