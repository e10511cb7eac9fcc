"""Options that `penstock launch slurm` hands through to sbatch."""

import pytest

from penstock.core.errors import UsageError
from penstock.launch.engines.sbatch_options import check_extra, check_variables
from tests.unit.launch.test_spec import make_spec


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
        check_extra(text)


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
        check_extra(text)


@pytest.mark.parametrize(
    "text",
    ["--qos=long", "--qos long", "-q long", "-c8", "-H", "--gpus-per-node=8", "--nodelist=n1", "--nice=-5"],
)
def test_other_options_are_handed_through_as_they_are(text):
    assert check_extra(text) == text


@pytest.mark.parametrize("text", ["qos=long", "", "--qos=a\n#SBATCH --uid=0"])
def test_what_is_no_option_is_refused(text):
    with pytest.raises(UsageError, match="--sbatch takes an option of sbatch"):
        check_extra(text)


def test_a_secret_in_an_option_is_refused():
    with pytest.raises(UsageError, match="--sbatch holds what looks like a secret"):
        check_extra("--export=ALL,HF_TOKEN=abc")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("--test-only", "test-only"),
        ("--test", "test-only"),
        ("--qos=long --test-o", "test-only"),
        ('--"test-only"', "test-only"),
        ("--te\\st-only", "test-only"),
        ("--parsable", "parsable"),
        ("--pars", "parsable"),
        ("--wrap=hostname", "wrap"),
        ("--wrap hostname", "wrap"),
        ("--wr='sleep 1'", "wrap"),
        ("--wait", "wait"),
        ("-W", "wait"),
        ("-HW", "wait"),
        ("-vWc4", "wait"),
        ("--chdir=/tmp", "chdir"),
        ("--chd /tmp", "chdir"),
        ("-D/tmp", "chdir"),
        ("-HD /tmp", "chdir"),
        ("--uid=0", "uid"),
        ("--ui root", "uid"),
        ("--gid=0", "gid"),
        ("--export=NONE", "export"),
        ("--export NONE", "export"),
        ("--exp=NIL", "export"),
        ("--export=PATH,HOME", "export"),
        ("--export=", "export"),
        ("--export", "export"),
        ("--export-file=/tmp/a", "export-file"),
        ("--get-user-env", "get-user-env"),
        ("--get-user-env=10L", "get-user-env"),
        ("--clusters=b", "clusters"),
        ("-Mb", "clusters"),
        ("-e /tmp/err", "error"),
        ("-Q", "quiet"),
        ("--quiet", "quiet"),
        ("-h", "help"),
        ("-V", "version"),
        ("--usage", "usage"),
    ],
)
def test_what_changes_the_submission_is_refused_by_name_however_it_is_written(text, option):
    with pytest.raises(UsageError, match=rf"--{option}\b.*\(got "):
        check_extra(text)


@pytest.mark.parametrize(
    "text",
    [
        "--export=ALL",
        "--export ALL,A=1",
        "--export=all,A=1",
        "--wait-all-nodes=1",
        "--comment='please --wait'",
        "-v",
    ],
)
def test_what_only_looks_like_one_of_these_is_handed_through(text):
    assert check_extra(text) == text


def test_a_quotation_without_end_is_no_option():
    with pytest.raises(UsageError, match="--sbatch takes an option of sbatch"):
        check_extra("--comment='a")


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("SBATCH_WAIT", "", "wait"),
        ("SBATCH_EXPORT", "NONE", "export"),
        ("SBATCH_GET_USER_ENV", "", "get-user-env"),
        ("SBATCH_ARRAY_INX", "0-3", "array"),
        ("SBATCH_NO_REQUEUE", "", "no-requeue"),
        ("SBATCH_OUTPUT", "/tmp/a", "output"),
        ("SBATCH_OPEN_MODE", "truncate", "open-mode"),
        ("SBATCH_SIGNAL", "TERM@5", "signal"),
        ("SBATCH_JOB_NAME", "b", "job-name"),
        ("SBATCH_CLUSTERS", "b", "clusters"),
        ("SLURM_CLUSTERS", "b", "clusters"),
        ("SBATCH_PARTITION", "b", "partition"),
        ("SBATCH_TIMELIMIT", "1", "time"),
    ],
)
def test_a_variable_that_overrides_the_script_is_refused_by_name(variable, value, option):
    spec = make_spec(queue="gpu", time_limit_s=3600.0)
    with pytest.raises(UsageError, match=f"{variable} is set, which is --{option} of sbatch") as refused:
        check_variables({"SBATCH_QOS": "long", variable: value}, spec)
    assert f"env -u {variable} " in str(refused.value)


def test_variables_that_do_not_contradict_the_script_are_left_to_slurm():
    known = {
        "SBATCH_PARTITION": "b",
        "SBATCH_ACCOUNT": "c",
        "SBATCH_TIMELIMIT": "9",
        "SBATCH_EXPORT": "ALL,A=1",
    }
    check_variables({**known, "SBATCH_QOS": "long", "SBATCH_GRES": "gpu:8"}, make_spec())
