"""Options that `penstock launch slurm` hands through to sbatch."""

import pytest

from penstock.cli.launch.slurm import _extra
from penstock.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("--nodes=8", "nodes"),
        ("--nodes 8", "nodes"),
        ("-N8", "nodes"),
        ("-N 8", "nodes"),
        ("-HN8", "nodes"),
        ("--qos=long --nodes=8", "nodes"),
        ("-n4", "ntasks"),
        ("-t10", "time"),
        ("-p x", "partition"),
        ("--part=x", "partition"),
        ("-Jother", "job-name"),
        ("-o/tmp/out", "output"),
        ("-Ateam", "account"),
        ("--sig=USR2@5", "signal"),
    ],
)
def test_what_the_script_sets_itself_is_refused_however_it_is_written(text, ours):
    with pytest.raises(UsageError, match=f"The script sets --{ours} itself"):
        _extra(text)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("--array=0-3", "array"),
        ("-a0-3", "array"),
        ("-Ha 0-3", "array"),
        ("--arr 0-3", "array"),
        ("--ntasks-per-node=2", "ntasks-per-node"),
        ("--ntasks-per-n=2", "ntasks-per-node"),
        ("--tasks-per-node=2", "tasks-per-node"),
        ("--qos=long --ntasks-per-gpu=1", "ntasks-per-gpu"),
    ],
)
def test_what_would_start_the_run_several_times_is_refused(text, option):
    with pytest.raises(UsageError, match=f"--{option} would start the run several times"):
        _extra(text)


@pytest.mark.parametrize(
    "text",
    ["--qos=long", "--qos long", "-q long", "-c8", "-H", "--gpus-per-node=8", "--nodelist=n1", "--nice=-5"],
)
def test_other_options_are_handed_through_as_they_are(text):
    assert _extra(text) == text


@pytest.mark.parametrize("text", ["qos=long", "", "--qos=a\n#SBATCH --uid=0"])
def test_what_is_no_option_is_refused(text):
    with pytest.raises(UsageError, match="--sbatch takes an option of sbatch"):
        _extra(text)


def test_a_secret_in_an_option_is_refused():
    with pytest.raises(UsageError, match="--sbatch holds what looks like a secret"):
        _extra("--export=ALL,HF_TOKEN=abc")
