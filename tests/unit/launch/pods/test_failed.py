"""Failed pods of a node: counted until there is a new checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.pods.failed import FailedPods


@pytest.fixture
def at(tmp_path, monkeypatch):
    """Start a pod of a node when the run has a checkpoint, or None; returns how many failed before it."""

    def at(newest, *, node=0, job="j1"):
        monkeypatch.setattr(JobFolder, "newest_known", lambda _: newest)
        return FailedPods(JobFolder(tmp_path), node).begin(job)

    return at


def test_pods_that_say_nothing_at_their_end_have_failed(at):
    assert [at(10) for _ in range(4)] == [0, 1, 2, 3]


def test_a_new_checkpoint_and_a_new_job_begin_the_count_again(at):
    assert [at(step) for step in (-1, -1, 10, 10, 20)] == [0, 1, 0, 1, 0]
    assert at(20, job="j2") == 0


def test_storage_that_does_not_answer_neither_begins_the_count_again_nor_forgets_it(at):
    assert [at(step) for step in (10, 10, None, None, 10, 20)] == [0, 1, 2, 3, 4, 0]
    assert [at(step, node=1) for step in (None, None, 30, 30)] == [0, 1, 0, 1]


def test_each_node_has_a_count_of_its_own(at):
    assert [at(10, node=0), at(10, node=1), at(10, node=0)] == [0, 0, 1]


@given(st.lists(st.sampled_from([0, 1, 2, 76, 77, EXIT_STOPPED, None]), max_size=12))
def test_only_ends_that_are_no_failures_take_the_start_back(tmp_path_factory, codes):
    pods = FailedPods(JobFolder(tmp_path_factory.mktemp("run")), 3)
    failed = 0
    for code in codes:  # None: killed
        assert pods.begin("j1") == failed
        if code is not None:
            pods.clear_unless_failed(code)
        failed = 0 if code in (0, EXIT_STOPPED) else failed + 1


def test_a_folder_that_cannot_be_written_or_a_damaged_note_counts_nothing(tmp_path):
    (tmp_path / "launch").write_text("a file")
    assert FailedPods(JobFolder(tmp_path), 0).begin("j1") == 0
    folder = JobFolder(tmp_path / "run")
    pods = FailedPods(folder, 0)
    pods.begin("j1")
    (folder.path / "pods" / "node-00000.json").write_text("{")
    assert pods.begin("j1") == 0
