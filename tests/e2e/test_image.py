"""The Containerfile as text; check_image.py makes what it says."""

from pathlib import Path

from tests.containerfile import stages_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text()


def test_the_last_stage_has_nothing_to_build_with_and_runs_as_nobody_special():
    first, last = stages_of(TEXT)
    said = [rest for word, rest in last.steps if word == "RUN"]
    assert not [text for text in said if any(tool in text for tool in ("g++", "gcc", "pip", "make", "-dev"))]
    users = [rest for word, rest in last.steps if word == "USER"]
    assert users == ["1001:0"], "a number: Kubernetes refuses a name where runAsNonRoot is set"
    assert ("COPY", f"--from={first.name} /opt/penstock /opt/penstock") in last.steps


def test_the_context_holds_what_is_copied_and_nothing_else():
    lines = (ROOT / ".containerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        each
        for stage in stages_of(TEXT)
        for word, rest in stage.steps
        if word == "COPY" and not rest.startswith("--from")
        for each in rest.split()[:-1]
    }
    assert "*" in lines
    assert copied == let_in
    assert all((ROOT / each).exists() for each in copied)
