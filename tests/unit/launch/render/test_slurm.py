"""The batch script: golden files, and what bash says of them."""

import subprocess
from pathlib import Path

import pytest

from penstock.core.errors import UsageError
from penstock.launch.preflight import command_of
from penstock.launch.render.slurm import render, time_text
from penstock.launch.spec import Secret, node_range
from tests.unit.launch.test_spec import make_spec

SPECS = {
    "fixed": make_spec(
        nodes=node_range("4"),
        processes=8,
        queue="gpu",
        account="team",
        time_limit_s=86400.0,
        grace_s=120.0,
        doctor="report",
    ),
    "elastic": make_spec(
        nodes=node_range("2:4"),
        extras=("--qos=long", "--cpus-per-task=16"),
        environment=(("NOTE", "it's"),),
        secrets=(Secret(name="KEY", source="file:/home/me/.key"),),
        doctor="require",
    ),
    "bare": make_spec(nodes=node_range("1"), doctor="skip", max_requeues=0),
    "prepared": make_spec(
        run_dir="/data/it's/first",
        doctor="report",
        setup="module load cuda\n",
        wrapper=("apptainer", "exec", "--nv", "/images/my image.sif"),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_script_is_the_golden_one(golden, name):
    rendered = render(SPECS[name])
    golden(
        f"slurm_{name}.json",
        {
            "files": {path: text.splitlines() for path, text in rendered.files.items()},
            "commands": [list(command) for command in rendered.commands],
            "settings": [str(setting) for setting in rendered.settings],
        },
    )


def script_of(spec):
    """Return the batch script of a run."""
    (script,) = [text for path, text in render(spec).files.items() if path.endswith("job.sbatch")]
    return script


def test_each_step_has_one_task_on_each_node_whatever_the_shell_that_submitted_says():
    (script,) = render(SPECS["elastic"]).files.values()
    steps = [line for line in script.splitlines() if line.lstrip().startswith("srun ")]
    assert len(steps) == 1
    assert '--ntasks-per-node=1 --ntasks="$SLURM_NNODES"' in steps[0]


@pytest.mark.parametrize("name", SPECS)
def test_bash_can_read_the_script(name):
    script = script_of(SPECS[name])
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def program(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def ran(
    tmp_path,
    code,
    *,
    restarts="0",
    stopped=False,
    states=("RUNNING",),
    doctor="skip",
    examined="exit 0",
    setup="",
    wrapper=(),
):
    """Run the script with a supervisor that ends with a code; return its code, and what it asked of Slurm.

    Args:
        states: what `squeue` prints, at each call the next; then the last.
        examined: what `srun` does.
        setup: what the script reads first.
    """
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    if stopped:
        (run / "launch" / "stop").touch()
    (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
    program(tmp_path, "python", f'echo "$FROM_SETUP" > {tmp_path}/supervised; exit {code}')
    program(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/asked')
    program(tmp_path, "squeue", f"head -n 1 {tmp_path}/states; sed -i '1{{$!d}}' {tmp_path}/states")
    program(tmp_path, "sleep", f'if [ "$1" = 120 ]; then kill -KILL $PPID; else echo >> {tmp_path}/slept; fi')
    program(tmp_path, "srun", examined)
    spec = make_spec(
        run_dir=str(run),
        work_dir=str(tmp_path),
        python=f"{tmp_path}/python",
        doctor=doctor,
        max_requeues=3,
        setup=setup,
        wrapper=wrapper,
    )
    for path, text in render(spec).files.items():
        Path(path).write_text(text)
    script = (run / "launch" / "job.sbatch").read_text()
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=False)
    asked = tmp_path / "asked"
    return done.returncode, asked.read_text().strip() if asked.exists() else ""


KILLED = -9
"""Of a job that Slurm ends to put it back into the queue."""


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 2), (76, 76)])
def test_codes_that_end_a_job_end_it(tmp_path, code, expected):
    assert ran(tmp_path, code) == (expected, "")


def test_a_run_that_stopped_after_saving_goes_back_into_the_queue(tmp_path):
    assert ran(tmp_path, 75) == (KILLED, "requeue 7")


def test_a_run_that_was_told_to_stop_for_good_does_not(tmp_path):
    assert ran(tmp_path, 75, stopped=True) == (0, "")


def test_a_job_that_was_cancelled_does_not_come_back(tmp_path):
    assert ran(tmp_path, 75, states=["COMPLETING"]) == (75, "")


def test_requeues_are_bounded(tmp_path):
    assert ran(tmp_path, 75, restarts="3") == (75, "")
    assert (tmp_path / "supervised").exists()


def test_a_job_that_slurm_requeued_too_often_does_not_start(tmp_path):
    assert ran(tmp_path, 0, restarts="4") == (75, "")
    assert not (tmp_path / "supervised").exists()


def test_time_limits_are_rounded_up():
    assert time_text(59.2) == "0-00:01:00"


@pytest.mark.parametrize("folder", ["my runs", "it's", "$(touch ran)", "100% `touch ran`"])
def test_paths_are_never_run(tmp_path, folder):
    """The doctor fails, so the script names its report; srun is one that runs its words here."""
    run = tmp_path / folder
    (run / "launch").mkdir(parents=True)
    (python := run / "python").write_text('#!/bin/sh\necho "asked $@"\nexit 3\n')
    words = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{words}\n")
    for program in (python, tmp_path / "srun"):
        program.chmod(0o755)
    spec = make_spec(run_dir=str(run), work_dir=str(tmp_path), python=str(python), doctor="require")
    (script,) = render(spec).files.values()
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, (run / "launch" / "doctor.txt").read_text()) == (
        1,
        f"asked {' '.join(command_of(spec))}\n",
    )
    assert done.stderr == (
        f"penstock doctor: exit code 3, see {run}/launch/doctor.txt\n"
        "not started: the run asks for sound nodes (--doctor require)\n"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_dir": "/runs/a\n#SBATCH --wrap=b"}, "The path of run.dir has a character"),
        ({"run_dir": '/runs/a"b'}, "The path of run.dir has a character"),
        ({"work_dir": "/runs/a\nb"}, "The path of the working folder has a character"),
        ({"queue": "gpu\n#SBATCH --uid=0"}, "--partition takes a name"),
        ({"account": "a b"}, "--account takes a name"),
    ],
)
def test_what_would_be_another_option_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        render(make_spec(**changes))


def test_sbatch_gets_a_path_with_spaces_and_percent_signs_as_one_word():
    (script,) = render(make_spec(run_dir="/my runs/100%j")).files.values()
    assert '#SBATCH --output="/my runs/100%%j/launch/slurm.out"\n' in script


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path):
    assert ran(tmp_path, 75, states=["", "", "RUNNING"]) == (KILLED, "requeue 7")
    assert len((tmp_path / "slept").read_text().splitlines()) == 2


@pytest.mark.parametrize("doctor", ["report", "require"])
def test_a_job_that_is_pre_empted_while_its_nodes_are_examined_comes_back(tmp_path, doctor):
    found = ran(tmp_path, 0, doctor=doctor, examined="kill -TERM $PPID; sleep 1; exit 143")
    assert found == (KILLED, "requeue 7")
    assert not (tmp_path / "supervised").exists()


@pytest.mark.parametrize("extra", ["-c8", "-c 8", "--cpus-per-task=8", "-s", "--exclusive=user"])
def test_a_job_that_says_what_of_a_node_it_takes_does_not_ask_for_whole_ones(extra):
    (script,) = render(make_spec(extras=(extra,))).files.values()
    assert "#SBATCH --exclusive\n" not in script


@pytest.mark.parametrize("code", [0, 1, 76])
@pytest.mark.parametrize("options", ["", "set -euo pipefail; ", "trap 'exit 9' TERM EXIT; code=9; pid=9; "])
def test_what_a_setup_exports_reaches_the_run_and_nothing_else_of_it_changes_the_script(
    tmp_path, options, code
):
    setup = f"{options}cd /; starts=99; export FROM_SETUP=loaded\n"
    assert ran(tmp_path, code, setup=setup) == (code, "")
    assert (tmp_path / "supervised").read_text() == "loaded\n"


@pytest.mark.parametrize(
    "setup", ["false", "exit", "exit 75", "set -e; false; true", "source /nosuch", "set -u; echo $NOSUCH"]
)
def test_a_setup_that_fails_or_exits_starts_nothing(tmp_path, setup):
    assert ran(tmp_path, 0, setup=f"{setup}\n") == (1, "")
    assert not (tmp_path / "supervised").exists()


def test_a_job_that_is_pre_empted_while_it_reads_its_setup_comes_back(tmp_path):
    setup = "kill -TERM $$; /bin/sleep 2\nexport FROM_SETUP=loaded\n"
    assert ran(tmp_path, 0, setup=setup) == (KILLED, "requeue 7")
    assert not (tmp_path / "supervised").exists()


def test_the_doctor_runs_with_the_setup_and_in_the_wrapper(tmp_path):
    found = ran(
        tmp_path,
        0,
        doctor="require",
        setup="export FROM_SETUP=loaded\n",
        wrapper=("box", "a b"),
        examined=f'echo "$FROM_SETUP $PATH" > {tmp_path}/examined; printf "%s|" "$@" >> {tmp_path}/examined',
    )
    assert found == (0, "")
    said = (tmp_path / "examined").read_text()
    assert said.startswith(f"loaded {tmp_path}:"), "the wrapper's python3 is this one, outside containers"
    assert "|doctor|box|a b|python3|-m|penstock|doctor|" in said
    assert (tmp_path / "supervised").exists(), "by the interpreter outside the wrapper"
