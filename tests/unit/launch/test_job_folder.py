"""Files of a launched run."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.errors import RunLocked, UsageError
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.supervise import SupervisorState
from tests.unit.launch.test_spec import make_spec


@pytest.fixture
def folder(tmp_path):
    made = JobFolder(tmp_path / "run")
    made.make()
    return made


def test_what_is_written_is_read_back(folder):
    spec, job = make_spec(), Job(engine="slurm", ident="7", host="", submitted_at="now")
    folder.write_spec(spec)
    folder.write_job(job)
    assert (folder.spec(), folder.job(), folder.has_job()) == (spec, job, True)


def test_all_nodes_may_note_the_end_of_a_job_at_once(folder):
    with ThreadPoolExecutor(8) as nodes:
        for mark, read in (
            (folder.mark_finished, folder.finished_job),
            (folder.mark_started, folder.started_job),
            (folder.mark_examined, folder.examined_job),
        ):
            assert list(nodes.map(mark, ["7"] * 200)) == [None] * 200
            assert read() == "7"
    assert len(list(folder.path.glob("*.json*"))) == 3, "no draft is left"


def test_a_folder_without_a_job_is_told_so(tmp_path):
    with pytest.raises(UsageError, match="was not started by `penstock launch`"):
        JobFolder(tmp_path).job()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"nodes": 3}'])
def test_a_damaged_file_is_said_to_be_one_with_a_remedy(folder, content):
    for name, read in (("spec.json", folder.spec), ("job.json", folder.job)):
        (folder.path / name).write_text(content)
        with pytest.raises(UsageError, match=rf"{name} is damaged.*launch the run again") as refused:
            read()
        assert "recipe" not in str(refused.value)


def test_counts_of_a_supervisor_outlive_it_and_not_another_launch(folder):
    folder.write_supervisor(SupervisorState(idle=2, newest=40, starts=5))
    assert folder.supervisor() == SupervisorState(idle=2, newest=40)
    folder.forget()
    assert folder.supervisor() == SupervisorState()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"idle": "x"}'])
def test_damaged_counts_are_none(folder, content):
    (folder.path / "supervisor.json").write_text(content)
    (folder.path / "request.json").write_text(content)
    assert folder.supervisor() == SupervisorState()
    assert folder.take_request() == 0


def test_a_request_is_taken_once(folder):
    folder.ask_for_nodes(3)
    assert (folder.take_request(), folder.take_request()) == (3, 0)


def test_a_stop_holds_for_the_job_that_was_asked_and_not_for_the_next_one(folder):
    assert not folder.is_to_stop()
    folder.ask_to_stop("j1")
    assert (folder.is_to_stop("j1"), folder.is_to_stop("j2"), folder.is_to_stop()) == (True, False, False)
    folder.ask_to_stop()
    assert folder.is_to_stop()
    folder.forget()
    assert not folder.is_to_stop()


def write_events(folder, node):
    for index in range(100):
        folder.log_event("start", node=node, cause="x" * 200, index=index)


def test_nodes_append_whole_lines(folder):
    writers = [
        multiprocessing.get_context("fork").Process(target=write_events, args=(folder, n)) for n in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        writer.close()
    found = folder.events()
    assert len(found) == 300
    assert [e["index"] for e in found if e["node"] == 1] == [*range(100)]


def test_a_line_that_was_cut_is_left_out(folder):
    folder.log_event("start", cause="whole")
    with (folder.path / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert [event["cause"] for event in folder.events()] == ["whole"]


def test_a_line_that_a_full_disk_cut_does_not_take_the_next_with_it(folder):
    with (folder.path / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    folder.log_event("start", cause="after")
    assert [event["cause"] for event in folder.events()] == ["after"]


def test_a_transition_that_cannot_be_written_is_a_warning(folder, caplog):
    (folder.path / "events.jsonl").symlink_to("/dev/full")
    folder.log_event("start", cause="nobody hears of it")
    assert "No space left on device" in caplog.text
    assert "nobody hears of it" in caplog.text


@pytest.mark.parametrize("cause", ["a\u2028b", "a\x85b", "a\x0cb", "caf\udce9"])
def test_a_cause_of_any_characters_is_one_transition(folder, cause):
    folder.log_event("start", cause=cause)
    folder.log_event("start", cause="after")
    assert [event["cause"] for event in folder.events()] == [cause, "after"]


def test_counts_that_cannot_be_written_are_a_warning(folder, caplog):
    (folder.path / "supervisor.json").mkdir()
    folder.write_supervisor(SupervisorState(idle=2))
    assert "The counts of starts were not written" in caplog.text


def test_one_launcher_holds_a_run(folder):
    assert not folder.is_held()
    with folder.held():
        assert folder.is_held()
        with pytest.raises(RunLocked), folder.held():
            pass
    assert not folder.is_held()


def test_a_run_that_never_started_has_no_checkpoint(folder):
    assert folder.newest_step() == -1
