"""Kinds of devices are rows of one table, and no other file names one, but for what is NVIDIA's own."""

import ast
import re
from pathlib import Path

import pytest
import torch

from penstock.core.errors import UsageError
from penstock.devices import accelerator
from penstock.devices.accelerator import KINDS

SOURCES = Path(__file__).parents[3] / "src" / "penstock"

NVIDIAS_OWN = {
    "devices/accelerator.py",
    "doctor/checks/devices.py",
    "engine/model_runner/decode_graphs.py",
    "nn/linear/float8.py",
    "nn/kernels/paged.py",
    "nn/kernels/varlen_torch.py",
    "nn/triton_support.py",
}
KIND = re.compile(rf"\b({'|'.join(sorted(set(KINDS) - {'cpu'}))})\b")


def named(source):
    """Return the lines of code, docstrings aside, in which a kind of accelerator is named."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                docstring.value = None
            case ast.Constant(value=str(text)) if KIND.search(text):
                lines.add(node.lineno)
            case ast.Attribute(attr=name) if KIND.fullmatch(name):
                lines.add(node.lineno)
    return sorted(lines)


def test_a_name_is_found_in_code_and_not_in_docstrings():
    source = '"""About cuda."""\nimport torch\nif torch.cuda.is_available():\n    x = "cpu:gloo,xpu:xccl"\n'
    assert named(source) == [3, 4]
    assert named('y = f"{x} cudagraphs"\n') == []


def test_no_other_file_names_a_kind_of_accelerator():
    found = {path.relative_to(SOURCES).as_posix(): named(path.read_text()) for path in SOURCES.rglob("*.py")}
    naming = {path for path, lines in found.items() if lines}
    assert naming == NVIDIAS_OWN, "ask penstock/devices/accelerator.py instead"


@pytest.mark.parametrize("of_type", sorted(set(KINDS) - {"cpu"}))
def test_an_accelerator_has_a_backend_of_its_own_beside_the_cpus(of_type):
    assert accelerator.is_accelerator(of_type)
    assert accelerator.backend_of(of_type) == f"cpu:gloo,{of_type}:{KINDS[of_type].backend}"
    assert KINDS[of_type].backend != "gloo"


@pytest.mark.skipif(accelerator.is_available(), reason="of machines without an accelerator")
def test_a_cpu_computes_where_there_is_no_accelerator_and_waits_for_nothing():
    assert accelerator.count() == 0
    for device in (accelerator.choose(), accelerator.choose(1)):
        assert device == torch.device("cpu")
        accelerator.use(device)
        accelerator.wait(device)
        accelerator.wait_for_stream(device)
        assert accelerator.name_of(device) == "cpu"
        assert accelerator.backend_of(device) == "gloo"


def test_what_holds_no_numbers_is_no_accelerator_and_has_no_graphs():
    assert not accelerator.is_accelerator(torch.device("meta"))
    assert not accelerator.kind_of("meta").has_graphs


def test_a_process_without_an_accelerator_of_its_own_is_told_so(monkeypatch):
    monkeypatch.setattr(accelerator, "_type", lambda: "xpu")
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    assert accelerator.choose(0) == torch.device("xpu", 0)
    with pytest.raises(UsageError, match=r"1 can be used here .got .process 2..\. Start at most 1"):
        accelerator.choose(1)


def test_generators_are_seeded_as_by_torch_without_a_note_for_devices_that_are_not_there(monkeypatch):
    torch.manual_seed(7)
    expected = torch.rand(3)
    monkeypatch.delattr("traceback.format_stack")
    accelerator.seed_generators(torch.device("cpu"), 7)
    assert torch.equal(torch.rand(3), expected)
