"""Engines whose model lies on several processes: the same tokens, and what happens when one is gone."""

import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.forked_workers import forked_workers
from tests.tiny_models import save_tiny_model

from penstock.core.errors import EngineClosed, ModelError, RunnerLost, UsageError
from penstock.engine.assemble import build_engine
from penstock.engine.background import EngineThread
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner import collectives
from penstock.engine.request import Request
from penstock.engine.workers import processes
from penstock.engine.workers.processes import RankProcesses

__all__ = ["forked_workers"]

PROMPTS = [(3,), (3, 4, 5, 9), tuple(range(100, 145)), (7, 7, 1) * 9, (210, 0, 105, 106)]
SMALL = {"tokens_per_step": 24, "max_context": 96, "device": "cpu"}
BLOCK_GIB = 4096 / 2**30  # of the tiny models, all ranks together


def answers(folder, ranks, *, requests, **settings):
    """Return the tokens of each request's answer, a step after one another, and how many were pre-empted."""
    config = EngineConfig(tensor_parallel=ranks, cache_gib=12 * BLOCK_GIB, **SMALL, **settings)
    engine = build_engine(folder, config)
    try:
        found, waiting = {}, list(requests)
        while waiting or engine.has_work:
            if waiting:
                found[engine.add(waiting.pop(0))] = []
            for piece in engine.step():
                found[piece.request_id] += piece.token_ids
                assert piece.finish in (None, "length")
        assert engine.stats().used_blocks == 0
        return list(found.values()), engine.stats().preemptions
    finally:
        engine.close()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("family", "settings"),
    # every family, and more ranks: test_sliced_models.py
    [("llama-tied", {"drafts": "ngram"}), ("qwen2-one-head", {"cache": "int8"})],
)
def test_ranks_give_the_tokens_of_one(family, settings, tmp_path):
    save_tiny_model(family, tmp_path)
    requests = [Request(prompt=prompt, max_tokens=32) for prompt in PROMPTS]
    expected, _ = answers(tmp_path, 1, requests=requests, cache=settings.get("cache", "auto"))
    assert len({token for tokens in expected for token in tokens}) > 20
    found, preemptions = answers(tmp_path, 2, requests=requests, **settings)
    assert found == expected
    assert preemptions or family == "qwen2-one-head"  # whose window leaves blocks for all


@pytest.mark.usefixtures("forked_workers")
def test_ranks_round_their_parts_of_the_matrices(tmp_path):
    save_tiny_model("llama", tmp_path)
    requests = [Request(prompt=prompt, max_tokens=8) for prompt in PROMPTS]
    found, _ = answers(tmp_path, 2, requests=requests, weights="int8")
    assert [len(tokens) for tokens in found] == [8] * len(PROMPTS)


PATIENCE_S = 120


def workers():
    """Return the ids of this process's ranks, in the order in which they were started."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        found += [int(pid) for pid in children.read_text().split()]
    return sorted(pid for pid in found if b"workers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())


class Heard:
    """Collects the pieces of many requests; events say what came."""

    def __init__(self, num_requests):
        self.finishes, self.errors = [], []
        self.started, self.ended = threading.Event(), threading.Event()
        self._missing = num_requests

    def __call__(self, piece):
        if piece.token_ids:
            self.started.set()
        if piece.finish is not None:
            self.finishes.append(piece.finish)
            self.errors.append(piece.error)
            if len(self.finishes) == self._missing:
                self.ended.set()


@pytest.fixture
def folder(tmp_path):
    save_tiny_model("llama", tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ranked(folder):
    """Two ranks in an engine's thread."""
    with EngineThread(
        build_engine(folder, EngineConfig(tensor_parallel=2, cache_gib=2**-8, **SMALL))
    ) as thread:
        yield thread


LONG = Request(prompt=(3, 4, 5), max_tokens=90)


def test_a_rank_killed_while_it_answers_ends_all_answers_and_is_named(ranked):
    heard = Heard(8)
    (pid,) = workers()
    for _ in range(8):
        ranked.submit(LONG, heard)
    assert heard.started.wait(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    assert heard.ended.wait(PATIENCE_S)
    assert set(heard.finishes) <= {"error", "length"}
    assert "error" in heard.finishes
    assert all("rank 1 was killed by SIGKILL" in error for error in heard.errors if error)
    with pytest.raises(EngineClosed, match="rank 1 was killed by SIGKILL"):
        ranked.submit(LONG, heard)
    assert "rank 1 was killed" in ranked.failure
    assert not workers()


def test_a_rank_killed_while_nobody_asks_is_noticed_at_once(ranked):
    os.kill(*workers(), signal.SIGKILL)
    ranked._thread.join(PATIENCE_S)  # its end is what is waited for: nothing else happens
    assert "rank 1 was killed by SIGKILL" in ranked.failure


def test_a_rank_that_hangs_is_given_up_and_named(folder, monkeypatch):
    monkeypatch.setattr(collectives, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(processes, "_PATIENCE_S", 1.0)
    with EngineThread(
        build_engine(folder, EngineConfig(tensor_parallel=2, cache_gib=2**-8, **SMALL))
    ) as thread:
        heard = Heard(1)
        os.kill(*workers(), signal.SIGSTOP)
        thread.submit(LONG, heard)
        assert heard.ended.wait(PATIENCE_S)
        assert "rank 1 does not answer" in heard.errors[0]
        thread._thread.join(PATIENCE_S)
        assert not workers()


def test_ctrl_c_is_heard_while_a_rank_stands_still_whose_step_then_goes_on(ranked, monkeypatch):
    begun, heard = threading.Event(), Heard(1)
    step = RankProcesses.step

    def begin(self, batch):
        step(self, batch)
        begun.set()

    monkeypatch.setattr(RankProcesses, "step", begin)
    (pid,) = workers()
    os.kill(pid, signal.SIGSTOP)
    ranked.submit(LONG, heard)
    assert begun.wait(PATIENCE_S)  # and waits for the other rank from here on
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    os.kill(pid, signal.SIGCONT)
    assert heard.ended.wait(PATIENCE_S)
    assert heard.finishes == ["length"]


def test_a_rank_that_takes_nothing_from_its_pipe_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_SEND_LIMIT_S", 1)
    monkeypatch.setattr(processes, "_PATIENCE_S", 0.5)
    others = RankProcesses.start({1: {"path": tmp_path, "config": {}}})
    others.ranks[0].process.send_signal(signal.SIGSTOP)
    with pytest.raises(RunnerLost, match="rank 1 does not answer"):
        others.step(bytes(50_000_000))
    others.close()
    assert not workers()


def test_ranks_outlive_the_signals_of_a_terminal_and_end_with_the_engine(ranked):
    (pid,) = workers()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    heard = Heard(1)
    ranked.submit(LONG, heard)
    assert heard.ended.wait(PATIENCE_S)
    assert heard.finishes == ["length"]
    ranked.close()
    assert not workers()


def test_a_rank_that_cannot_open_its_part_says_why(tmp_path):
    job = {"path": tmp_path / "gone", "config": asdict(EngineConfig(tensor_parallel=2))}
    others = RankProcesses.start({1: job})
    with pytest.raises(RunnerLost, match=r"rank 1 failed: .*gone is not a folder"):
        others.answered()
    others.close()
    assert not workers()


def test_a_model_that_cannot_be_opened_leaves_no_rank(folder):
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="is damaged"):
        build_engine(folder, EngineConfig(tensor_parallel=2, cache_gib=2**-8, **SMALL))
    assert not workers()


def test_a_number_of_ranks_that_cannot_share_the_model_starts_none(folder):
    with pytest.raises(UsageError, match=r"4 query heads and 2 key-value heads .*got 3"):
        build_engine(folder, EngineConfig(tensor_parallel=3, cache_gib=2**-8, **SMALL))
    assert not workers()
