"""The fastest candidate that is right is used, kept, recorded and used again; with made-up kernels."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.devices import accelerator, kernel_choice
from penstock.devices.kernel_choice import Operation, choose, identity_of, keep, measure
from penstock.devices.kernel_table import ChosenKernel, KernelTable, fastest, kept, kept_path
from tests.examples import examples

CPU = torch.device("cpu")
NOW = [0.0]


@pytest.fixture(autouse=True)
def made_up_time(monkeypatch):
    """Have kernels take the time that they say."""
    monkeypatch.setattr(kernel_choice, "clock", SimpleNamespace(monotonic=lambda: NOW[0]))


def candidate(name, *, takes_s=0.001, wrong_by=0.0, raises=None):
    """Return a name, and a kernel that doubles a number."""

    def prepare(x):
        def call():
            if raises is not None:
                raise raises
            NOW[0] += takes_s
            return (2 * x + wrong_by,)

        return call

    return name, prepare


def doubling(*candidates, name="double"):
    return Operation(
        name=name,
        shape="3 numbers",
        kernels=dict(candidates),
        trial=lambda: torch.ones(3),
        load=lambda: torch.ones(3),
        exact=lambda x: (2 * x.double(),),
        near=1e-3,
    )


QUICK, SLOW = candidate("quick"), candidate("slow", takes_s=0.003)


@pytest.fixture
def measured_device(monkeypatch, tmp_path):
    """Have the CPU taken for a device whose kernels are measured, with a cache of its own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_choice.accelerator, "is_accelerator", lambda _: True)
    monkeypatch.setattr(accelerator, "wait", lambda _: None)
    monkeypatch.setattr(kernel_choice, "identity_of", lambda _: ("a device", {"torch": "9"}))
    return tmp_path


TIMES = st.dictionaries(st.sampled_from("abcdef"), st.floats(1.0, 1e6), min_size=1)


@given(us=TIMES)
@examples(100)
def test_the_chosen_one_is_among_the_fastest_and_the_first_of_them(us):
    chosen, best = fastest(us), min(us.values())
    assert us[chosen] <= 1.02 * best
    assert all(us[name] > 1.02 * best for name in list(us)[: list(us).index(chosen)])


@given(us=TIMES, slower=st.floats(1.0, 10.0))
@examples(100)
def test_a_device_that_is_slower_throughout_chooses_alike(us, slower):
    assert fastest({name: 2.0 ** round(slower) * time for name, time in us.items()}) == fastest(us)


def test_the_fastest_right_candidate_wins():
    row = measure(doubling(SLOW, QUICK), CPU)
    assert row.kernel == "quick"
    assert row.lead == pytest.approx(3.0)
    assert list(row.us) == ["slow", "quick"]
    assert row.out == {}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (candidate("bad", wrong_by=0.1), "wrong by 0.05 of the largest value, allowed 0.001"),
        (candidate("bad", wrong_by=float("nan")), "wrong by nan"),
        (candidate("bad", raises=RuntimeError("no cuDNN\nhere")), "RuntimeError: no cuDNN"),
        (candidate("bad", raises=torch.OutOfMemoryError("full")), "OutOfMemoryError: full"),
    ],
    ids=["wrong", "nan", "missing", "no memory"],
)
def test_a_candidate_that_fails_is_out_with_a_line_in_the_log(bad, why, caplog):
    row = measure(doubling(bad, SLOW), CPU)
    assert row.kernel == "slow"
    assert list(row.us) == ["slow"]
    assert why in row.out["bad"]
    assert why in caplog.text


def test_a_candidate_that_has_no_room_for_the_real_size_is_out(caplog):
    def prepare(x):
        if len(x) > 3:
            raise torch.OutOfMemoryError("full")
        return lambda: (2 * x,)

    operation = replace(doubling(("large", prepare), QUICK), load=lambda: torch.ones(4))
    assert measure(operation, CPU).out == {"large": "OutOfMemoryError: full"}
    assert "full" in caplog.text


def test_a_device_on_which_no_kernel_is_right_is_refused():
    with pytest.raises(
        PenstockError, match=r"No kernel computes double correctly on this device.*wrong by 0.5"
    ):
        measure(doubling(candidate("a", wrong_by=1.0), candidate("b", raises=ValueError("no"))), CPU)


def test_a_candidate_with_a_cost_is_measured_on_purpose_only():
    operation = replace(doubling(SLOW, QUICK), costly={"quick"})
    assert measure(operation, CPU).us.keys() == {"slow"}
    assert measure(operation, CPU, on_purpose=True).kernel == "quick"


def test_what_was_measured_is_kept_and_not_measured_again(measured_device, monkeypatch):
    table = choose([doubling(SLOW, QUICK)], CPU)
    assert table.chosen == {"double": "quick"}
    path = kept_path("a device", {"torch": "9"})
    assert path.is_relative_to(measured_device)
    assert KernelTable.read(path).rows == table.rows
    monkeypatch.setattr(kernel_choice, "measure", lambda *_: pytest.fail("measured again"))
    assert choose([doubling(SLOW, QUICK)], CPU).rows == table.rows


@pytest.mark.usefixtures("measured_device")
def test_other_versions_are_measured_anew(monkeypatch):
    choose([doubling(SLOW, QUICK)], CPU)
    monkeypatch.setattr(kernel_choice, "identity_of", lambda _: ("a device", {"torch": "10"}))
    found = choose([doubling(QUICK, candidate("slower", takes_s=0.002))], CPU)
    assert found.chosen == {"double": "quick"}
    assert found.rows["double 3 numbers"].us.keys() == {"quick", "slower"}


@pytest.mark.usefixtures("measured_device")
def test_operations_are_added_to_what_is_kept():
    choose([doubling(SLOW, QUICK)], CPU)
    choose([doubling(QUICK, SLOW, name="again")], CPU)
    assert kept("a device", {"torch": "9"}).chosen == {"double": "quick", "again": "quick"}


@pytest.mark.usefixtures("measured_device")
def test_a_start_that_has_no_more_time_takes_the_first_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr(kernel_choice, "FIRST_START_S", 0.0)
    assert choose([doubling(SLOW, QUICK)], CPU).chosen == {"double": "slow"}
    assert kept("a device", {"torch": "9"}).rows == {}


@pytest.mark.usefixtures("measured_device")
def test_a_device_that_is_full_starts_with_the_first(caplog):
    operation = doubling(
        candidate("a", raises=torch.OutOfMemoryError("full")), candidate("b", raises=OSError())
    )
    assert choose([operation], CPU).chosen == {"double": "a"}
    assert "none could be measured" in caplog.text
    assert kept("a device", {"torch": "9"}).rows == {}


def test_a_cache_that_cannot_be_written_is_a_line_in_the_log(measured_device, caplog):
    (measured_device / "kernels").write_text("a file")
    assert choose([doubling(SLOW, QUICK)], CPU).chosen == {"double": "quick"}
    assert "could not be kept" in caplog.text


@pytest.mark.usefixtures("measured_device")
def test_a_kept_table_that_is_damaged_is_measured_anew():
    path = kept_path("a device", {"torch": "9"})
    path.parent.mkdir(parents=True)
    path.write_text('{"rows": 3}')
    assert choose([doubling(SLOW, QUICK)], CPU).chosen == {"double": "quick"}
    assert KernelTable.read(path).chosen == {"double": "quick"}


def test_reference_measures_nothing_and_takes_the_first(measured_device):
    assert choose([doubling(SLOW, QUICK)], CPU, setting="reference").chosen == {"double": "slow"}
    assert not (measured_device / "kernels").exists()


def test_on_cpus_the_first_computes_whatever_was_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    name, versions = identity_of(CPU)
    keep(
        KernelTable(
            device=name,
            versions=versions,
            rows={"double 3 numbers": ChosenKernel(kernel="quick", us={"quick": 1.0})},
        )
    )
    assert choose([doubling(SLOW, QUICK)], CPU).chosen == {"double": "slow"}


OF_RUN = KernelTable(
    device="a device",
    versions={"torch": "9"},
    rows={"double 8 numbers": ChosenKernel(kernel="slow", us={"slow": 2.0})},
)


@pytest.mark.usefixtures("measured_device")
def test_a_resumed_run_uses_what_it_has_used_though_another_is_faster():
    for _ in range(2):
        table = choose([doubling(QUICK, SLOW)], CPU, recorded=OF_RUN)
        assert table.rows == {"double 3 numbers": OF_RUN.rows["double 8 numbers"]}
    assert kept("a device", {"torch": "9"}).rows == {}


@pytest.mark.parametrize(
    ("present", "why"),
    [
        ((QUICK,), "it has no such kernel on this device"),
        ((QUICK, candidate("slow", raises=RuntimeError("no cuDNN"))), "no cuDNN"),
        ((QUICK, candidate("slow", wrong_by=1.0)), "wrong by"),
    ],
    ids=["unknown", "raises", "wrong"],
)
@pytest.mark.usefixtures("measured_device")
def test_a_recorded_kernel_that_another_device_lacks_is_replaced(present, why, monkeypatch, caplog):
    monkeypatch.setattr(kernel_choice, "identity_of", lambda _: ("another", {"torch": "9"}))
    assert choose([doubling(*present)], CPU, recorded=OF_RUN).chosen == {"double": "quick"}
    assert "Kernel slow of double is not used" in caplog.text
    assert why in caplog.text


@pytest.mark.usefixtures("measured_device")
def test_another_setting_chooses_anew():
    by_hand = replace(OF_RUN, setting="reference")
    assert choose([doubling(QUICK, SLOW)], CPU, recorded=by_hand).chosen == {"double": "quick"}
    assert choose([doubling(QUICK, SLOW)], CPU, setting="reference", recorded=OF_RUN).chosen == {
        "double": "quick"
    }


@pytest.fixture
def pinned(tmp_path):
    path = tmp_path / "table.json"
    OF_RUN.write(path)
    return path


def test_a_file_pins_a_choice(pinned, caplog):
    operations = [doubling(QUICK, SLOW), doubling(QUICK, SLOW, name="other")]
    assert choose(operations, CPU, setting=str(pinned)).chosen == {"double": "slow", "other": "quick"}
    assert "has no entry for" in caplog.text
    assert "other" in caplog.text


@pytest.mark.parametrize(
    "bad", [(QUICK,), (QUICK, candidate("slow", wrong_by=1.0))], ids=["unknown", "wrong"]
)
def test_a_file_that_pins_what_cannot_compute_is_refused(pinned, bad):
    said = r"pins double of 3 numbers to a kernel that cannot compute it .*slow.*kernels MODEL --out"
    with pytest.raises(ConfigError, match=said):
        choose([doubling(*bad)], CPU, setting=str(pinned))


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, UsageError), ("[1]", ConfigError), ('{"rows": {"a 1": {}}}', ConfigError), ("{", ConfigError)],
)
def test_a_file_that_is_no_table_is_refused(content, error, tmp_path):
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=r"table.json.*penstock kernels --out FILE"):
        choose([], CPU, setting=str(path))


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = KernelTable(
        setting="x.json",
        device="a device",
        versions={"torch": "9"},
        rows={"double 3 numbers": ChosenKernel(kernel="b", us={"a": 2.0, "b": 1.5}, out={"c": "no cuDNN"})},
    )
    table.write(tmp_path / "deep" / "table.json")
    assert KernelTable.read(tmp_path / "deep" / "table.json") == table
    assert (
        json.loads((tmp_path / "deep" / "table.json").read_text())["rows"]["double 3 numbers"]["kernel"]
        == "b"
    )


def test_a_choice_is_said_in_words():
    assert (
        str(ChosenKernel(kernel="b", us={"a": 3.0, "b": 1.5})) == "b (1.5 us, 2.00 times as fast as the next)"
    )
    assert str(ChosenKernel(kernel="b", us={"b": 1.5})) == "b (the only one)"
    assert str(ChosenKernel(kernel="b")) == "b (not measured)"


@pytest.mark.usefixtures("measured_device")
def test_a_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        choose([doubling(SLOW, QUICK)], CPU)
    assert "double: quick" in caplog.text
