"""`penstock serve --tensor-parallel 2`: one rank killed, all processes told to end, the first one gone."""

import os
import select
import signal
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.serving import PATIENCE_S, make_model, serving

TWO = ("--cache-gib", "0.05", "--tensor-parallel", "2")
ASK = {"model": "tiny", "prompt": "the turbine", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("served") / "tiny")


def ranks_of(pid):
    """Return the processes that hold the other ranks of a server."""
    children = [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]
    return [child for child in children if b"workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def expecting_ends(pids):
    """Fail unless these processes, which are not this one's children, end in here or soon after."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for handle in handles:
            assert select.select([handle], [], [], PATIENCE_S)[0], "a rank is left"
    finally:
        for handle in handles:
            os.close(handle)


def test_a_killed_rank_ends_streams_with_an_error_and_the_server_with_a_code(folder):
    with serving(folder, *TWO) as server, server.openai() as client:
        (rank,) = ranks_of(server.process.pid)
        assert client.completions.create(**ASK, max_tokens=8).usage.completion_tokens == 8
        stream = client.completions.create(**ASK, max_tokens=4000, stream=True)
        next(iter(stream))
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="rank 1 was killed by SIGKILL"):
            for _ in stream:
                pass
        assert server.process.wait(PATIENCE_S) == 1
        assert "rank 1 was killed by SIGKILL" in server.errors.read_text()


def test_a_signal_to_all_lets_answers_end_and_then_all_processes(folder):
    with serving(folder, *TWO) as server, server.openai() as client:
        ranks = ranks_of(server.process.pid)
        stream = iter(client.completions.create(**ASK, max_tokens=300, stream=True))
        next(stream)
        with expecting_ends(ranks):
            for pid in (*ranks, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            finishes = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
            assert server.process.wait(PATIENCE_S) == 0
        assert finishes[-1] == "length"


def test_no_rank_outlives_a_server_that_is_killed(folder):
    with serving(folder, *TWO) as server:
        ranks = ranks_of(server.process.pid)
        assert len(ranks) == 1
        with expecting_ends(ranks):
            server.process.kill()
