"""With how many islands a job goes on: as its rows divide, never fewer than asked, once a request."""

import pytest

from penstock.core import env
from penstock.core.errors import ConfigError, UsageError
from penstock.launch.local import EXIT_STOPPED, JobOutcome
from penstock.train.control.requests import CONTROL_FOLDER, ControlReply, answer
from penstock.train.control.resize_islands import Islands, check_islands, islands_left
from tests.islands import counting_corpus, recipe_of

KILLED = JobOutcome(1, ["Rank 3 was killed by SIGKILL."], lost=(3,))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return counting_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def recipe(corpus, tmp_path):
    """Islands of two ranks, and rows that divide over 1, 2 or 4 of them."""
    return recipe_of(
        corpus, tmp_path, parallel={"replicate": -1, "shard": 2}, outer={"every": 4, "min_islands": 2}
    )


def islands_of(recipe, *, processes, said=None):
    return Islands(recipe, processes=processes, say=[].append if said is None else said.append)


def test_rows_must_divide_over_the_islands_that_are_left(recipe):
    assert [islands_left(recipe, most=most) for most in (5, 4, 3, 2, 1)] == [4, 4, 2, 2, 0]


def test_a_killed_rank_takes_its_island_with_it(recipe):
    said = []
    islands = islands_of(recipe, processes=8, said=said)
    assert islands.again(KILLED) == 4
    assert said == ["Rank 3 was killed by SIGKILL. The run continues with 2 islands."]
    assert islands.again(KILLED) == 0, "outer.min_islands"


@pytest.mark.parametrize(
    "outcome", [JobOutcome(1, ["wrong"]), JobOutcome(0, []), JobOutcome(EXIT_STOPPED, [])]
)
def test_a_job_that_failed_finished_or_was_stopped_does_not_go_on(recipe, outcome):
    assert islands_of(recipe, processes=8).again(outcome) == 0


def test_a_request_is_followed_once(recipe, tmp_path):
    (tmp_path / CONTROL_FOLDER).mkdir()
    answer(tmp_path, ControlReply(number=1, taken_up=True, said="", islands=2))
    islands = islands_of(recipe, processes=4)
    assert islands.again(JobOutcome(EXIT_STOPPED, [])) == 0, "that was before this job"
    answer(tmp_path, ControlReply(number=2, taken_up=True, said="", islands=4))
    answer(tmp_path, ControlReply(number=3, taken_up=False, said="refused"))
    assert islands.again(JobOutcome(EXIT_STOPPED, [])) == 8
    assert islands.again(JobOutcome(EXIT_STOPPED, [])) == 0


def test_what_was_asked_before_an_island_was_lost_is_done_with(recipe, tmp_path):
    """The processes that had taken it up are gone; those that follow know nothing of it."""
    (tmp_path / CONTROL_FOLDER).mkdir()
    islands = islands_of(recipe, processes=8)
    answer(tmp_path, ControlReply(number=1, taken_up=True, said="", islands=2))
    assert islands.again(KILLED) == 4
    assert islands.again(JobOutcome(EXIT_STOPPED, [])) == 0


def test_what_a_job_cannot_go_on_with_is_refused(recipe, monkeypatch):
    monkeypatch.delenv(env.RENDEZVOUS, raising=False)
    with pytest.raises(UsageError, match=r"is fixed while it runs \(got 4\). Set outer.min_islands"):
        check_islands(recipe, 4)
    monkeypatch.setenv(env.RENDEZVOUS, "file:///there")
    check_islands(recipe, 4)
    with pytest.raises(UsageError, match=r"outer.min_islands is 2 \(got 1\). Ask for as many"):
        check_islands(recipe, 1)
    with pytest.raises(ConfigError, match="does not divide"):
        check_islands(recipe, 3)


def test_min_islands_needs_islands_whose_number_is_free(corpus, tmp_path):
    with pytest.raises(
        ConfigError, match=r"outer.min_islands needs a variable number of islands, and it is fixed"
    ):
        recipe_of(corpus, tmp_path, outer={"every": 4, "min_islands": 1})
