"""The library of C++ operators: built once, in a safe place, and never needed."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from penstock.core import env, native_compiler
from penstock.core.native_build import BeingBuilt, NotBuilt, library_if_built, library_of
from penstock.nn import native
from penstock.nn.native import built_library

MULTIPLY = """
#include "tiles.h"
void multiply(penstock::tiles::Task& pairs, penstock::tiles::Task& bytes) {
  if (!penstock::tiles::usable()) return;
  penstock::tiles::Unit unit;
  unit.multiply<penstock::tiles::PAIRS>(pairs);
  unit.multiply<penstock::tiles::BYTES>(bytes);
}
"""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in that writes what it is told to and counts its runs."""
    path, runs = tmp_path / "cxx", tmp_path / "runs"
    path.write_text(
        f"#!/bin/sh\nif [ $1 = --version ]; then echo stand-in 1; exit; fi\necho run >> {runs}\n"
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path, lambda: len(runs.read_text().splitlines())


def test_what_was_built_is_found_again(own_cache, compiler):
    _, num_runs = compiler
    first = built_library()
    assert first.read_text() == "library\n"
    assert first.parent == own_cache
    assert built_library() == first
    assert num_runs() == len(native.unit().texts) + 1  # and the linker's


def test_several_at_once_build_one_library(own_cache, compiler):
    _, num_runs = compiler
    with ThreadPoolExecutor(6) as pool:
        built = set(pool.map(lambda _: built_library(), range(6)))
    assert len(built) == 1
    assert num_runs() == len(native.unit().texts) + 1  # and the linker's
    assert sorted(p.name for p in own_cache.iterdir()) == sorted([built.pop().name, "operators.lock"])


@pytest.mark.usefixtures("own_cache")
def test_another_source_compiler_or_cpu_is_another_library(compiler, tmp_path, monkeypatch):
    path, _ = compiler
    names = [built_library()]
    monkeypatch.setattr(env, "cpu_features", lambda: "flags: sse2")
    names.append(built_library())
    path.write_text(path.read_text().replace("stand-in 1", "stand-in 2"))
    names.append(built_library())
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "one.cpp").write_text("int one;")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "sources")
    names.append(built_library())
    assert len(set(names)) == len(names)


@pytest.mark.usefixtures("compiler")
def test_a_folder_that_others_can_write_to_is_refused(own_cache):
    own_cache.mkdir(parents=True)
    own_cache.chmod(0o777)
    with pytest.raises(NotBuilt, match=r"writable by others .*native.* Set PENSTOCK_CACHE"):
        built_library()


@pytest.mark.usefixtures("compiler")
def test_a_parent_in_which_others_could_replace_the_folder_is_refused(own_cache):
    own_cache.mkdir(parents=True)
    own_cache.parent.chmod(0o777)
    with pytest.raises(NotBuilt, match="writable by others"):
        built_library()
    own_cache.parent.chmod(0o1777)  # as /tmp: only owners rename
    built_library()


@pytest.mark.usefixtures("own_cache")
def test_no_compiler_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotBuilt, match=r"no C\+\+ compiler .*no-such-compiler.*Install g\+\+"):
        built_library()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(own_cache, compiler):
    path, _ = compiler
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "cannot do this" >&2\nexit 3\n')
    with pytest.raises(NotBuilt, match=r"failed .*cannot do this.* Set CXX"):
        built_library()
    (noted,) = own_cache.glob("*.failed")
    assert {p.name for p in own_cache.iterdir()} == {"operators.lock", noted.name}


def test_a_build_that_failed_is_tried_again_by_the_command_or_with_another_compiler(own_cache, compiler):
    path, num_runs = compiler
    good = path.read_text()
    path.write_text(good.replace("while", "exit 3\nwhile"))
    with pytest.raises(NotBuilt, match="The compiler failed"):
        built_library()
    once = num_runs()
    with pytest.raises(
        NotBuilt, match=r"did not compile on this machine .*status 3.*python -m penstock.nn.native"
    ):
        built_library()
    assert num_runs() == once
    path.write_text(good)
    assert library_of(native.unit(), try_again=True).is_file()
    assert not list(own_cache.glob("*.failed"))


@pytest.mark.usefixtures("own_cache", "compiler")
def test_the_path_of_the_environment_is_no_part_of_the_name():
    unit = native.unit()
    elsewhere = replace(unit, paths=["-I/another/environment/torch/include"])
    assert library_of(elsewhere) == library_of(unit)


GATED = """#!/bin/sh
if [ "$1" = --version ]; then echo gated 1; exit; fi
sleep 1000 &
echo $$ $! $PPID >> {pids}
while [ ! -e {gate} ]; do sleep 0.05; done
kill $!
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def gated(tmp_path, monkeypatch):
    """A compiler that starts another process, and ends only when its gate opens."""
    path, pids, gate = tmp_path / "cxx", tmp_path / "pids", tmp_path / "gate"
    path.write_text(GATED.format(pids=pids, gate=gate))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    yield pids, gate
    gate.touch()


def processes_in(pids):
    """The compiler, what it started and its guard, once it runs."""
    return eventually(lambda: pids.is_file() and [int(pid) for pid in pids.read_text().split()])


def eventually(found):
    while not (value := found()):
        time.sleep(0.02)
    return value


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


COMMAND = [sys.executable, "-m", "penstock.nn.native"]


def test_killed_builds_leave_no_compiler_and_the_next_removes_their_folder(own_cache, gated):
    pids, gate = gated
    builder = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL)
    started = processes_in(pids)
    assert list(own_cache.glob("operators-building-*"))
    builder.kill()
    builder.wait()
    eventually(lambda: all(map(is_gone, started)))
    assert list(own_cache.glob("operators-building-*"))
    gate.touch()
    assert built_library().read_text() == "library\n"
    assert not list(own_cache.glob("operators-building-*"))


def test_the_limit_ends_the_compiler_and_what_it_started(own_cache, gated, monkeypatch):
    pids, _ = gated
    monkeypatch.setattr(native_compiler, "LIMIT_S", 0.5)
    with pytest.raises(NotBuilt, match=r"did not finish .*Compiling the C\+\+ operators.*not done after"):
        built_library()
    eventually(lambda: all(map(is_gone, processes_in(pids))))
    assert {p.suffix for p in own_cache.iterdir()} == {".lock", ".failed"}


@pytest.mark.usefixtures("own_cache")
def test_who_waits_for_another_build_says_so_and_gets_its_library(gated, monkeypatch):
    pids, gate = gated
    builder = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True)
    processes_in(pids)
    with pytest.raises(BeingBuilt, match=r"Another process is building the C\+\+ operators"):
        library_if_built(native.unit())
    monkeypatch.setattr(native_compiler, "_QUIET_S", 0.0)
    said = []

    def say(text):
        said.append(text)
        gate.touch()

    library = library_of(native.unit(), say=say)
    assert said[0].startswith("Another process compiles the C++ operators; waiting for it: ")
    assert builder.communicate()[0].strip() == str(library)


@pytest.mark.usefixtures("own_cache")
def test_waiting_for_another_build_has_a_bound(gated, monkeypatch):
    pids, _ = gated
    builder = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL)
    processes_in(pids)
    monkeypatch.setattr(native_compiler, "LIMIT_S", 0.2)
    with pytest.raises(NotBuilt, match="waiting for it: not done after 0 s"):
        built_library()
    builder.terminate()
    builder.wait()


@pytest.mark.usefixtures("own_cache")
def test_the_first_use_waits_for_nothing_and_the_next_start_has_the_operators(gated, monkeypatch, caplog):
    pids, gate = gated
    monkeypatch.delenv("PENSTOCK_NATIVE")
    with caplog.at_level(logging.WARNING):
        assert not cache(native.is_available.__wrapped__)()
    told = caplog.records[0].getMessage()
    assert re.match(r"The C\+\+ operators are being built by process \d+: once a machine", told)
    assert told.endswith("cores. Until then plain PyTorch computes, slower; the next start has the operators")
    processes_in(pids)
    gate.touch()
    library = library_of(native.unit())
    assert library_if_built(native.unit()) == library


@pytest.mark.usefixtures("own_cache")
def test_a_build_says_how_long_it_takes_while_it_takes_it(gated, monkeypatch):
    _, gate = gated
    monkeypatch.setattr(native_compiler, "_QUIET_S", 0.0)
    said = []
    library_of(native.unit(), say=lambda text: (said.append(text), gate.touch()))
    how_long = "once a machine, for half a minute on two idle cores"
    assert said[0].startswith(f"Compiling the C++ operators, {how_long}: ")


@pytest.mark.usefixtures("compiler")
def test_a_home_that_cannot_be_written_to_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", "/proc/nowhere")
    for ask in (library_of, library_if_built):
        with pytest.raises(NotBuilt, match=r"No folder for compiled code .*Set PENSTOCK_CACHE"):
            ask(native.unit())


@pytest.mark.usefixtures("own_cache")
def test_without_operators_it_is_said_once_and_answered_no(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    asked_anew = cache(native.is_available.__wrapped__)
    with caplog.at_level(logging.WARNING):
        assert not asked_anew()
        assert not asked_anew()
    assert len(caplog.records) == 1
    assert "The C++ operators are not used" in caplog.text


@pytest.mark.usefixtures("own_cache", "compiler")
def test_a_library_that_cannot_be_loaded_is_answered_no():
    assert not native.is_available.__wrapped__()


@pytest.mark.usefixtures("own_cache", "compiler")
def test_the_command_says_where_the_library_is():
    command = [sys.executable, "-m", "penstock.nn.native"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip() == str(built_library())


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler here")
def test_what_is_here_compiles():  # or every test of an operator would be skipped
    assert built_library().is_file()
    assert native.is_available()


def test_the_operators_compute_on_the_threads_of_torch():
    if not native.is_available():
        pytest.skip("no compiler here")
    maps = Path("/proc/self/maps").read_text().splitlines()
    pools = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line}
    assert len(pools) <= 1, pools


def test_matrix_tiles_compile_for_a_cpu_that_has_them(tmp_path):
    try:
        compiler = native._compiler()
    except NotBuilt:
        pytest.skip("no C++ compiler here")
    code, text = tmp_path / "multiply.cpp", tmp_path / "multiply.s"
    code.write_text(MULTIPLY)
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-mavx512f", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
    command = [compiler, *flags, f"-I{native.SOURCES}", "-S", str(code), "-o", str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if any(word in done.stderr for word in ("unrecognized", "unknown", "unsupported")):
        pytest.skip("this compiler does not know the instructions, so the operators do without")
    assert (done.returncode, done.stderr) == (0, "")
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
        assert instruction in text.read_text()
