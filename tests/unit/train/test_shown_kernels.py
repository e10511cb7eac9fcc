"""What a dry run says of kernels, without measuring: the run's record, the kept table, or a pinned file."""

from types import SimpleNamespace

import pytest
import torch

from penstock.devices import kernel_choice
from penstock.devices.kernel_choice import Operation
from penstock.devices.kernel_table import ChosenKernel, KernelTable, kept_path
from penstock.train import kernels

CPU = torch.device("cpu")
IDENTITY = "a device", {"torch": "9"}


def never(*_):
    raise AssertionError("a dry run computes nothing")


def operation(shape):
    return Operation(
        name="attention.rows",
        shape=shape,
        kernels={"first": never, "second": never},
        trial=never,
        load=never,
        exact=never,
        near=0.0,
    )


@pytest.fixture(autouse=True)
def measured_device(monkeypatch, tmp_path):
    """Have the CPU taken for a device that keeps a table for rows of 8 tokens."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_choice.accelerator, "is_accelerator", lambda _: True)
    monkeypatch.setattr(kernel_choice, "identity_of", lambda _: IDENTITY)
    row = ChosenKernel(kernel="second", us={"first": 3.0, "second": 2.0})
    KernelTable(device=IDENTITY[0], versions=IDENTITY[1], rows={"attention.rows 8": row}).write(
        kept_path(*IDENTITY)
    )


def shown(monkeypatch, *, setting="auto", shape="8", recorded=None):
    monkeypatch.setattr(kernels, "operations_of", lambda *_: [operation(shape)])
    monkeypatch.setattr(kernels, "recorded_kernels", lambda _: recorded or KernelTable())
    return kernels.shown_kernels(SimpleNamespace(kernels=setting), None, CPU)["attention.rows"]


def test_the_kept_choice_is_shown_for_its_shape_alone(monkeypatch):
    assert shown(monkeypatch) == "second (2 us, 1.50 times as fast as the next)"
    assert shown(monkeypatch, shape="16") == "not chosen yet on this device"


def test_the_record_of_the_run_comes_first_if_its_setting_is_the_same(monkeypatch):
    recorded = KernelTable(rows={"attention.rows 16": ChosenKernel(kernel="first")})
    assert shown(monkeypatch, recorded=recorded) == "first (not measured)"
    assert shown(monkeypatch, recorded=recorded, setting="reference") == "first (the first)"


def test_a_pinned_file_counts_for_any_shape(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    KernelTable(rows={"attention.rows 4": ChosenKernel(kernel="second")}).write(path)
    assert shown(monkeypatch, setting=str(path), shape="16") == "second (not measured)"
