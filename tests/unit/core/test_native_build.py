"""Libraries that an image ships: root's alone, for a CPU that can run them, of these sources."""

import ctypes
import logging
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.core import env
from penstock.core.errors import UsageError
from penstock.core.native_build import (
    BASELINES,
    NotBuilt,
    Unit,
    baselines_named,
    baselines_of,
    build_ahead,
    find_compiler,
    library_of,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler here"),
    pytest.mark.skipif(os.geteuid() != 0, reason="libraries of root's need root"),
]
OLDEST = BASELINES[-1]


def no_compiler():
    raise NotBuilt("There is no C compiler")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A unit whose library is shipped for each baseline, on a machine without a compiler."""
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    unit = Unit(
        name="numbers",
        title="numbers",
        takes="a second",
        module="nothing",
        texts=['#include "seven.c"\n', "int eight(void) { return 8; }\n"],
        suffix=".c",
        sources=[source],
        find_compiler=lambda: find_compiler("C", "CC", ["cc"]),
        variable="CC",
        flags=("-O2", "-fPIC"),
    )
    folder = tmp_path / "lib"
    for baseline in BASELINES:
        build_ahead(unit, folder, baseline)
    monkeypatch.setenv("PENSTOCK_LIBRARIES", str(folder))
    monkeypatch.setenv("PENSTOCK_CACHE", "/proc/nowhere")
    return replace(unit, find_compiler=no_compiler), folder


def test_the_best_library_that_the_cpu_can_run_is_loaded(shipped, monkeypatch):
    unit, folder = shipped
    for baseline in BASELINES:
        monkeypatch.setattr(env, "cpu_features", lambda needs=baseline.needs: f"flags : {' '.join(needs)}")
        library = library_of(unit)
        assert library.parent == folder
        assert library.name.startswith(f"numbers-{baseline.name}-")
    loaded = ctypes.CDLL(str(library))  # compiled for the oldest
    assert (loaded.seven(), loaded.eight()) == (7, 8)


def test_a_named_baseline_comes_before_the_best_one(shipped, monkeypatch):
    unit, _ = shipped
    best = next(iter(BASELINES))
    monkeypatch.setattr(env, "cpu_features", lambda: f"flags : {' '.join(best.needs)}")
    monkeypatch.setenv("PENSTOCK_NATIVE_BASELINE", OLDEST.name)
    assert library_of(unit).name.startswith(f"numbers-{OLDEST.name}-")
    monkeypatch.setenv("PENSTOCK_NATIVE_BASELINE", "x86-64-v5")
    with pytest.raises(UsageError, match="no such baseline"):
        library_of(unit)


def test_a_cpu_older_than_all_of_them_gets_none(shipped, monkeypatch):
    monkeypatch.setattr(env, "cpu_features", lambda: f"flags : {' '.join(OLDEST.needs - {'fma'})}")
    with pytest.raises(NotBuilt, match="no C compiler"):
        library_of(shipped[0])


def test_other_sources_flags_or_versions_have_other_libraries(shipped):
    unit, _ = shipped
    for other in (
        replace(unit, version="torch 3"),
        replace(unit, flags=("-O3",)),
        replace(unit, links=("-lm",)),
    ):
        with pytest.raises(NotBuilt):
            library_of(other)
    unit.sources[0].write_text("int seven(void) { return 8; }\n")
    with pytest.raises(NotBuilt):
        library_of(unit)


@pytest.mark.parametrize("spoil", ["own the file", "own a parent", "write the file", "write the folder"])
def test_a_library_that_others_could_change_is_not_loaded(shipped, spoil, caplog, monkeypatch):
    unit, folder = shipped
    monkeypatch.setattr(env, "cpu_features", lambda: f"flags : {' '.join(OLDEST.needs)}")
    library = library_of(unit)
    verb, what = (
        spoil.split()[0],
        {"file": library, "parent": folder.parent, "folder": folder}[spoil.split()[2]],
    )
    os.chown(what, 65534, 0) if verb == "own" else what.chmod(0o775)
    with caplog.at_level(logging.WARNING), pytest.raises(NotBuilt):
        library_of(unit)
    assert f"{what} is not root's alone" in caplog.text


def test_a_link_to_a_folder_of_others_is_not_followed(shipped, tmp_path, monkeypatch):
    unit, folder = shipped
    theirs = tmp_path / "theirs"
    shutil.copytree(folder, theirs)
    os.chown(theirs, 65534, 65534)
    monkeypatch.setenv("PENSTOCK_LIBRARIES", str(tmp_path / "link"))
    (tmp_path / "link").symlink_to(theirs)
    with pytest.raises(NotBuilt):
        library_of(unit)


def test_baselines_are_in_the_order_of_what_they_need():
    for better, worse in pairwise(BASELINES):
        assert worse.needs < better.needs
    assert baselines_of(Path("/dev/null").read_text()) == []
    assert [each.name for each in baselines_named(["x86-64-v3"])] == ["x86-64-v3"]
