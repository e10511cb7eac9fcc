"""`penstock launch logs`: a log that is read in pieces, or while it is written; an engine that is away."""

import pytest

from penstock.cli.launch import logs
from penstock.cli.launch.logs import GrowingLog
from penstock.cli.main import main
from penstock.launch.engines.engine import EngineUnreachable, JobState
from penstock.launch.job_folder import Job, JobFolder


@pytest.mark.parametrize("before", range(2**16 - 4, 2**16 + 1))
def test_a_character_at_the_edge_of_a_piece_is_printed_whole(tmp_path, capsys, before):
    text = "x" * before + "日本\n"
    (tmp_path / "log").write_text(text)
    GrowingLog(tmp_path / "log").print_new()
    assert capsys.readouterr().out == text


def test_a_character_that_is_half_written_waits_for_its_rest(tmp_path, capsys):
    log, content = GrowingLog(tmp_path / "log"), "日\n".encode()
    log.print_new()
    for end in range(len(content) + 1):
        (tmp_path / "log").write_bytes(content[:end])
        log.print_new()
    assert capsys.readouterr().out == "日\n"


def test_bytes_that_are_no_text_are_printed_as_such(tmp_path, capsys):
    (tmp_path / "log").write_bytes(b"a\xffb\n")
    GrowingLog(tmp_path / "log").print_new()
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}b\n"


class BusyEngine:
    """An engine that does not answer at first, and has ended the job then; the job prints meanwhile."""

    def __init__(self, log):
        self.log, self.looks = log, 0

    def state(self, _job, _folder):
        self.looks += 1
        with self.log.open("a") as file:
            file.write(f"look {self.looks}\n")
        if self.looks < 3:
            raise EngineUnreachable("Slurm did not answer")
        return JobState(is_live=False, status="COMPLETED")


class GoneEngine:
    """An engine that never answers again."""

    def state(self, _job, _folder):
        raise EngineUnreachable("squeue cannot reach Slurm", fix="Ask `scontrol ping`.")


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """The folder of a job of an engine, whose log is followed."""
    folder = JobFolder(tmp_path)
    folder.make()
    folder.write_job(Job(engine="slurm", ident="7", host="", submitted_at="now"))
    monkeypatch.setattr(logs, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(logs, "_POLL_S", 0.01)

    def follow(engine):
        monkeypatch.setattr(logs, "ENGINES", {"slurm": engine})
        return main(["launch", "logs", str(tmp_path), "-f"])

    return folder, follow


def test_a_log_is_followed_while_the_engine_does_not_answer(followed, capsys):
    folder, follow = followed
    assert follow(BusyEngine(folder.log_of(0))) == 0
    assert capsys.readouterr().out == "look 1\nlook 2\nlook 3\n"


@pytest.mark.timeout(60)
def test_a_log_of_a_job_that_nobody_knows_of_any_more_is_followed_for_a_while(followed, capsys, monkeypatch):
    folder, follow = followed
    folder.log_of(0).write_text("step 1\n")
    monkeypatch.setattr(logs, "_MAX_SILENCE_S", 0.2)
    assert follow(GoneEngine()) == 1
    printed = capsys.readouterr()
    assert (printed.out, "squeue cannot reach Slurm" in printed.err) == ("step 1\n", True)
