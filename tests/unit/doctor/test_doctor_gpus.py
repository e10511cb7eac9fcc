"""Reading NVML, with a stand-in for the driver's library: what is asked, and what a card may not support."""

import sys
from types import SimpleNamespace

import pytest

from penstock.doctor.checks import gpus


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801 - its name in the package
    pass


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801
    pass


def driver(**over):
    """The part of the package pynvml that is used, with two cards."""

    def refuse(*_):
        raise NVMLError_NotSupported

    parts = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: "H100",
        "nvmlDeviceGetPciInfo": lambda device: SimpleNamespace(
            busId=f"00000000:{device + 0x3B:X}:00.0".encode()
        ),
        "nvmlDeviceGetTotalEccErrors": lambda _, kind, __: [7, 0][kind],
        "nvmlDeviceGetRemappedRows": lambda _: (1, 2, 0, 1),
        "nvmlDeviceGetCurrentClocksThrottleReasons": refuse,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "NVML_VOLATILE_ECC": 0,
        "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVMLError": NVMLError,
        "NVMLError_NotSupported": NVMLError_NotSupported,
        "NVMLError_FunctionNotFound": NVMLError_FunctionNotFound,
        **over,
    }
    return SimpleNamespace(**parts)


def read(monkeypatch, **over):
    monkeypatch.setitem(sys.modules, "pynvml", driver(**over))
    return gpus.read_nvml(gpus.GpuFacts(on_the_bus=2))


def test_each_card_is_read_and_what_it_does_not_support_is_unknown(monkeypatch):
    found = read(monkeypatch)
    assert [gpu.bus for gpu in found.gpus] == ["0000:3b:00.0", "0000:3c:00.0"]
    card = found.gpus[0]
    assert (card.corrected_errors, card.uncorrected_errors, card.remapped_rows) == (7, 0, 3)
    assert (card.is_remap_pending, card.has_remap_failed, card.throttle_bits) == (False, True, None)


def test_a_card_that_cannot_be_read_is_named_and_the_others_are_read(monkeypatch):
    def handle(index):
        if index:
            raise NVMLError("GPU is lost")
        return index

    found = read(monkeypatch, nvmlDeviceGetHandleByIndex=handle)
    assert (len(found.gpus), found.lost) == (1, ("GPU 1: GPU is lost",))


def test_without_the_package_or_the_driver_it_is_not_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.read_nvml(gpus.GpuFacts()).why_not == "the package nvidia-ml-py is not installed"

    def init():
        raise NVMLError("Driver Not Loaded")

    assert read(monkeypatch, nvmlInit=init).why_not == "NVML: Driver Not Loaded"


def test_the_real_package_has_every_name_that_is_used():
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(driver()) if not hasattr(pynvml, name)] == []
    assert (pynvml.nvmlClocksThrottleReasonHwSlowdown, pynvml.nvmlClocksThrottleReasonSwThermalSlowdown) == (
        8,
        32,
    )
    bits = {
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "hardware thermal slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    assert {name: bit for name, (bit, _) in gpus._THROTTLED.items()} == bits


def test_gpus_on_the_bus_are_counted(tmp_path):
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "class").write_text(f"{kind}\n")
    assert gpus._on_the_bus(tmp_path) == 2
    assert gpus._on_the_bus(tmp_path / "absent") == 0
