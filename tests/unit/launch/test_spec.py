"""The specification of a launched run: what it reads, and what it refuses."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.errors import UsageError
from penstock.launch.spec import (
    NodeRange,
    RunSpec,
    Secret,
    check_grace,
    check_no_secret,
    check_no_secret_in,
    checked_setup,
    environment_of,
    node_range,
    secrets_of,
    words_of_wrapper,
)
from tests.examples import examples


def make_spec(**changes):
    values = {
        "name": "first",
        "command": ("train", "/data/runs/first/launch/recipe.toml"),
        "run_dir": "/data/runs/first",
        "work_dir": "/work",
        "python": "/opt/penstock/bin/python",
        "nodes": NodeRange(least=2, most=2),
    }
    return RunSpec(**{**values, **changes})


def test_a_specification_is_read_back_as_written():
    spec = make_spec(
        nodes=node_range("1:3"),
        secrets=(Secret(name="KEY", source="file:/k"),),
        environment=(("A", "1"),),
        extras=("--qos=long",),
    )
    assert RunSpec.read(spec.as_json()) == spec


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "two", "1:", "-1", "1:2:3", ""])
def test_numbers_of_nodes_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match=f"--nodes takes a number.*got '{text}'"):
        node_range(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"processes": 0}, "--processes must be from 1 "),
        ({"idle_starts": 0}, "--idle-starts must be from 1 "),
        ({"max_requeues": -1}, "--max-requeues must be from 0 "),
        ({"max_requeues": 10**9}, r"--max-requeues must be from 0 to 1,000,000 \(got 1000000000\)"),
        ({"grace_s": 0.0}, r"--grace takes a number of seconds above 0, at most 65,535 \(got 0"),
        ({"grace_s": 1e15}, r"--grace takes a number of seconds .*got 1000000000000000"),
        (
            {"time_limit_s": 1e15},
            r"--time-limit takes a time of at most ten years \(got 1000000000000000\.0\)",
        ),
        ({"time_limit_s": float("nan")}, r"--time-limit takes .*got nan"),
        ({"time_limit_s": 30.0, "grace_s": 60.0}, "stopped before it starts"),
        ({"secrets": (Secret(name="T", source="key:a/b"),)}, r"Only Kubernetes .*got '--secret T=key:a/b'"),
    ],
)
def test_values_that_cannot_be_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        make_spec(**changes)


def test_a_grace_too_short_for_the_measured_save_is_refused_with_one_that_would_do():
    check_grace(60, step_s=2.0, save_s=50.0)
    with pytest.raises(UsageError, match=r"save of 58\.0 s .* \(got '60 s'\)\. Give --grace 66 or more"):
        check_grace(60, step_s=2.0, save_s=58.0)


def test_a_grace_of_a_run_that_has_measured_nothing_is_compared_with_the_margin_alone():
    with pytest.raises(UsageError, match=r"too short for a margin of 5 s \(got '0\.4 s'\)"):
        check_grace(0.4, step_s=0.0, save_s=0.0)


LONG = "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


@pytest.mark.parametrize(
    "value",
    [
        f"glpat-{LONG}",
        f"gldt-{LONG}",
        f"xoxb-123456789012-{LONG}",
        f"xapp=xoxe-{LONG}",
        f"AIza{LONG[:35]}",
        f"pypi-AgEIcHlwaS5vcmc{LONG}",
        f"npm_{LONG}",
        f"github_pat_11AB_{LONG}",
        f"dckr_pat_{LONG}",
        "ASIAABCDEFGHIJKLMNOP",
        f"https://store.example/c.arrow?sv=2024&sig={LONG}",
        f"https://host/corpus?token={LONG}",
        f"https://host/corpus?a=1&access_token={LONG}",
        f"https://bucket.s3.amazonaws.com/x?X-Amz-Signature={LONG}",
        f"s3://bucket/x;apiKey={LONG}",
    ],
)
@pytest.mark.parametrize("name", ["PATH_OF_IT", "note"])
def test_a_key_is_known_by_its_form_wherever_it_stands(name, value):
    for where, refuse in (
        ("--env", lambda: environment_of([f"{name}={value}"])),
        ("The recipe", lambda: check_no_secret({"a": {name: [value]}}, where="The recipe")),
        ("--sbatch", lambda: check_no_secret_in([f"--comment={value}"], where="--sbatch")),
    ):
        with pytest.raises(UsageError, match=f"{where} holds what looks like a secret") as caught:
            refuse()
        assert LONG[-20:] not in str(caught.value)


@pytest.mark.parametrize("name", ["DB_PASS", "PASS", "smtp.pass", "DB_PWD", "SSH_PASSPHRASE", "SIGNING_KEY"])
def test_a_variable_is_known_as_a_secret_by_its_name(name):
    with pytest.raises(UsageError, match="looks like a secret"):
        check_no_secret({name: "x1"}, where="--env")


@pytest.mark.parametrize(
    "values",
    [
        {"measure": {"wandb_api_key": "0123456789"}},
        {"run": {"hub.token": "x1"}},
        {"data": {"corpora": {"web": {"path": "https://me:pass@host/corpus"}}}},
        {"note": "hf_abcdefghijklmnopqrstuvwx"},
        {"list": ["AKIAABCDEFGHIJKLMNOP"]},
    ],
)
def test_a_secret_in_the_recipe_is_refused_and_not_repeated(values):
    with pytest.raises(UsageError, match="--secret NAME=file:PATH") as caught:
        check_no_secret(values, where="The recipe")
    for secret in ("0123456789", "me:pass", "hf_abcd", "AKIAABC"):
        assert secret not in str(caught.value)


BODY = "s3cr3t" + "0aB" * 12


@pytest.mark.parametrize(
    "values",
    [
        *({"note": f"{begin}{BODY}"} for begin in (
            "glpat-", "gldt-", "xoxb-", "xoxp-", "xapp-", "AIza", "pypi-AgE", "npm_", "github_pat_", "ya29.",
            "dckr_pat_", "hvs.", "sk_live_", "AccountName=a;AccountKey=", "nvapi-", "gsk_", "xai-", "pplx-",
            "r8_", "tgp_v1_", "lsv2_pt_",
        )),
        *({name: BODY} for name in (
            "DB_PASS", "pass", "PGPASSWORD", "MYSQL_PWD", "ssh.passphrase", "TLS_PRIVATE_KEY", "ACCOUNT_KEY",
        )),
        *({"path": f"https://host/c?a=1&{query}={BODY}"} for query in (
            "sig", "key", "ssh_key", "auth", "pwd", "token", "access_token",
            "X-Amz-Security-Token", "X-Goog-Signature", "api_key",
        )),
        {"path": f"https://host/c?sig={BODY}"},
        {"path": f"https://:{BODY}@host/c"},
        {"path": f"https://me:a:{BODY}@host/c"},
        {"note": "ASIAABCDEFGHIJKLMNOP"},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_of_services_and_signed_addresses_are_secrets_and_not_repeated(values):
    (name,) = values
    with pytest.raises(UsageError, match="what looks like a secret") as caught:
        check_no_secret(values, where="The recipe")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(UsageError, match="what looks like a secret"):
        environment_of([f"{name.replace('.', '_')}={values[name]}"])


@pytest.mark.parametrize(
    "value",
    [
        "npm_config",
        "pypi-mirror",
        "xoxo",
        "AIza",
        "s3://b/c?region=eu",
        "https://h/?tokens=5&design=a",
        "a@b:c",
        "PASSED",
    ],
)
def test_texts_without_a_token_are_taken(value):
    check_no_secret({"BYPASS": value, "PWD": value, "OLDPWD": value, "compass": value}, where="The recipe")


SECRET_ENDS = (
    *("token", "secret", "pass", "password", "passwd", "passphrase", "credentials", "api_key", "ssh_key"),
    *("private_key", "deploy_key", "gpg_key", "signing_key", "access_key", "service_key", "db_pwd", "pgpass"),
)
OWNERS = st.lists(st.sampled_from(["hf", "wandb", "my", "prod", "s3", "Db", "git", "lab", "x"]), max_size=3)


def spell(words, style):
    joined = "_".join(words)
    return {
        "snake": joined.lower(),
        "upper": joined.upper(),
        "kebab": joined.lower().replace("_", "-"),
        "dots": joined.lower().replace("_", "."),
        "camel": "".join(word[:1].upper() + word[1:].lower() for word in joined.split("_")),
    }[style]


@examples(300)
@given(
    OWNERS,
    st.sampled_from(SECRET_ENDS),
    st.sampled_from(["snake", "upper", "kebab", "dots", "camel"]),
    st.sampled_from(["", "_2", "1"]),
    st.sampled_from([BODY, "x1", "hunter2", "20260101", "<secret>"]),
)
def test_a_name_that_ends_like_a_secret_is_one_in_every_spelling(owners, end, style, number, value):
    with pytest.raises(UsageError, match="looks like a secret"):
        check_no_secret({spell([*owners, end], style) + number: value}, where="--env")


@examples(200)
@given(
    st.sampled_from(["num", "max", "min", "first", "total", "n", "tokens_per", "last"]),
    OWNERS,
    st.sampled_from(["pass", "token"]),
    st.sampled_from(["snake", "upper", "kebab", "dots", "camel"]),
    st.integers(0, 10**9),
)
def test_a_count_of_tokens_or_passes_is_no_secret(count, owners, end, style, value):
    assume(style != "camel" or count != "n" or not owners)  # NS3Pass: one word, as in HTTPPass
    check_no_secret({spell([count, *owners, end], style): str(value)}, where="--env")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EOS_TOKEN", "</s>"), ("pad_token", "[PAD]"), ("NUM_PASS", "3"), ("MAX_TOKEN", "3"), ("pass", "2"),
        ("DEBUG_TOKEN", "false"), ("sort_key", "abcdef"), ("PRIMARY_KEY", "id"), ("text_key", "text"),
        ("COMPASS", "north"), ("BYPASS", "x1"), ("monkey", "x1"), ("turnkey", "x1"), ("PGPASSFILE", "/run/x"),
        ("KEY_FILE", "/run/x"), ("note", "xai-explanations-of-models"), ("path", "s3://b/c?keys=5&monkey=a"),
    ],
)  # fmt: skip
def test_names_of_other_things_are_no_secrets(name, value):
    check_no_secret({name: value}, where="--env")


def test_what_only_sounds_like_a_secret_is_taken():
    check_no_secret(
        {"max_tokens": 5, "tokenizer": "x", "data": {"path": "s3://bucket/tokens", "token_budget": "1T"}},
        where="The recipe",
    )
    check_no_secret(
        {
            "PWD": "/home/me", "OLDPWD": "/home/me", "bypass": "yes", "pass_rate": 3,
            "name": "glue-cola-tune-of-all-layers",
            "run": "global-batch-size-of-the-second-try", "folder": "/data/hf_models_of_last_year_and_before",
            "path": "https://host/corpus?version=3&tokens=4", "mirror": "pypi-mirror-of-our-own-company",
            "task": "risk-assessment-of-many-documents", "npm": "npm_config_registry_of_the_cluster_node",
        },
        where="--env",
    )  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [
        "--export=ALL,HF_TOKEN=s3cr3t",
        "--export=HF_TOKEN=s3cr3t",
        "--export HF_TOKEN=s3cr3t,A=1",
        "--comment=hf_s3cr3tabcdefghijklmnop",
        "--comment hf_s3cr3tabcdefghijklmnop",
    ],
)
def test_a_secret_in_an_option_of_another_program_is_refused_and_not_repeated(option):
    with pytest.raises(UsageError, match="--sbatch holds what looks like a secret") as caught:
        check_no_secret_in(["--qos=long", option], where="--sbatch")
    assert "s3cr3t" not in str(caught.value)


def test_options_that_name_a_secret_without_its_value_are_taken():
    check_no_secret_in(
        ["--export=ALL,HF_TOKEN", "--max-tokens=5", "--comment=token of thanks"], where="--sbatch"
    )


def test_secrets_are_references():
    assert secrets_of(["KEY=file:/home/me/.key", "TOKEN=env:HF_TOKEN"]) == (
        Secret(name="KEY", source="file:/home/me/.key"),
        Secret(name="TOKEN", source="env:HF_TOKEN"),
    )
    for wrong in ("KEY=hunter2", "KEY", "KEY=file:", "KEY=file:relative", "1KEY=env:A", "KEY=env:not a name"):
        with pytest.raises(UsageError, match="--secret") as caught:
            secrets_of([wrong])
        assert "hunter2" not in str(caught.value)


def test_variables_are_pairs_and_no_secrets():
    assert environment_of(["A=1", "B=x=y"]) == (("A", "1"), ("B", "x=y"))
    for wrong in ("A", "=1", "A B=1"):
        with pytest.raises(UsageError, match="--env takes NAME=VALUE"):
            environment_of([wrong])
    with pytest.raises(UsageError, match="what looks like a secret"):
        environment_of(["HF_TOKEN=abc"])


def test_the_processes_of_a_run_log_as_the_command_that_launched_them(monkeypatch):
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "text")
    assert environment_of(["A=1"]) == (("A", "1"),)
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    assert environment_of(["A=1"]) == (("A", "1"), ("PENSTOCK_LOG_FORMAT", "json"))
    assert environment_of(["PENSTOCK_LOG_FORMAT=logfmt"]) == (("PENSTOCK_LOG_FORMAT", "logfmt"),)


@pytest.mark.parametrize(
    "line",
    [
        "module load cuda/12.4",
        'export HF_TOKEN="$(cat ~/.token)"',
        "export WANDB_API_KEY=$KEY",
        "a=`b` c=1",
        "export HF_TOKEN=''",
        'HF_TOKEN=""; b',
        "unset A; HF_TOKEN=",
    ],
)
def test_a_setup_may_read_a_secret_from_elsewhere(line):
    assert checked_setup(f"{line}\n") == f"{line}\n"


@pytest.mark.parametrize(
    "line", ["export WANDB_API_KEY=0123456789abcdef", f"login hf_{'a' * 30}", "DB_PASS='x1'"]
)
def test_a_setup_with_a_secret_is_refused_and_does_not_show_it(line):
    with pytest.raises(UsageError, match="The setup file holds what looks like a secret") as caught:
        checked_setup(f"true\n{line}\n")
    assert line[-6:] not in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "apptainer exec 'a", "a\nb", "a \x1b[1m"])
def test_a_wrapper_that_is_no_command_is_refused(text):
    with pytest.raises(UsageError, match="--wrapper takes a command"):
        words_of_wrapper(text)


@pytest.mark.parametrize(
    "text",
    [
        "--nv apptainer exec x",
        "FOO=1 apptainer exec x",
        "source env.sh && numactl",
        "source env.sh",
        "cd /a; numactl",
        "numactl -l | cat",
        "numactl -l &",
    ],
)
def test_a_wrapper_that_only_a_shell_could_run_is_refused(text):
    with pytest.raises(UsageError, match="Put variables and `source` into --setup"):
        words_of_wrapper(text)


def test_a_shell_may_be_the_wrapper():
    assert words_of_wrapper("""bash -c 'A=1; exec "$@" && true' --""")[2] == 'A=1; exec "$@" && true'


def test_a_wrapper_with_a_secret_is_refused():
    with pytest.raises(UsageError, match="--wrapper holds what looks like a secret"):
        words_of_wrapper("apptainer exec --env WANDB_API_KEY=0123456789abcdef a.sif")


def test_python_is_that_of_the_wrapper_on_nodes():
    assert make_spec().node_python == ("/opt/penstock/bin/python",)
    assert make_spec(wrapper=("numactl", "-l")).node_python == ("numactl", "-l", "python3")
