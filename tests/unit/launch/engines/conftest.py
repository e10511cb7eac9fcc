"""Programs of Slurm's names, for tests of its engine."""

import pytest


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts programs of Slurm's names into the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def make(name, script):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make
