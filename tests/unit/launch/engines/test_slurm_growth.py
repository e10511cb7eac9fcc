"""When an elastic Slurm job asks for more nodes: for what is missing, once, and more seldom if in vain."""

import threading
from types import SimpleNamespace

import pytest

from penstock.core.errors import PenstockError
from penstock.launch.engines import slurm_growth
from penstock.launch.engines.slurm_growth import JoiningJob, NodeGrowth, nodes_to_ask, pause_after

PATIENCE_S = 30.0


def start(node, nodes):
    return {"event": "start", "node": node, "nodes": nodes}


def job(ident, first, count=1):
    return JoiningJob(ident=ident, nodes=range(first, first + count))


WHOLE = [start(0, 3), start(1, 3), start(2, 3)]
SHRUNK = [*WHOLE, start(0, 2), start(1, 2)]
GROWN = [*SHRUNK, start(0, 3), start(1, 3), start(3, 3)]


@pytest.mark.parametrize(
    ("starts", "asked", "queue", "expected"),
    [
        ([], [], [], 0),
        (WHOLE, [], [], 0),
        (SHRUNK, [], [], 1),
        (SHRUNK, [job("8", 3)], ["8"], 0),  # it waits, or its node is joining
        (SHRUNK, [job("8", 3)], [], 1),  # it has ended without
        (GROWN, [job("8", 3)], ["8"], 0),
        ([*GROWN, start(0, 2), start(1, 2)], [job("8", 3)], [], 1),  # the new one left again
        ([*GROWN, start(0, 2), start(3, 2)], [job("8", 3)], ["8"], 1),  # another one was lost
        ([*GROWN, start(3, 1)], [job("8", 3)], ["8"], 2),
        ([*GROWN, start(3, 1)], [job("8", 3), job("9", 4, 2)], ["8", "9"], 0),
    ],
)
def test_it_asks_for_what_is_missing_unless_it_has_asked_already(starts, asked, queue, expected):
    assert nodes_to_ask(3, starts, asked, queue) == expected


def test_jobs_that_never_train_are_asked_for_ever_more_seldom():
    asked = [job(str(number), number) for number in range(3, 13)]
    assert [pause_after(WHOLE, asked[:count]) for count in range(4)] == [0.0, 60.0, 120.0, 240.0]
    assert pause_after(WHOLE, asked) == 3600.0
    assert pause_after([*WHOLE, start(12, 3)], asked) == 0.0


class Folder:
    """Events of a run, without a file."""

    def __init__(self, events):
        self.told = events

    def events(self):
        return [{"event": "start", "first_rank": 0} | event for event in self.told]

    def log_event(self, event, *, cause):
        self.told.append({"event": event, "cause": cause})


@pytest.fixture
def grown(monkeypatch):
    """A growth with a job that was asked for, the words of its commands, and a way to answer them."""
    monkeypatch.setattr(slurm_growth, "_LOOK_S", 0.0)
    monkeypatch.setattr(slurm_growth, "_STORE_LINGERS_S", 0.0)
    said, answers = [], {"squeue": "8\n"}

    def command(*words, is_tried=False, as_new=False, more=None):  # noqa: ARG001
        said.append(words)
        answer = answers.get(words[0], "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    spec = SimpleNamespace(nodes=SimpleNamespace(most=3))
    found = NodeGrowth(spec, Folder([]), job="7", host=str, port=1, key="k" * 32, run=command)
    found._asked.append(job("8", 3))
    return found, said, answers


def looked(growth):
    growth.look()
    growth._asking.join(PATIENCE_S)
    assert not growth._asking.is_alive()


def test_a_slurm_that_does_not_answer_holds_nobody_up_and_is_not_asked_twice(grown, monkeypatch):
    monkeypatch.setattr(slurm_growth, "_END_S", 0.0)
    growth, said, answers = grown
    answers["squeue"] = ""
    growth._folder.told += SHRUNK
    asked, answer, command = threading.Event(), threading.Event(), growth._run

    def hang(*words, **options):
        asked.set()
        answer.wait(PATIENCE_S)
        return command(*words, **options)

    growth._run = hang
    growth.look()
    assert asked.wait(PATIENCE_S)
    first = growth._asking
    growth.look()
    assert growth._asking is first
    growth._run = command
    growth.end()
    assert said == [("scancel", "--quiet", "8")]
    answer.set()
    first.join(PATIENCE_S)
    assert "sbatch" not in [words[0] for words in said], "the run has ended"


def test_a_job_that_waits_is_taken_back_once_all_nodes_are_there_again(grown):
    growth, said, _ = grown
    growth._folder.told += WHOLE
    looked(growth)
    assert said[-1] == ("scancel", "--quiet", "--state=PENDING", "8")


def test_a_queue_that_does_not_answer_submits_no_second_job(grown):
    growth, said, answers = grown
    answers["squeue"] = PenstockError("slurm_load_jobs error: Socket timed out")
    growth._folder.told += SHRUNK
    looked(growth)
    assert [words[0] for words in said] == ["squeue"]
    assert growth._folder.told[-1]["event"] == "refused"


def test_nodes_that_joined_end_with_the_first_job(grown):
    growth, said, _ = grown
    growth.end()
    assert said == [("scancel", "--quiet", "8")], (
        "not only those that wait: they would train on by themselves"
    )
