"""What the operator makes of the fields of a TrainingRun, right and wrong."""

import argparse

import pytest
import yaml
from tools.crd import CRD

from penstock.cli import operator
from penstock.cli.launch import kubernetes
from penstock.cli.operator import plan_of
from penstock.core.errors import UsageError
from penstock.launch.controller.reconcile import digest_of, planned

RECIPE = """
[run]
dir = "first"
steps = 3
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
sequence_length = 32
global_batch_size = 12
[data.corpora.python]
path = "corpus"
[optim]
learning_rate = 0.01
"""


def run(recipe=RECIPE, *, excluded=(), **spec):
    return {
        "metadata": {"name": "first", "namespace": "team", "uid": "7"},
        "spec": {"image": "i", "recipe": recipe, "volumes": [{"claim": "runs", "path": "/runs"}], **spec},
        "status": {"excludedNodes": list(excluded)},
    }


def test_a_run_is_planned_with_a_port_for_its_progress():
    plan, invalid = planned(run(nodes="2:4"), plan_of)
    assert not invalid
    assert (str(plan.spec.nodes), plan.metrics_port) == ("2:4", 9400)
    assert plan.spec.pod.open_ports == (9400,), "the operator asks for it from another namespace"


def test_a_port_of_metrics_that_only_its_pod_reaches_is_opened_to_nobody():
    plan, _ = planned(run(recipe=RECIPE + '[measure]\nmetrics_host = "127.0.0.1"\n'), plan_of)
    assert plan.spec.pod.open_ports == ()


def test_a_run_without_a_network_policy_is_planned_so():
    plan, _ = planned(run(networkPolicy="none"), plan_of)
    assert plan.spec.pod.network_policy == "none"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_may_start_more_than_its_pods_can_hold(wanted):
    plan, _ = planned(run(oversubscribe=wanted), plan_of)
    assert ("--oversubscribe" in plan.spec.command) == wanted


OF_METADATA = {"name", "namespace"}
OF_PEOPLE = {"dry-run", "explain", "json", "cluster", "network", "code", "code-store"}
OF_A_JOB = {"ttl"}  # whose JobSet is gone starts again: a TrainingRun is deleted instead
OF_RECIPE = {"ignore-key"}  # model.ignored_keys
LISTS = {
    "set": "set",
    "env": "env",
    "secrets": "secret",
    "volumes": "volume",
    "networks": "networks",
    "podPatch": "pod-patch",
    "nodeSelector": "node-selector",
    "excludeNodes": "exclude-node",
}


def test_each_option_of_a_run_is_a_field_of_a_training_run():
    parser = argparse.ArgumentParser(add_help=False)
    kubernetes.add_arguments(parser)
    options = {
        action.option_strings[0].removeprefix("--") for action in parser._actions if action.option_strings
    }
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    words = operator.words_of(dict.fromkeys([*operator._OPTIONS, *operator._FLAGS], True), [])
    plain = {word.removeprefix("--").partition("=")[0] for word in words}
    assert plain | set(LISTS.values()) == options - OF_METADATA - OF_PEOPLE - OF_A_JOB - OF_RECIPE
    known = {*operator._OPTIONS, *operator._FLAGS, *LISTS}
    assert fields.keys() - known == {"recipe", "suspend", "networkProvider"}
    assert known <= fields.keys()
    assert {name for name, field in fields.items() if field.get("type") == "boolean"} == {
        *operator._FLAGS,
        "suspend",
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (run(recipe=RECIPE + "\n[nothing]\na = 1\n"), "nothing"),
        (run(recipe="[run"), "recipe.toml"),
        (run(recipe="measure = 3\n" + RECIPE), "measure"),
        (run(recipe=f"a = {'[' * 20_000}"), "cannot be read: RecursionError"),
        (run(timeLimit="soon"), "--time-limit"),
        (run(nodes="two"), "MIN:MAX"),
        (run(networks=[{"mastr": "ens1"}]), "networks[0].mastr"),
    ],
)
def test_a_wrong_field_is_told_in_the_same_words_at_each_look(wrong, words):
    plan, invalid = planned(wrong, plan_of)
    assert plan is None
    assert words in invalid
    assert "/tmp" not in invalid
    assert planned(wrong, plan_of) == (None, invalid)


def test_an_error_that_nobody_foresaw_names_no_folder_that_is_another_at_each_look(monkeypatch):
    def fail(folder, *_):
        raise FileNotFoundError(2, "No such file or directory", str(folder / "more" / "recipe.toml"))

    monkeypatch.setattr(operator, "_plan_in", fail)
    _, invalid = planned(run(), plan_of)
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'more/recipe.toml'" in invalid


@pytest.mark.parametrize("option", ["--lease=nan", "--every=inf", "--every=-1"])
def test_what_is_no_time_is_refused(option, capsys):
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--namespace=a", option])
    assert "is not a time such as" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--lease=0.9", "--every=0"])
def test_a_time_that_is_too_short_is_refused(option):
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    with pytest.raises(UsageError, match=r"must be at least .*ten years"):
        operator.run(parser.parse_args(["--namespace=a", option]))


def test_a_digest_is_of_what_is_asked_for():
    assert digest_of(run()) == digest_of(run(suspend=True))
    others = [run(nodes=2), run(recipe=f"{RECIPE}\n"), run(excluded=["n1"]), run(excluded=["n1", "n2"])]
    assert len({digest_of(each) for each in [run(), *others]}) == 5
    assert digest_of(run(excluded=["n1", "n2"])) == digest_of(run(excluded=["n2", "n1"]))
