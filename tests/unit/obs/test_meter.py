"""The meter: rates of a step from three readings of the clock."""

import pytest

from penstock.core import clock
from penstock.obs.meter import StepMeter, peak_memory_bytes


def meter_of_one_step(monkeypatch, *readings):
    times = iter((readings[0], *readings))  # the constructor reads the clock too
    monkeypatch.setattr(clock, "monotonic", lambda: next(times))
    meter = StepMeter(flops_per_token=lambda length: 6e4 * length, peak_flops=1e10)
    meter.start()
    meter.got_batch()
    return meter


def test_rates_are_those_of_the_whole_step(monkeypatch):
    rates = meter_of_one_step(monkeypatch, 10.0, 10.5, 12.0).finish(rows=10, sequence_length=100)
    assert rates.step_s == 2.0
    assert rates.tokens_per_s == 500.0
    assert rates.data_wait_share == 0.25
    assert rates.mfu == pytest.approx(500 * 6e6 / 1e10)


def test_a_step_that_took_no_time_has_finite_rates(monkeypatch):
    rates = meter_of_one_step(monkeypatch, 5.0, 5.0, 5.0).finish(rows=10, sequence_length=100)
    assert rates.step_s > 0
    assert rates.tokens_per_s < float("inf")
    assert rates.data_wait_share == 0


def test_each_step_is_timed_from_its_own_start(monkeypatch):
    meter = meter_of_one_step(monkeypatch, 0.0, 1.0, 4.0, 100.0, 100.0, 101.0)
    meter.finish(rows=1, sequence_length=1000)
    meter.start()
    meter.got_batch()
    assert meter.finish(rows=1, sequence_length=1000).step_s == 1.0


def test_peak_memory_is_in_bytes():
    assert peak_memory_bytes() > 10 * 2**20  # an interpreter with numpy is larger than 10 MiB
