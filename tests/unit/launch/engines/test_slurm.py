"""What is submitted to Slurm, cancelled and asked of it; and its absence and silence."""

import shutil

import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.launch.engines import slurm, slurm_commands
from penstock.launch.engines.slurm import (
    ENGINE,
    check_shell,
    checked_by_slurm,
    submit,
)
from penstock.launch.engines.slurm_commands import SlurmUnreachable
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.render.slurm import render
from penstock.launch.spec import Secret, node_range
from tests.unit.launch.test_spec import make_spec

JOB = Job(engine="slurm", ident="7", host="here", submitted_at="now")


@pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="SLURM IS NOT INSTALLED: apt-get install slurm-wlm"
)
def test_a_slurm_that_cannot_be_reached_is_told_and_a_dry_run_says_that_it_asked_nobody(
    tmp_path, monkeypatch
):
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/none\nMessageTimeout=1\n"
        "NodeName=n1 NodeAddr=127.0.0.1\nPartitionName=p Nodes=n1\n"
    )  # without a file Slurm asks the network's DNS for one, for two minutes
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    spec = make_spec(run_dir=str(tmp_path / "run"))
    with pytest.raises(PenstockError, match=r"scontrol cannot reach Slurm: .*SLURM_CONF"):
        submit(spec, JobFolder(tmp_path / "run"), render(spec))
    assert not (tmp_path / "run").exists()
    assert "the script was not tested: sbatch --test-only cannot reach Slurm" in checked_by_slurm(
        render(spec)
    )
    with pytest.raises(SlurmUnreachable, match="squeue cannot reach Slurm"):
        ENGINE.state(JOB, JobFolder(tmp_path / "run"))


def test_a_secret_that_this_shell_does_not_have_is_missed_before_a_dry_run_ends(monkeypatch):
    monkeypatch.delenv("NOSUCH", raising=False)
    with pytest.raises(UsageError, match="The variable NOSUCH"):
        check_shell(make_spec(secrets=(Secret(name="TOKEN", source="env:NOSUCH"),)))


@pytest.mark.parametrize("setup", ["if true; then\n", "echo 'open\n", "module load )\n"])
def test_a_setup_that_bash_cannot_read_is_refused_with_its_line(setup):
    with pytest.raises(UsageError, match=r"bash cannot read the setup file: line \d"):
        check_shell(make_spec(setup=setup))


def test_without_slurm_nothing_is_submitted_and_a_dry_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = make_spec(run_dir=str(tmp_path / "run"))
    with pytest.raises(PenstockError, match="There is no sbatch on this machine"):
        submit(spec, JobFolder(tmp_path / "run"), render(spec))
    assert not (tmp_path / "run").exists()
    assert "was not tested" in checked_by_slurm(render(spec))


def test_a_resize_without_the_secrets_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("NOSUCH", raising=False)
    folder = JobFolder(tmp_path / "run")
    folder.make()
    folder.write_spec(
        make_spec(run_dir=str(folder.run), secrets=(Secret(name="TOKEN", source="env:NOSUCH"),))
    )
    with pytest.raises(UsageError, match="The variable NOSUCH"):
        ENGINE.resize(JOB, folder, node_range("2"))
    assert not folder.is_to_stop()


def failing(said):
    return f"echo 'slurm_load_jobs error: {said}' >&2; exit 1"


def test_a_job_that_slurm_has_forgotten_has_ended(command, tmp_path):
    for name in ("squeue", "scontrol"):
        command(name, failing("Invalid job id specified"))
    state = ENGINE.state(JOB, JobFolder(tmp_path))
    assert (state.is_live, state.status, state.reason) == (False, "ENDED", "Slurm no longer knows the job")


def test_a_cancel_of_a_job_that_has_ended_says_that_nothing_is_left_to_stop(command, tmp_path):
    for name in ("squeue", "scontrol"):
        command(name, failing("Invalid job id specified"))
    with pytest.raises(PenstockError, match=r"Job 7 has ended already.*nothing to stop; launch it again"):
        ENGINE.cancel(JOB, JobFolder(tmp_path), now=False)


@pytest.mark.parametrize("fails", ["squeue", "scontrol"])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Unable to contact slurm controller (connect failure)", "cannot reach Slurm"),
        ("Socket timed out on send/recv operation", "cannot reach Slurm"),
        ("Zero Bytes were transmitted or received", "refused: slurm_load_jobs error: Zero Bytes"),
    ],
)
def test_a_query_that_fails_does_not_say_that_the_job_has_ended(command, tmp_path, fails, said, told):
    for name in ("squeue", "scontrol"):
        command(name, failing(said) if name == fails else "")
    with pytest.raises(PenstockError, match=f"{fails} {told}"):
        ENGINE.state(JOB, JobFolder(tmp_path))


def test_a_cancel_waits_while_the_controller_is_busy(command, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    folder = JobFolder(tmp_path)
    folder.make()
    folder.write_spec(make_spec())
    looks = tmp_path / "looks"
    busy = f'[ "$(wc -l < {looks})" != 2 ] || {{ {failing("Socket timed out on send/recv operation")}; }}'
    command("squeue", f'echo >> {looks}; {busy}; [ "$(wc -l < {looks})" != 1 ] || echo RUNNING')
    command("scontrol", f"{busy}; echo JobState=COMPLETED ExitCode=0:0")
    command("scancel", "")
    assert ENGINE.cancel(JOB, folder, now=False) == "job 7 stopped after saving"
    assert looks.read_text().count("\n") == 3


SILENT = ["exec sleep 60", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"]


@pytest.fixture
def submitted(command, tmp_path, monkeypatch):
    """Submits a run to programs that play Slurm: what sbatch and squeue do."""
    monkeypatch.setattr(slurm_commands, "ANSWER_S", 5.0)

    def submit_to(sbatch, squeue):
        command("scontrol", "")
        command("sbatch", sbatch)
        command("squeue", squeue)
        spec, folder = make_spec(run_dir=str(tmp_path / "run")), JobFolder(tmp_path / "run")
        return submit(spec, folder, render(spec)), folder

    return submit_to


@pytest.mark.parametrize("sbatch", SILENT)
def test_a_job_that_slurm_took_without_an_answer_is_found_by_its_script(submitted, tmp_path, sbatch):
    queue = f"echo '9|/other'; echo '11|{tmp_path}/run/launch/job.sbatch'; echo '12|(null)'"
    ident, folder = submitted(sbatch, queue)
    assert (ident, folder.job().ident) == ("11", "11")


@pytest.mark.parametrize("squeue", ["", failing("Socket timed out on send/recv operation")])
def test_files_of_a_job_that_slurm_may_have_taken_stay(submitted, tmp_path, squeue):
    with pytest.raises(SlurmUnreachable, match=r"may have taken the job.* squeue --me --name=first"):
        submitted(SILENT[1], squeue)
    files = {path.name for path in (tmp_path / "run" / "launch").iterdir()}
    assert {"job.sbatch", "spec.json"} <= files


def test_a_job_that_slurm_refused_leaves_no_files(submitted, tmp_path):
    with pytest.raises(PenstockError, match="Invalid qos"):
        submitted("echo 'sbatch: error: Invalid qos specification' >&2; exit 1", "")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "answer", ["", "echo 'Job 5 to start at 2026-01-01'", "echo ':'", "echo 12_3", "echo ready"]
)
def test_an_answer_without_a_number_is_no_submission_and_nothing_is_left(submitted, tmp_path, answer):
    with pytest.raises(PenstockError, match="sbatch printed no number of a job"):
        submitted(answer or "true", "")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_the_number_is_the_last_line_and_may_name_its_cluster(submitted):
    assert submitted("echo 'welcome to the cluster'; echo '31;here'", "")[0] == "31"


def test_a_submission_is_refused_where_a_variable_overrides_its_script(submitted, monkeypatch, tmp_path):
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    with pytest.raises(UsageError, match="SBATCH_EXPORT is set, which is --export of sbatch"):
        submitted("echo 5", "")
    assert not (tmp_path / "run").exists()
